"""A graph and one input -> which of its nodes really called a model, with which model and tools.

The graph is run once, recorded into a store that is thrown away; its calls go where the app sends them, so they cost
what they cost. Invariants: what happened before a failure or a time limit is told all the same; the app's checkpointer
keeps nothing of the run. It does not know how the nodes look from outside: `app_models` does.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from marft_bridge.instrumentation import instrument_paused
from marft_bridge.record import Recorder
from marft_bridge.recorded_graph import graph_to_original, wrap
from trace_store import conventions as c
from trace_store.journal import Journal
from trace_store.records import ONE_TOOL_OF
from trace_store.store import TraceStore


@dataclass(slots=True)
class Called:
    """The calls of one node."""

    calls: int = 0
    models: dict[str, None] = field(default_factory=dict)  # as the engine named them, in order
    tools: dict[str, None] = field(default_factory=dict)  # that the calls offered


@dataclass(frozen=True, slots=True)
class Probe:
    """One run."""

    nodes: dict[str, Called]  # by the recorder's name; a node that called no model is absent
    failed: str | None  # why the run did not come to its end, on one line


def probe(graph: Any, graph_input: Any, runner: asyncio.Runner, limit_s: float) -> Probe:
    """Runs the graph once on the loop that it was opened on."""
    with TemporaryDirectory(prefix="marft-probe-") as folder, instrument_paused():
        path = Path(folder) / "store.duckdb"
        journal = Journal(Path(f"{path}.journal"))
        recorded = wrap(graph_to_original(graph), Recorder(journal))
        try:
            failed = runner.run(_run_once(recorded, graph_input, limit_s))
        finally:
            recorded.unwrap()
            journal.close()
        with TraceStore.open(path) as store:
            store.take_in()
            return Probe(_called(store), failed)


async def _run_once(graph: Any, graph_input: Any, limit_s: float) -> str | None:
    thread = uuid.uuid4().hex
    try:
        await asyncio.wait_for(graph.ainvoke(graph_input, {"configurable": {"thread_id": thread}}), limit_s)
    except TimeoutError:
        return f"it took longer than {limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever the graph raises is told
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        checkpointer: Any = getattr(graph, "checkpointer", None)
        if hasattr(checkpointer, "adelete_thread"):
            with suppress(NotImplementedError):
                await checkpointer.adelete_thread(thread)
    return None


def _called(store: TraceStore) -> dict[str, Called]:
    nodes: dict[str, Called] = {}
    for episode in store.episodes():
        for span in store.spans(episode.episode_id):
            if span.operation != c.CHAT:
                continue
            node = nodes.setdefault(str(span.attributes.get(c.NODE)), Called())
            node.calls += 1
            model = span.attributes.get(c.RESPONSE_MODEL) or span.attributes.get(c.REQUEST_MODEL)
            if model is not None:
                node.models[str(model)] = None
        for name in episode.lineage:
            node_of_tool, _, tool = name.removeprefix(ONE_TOOL_OF).rpartition("/")
            if name.startswith(ONE_TOOL_OF) and node_of_tool in nodes:
                nodes[node_of_tool].tools[tool] = None
    return nodes
