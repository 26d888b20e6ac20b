"""The task of LangGraph's in whose context something is called -> its name, and what recorders know of it.

A call with callbacks of its own, and `model.generate`, name no parent, and work that a node has started may begin when
the node's run has ended. Python's context leads from both to the task: LangGraph and LangChain copy it into their
threads, asyncio into its tasks. Invariant: one object for each task that runs, so that runs with equal task ids (they
go on from one checkpoint) are never mixed up.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(slots=True, eq=False)
class RunningTask:
    """One task, from its start on for as long as anything refers to its context."""

    graph_run: UUID  # callback run of its graph
    checkpoint_ns: str  # LangGraph's
    node_runs: dict[Any, Any]  # a recorder's `OpenRuns` -> its run of the node's latest attempt


running_task: ContextVar[RunningTask | None] = ContextVar("marft_running_task", default=None)
"""The innermost task around the caller."""
