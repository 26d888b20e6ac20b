"""A node that calls its model with a client of its own, recorded or redirected, and what the record has of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import httpx
from langgraph.graph import START, StateGraph

from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.clients.hooks import client_patches, redirected_clients
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from support.fake_vllm import FakeVllm, running
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal, read_segment
from trace_store.records import Action, SpanRow, Trajectory

WRITER = Route("writer@3", "writer@3", 3, temperature=0.7, max_tokens=200)
SEED = 11


class State(TypedDict, total=False):
    out: Any


def graph_of(**nodes: Callable[..., Any]) -> Any:
    """A chain of these nodes."""
    graph = StateGraph(State)
    before = START
    for name, node in nodes.items():
        graph.add_node(name, node)
        graph.add_edge(before, name)
        before = name
    return graph.compile()


@dataclass
class ClientRig:
    """The served model, the app's provider, and a folder for journals."""

    ours: FakeVllm
    hosted: Any
    chat: NodeChat
    folder: Path
    options: RecordOptions = field(default_factory=RecordOptions)
    routes: dict[str, Route] = field(default_factory=lambda: {"writer": WRITER})
    prompts: dict[str, str] = field(default_factory=dict)
    routing: Routing | None = None
    spans: list[SpanRow] = field(default_factory=list)
    recorder: Recorder | None = None

    def recorded(self, run: Callable[[Any], Any], graph: Any, *, redirected: bool = False) -> tuple[Any, list[Action]]:
        """What `run` gives of the recorded graph, and the actions of the record."""
        result, trajectory = self.trajectory(run, graph, redirected=redirected)
        return result, list(trajectory.actions)

    def trajectory(self, run: Callable[[Any], Any], graph: Any, *, redirected: bool = False) -> tuple[Any, Trajectory]:
        """As `recorded`, with the whole trajectory."""
        journal = Journal(self.folder / f"journal-{len(list(self.folder.iterdir()))}")
        self.recorder = recorder = Recorder(journal, self.options)
        recorded = wrap(graph, recorder)
        self.routing = Routing(self.routes, SEED, self.chat, prompts=self.prompts) if redirected else None
        token = current_routing.set(self.routing)
        try:
            with ExitStack() as stack:
                if redirected:
                    stack.enter_context(redirected_models())
                    stack.enter_context(redirected_clients() if self.options.other_clients else nullcontext())
                result = run(recorded)
        finally:
            current_routing.reset(token)
            recorded.unwrap()
            journal.close()
            self.spans = [
                record
                for segment in journal._folder.glob("*.segment")
                for record in read_segment(segment)[0]
                if isinstance(record, SpanRow)
            ]
        assert recorder.failures == 0
        return result, spans_to_trajectory(self.spans)

    def run_async(self, app: Any, close: Callable[[], Awaitable[None]] | None = None) -> Any:
        """The result of the app on a loop of its own; connections are closed with it."""
        self.chat.http_async_client = httpx.AsyncClient(trust_env=False)

        async def run() -> Any:
            try:
                return await app.ainvoke({})
            finally:
                await self.chat.http_async_client.aclose()
                if close is not None:
                    await close()

        return asyncio.run(run())

    def chat_spans(self) -> list[SpanRow]:
        """The spans of the last run's model calls, in the order of their start."""
        return sorted((span for span in self.spans if span.operation == "chat"), key=lambda span: span.start_ns)


def node_chat(server: FakeVllm, client: httpx.Client) -> NodeChat:
    """What asks a served model for the nodes of an episode."""
    return NodeChat(
        model="base",
        base_url=f"{server.url}/v1",
        api_key="ours",
        http_client=client,
        http_async_client=httpx.AsyncClient(trust_env=False),
        max_retries=0,
    )


@contextmanager
def client_rig(folder: Path, hosted: Any) -> Iterator[ClientRig]:
    """A rig whose provider is the server `hosted`."""
    ours = FakeVllm()
    ours.adapters["writer@3"] = "/adapters/writer/3"
    ours.auto_tools = True
    with running(ours), running(hosted), httpx.Client(trust_env=False) as client:
        chat = node_chat(ours, client)
        yield ClientRig(ours, hosted, chat, folder)


@contextmanager
def without_other_recorders() -> Iterator[None]:
    """Lifts the patches that graphs of other tests hold, which were wrapped and live on."""
    gc.collect()
    held_count = client_patches._state.user_count
    for _ in range(held_count):
        client_patches.detach()
    try:
        yield
    finally:
        for _ in range(held_count):
            client_patches.attach()
