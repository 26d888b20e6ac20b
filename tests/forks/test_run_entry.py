"""Owns: a fork that enters its run at the app's own checkpoint before the call is the fork that replays all of the run.

- The same prompts, answers, D, state and reward, on a chain, a loop, packets, joins, commands, parallel nodes, messages
  with tools, a subgraph in flight, a later turn; and its record is whole.
- No node of the supersteps before the call runs, no checkpoint of the app's is written.
- Where it spares less than its trial costs, or a checkpoint does not hold all, the run is replayed, with the reason.
"""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.cache.memory import InMemoryCache
from langgraph.channels import UntrackedValue
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeError
from langgraph.func import task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.managed import RemainingSteps
from langgraph.prebuilt import ToolNode
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt
from support.edge_rig import edges_of
from support.thread_rig import Echo, Lab, T, facts, keeping, nested

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.fork_plan import text_to_call
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.forks.run_entry import RunEntry, find_entry
from marft_bridge.replay.replayed_run import ReplayOptions, replay_run, to_comparable_output
from marft_bridge.rollouts.langgraph_json import ServerStore

ran: Counter[str] = Counter()


def keep_longer(one: str, other: str) -> str:
    return max(one, other, key=len)


class State(TypedDict, total=False):
    ask: str
    log: Annotated[list[str], operator.add]
    best: Annotated[str, keep_longer]
    last: str
    left: RemainingSteps


def say(name: str, **fields: Any) -> Callable[[State], dict[str, Any]]:
    """A node that asks its model about all that it knows."""

    def node(state: State) -> dict[str, Any]:
        ran[name] += 1
        known = [state.get(key) for key in ("ask", "log", "best", "last", "left")]
        text = str(Echo().invoke(f"{name} {known}").text)
        return {"log": [text], "best": text, **fields}

    return node


def built(saver: Any, names: str, *edges: tuple[Any, Any], nodes: dict[str, Any] | None = None) -> Any:
    graph = StateGraph(State)
    for name in names:
        graph.add_node(name, (nodes or {}).get(name) or say(name))
    for one, other in edges:
        if callable(other):
            graph.add_conditional_edges(one, other)
        else:
            graph.add_edge(one, other)
    return graph.compile(checkpointer=saver)


def chain(saver: Any) -> Any:
    return built(saver, "abcd", (START, "a"), ("a", "b"), ("b", "c"), ("c", "d"))


def loop(saver: Any) -> Any:
    def again(state: State) -> Any:
        return "a" if len(state["log"]) % 5 else END

    return built(saver, "a", (START, "a"), ("a", again))


def packets(saver: Any) -> Any:
    def send(state: State) -> Any:
        return [Send("b", {"ask": f"{state['ask']}{number}", "log": []}) for number in range(3)]

    return built(saver, "abcd", (START, "a"), ("a", send), ("b", "c"), ("c", "d"))


def parallel(saver: Any) -> Any:
    """d waits for b and for c, which takes one superstep more."""
    edges = [(START, "a"), ("a", "b"), ("a", "c"), ("c", "e"), (["b", "e"], "d")]
    return built(saver, "abcde", *edges)


def commands(saver: Any) -> Any:
    def a(state: State) -> Command[Any]:
        return Command(goto=["b", Send("c", {"ask": "sent", "log": ["x"]})], update=say("a", last="a")(state))

    return built(saver, "abcd", (START, "a"), ("b", "d"), ("c", "d"), nodes={"a": a})


class Chat(TypedDict):
    messages: Annotated[list[Any], add_messages]


@tool
def look(word: str) -> str:
    """Looks a word up."""
    ran["look"] += 1
    return f"{word} is {len(word)} long"


class Caller(Echo):
    """Asks for the tool three times, then answers."""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        result = super()._generate([HumanMessage(f"x {[each.text for each in messages]}")])
        message = result.generations[0].message
        if len(messages) % 7 and isinstance(message, AIMessage):
            number = len(messages)
            message.tool_calls = [
                {"name": "look", "args": {"word": message.text}, "id": f"c{number}", "type": "tool_call"}
            ]
        return result

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools])


