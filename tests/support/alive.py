"""How many objects of a class are in memory, for tests of what is kept: each look collects garbage first."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from trace_store.records import Trajectory
from trace_store.store import TraceStore


def count_alive(kind: type) -> int:
    """The objects of a class, also where nothing but other objects leads to them."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())  # isinstance would ask objects of others for a class


def count_while_streaming(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trajectories are in memory each time that `TraceStore.trajectories` has given one; grows as it does."""
    counts: list[int] = []
    original = TraceStore.trajectories

    def watched(store: TraceStore, **options: Any) -> Iterator[Trajectory]:
        before = count_alive(Trajectory)
        for trajectory in original(store, **options):
            counts.append(count_alive(Trajectory) - before)
            yield trajectory

    monkeypatch.setattr(TraceStore, "trajectories", watched)
    return counts
