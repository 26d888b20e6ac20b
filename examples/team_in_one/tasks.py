"""The duo's tasks -> the same training tasks, and of its held-out ones those that are new but for their kind.

The duo holds tasks out by a hash of their ids, so `What is 3 + 4?` may be held out while it learns `What is 4 + 3?`. A
node that imitates it could then know an answer by heart. Here a held-out task stands for its wording and its numbers,
whatever their order and whoever has which things: it is left out where such a task is trained on, or is held out
already. Nothing is added and no id changes, so what the duo was trained on is what the node may learn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphs import math_duo
from marft_bridge.rollouts.app import split_tasks

HELDOUT = 0.33  # as examples/math_duo/bridge.toml and the bridge.toml beside this file have it


def tasks() -> Iterator[dict[str, Any]]:
    """313 tasks: the duo's 280 training tasks, then 33 of the 125 that it holds out."""
    training_tasks, heldout_tasks = split_tasks(list(math_duo.tasks()), HELDOUT)
    yield from training_tasks
    known_keys = {task_to_key(task) for task in training_tasks}
    for task in heldout_tasks:
        if (key := task_to_key(task)) not in known_keys:
            known_keys.add(key)
            yield task


def task_to_key(task: dict[str, Any]) -> tuple[str, int, int]:
    """The number of the wording, and the two numbers, the smaller first; from the id, which is `sum-0-3-4`."""
    _, template, *numbers = str(task["id"]).split("-")
    small, large = sorted(map(int, numbers))
    return template, small, large