def agent(saver: Any) -> Any:
    def model(state: Chat) -> dict[str, Any]:
        ran["model"] += 1
        return {"messages": [Caller().bind_tools([look]).invoke(state["messages"])]}

    graph = StateGraph(Chat)
    graph.add_node("model", model)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=saver)


SHAPES: dict[str, tuple[Callable[[Any], Any], str, int, int]] = {  # graph, call, forks, supersteps that are spared
    "chain": (chain, "d", 1, 3),
    "loop": (loop, "a:4", 1, 3),
    "packets": (packets, "d", 1, 3),
    "one packet": (packets, "b:2", 4, 1),
    "parallel": (parallel, "d", 1, 3),
    "beside one that ended": (parallel, "e", 2, 2),
    "commands": (commands, "d", 1, 2),
    "agent": (agent, "model:3", 3, 4),
    "subgraph in flight": (nested, "in/y", 2, 1),
    "subgraph with a history": (keeping, "in/y", 2, 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "loop" else pytest.mark.slow) for name in SHAPES]
)
def test_a_fork_that_enters_its_run_is_the_fork_that_replays_it(name: str, tmp_path: Path) -> None:
    build, at, samples, superstep_count = SHAPES[name]
    lab = Lab(tmp_path, build)
    asks = ["one", "two", "three"]
    lab.turns(*([{"messages": [HumanMessage(each)]} for each in asks] if build is agent else asks))
    held = {key: len(each) for key, each in lab.saver.storage["t"].items()}
    entered, start = lab.fork(1, at, samples=samples)
    rewards = lab.reward_sums
    assert isinstance(start.entry, RunEntry), start.entry
    assert start.entry.superstep_count == superstep_count
    replayed, start = lab.fork(1, at, graph=build(InMemorySaver()), samples=samples)
    assert start.entry == "the app's checkpointer does not hold all of its checkpoints"
    assert facts(entered) == facts(replayed)
    assert rewards == lab.reward_sums
    parent = lab.load(1).run
    assert edges_of(entered.trajectory) == edges_of(parent.trajectory)
    assert to_comparable_output(entered.output) == to_comparable_output(parent.output)
    for field in ("lineage", "begins", "from_checkpoint", "thread_id", "outcome"):
        assert getattr(entered.trajectory.episode, field) == getattr(replayed.trajectory.episode, field)
    assert len(entered.spans) == len(replayed.spans) == len(parent.spans)
    assert {key: len(each) for key, each in lab.saver.storage["t"].items()} == held


@pytest.mark.slow
def test_no_node_before_the_call_runs_and_the_fork_is_a_whole_run_of_its_own(tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one")
    ran.clear()
    entered, start = lab.fork(0, "d", samples=3)
    assert ran == {"d": 4}  # three forks, and the trial
    parent = lab.load(0).run
    assert [each.replayed_from for each in entered.trajectory.actions] == [
        *(call.action_id for call in parent.calls[:3]),
        None,
    ]
    assert {span.span_id for span in entered.spans}.isdisjoint(span.span_id for span in parent.spans)
    assert isinstance(start.entry, RunEntry)
    assert str(start) == f"; 3 supersteps from the app's checkpointer, up to {start.entry.checkpoint_id}"
    root = entered.root
    assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in entered.spans)
    assert replay_run(chain(InMemorySaver()), entered).divergence is None


# -- why a run is replayed ------------------------------------------------------------------------------------------


def entry_of(lab: Lab, at: str, *, number: int = 0, samples: int = 9, tools: ToolChoice = "recorded") -> Any:
    """Where forks of a run enter it, or why they do not."""
    run = lab.load(number).run
    with asyncio.Runner() as runner:
        return find_entry(
            lab.graph,
            run,
            text_to_call(run, at),
            samples=samples,
            options=ReplayOptions(tools, allow_connections=True),
            settings={},
            runner=runner,
        )


def after_a_graph(saver: Any) -> Any:
    return built(saver, "abd", (START, "a"), ("a", "b"), ("b", "d"), nodes={"b": chain(None)})


def after_a_router(saver: Any) -> Any:
    def route(state: State) -> str:
        return "d" if Echo().invoke("where to").text else END

    return built(saver, "abd", (START, "a"), ("a", "b"), ("b", route))


