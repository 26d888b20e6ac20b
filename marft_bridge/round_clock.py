"""The parts of training rounds, as they happen -> how many seconds each took, for a round's line in `metrics.jsonl`.

A round in order: the versions that play it are published, its episodes are played, the trainer scores them and updates.
Invariants: a part that did not happen is None, never 0, and one that failed counts for nothing. Parts of several
rounds may overlap, each on a thread of its own. It does not know what happens in a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARTS = PUBLISH, ROLLOUT, SCORE, UPDATE = "publish", "rollout", "score", "update"


class RoundClock:
    """How long the parts of each round took, until its line is written.

    Args:
        now: the time in seconds, from any beginning.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began: dict[int, float] = {}
        self._took: dict[tuple[int, str], float] = {}

    @contextmanager
    def part(self, number: int, name: str) -> Iterator[None]:
        """Counts what happens inside for round `number`; what happens in several pieces adds up."""
        began = self._now()
        self._began.setdefault(number, began)
        yield
        self._took[number, name] = self._took.get((number, name), 0.0) + self._now() - began

    def finish(self, number: int, trained: Mapping[str, float | None]) -> dict[str, float | None]:
        """Seconds by part of a round that is over, once, as it happened in this process.

        Args:
            trained: what the trainer measured itself of a part, which is added.

        Returns:
            {"round", "publish", "rollout", "score", "update"}: `round` is from where its first part began until now.
        """
        took: dict[str, float | None] = {"round": self._now() - self._began.pop(number)}
        for name in PARTS:
            pieces = [self._took.pop((number, name), None), trained.get(name)]
            known = [seconds for seconds in pieces if seconds is not None]
            took[name] = sum(known) if known else None
        return took
