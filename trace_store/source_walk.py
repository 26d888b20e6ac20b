"""What each thing depends on -> the nearest ones that stop a walk back from some of them, through those that do not.

A set of things is one integer, a bit for each: where every step of a loop reads from all steps before it, a walk meets
each thing once, and what it leads on to costs no more than the bits that stand for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Source = tuple[str, bool]
"""The name of what something depends on, and whether that is exact."""


class SourceWalk:
    """Walks over the same things, whose names may hold no others.

    Args:
        names: of all things.
        stops: those that a walk ends at.
        sources_of: what each of the others depends on; asked once for each that a walk comes through.
    """

    def __init__(
        self, names: Sequence[str], stops: Iterable[str], sources_of: Callable[[str], Iterable[Source]]
    ) -> None:
        self._names = names
        self._bit_of: Mapping[str, int] = {name: 1 << position for position, name in enumerate(names)}
        self._stops = self._to_bits(stops)
        self._sources_of = sources_of
        self._sources: dict[int, tuple[int, int]] = {}  # position -> its exact sources, and all of them

    def nearest(self, sources: Iterable[Source]) -> dict[str, bool]:
        """The first stop on each way back from the sources -> whether exact dependencies alone lead there.

        Sources that are no thing of this walk are left out.
        """
        exact, either = self._split(sources)
        exact_stops = self._walk(exact, 0) & self._stops
        stops = self._walk(either, 1) & self._stops
        return {name: bool(exact_stops & self._bit_of[name]) for name in self._to_names(stops)}

    def _walk(self, start: int, exactness: int) -> int:
        """All that is met, from the last thing to the first, by exact sources (0) or by any (1)."""
        visited, pending = 0, start
        while pending:
            position = pending.bit_length() - 1
            bit = 1 << position
            visited |= bit
            if not self._stops & bit:
                pending |= self._sources_at(position)[exactness]
            pending &= ~visited
        return visited

    def _sources_at(self, position: int) -> tuple[int, int]:
        if position not in self._sources:
            self._sources[position] = self._split(self._sources_of(self._names[position]))
        return self._sources[position]

    def _split(self, sources: Iterable[Source]) -> tuple[int, int]:
        pairs = list(sources)
        exact = self._to_bits(name for name, is_exact in pairs if is_exact)
        return exact, exact | self._to_bits(name for name, is_exact in pairs if not is_exact)

    def _to_bits(self, names: Iterable[str]) -> int:
        bits = 0
        for bit in {self._bit_of[name] for name in names if name in self._bit_of}:
            bits |= bit
        return bits

    def _to_names(self, bits: int) -> Iterable[str]:
        while bits:
            position = bits.bit_length() - 1
            yield self._names[position]
            bits &= ~(1 << position)