def after_a_task(saver: Any) -> Any:
    @task
    def write(text: str) -> dict[str, Any]:
        return {"log": [text]}

    def b(state: State) -> Any:
        return write(state["ask"]).result()

    return built(saver, "abd", (START, "a"), ("a", "b"), ("b", "d"), nodes={"b": b})


def after_an_error(saver: Any) -> Any:
    attempts: list[int] = []

    def b(state: State) -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("again")
        return {"log": ["b"]}

    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_node("b", b, retry_policy=RetryPolicy(initial_interval=0.01, retry_on=ValueError))
    graph.add_node("d", say("d"))
    for one, other in ((START, "a"), ("a", "b"), ("b", "d")):
        graph.add_edge(one, other)
    return graph.compile(checkpointer=saver)


def after_an_error_handler(saver: Any) -> Any:
    def b(state: State) -> Any:
        raise ValueError("broken")

    def handle(state: State, error: NodeError) -> Command[Any]:
        return Command(update={"log": [str(error.error)]}, goto="d")

    graph = StateGraph(State)
    graph.add_node("a", say("a"))
    graph.add_node("b", b, error_handler=handle)
    graph.add_node("d", say("d"))
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    return graph.compile(checkpointer=saver)


def with_a_cache(saver: Any) -> Any:
    graph = chain(saver)
    graph.cache = InMemoryCache()
    return graph


def with_a_store(saver: Any) -> Any:
    graph = chain(saver)
    graph.store = InMemoryStore()
    return graph


class Untracked(State):
    handle: Annotated[str, UntrackedValue]


def with_an_untracked_value(saver: Any) -> Any:
    graph = StateGraph(Untracked)
    for name in "ab":
        graph.add_node(name, say(name))
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    return graph.compile(checkpointer=saver)


REASONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a graph inside ran before the call": (after_a_graph, "d:1"),
    "a router asked a model before the call": (after_a_router, "d"),
    "a functional task ran before the call": (after_a_task, "d"),
    "a node failed before the call": (after_an_error, "d"),
    "an error handler ran before the call": (after_an_error_handler, "d"),
    "the app keeps a store of LangGraph's": (with_a_store, "d"),
    "the app keeps a cache of LangGraph's": (with_a_cache, "d"),
    "its state has a channel that checkpoints leave out": (with_an_untracked_value, "b"),
    "no superstep lies before the call": (chain, "a"),
    "the app has no checkpointer": (lambda _: chain(None), "d"),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", REASONS)
def test_what_checkpoints_do_not_tell_all_of_is_replayed(reason: str, tmp_path: Path) -> None:
    build, at = REASONS[reason]
    lab = Lab(tmp_path, build)
    lab.turns("one")
    assert entry_of(lab, at) == reason


def test_a_store_that_the_graph_has_only_for_being_listed_keeps_nothing_of_a_run(tmp_path: Path) -> None:
    """As `open_graph` gives one to every graph of a langgraph.json."""
    lab = Lab(tmp_path, chain)
    lab.turns("one")
    lab.graph.store = ServerStore()
    assert isinstance(entry_of(lab, "d"), RunEntry)
    lab.graph.store = InMemoryStore()
    assert entry_of(lab, "d") == "the app keeps a store of LangGraph's"


def cached_then(a: Any, saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("a", a, cache_policy=CachePolicy(key_func=lambda _: "key"))
    graph.add_node("d", say("d"))
    graph.add_edge(START, "a")
    graph.add_edge("a", "d")
    return graph.compile(checkpointer=saver, cache=InMemoryCache())


@pytest.mark.slow
def test_a_run_with_a_task_from_a_cache_that_is_gone_is_replayed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, lambda saver: cached_then(lambda _: {"last": "plain"}, saver))
    lab.recorded.invoke({"ask": "one"}, {"configurable": {"thread_id": "before"}})  # fills the cache
    lab.turns("one")
    lab.graph.cache = None
    assert entry_of(lab, "d", number=1) == "a task got its writes from a cache before the call"


