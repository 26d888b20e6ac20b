"""A generator of reasoning-gym -> tasks; a task and an answer -> its score by the same generator.

A task holds its origin (generator, options, seed, index), and its question and answer are generated again for a score:
what else a scorer needs (positions, tables) never passes through files. Invariants: the library is loaded in worker
processes only (`sandbox.reasoning_gym_worker`), which the kernel confines; a task that the installed version of the
library generates differently is refused, not scored.
"""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from marft_bridge.common.errors import GraphError
from marft_bridge.common.extras import install_command
from marft_bridge.sandbox.worker_process import UnansweredJob, WorkerPool, WorkerSpec
from marft_bridge.tasks.lines import LocatedRecord
from marft_bridge.tasks.options import GymTasks

ORIGIN_FIELD = "reasoning_gym"
"""The field of a task that holds its origin."""
_TASKS_PER_JOB = 50
_GENERATE_S = 300.0  # for one job: some generators search for their puzzles

_workers = WorkerPool(
    WorkerSpec(
        "marft_bridge.sandbox.reasoning_gym_worker",
        failure_prefix="reasoning-gym gave no answer",
        start_failure_prefix="reasoning-gym cannot be used here",
    ),
    max_workers=2,
)
atexit.register(_workers.close)


def close_workers() -> None:
    """Ends the processes; the next task or score starts new ones."""
    _workers.close()


def require_gym() -> None:
    """Raises GraphError where the library is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise GraphError(f"reasoning-gym is not installed: {install_command('reasoning-gym')}")


def gym_to_tasks(options: GymTasks) -> Iterator[LocatedRecord]:
    """`size` tasks with `id`, `question`, `answer` (None where the generator gives none) and their origin.

    Raises:
        GraphError: there is no such generator, it does not take these options, or it needs a library that is missing.
    """
    require_gym()
    generator: dict[str, Any] = {
        "dataset": options.dataset,
        "seed": options.seed,
        "size": options.size,
        "options": dict(options.options),
    }
    for first in range(0, options.size, _TASKS_PER_JOB):
        last = min(first + _TASKS_PER_JOB, options.size)
        reply = _run_job({"generator": generator, "first": first, "last": last}, _GENERATE_S, "graph.tasks")
        for index, (question, answer) in enumerate(reply["entries"], start=first):
            task = {"id": f"{options.dataset}-{options.seed}-{index}", "question": question, "answer": answer}
            yield f"task {index} of {options.dataset!r}", task | {ORIGIN_FIELD: generator | {"index": index}}


def answer_to_score(task: Mapping[str, Any], answer: str, limit_s: float) -> float:
    """The score that the task's own generator gives the answer. Blocks; safe in any thread.

    Raises:
        UnansweredJob: not within time and memory, or the scorer failed; the message is the reason.
        GraphError: the task is of no generator, or the generator makes a different one now.
    """
    origin, subject = task.get(ORIGIN_FIELD), f"task {task.get('id')!r}"
    if not isinstance(origin, Mapping) or not {"dataset", "seed", "size", "options", "index"} <= origin.keys():
        raise GraphError(f"{subject} is of no generator of reasoning-gym: it has no table {ORIGIN_FIELD!r}")
    generator = {name: value for name, value in origin.items() if name != "index"}
    job = {"generator": generator, "index": origin["index"], "question": task.get("question"), "answer": answer}
    return float(_run_job(job, limit_s, subject)["score"])


def _run_job(job: Mapping[str, Any], limit_s: float, subject: str) -> dict[str, Any]:
    """The reply of a worker; errors name the subject. Raises UnansweredJob for a score, GraphError otherwise."""
    try:
        reply = _workers.run_job(job, limit_s)
    except UnansweredJob as reason:
        if "answer" in job:
            raise
        raise GraphError(f"{subject}: {reason}") from None
    if "refused" in reply:
        raise GraphError(f"{subject}: {reply['refused']}")
    return reply
