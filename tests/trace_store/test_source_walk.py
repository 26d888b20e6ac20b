"""Owns: a walk back along what things depend on: the first stops on every way, each thing asked once.

Held against a search that follows every way by itself, on things that may depend on each other in a ring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from trace_store.source_walk import Source, SourceWalk

NAMES = [f"n{position}" for position in range(7)]
_SOURCES = st.lists(st.tuples(st.sampled_from([*NAMES, "elsewhere"]), st.booleans()), max_size=4)


def nearest_by_search(
    sources: Iterable[Source], stops: Sequence[str], sources_of: Mapping[str, Iterable[Source]]
) -> dict[str, bool]:
    """All (thing, whether the way there is exact) that can be met, one step after another."""
    met: set[Source] = set()
    pending = [source for source in sources if source[0] in NAMES]
    while pending:
        name, exact = pending.pop()
        if (name, exact) not in met:
            met.add((name, exact))
            further = [] if name in stops else sources_of[name]
            pending += [(source, exact and is_exact) for source, is_exact in further if source in NAMES]
    return {name: (name, True) in met for name, _ in met if name in stops}


@given(
    sources=_SOURCES,
    stops=st.lists(st.sampled_from(NAMES), unique=True),
    sources_of=st.fixed_dictionaries(dict.fromkeys(NAMES, _SOURCES)),
)
def test_the_first_stops_are_met_and_exactly_so_where_one_exact_way_leads_there(
    sources: list[Source], stops: list[str], sources_of: dict[str, list[Source]]
) -> None:
    walk = SourceWalk(NAMES, stops, sources_of.__getitem__)
    assert walk.nearest(sources) == nearest_by_search(sources, stops, sources_of)
    assert walk.nearest([]) == {}


def test_a_thing_is_asked_once_for_its_sources_however_many_walks_come_through_it() -> None:
    """Every second step of a loop stops walks, and every step reads from all before it."""
    names = [str(position) for position in range(200)]
    asked: Counter[str] = Counter()

    def sources_of(name: str) -> list[Source]:
        asked[name] += 1
        return [(earlier, True) for earlier in names[: int(name)]]

    walk = SourceWalk(names, names[::2], sources_of)
    for position in range(200):
        stops = walk.nearest([(earlier, True) for earlier in names[:position]])
        assert stops == dict.fromkeys(names[:position][::2], True)
    assert asked == Counter(names[1:199:2])
