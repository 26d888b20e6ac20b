"""Tasks -> the requests for episodes of a command, in an order and with seeds that are the same every time.

Invariant: groups of samples stay together, and all tasks come once before one comes again. It runs nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.tasks.reading import Task


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to run. (task, sample, variant, round) identifies it within a run."""

    run_id: str
    task: Task
    split: str
    sample: int
    seed: int
    adapters: Mapping[str, int]  # node -> version
    round: int | None = None
    variant: str | None = None
    temperature: float | None = None  # None: the collector's
    answers: Mapping[str, str] = field(default_factory=dict)  # node -> the text that answers its calls, and no model

    @property
    def key(self) -> tuple[str, int, str | None, int | None]:
        """What resuming compares."""
        return (self.task["id"], self.sample, self.variant, self.round)


def task_order(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in a seeded order that does not depend on their order in the file."""
    ordered = sorted(tasks, key=lambda task: str(task["id"]))
    random.Random(seed).shuffle(ordered)
    return ordered


def plan_episodes(
    tasks: Sequence[Task], episodes: int, samples_per_task: int, *, seed: int, **common: Any
) -> list[EpisodeRequest]:
    """`episodes` requests over `tasks` in order, from the start again when they run out.

    Groups of `samples_per_task` stay together. A task that comes again gets new sample numbers; every request
    gets its own seed, which depends on the run's seed, the task and the sample only.
    """
    used: Counter[str] = Counter()
    requests: list[EpisodeRequest] = []
    for number in range(-(-episodes // samples_per_task)):
        task = tasks[number % len(tasks)]
        for _ in range(samples_per_task):
            sample = used[task["id"]]
            used[task["id"]] += 1
            episode_seed = _derived_seed(seed, common.get("round"), task["id"], sample)
            requests.append(EpisodeRequest(task=task, sample=sample, seed=episode_seed, **common))
    return requests[:episodes]


def _derived_seed(seed: int, round_number: int | None, task_id: str, sample: int) -> int:
    digest = hashlib.sha256(f"{seed}/{round_number}/{task_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
