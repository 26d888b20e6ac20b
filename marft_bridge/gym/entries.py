"""A generator of reasoning-gym -> tasks; a task and an answer -> its score by the same generator.

A task says from which generator, options, seed and place it is, and its question and answer are made again for a score:
what a scorer needs besides (positions, tables) never passes through files. Invariants: the library is loaded in worker
processes only (`worker`), where the kernel holds it; a task that another version of the library would make otherwise is
refused, not scored. It knows no rewards and no graphs.
"""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from marft_bridge.errors import GraphError
from marft_bridge.rewards.worker_process import Unanswered, Work, WorkerPool
from marft_bridge.tasks.lines import Placed
from marft_bridge.tasks.options import GymTasks

FIELD = "reasoning_gym"
"""Of a task: where it comes from."""
_AT_A_TIME = 50
_MAKE_S = 300.0  # for so many: some generators search for their puzzles

_workers = WorkerPool(
    Work("marft_bridge.gym.worker", undone="reasoning-gym gave no answer", unsafe="reasoning-gym cannot be used here"),
    most=2,
)
atexit.register(_workers.close)


def close_workers() -> None:
    """Ends the processes; the next task or score starts new ones."""
    _workers.close()


def require_gym() -> None:
    """Raises GraphError where the library is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise GraphError("reasoning-gym is not installed: pip install 'marft-bridge[reasoning-gym]'")


def gym_to_tasks(options: GymTasks) -> Iterator[Placed]:
    """`size` tasks with `id`, `question`, `answer` (None where there is none to show) and where each comes from.

    Raises:
        GraphError: there is no such generator, it does not take these options, or a library of its is missing.
    """
    require_gym()
    generator: dict[str, Any] = {
        "dataset": options.dataset,
        "seed": options.seed,
        "size": options.size,
        "options": dict(options.options),
    }
    for first in range(0, options.size, _AT_A_TIME):
        last = min(first + _AT_A_TIME, options.size)
        told = _told({"generator": generator, "first": first, "last": last}, _MAKE_S, "graph.tasks")
        for index, (question, answer) in enumerate(told["entries"], start=first):
            task = {"id": f"{options.dataset}-{options.seed}-{index}", "question": question, "answer": answer}
            yield f"task {index} of {options.dataset!r}", task | {FIELD: generator | {"index": index}}


def answer_to_score(task: Mapping[str, Any], answer: str, limit_s: float) -> float:
    """What the task's own generator gives for the answer. Blocks; safe in any thread.

    Raises:
        Unanswered: not within time and memory, or the scorer failed; the message is the reason.
        GraphError: the task is of no generator, or the generator makes another one now.
    """
    origin, what = task.get(FIELD), f"task {task.get('id')!r}"
    if not isinstance(origin, Mapping) or not {"dataset", "seed", "size", "options", "index"} <= origin.keys():
        raise GraphError(f"{what} is of no generator of reasoning-gym: it has no table {FIELD!r}")
    generator = {name: value for name, value in origin.items() if name != "index"}
    job = {"generator": generator, "index": origin["index"], "question": task.get("question"), "answer": answer}
    return float(_told(job, limit_s, what)["score"])


def _told(job: Mapping[str, Any], limit_s: float, what: str) -> dict[str, Any]:
    try:
        told = _workers.ask(job, limit_s)
    except Unanswered as reason:
        if "answer" in job:
            raise
        raise GraphError(f"{what}: {reason}") from None
    if "refused" in told:
        raise GraphError(f"{what}: {told['refused']}")
    return told
