"""Owns: a sample that has its part of every kind, whatever order the kinds come in, and the same each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.common.spread import spread_rows


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("agents", [("reasoner", "actor"), ("a", "b", "c", "d")])
def test_calls_that_alternate_are_chosen_of_every_agent_and_turn_alike(agents: tuple[str, ...], turns: int) -> None:
    kinds = [(agent, turn) for _ in range(64) for turn in range(turns) for agent in agents]
    chosen = spread_rows(kinds, 24)
    assert set(Counter(kinds[row] for row in chosen).values()) == {24 // (turns * len(agents))}


def test_the_chosen_lie_all_over_the_things_of_a_kind() -> None:
    """By hand: 12 things in stretches of 3, at 0.618, 0.236, 0.854 and 0.472 of each."""
    assert spread_rows([0] * 12, 4) == [0 + 1, 3 + 0, 6 + 2, 9 + 1]


@given(st.lists(st.integers(0, 4), max_size=80), st.integers(1, 40))
def test_every_kind_has_its_part_and_nothing_is_chosen_twice(kinds: list[int], count: int) -> None:
    chosen = spread_rows(kinds, count)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(kinds))
    taken = Counter(kinds[row] for row in chosen)
    for kind, number in Counter(kinds).items():
        part = number * len(chosen) / len(kinds)
        assert part - 2 < taken[kind] < part + 2
        assert taken[kind] > 0 or part < 2
