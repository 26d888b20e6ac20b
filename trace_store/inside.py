"""What one node execution did, with its times -> which of it followed which: bounds from above.

The parts of an execution are its own calls, its tool runs and the graphs that it ran. "Ended before it began" is an
interval order; the links are its transitive reduction, so a part is linked to the latest parts that ended before it
began. Invariants: parts that overlap in time are not linked; parts that know whose results they were given
(`is_called`) are linked to the others only, since they have exact edges among each other already.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Part:
    """Something that one execution did, with at least one action. Times in nanoseconds, `start <= end`."""

    start: int
    end: int
    first_actions: tuple[str, ...]
    last_actions: tuple[str, ...]
    inner_actions: tuple[str, ...] = ()  # all of them; empty where the first are all
    is_called: bool = False

    @property
    def actions(self) -> tuple[str, ...]:
        """All actions in it."""
        return self.inner_actions or self.first_actions


def parts_to_links(parts: Sequence[Part], successors: Mapping[str, set[str]]) -> Iterator[tuple[Part, Part]]:
    """Pairs (earlier, later) of parts of one execution. `successors` has the edges between called parts."""
    own_parts = _Timeline(part for part in parts if not part.is_called)
    called_parts = _Timeline(part for part in parts if part.is_called)
    for part in own_parts.parts:
        last_own, last_called = own_parts.latest_start_before(part), called_parts.latest_start_before(part)
        for earlier_part in own_parts.ended_between(max(last_own, last_called), part):
            yield earlier_part, part
        ended_parts = called_parts.ended_between(last_own, part)
        ended_actions = {action for ended_part in ended_parts for action in ended_part.actions}
        for ended_part in ended_parts:
            later_actions = ended_actions - set(ended_part.actions)
            if not any(later_actions & successors.get(action, set()) for action in ended_part.actions):
                yield ended_part, part
    given_since = _latest_given(called_parts.parts, successors)
    for part in called_parts.parts:
        since_ns = max(own_parts.latest_start_before(part), given_since.get(part, -1))
        for earlier_part in own_parts.ended_between(since_ns, part):
            yield earlier_part, part


def _latest_given(called_parts: Sequence[Part], successors: Mapping[str, set[str]]) -> dict[Part, int]:
    """Called part -> the latest start of those whose results it was given, or may have been."""
    part_of_action = {action: part for part in called_parts for action in part.actions}
    latest_starts: dict[Part, int] = {}
    for action, earlier_part in part_of_action.items():
        for successor in successors.get(action, ()):
            part = part_of_action.get(successor, earlier_part)
            if part is not earlier_part:
                latest_starts[part] = max(latest_starts.get(part, -1), earlier_part.start)
    return latest_starts


class _Timeline:
    """Parts sorted by their end, to find those that ended before another began. Parts of one instant are unordered."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = sorted(parts, key=lambda part: (part.end, part.start))
        self._end_times = [part.end for part in self.parts]
        self._latest_starts = list(accumulate((part.start for part in self.parts), max))

    def latest_start_before(self, part: Part) -> int:
        """The latest start among the parts that ended before `part` began; -1 when none did."""
        count = bisect_right(self._end_times, part.start)
        while count > 0 and self.parts[count - 1].start >= part.start:  # zero-length parts at this very instant
            count -= 1
        return self._latest_starts[count - 1] if count else -1

    def ended_between(self, since_ns: int, part: Part) -> list[Part]:
        """Parts that ended before `part` began, with no part in between that began at `since_ns`."""
        window = self.parts[bisect_left(self._end_times, since_ns) : bisect_right(self._end_times, part.start)]
        return [
            earlier_part
            for earlier_part in window
            if earlier_part.start < part.start and (earlier_part.end > since_ns or earlier_part.start == since_ns)
        ]
