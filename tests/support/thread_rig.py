"""Apps whose models say the same to the same prompt, the runs of one thread of them, and forks of these runs."""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from marft_bridge import wrap
from marft_bridge.forks.fork_plan import ForkChange, plan_forks, text_to_call
from marft_bridge.forks.given_tools import ToolChoice, given_tools
from marft_bridge.forks.recorded_prefix import run_to_prefix
from marft_bridge.forks.thread_start import ThreadStart, load_forked, run_to_start
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.run_facts import value_to_text
from marft_bridge.replay.episodes import load_run
from marft_bridge.replay.private_memory import PrivateMemory, private_memory
from marft_bridge.replay.recorded_run import RecordedRun, spans_to_run
from marft_bridge.replay.replayed_run import to_comparable_output
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import OWN_MODELS, Collector
from support.edge_rig import edges_of, recorded_traces
from trace_store.journal import Journal
from trace_store.store import TraceStore

T: Any = {"configurable": {"thread_id": "t"}}


class Echo(BaseChatModel):
    """Says the same to the same prompt, always: a deterministic policy."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        text = str(messages[-1].content)
        message = AIMessage(f"<{text.split()[0]} {sum(map(ord, text)) % 997}>")
        return ChatResult(generations=[ChatGeneration(message=message)])


class State(TypedDict, total=False):
    ask: str
    log: Annotated[list[str], operator.add]
    turns: int


def say(name: str) -> Callable[[State], dict[str, Any]]:
    def node(state: State) -> dict[str, Any]:
        return {"log": [str(Echo().invoke(f"{name} {state['ask']} {state.get('log', [])}").text)]}

    return node


def chain(saver: Any, **_: Any) -> Any:
    graph = StateGraph(State)
    for name in "abc":
        graph.add_node(name, say(name))
    for one, other in zip([START, *"abc"], [*"abc", END], strict=True):
        graph.add_edge(one, other)
    return graph.compile(checkpointer=saver)


def loop(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda state: "a" if len(state["log"]) % 3 else END, ["a", END])
    return graph.compile(checkpointer=saver)


def gather(saver: Any) -> Any:
    graph = StateGraph(State)
    for name in "abc":
        graph.add_node(name, say(name))
    graph.add_edge(START, "a")
    packets = lambda state: [Send("b", {"ask": f"{state['ask']}{n}"}) for n in range(3)]  # noqa: E731
    graph.add_conditional_edges("a", packets, ["b"])
    graph.add_edge("b", "c")
    return graph.compile(checkpointer=saver)


def nested(saver: Any, inner_saver: Any = None) -> Any:
    inner = StateGraph(State)
    inner.add_node("x", lambda state: say("x")(state) | {"turns": state.get("turns", 0) + 1})
    inner.add_node("y", lambda state: say(f"y{state['turns']}")(state))
    inner.add_edge(START, "x")
    inner.add_edge("x", "y")
    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_node("in", inner.compile(checkpointer=inner_saver))
    graph.add_edge(START, "a")
    graph.add_edge("a", "in")
    return graph.compile(checkpointer=saver)


def keeping(saver: Any) -> Any:
    """Its subgraph keeps a history of its own on the thread."""
    return nested(saver, inner_saver=True)


GRAPHS = {"chain": (chain, "b"), "loop": (loop, "a"), "gather": (gather, "b"), "nested": (nested, "in/x")}
GRAPHS["keeping"] = (keeping, "in/y")


class Lab:
    """An app on its own models, the runs of one thread of it, and forks of them.

    Args:
        saver: the app's checkpointer; None: one in memory.
        runner: the event loop of an app that runs asynchronously; None: it runs synchronously.
    """

    def __init__(
        self, folder: Path, build: Callable[[Any], Any], saver: Any = None, runner: asyncio.Runner | None = None
    ) -> None:
        self.folder, self.saver, self._runner = folder, InMemorySaver() if saver is None else saver, runner
        self.graph = build(self.saver)
        self.reward_sums: dict[str, float] = {}  # of the latest forks
        self.recorded = wrap(self.graph, folder / "traces.duckdb")

    def turns(self, *inputs: Any) -> None:
        for each in inputs:
            value = {"ask": each} if isinstance(each, str) else each
            if self._runner is None:
                self.recorded.invoke(value, T)
            else:
                self._runner.run(self.recorded.ainvoke(value, T))

    def load(self, number: int) -> Any:
        """The run with this number, from 0, as `fork` loads it."""
        self.recorded.recorder.journal.sync()
        with TraceStore.open(self.folder / "traces.duckdb") as store:
            store.take_in()
            return load_forked(store, [each.episode_id for each in store.episodes()][number])

    def load_run(self, episode_id: str) -> RecordedRun:
        """One of the runs, with the store open for the moment."""
        with TraceStore.open(self.folder / "traces.duckdb", read_only=True) as store:
            return load_run(store, episode_id)

    def fork(
        self, number: int, at: str, graph: Any = None, *, tools: ToolChoice = "recorded", samples: int = 1
    ) -> tuple[RecordedRun, ThreadStart]:
        """The last fork of the run with this number, at `NODE[:k]`."""
        forked, graph = self.load(number), self.graph if graph is None else graph
        call = text_to_call(forked.run, at if at.rpartition(":")[2].isdecimal() else f"{at}:1")
        prefix = run_to_prefix(forked.run, call, tools=tools)
        requests = plan_forks(forked.run, prefix, ForkChange(), run_id="f", samples=samples, seed=0)
        journal = Journal(self.folder / f"journal-{id(graph)}")
        recorder = Recorder(journal)
        app = App(lambda _: graph, [], [], dict, lambda task, state: _score(state), "reward")
        recorded = wrap(graph, recorder)
        loop: Any = asyncio.Runner() if self._runner is None else nullcontext(self._runner)
        with loop as runner, redirected_models(), given_tools():
            start = run_to_start(
                recorded,
                forked,
                call,
                samples=samples,
                tools=tools,
                load=self.load_run,
                settings={},
                runner=runner,
            )
            requests = [replace(each, start=start, beginning=start.prefix_to_rest(prefix)) for each in requests]
            with private_memory(PrivateMemory()):
                collector = Collector(graph=recorded, app=app, backend=OWN_MODELS)
                tally = runner.run(collector.requests_to_episodes(requests))
        assert tally.outcomes["failed"] == 0, tally.failures
        self.reward_sums = dict(tally.reward_sums)
        recorded.unwrap()
        made = spans_to_run(recorded_traces(recorder)[-1])
        journal.close()
        return made, start


def _score(state: Any) -> float:
    """A reward that depends on all of a state, but for what is drawn anew in each run."""
    return float(len(str(to_comparable_output(json.loads(value_to_text(state))))))


def facts(run: RecordedRun) -> Any:
    """What both ways have to give: calls and who was asked anew, D, and the end."""
    replayed = {action.action_id: action.replayed_from for action in run.trajectory.actions}
    calls = sorted((call.node, str(call.prompt), replayed[call.action_id] or "") for call in run.calls)
    return calls, edges_of(run.trajectory), to_comparable_output(run.output), run.trajectory.episode.from_checkpoint
