"""A callback's run ids, or the context that it comes from -> the recorded run that it belongs under.

One `OpenRuns` per recorder holds its callback runs from their start to their end. Invariants: a parent is found by its
run id, and where LangChain names none by the task in whose context the call was made, never by a name that two runs may
share, so that threads, asyncio and runs from one checkpoint cannot mix episodes; no run is added to a trace that has
ended, and none is kept that ended.
"""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from marft_bridge.common.library_internals import var_child_runnable_config
from marft_bridge.common.running_routers import in_router, own_namespace
from marft_bridge.common.running_task import running_task
from marft_bridge.recording.inner_calls import answers_a_call, latest_call
from marft_bridge.recording.trace_state import OpenRun


class OpenRuns:
    """The callback runs of one recorder that have begun and not ended, by LangChain's run ids."""

    def __init__(self) -> None:
        self._runs: dict[UUID, OpenRun] = {}

    def get(self, run_id: UUID | None) -> OpenRun | None:
        """The run of this id; None where it is none of ours, or has ended."""
        return None if run_id is None else self._runs.get(run_id)

    def snapshot(self) -> dict[UUID, OpenRun]:
        """The runs that are open now. A copy, made in one step: other threads open and close runs meanwhile."""
        return self._runs.copy()

    def add(self, run_id: UUID, run: OpenRun) -> None:
        """Keeps a run that has begun, here and in its trace.

        Raises:
            LookupError: its trace has ended.
        """
        with run.trace.lock:
            if run.trace.has_ended:  # meanwhile, in another thread
                raise LookupError("the run around it has ended")
            run.trace.runs[run] = run_id
            self._runs[run_id] = run

    def remove(self, run_id: UUID) -> OpenRun | None:
        """Lets go of a run that ends; None where that is none of ours, or has ended before."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.trace.runs.pop(run, None)
        return run

    def note_node_run(self, graph_run: UUID | None, node_run: OpenRun) -> None:
        """Notes the run of the node whose task is run in this context: what names no parent here belongs under it.

        `graph_run` is the run of the graph that LangChain names as the node's parent.
        """
        task = running_task.get()
        if task is not None and task.graph_run == graph_run:  # the hooks may have been removed meanwhile
            task.node_runs[self] = node_run

    def node_run(self) -> OpenRun | None:
        """The run of the node in whose task the caller is, which may have ended; None outside those of our runs."""
        task = running_task.get()
        node_run: OpenRun | None = None if task is None else task.node_runs.get(self)
        return node_run

    def find_parent(self, parent_run_id: UUID | None) -> OpenRun | None:
        """The run around a new one; None outside any graph run, and where that has ended."""
        parent = self.get(parent_run_id) or self._run_of_context()
        if parent is None:
            return None
        if not in_router():
            return parent
        ns = own_namespace(parent.checkpoint_ns)
        router = parent.trace.routers.get(ns) if ns != parent.checkpoint_ns else None
        if router is None:
            return parent
        return replace(parent, owns_span=False, is_root=False, checkpoint_ns=ns, task=router.task, router=router)

    def _run_of_context(self) -> OpenRun | None:
        """The run in whose context the caller is, for one that names no parent: a call with callbacks of its own, or
        `model.generate`; or whose parent has ended: work that a node started. Then it is the node's, while the graph
        runs."""
        config = var_child_runnable_config.get()
        run = self.get(None if config is None else getattr(config.get("callbacks"), "parent_run_id", None))
        if run is not None:
            return run
        node_run = self.node_run()
        if node_run is None or node_run.trace.has_ended:
            return None
        return replace(node_run, owns_span=False)

    def find_outer_call(self, parent: OpenRun) -> OpenRun | None:
        """The call of a model that asks another one to answer, for the call of that one: both are one action."""
        if parent.is_call or parent.part_of is not None:
            return parent.part_of or parent
        outer_call = self.get(latest_call.get())
        return outer_call if outer_call is not None and answers_a_call() else None
