"""A graph and one input -> which of its nodes really called a model, with which model and tools.

The graph is run once, recorded into a temporary store; its calls go to the app's own models, and cost as much.
Invariants: the calls before a failure or a time limit are reported all the same; the app's checkpointer keeps nothing
of the run. `rollouts.app_models` inspects nodes without running them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

from langgraph.types import PregelExecutableTask

from marft_bridge.common.node_names import namespace_to_node
from marft_bridge.recording.instrument import instrument_paused
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import graph_to_original, wrap
from trace_store import conventions as c
from trace_store.journal import Journal
from trace_store.records import ONE_TOOL_OF
from trace_store.store import TraceStore


@dataclass(slots=True)
class NodeCalls:
    """The model calls of one node."""

    calls: int = 0
    models: dict[str, None] = field(default_factory=dict)  # as the engine named them, in order
    tools: dict[str, None] = field(default_factory=dict)  # offered by the calls


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one run."""

    nodes: dict[str, NodeCalls]  # by the recorder's name; a node that called no model is absent
    namesakes: dict[str, int]  # name -> the graphs that acted under it, where several did without declaring it
    failure: str | None  # why the run did not come to its end, on one line


class _ProbeRecorder(Recorder):
    """Keeps apart the graphs that act under one name, which no span shows."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self.node_by_namespace: dict[str, Any] = {}  # our namespace -> the runnable of LangGraph's node

    def note_task_start(self, graph_run: UUID, task: PregelExecutableTask, *args: Any, **kwargs: Any) -> None:
        """Notes which node the task runs: two graphs never share one, two copies of a graph do."""
        super().note_task_start(graph_run, task, *args, **kwargs)
        checkpoint_ns = self.own_namespace(graph_run, task.config["configurable"]["checkpoint_ns"])
        self.node_by_namespace[checkpoint_ns] = task.proc


def probe(graph: Any, graph_input: Any, arguments: Mapping[str, Any], runner: asyncio.Runner, limit_s: float) -> Probe:
    """Runs the graph once on the loop that it was opened on.

    Args:
        arguments: what it is invoked with, besides its input; see `RunSettings.to_arguments`.
    """
    with TemporaryDirectory(prefix="marft-probe-") as folder, instrument_paused():
        path = Path(folder) / "store.duckdb"
        journal = Journal(Path(f"{path}.journal"))
        recorder = _ProbeRecorder(journal)
        recorded = wrap(graph_to_original(graph), recorder)
        try:
            failure = runner.run(_run_once(recorded, graph_input, arguments, limit_s=limit_s))
        finally:
            recorded.unwrap()
            journal.close()
        with TraceStore.open(path) as store:
            store.take_in()
            return Probe(_calls_by_node(store), _count_namesakes(store, recorder.node_by_namespace), failure)


async def _run_once(graph: Any, graph_input: Any, arguments: Mapping[str, Any], limit_s: float) -> str | None:
    thread = arguments["config"]["configurable"]["thread_id"]
    try:
        await asyncio.wait_for(graph.ainvoke(graph_input, **arguments), limit_s)
    except TimeoutError:
        return f"it took longer than {limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - any error of the graph is reported
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        checkpointer: Any = getattr(graph, "checkpointer", None)
        if hasattr(checkpointer, "adelete_thread"):
            with suppress(NotImplementedError):
                await checkpointer.adelete_thread(thread)
    return None


def _count_namesakes(store: TraceStore, node_by_namespace: Mapping[str, Any]) -> dict[str, int]:
    """Name -> graphs that acted under it, where several did. Those that declare the name want to be one agent."""
    ids_by_name: dict[str, set[int]] = {}
    for episode in store.episodes():
        for span in store.spans(episode.episode_id):
            name, namespace = str(span.attributes.get(c.NODE)), str(span.attributes.get(c.CHECKPOINT_NS))
            is_path = name == namespace_to_node(namespace) or "/" in name
            if span.operation == c.CHAT and is_path and namespace in node_by_namespace:
                ids_by_name.setdefault(name, set()).add(id(node_by_namespace[namespace]))
    return {name: len(ids) for name, ids in ids_by_name.items() if len(ids) > 1}


def _calls_by_node(store: TraceStore) -> dict[str, NodeCalls]:
    nodes: dict[str, NodeCalls] = {}
    for episode in store.episodes():
        for span in store.spans(episode.episode_id):
            if span.operation != c.CHAT:
                continue
            node = nodes.setdefault(str(span.attributes.get(c.NODE)), NodeCalls())
            node.calls += 1
            model = span.attributes.get(c.RESPONSE_MODEL) or span.attributes.get(c.REQUEST_MODEL)
            if model is not None:
                node.models[str(model)] = None
        for name in episode.lineage:
            node_of_tool, _, tool = name.removeprefix(ONE_TOOL_OF).rpartition("/")
            if name.startswith(ONE_TOOL_OF) and node_of_tool in nodes:
                nodes[node_of_tool].tools[tool] = None
    return nodes
