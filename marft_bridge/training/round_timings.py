"""The parts of training rounds, as they happen -> the seconds of each, for a round's line in `metrics.jsonl`.

A round in order: the versions that play it are published, its episodes are played, the trainer scores them and updates.
Invariants: a part that did not happen is None, never 0, and one that failed is not counted. Parts of several rounds
may overlap, each on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARTS = PUBLISH, ROLLOUT, SCORE, UPDATE = "publish", "rollout", "score", "update"


class RoundClock:
    """Measures the parts of each round until its line is written.

    Args:
        now: the time in seconds, from an arbitrary zero.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started: dict[int, float] = {}
        self._seconds: dict[tuple[int, str], float] = {}

    @contextmanager
    def part(self, number: int, name: str) -> Iterator[None]:
        """Adds the time of the block to a part of round `number`."""
        started = self._now()
        self._started.setdefault(number, started)
        yield
        self._seconds[number, name] = self._seconds.get((number, name), 0.0) + self._now() - started

    def finish(self, number: int, trainer_seconds: Mapping[str, float | None]) -> dict[str, float | None]:
        """The seconds of a round's parts in this process, once the round is over; may be called once per round.

        Args:
            trainer_seconds: part -> seconds that the trainer measured itself, which are added.

        Returns:
            {"round", "publish", "rollout", "score", "update"}: `round` is from the beginning of its first part to now.
        """
        seconds_by_part: dict[str, float | None] = {"round": self._now() - self._started.pop(number)}
        for name in PARTS:
            pieces = [self._seconds.pop((number, name), None), trainer_seconds.get(name)]
            measured = [seconds for seconds in pieces if seconds is not None]
            seconds_by_part[name] = sum(measured) if measured else None
        return seconds_by_part