def test_a_task_from_a_cache_that_calls_a_model_is_named_as_what_forks_cannot_repeat(tmp_path: Path) -> None:
    lab = Lab(tmp_path, lambda saver: cached_then(say("a"), saver))
    lab.recorded.invoke({"ask": "one"}, {"configurable": {"thread_id": "before"}})
    lab.turns("one")
    assert [call.node for call in lab.load(1).run.calls] == ["d"]
    with pytest.raises(AssertionError, match=r"in the record it made no such call: its task came from the app.*cache"):
        lab.fork(1, "d")


@pytest.mark.slow
def test_a_run_that_served_models_answered_is_replayed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one")
    run = lab.load(0).run
    episode = replace(run.trajectory.episode, adapters={"a": 1})
    served = replace(run, trajectory=replace(run.trajectory, episode=episode))
    with asyncio.Runner() as runner:
        entry = find_entry(
            lab.graph,
            served,
            text_to_call(run, "d"),
            samples=9,
            options=ReplayOptions(allow_connections=True),
            settings={},
            runner=runner,
        )
    assert entry == "its nodes were answered by served models"


@pytest.mark.slow
def test_a_run_after_an_edit_is_entered_while_the_app_holds_the_edit_and_refused_once_it_does_not(
    tmp_path: Path,
) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one")
    lab.graph.update_state(T, {"log": ["edited"]})
    lab.turns("two")
    lab.graph.update_state(T, {"log": ["edited later"]})
    fork, start = lab.fork(1, "d", samples=2)
    assert isinstance(start.entry, RunEntry)
    prompt = str(fork.calls[-1].prompt)
    assert "'edited'" in prompt
    assert "edited later" not in prompt
    with pytest.raises(GraphError, match="begins after its thread was edited by update_state"):
        lab.fork(1, "d", graph=chain(InMemorySaver()))


@pytest.mark.slow
def test_a_run_is_replayed_where_that_costs_no_more_supersteps(tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    lab.turns("one")
    reason = "it is no cheaper: 3 x 1 supersteps before the call, 3 from there on"
    assert entry_of(lab, "b", samples=3) == reason
    assert isinstance(entry_of(lab, "b", samples=4), RunEntry)
    assert entry_of(lab, "b", tools="run") == "its tools run again"


@pytest.mark.slow
def test_a_run_that_resumes_or_begins_in_the_past_is_replayed(tmp_path: Path) -> None:
    def ask(state: State) -> dict[str, Any]:
        return {"log": [str(interrupt("how"))]}

    def build(saver: Any) -> Any:
        return built(saver, "abcd", (START, "a"), ("a", "b"), ("b", "c"), ("c", "d"), nodes={"b": ask})

    lab = Lab(tmp_path, build)
    lab.turns("one", Command(resume="well"))
    lab.recorded.invoke(None, list(lab.graph.get_state_history(T))[2].config)
    for number in (1, 2):
        assert entry_of(lab, "d", number=number) == "it did not begin with a new input at the end of its thread"


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["async", "exit"])
def test_a_run_whose_checkpoints_are_gone_is_replayed(durability: Any, tmp_path: Path) -> None:
    lab = Lab(tmp_path, chain)
    lab.recorded.invoke({"ask": "one"}, T, durability=durability)
    if durability == "async":
        lab.saver.delete_thread("t")
    assert entry_of(lab, "d") == "the app's checkpointer does not hold all of its checkpoints"


@pytest.mark.slow
def test_a_run_whose_nodes_keep_something_elsewhere_is_replayed(tmp_path: Path) -> None:
    notes: list[str] = []

    def b(state: State) -> dict[str, Any]:
        notes.append("b was here")
        return {"log": ["b"]}

    def d(state: State) -> dict[str, Any]:
        return {"log": [str(Echo().invoke(f"d {notes}").text)]}

    def build(saver: Any) -> Any:
        return built(saver, "abcd", (START, "a"), ("a", "b"), ("b", "c"), ("c", "d"), nodes={"b": b, "d": d})

    lab = Lab(tmp_path, build)
    lab.turns("one")
    notes.clear()
    fork, start = lab.fork(0, "d")
    assert str(start.entry).startswith("entered there, the recorded run does not come out the same: d, call 1: message")
    assert to_comparable_output(fork.output) == to_comparable_output(lab.load(0).run.output)
