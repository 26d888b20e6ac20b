"""Owns: a fork that enters its run at the app's own checkpoint before the call is the fork that replays all of the run.

- The same prompts, answers, D, state and reward, on a chain, a loop, packets, joins, commands, parallel nodes, messages
  with tools, a subgraph in flight, a later turn; and its record is whole.
- No node of the supersteps before the call runs, no checkpoint of the app's is written.
- Where it spares less than its trial costs, or a checkpoint does not hold all, the run is replayed, with the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.managed import RemainingSteps
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send
from support.edge_rig import edges_of
from support.thread_rig import Echo, Lab, T, facts, keeping, nested

from marft_bridge.forks.run_entry import RunEntry
from marft_bridge.replay.replayed_run import to_comparable_output

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
        from langchain_core.utils.function_calling import convert_to_openai_tool

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


SHAPES: dict[str, tuple[Callable[[Any], Any], str, int, int]] = {  # graph, call, supersteps spared, nodes not run
    "chain": (chain, "d", 3, 3),
    "loop": (loop, "a:4", 3, 3),
    "packets": (packets, "d", 3, 5),
    "one packet": (packets, "b:2", 1, 1),
    "parallel": (parallel, "d", 3, 4),
    "beside one that ended": (parallel, "e", 2, 3),
    "commands": (commands, "d", 2, 3),
    "agent": (agent, "model:3", 4, 2),
    "subgraph in flight": (nested, "in/y", 1, 1),
    "subgraph with a history": (keeping, "in/y", 1, 1),
}
FAST = ("loop", "beside one that ended")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHAPES]
)
def test_a_fork_that_enters_its_run_is_the_fork_that_replays_it(name: str, tmp_path: Path) -> None:
    build, at, superstep_count, _ = SHAPES[name]
    lab = Lab(tmp_path, build)
    first_inputs: list[Any] = ["one", "two", "three"]
    if build is agent:
        first_inputs = [{"messages": [HumanMessage(each)]} for each in first_inputs]
    lab.turns(*first_inputs)
    held = {key: len(each) for key, each in lab.saver.storage["t"].items()}
    for number in (0, 1):  # the first run of the thread, and one that others come before and after
        ran.clear()
        entered, start = lab.fork(number, at, samples=4)
        entered_counts = Counter(ran)
        assert isinstance(start.entry, RunEntry), start.entry
        assert start.entry.superstep_count == superstep_count
        ran.clear()
        replayed, start = lab.fork(number, at, graph=build(InMemorySaver()), samples=4)
        replayed_counts = Counter(ran)
        assert not isinstance(start.entry, RunEntry)
        assert facts(entered) == facts(replayed)
        parent = lab.load(number).run
        assert edges_of(entered.trajectory) == edges_of(parent.trajectory)
        assert to_comparable_output(entered.output) == to_comparable_output(parent.output)
        assert entered.trajectory.episode.lineage == replayed.trajectory.episode.lineage
        assert len(entered.spans) == len(replayed.spans) == len(parent.spans)
        print(name, entered_counts, replayed_counts)
    assert {key: len(each) for key, each in lab.saver.storage["t"].items()} == held
