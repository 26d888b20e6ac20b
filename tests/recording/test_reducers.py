"""Owns: whose values a state key holds is what its reducer left, shown or only bounded, for every kind of reducer.

As in test_edges: `a>b` is exact, `a?b` a bound from above, and no edge says that nothing of a's can be left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.channels import EphemeralValue
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Overwrite
from support.edge_rig import node_of, recorded_edges, says

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

model = says()


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def longest(earlier: str, later: str) -> str:
    return earlier if len(earlier) > len(later) else later


def keep_two(earlier: list[Any], later: list[Any]) -> list[Any]:
    return [*earlier, *later][-2:]


def extend_in_place(earlier: list[Any], later: list[Any]) -> list[Any]:
    later.extend(earlier)
    return later


def merge_in_place(earlier: list[Any], later: list[Any]) -> list[Any]:
    for old in earlier:
        later[0]["text"] = old["text"] + later[0]["text"]
    return later


def replace(earlier: Any, later: Any) -> Any:
    return later


def joined(earlier: str, later: str) -> str:
    return f"{earlier} {later}"


def obeys(earlier: Any, later: Any) -> Any:
    """A reducer that is told in the written value whether it replaces."""
    return later["value"] if isinstance(later, dict) and later.get("type") == "override" else earlier + later


def override(value: Any) -> dict[str, Any]:
    return {"type": "override", "value": value}


def cell(text: str) -> dict[str, str]:
    return {"text": text}


def newest_two(earlier: list[Any], later: list[Any]) -> list[Any]:
    return add_messages(earlier, later)[-2:]  # type: ignore[index,return-value]


def by(*names: str) -> list[HumanMessage]:
    return [HumanMessage(name) for name in names]


# reducer, what a and b write -> the data edges into c, which reads the key
CASES: dict[str, tuple[Any, Callable[..., Any], Any, Any, str]] = {
    "a text that is replaced": (str, replace, "by a", "by b", "b>c"),
    "a text that is kept": (str, longest, "by a, the longer", "by b", "a>c b?c"),
    "a text that is made anew": (str, joined, "by a", "by b", "a?c b?c"),
    "a number may be anybody's": (int, replace, 1, 2, "a?c b?c"),
    "one text of two": (str, replace, "equal", "equal", "a?c b?c"),
    "a list that is replaced": (list, replace, ["by a"], ["by b"], "b>c"),
    "a list that is replaced by nothing": (list, replace, ["by a"], [], "b>c"),
    "a list of which all is left": (list, keep_two, ["by a"], ["by b"], "a>c b>c"),
    "a list of which a's is cut off": (list, keep_two, ["by a"], ["by b", "and b"], "b>c"),
    "a list that is extended in place": (list, extend_in_place, ["by a"], ["by b"], "a>c b>c"),
    "a list of numbers may be anybody's": (list, keep_two, [1], [2, 3], "a?c b?c"),
    "a list that is added to": (list, operator.add, ["by a"], ["by b"], "a>c b>c"),
    "a number that is added to": (int, operator.add, 1, 2, "a>c b>c"),
    "a dict that is merged": (dict, operator.or_, {"x": cell("a")}, {"y": cell("b")}, "a>c b>c"),
    "a dict of which a's is written over": (dict, operator.or_, {"x": 1}, {"x": 1, "y": 2}, "b>c"),
    "a dict under a reducer of one's own": (dict, lambda x, y: {**x, **y}, {"x": cell("a")}, {"x": cell("b")}, "b>c"),
    "a dict in a list that is changed in place": (list, merge_in_place, [cell("a")], [cell("b")], "a?c b?c"),
    "dicts in a list of which a's is cut off": (list, keep_two, [cell("a")], [cell("b"), cell("c")], "b>c"),
    "messages that are given ids by a reducer of one's own": (list, newest_two, by("a"), by("b"), "a>c b>c"),
    "messages of which a's is cut off": (list, newest_two, by("a"), by("b", "b"), "b>c"),
    "a list that the writer tells to replace": (list, obeys, ["by a"], override(["by b"]), "b>c"),
    "messages that the writer tells to replace": (list, obeys, by("a"), override(by("b")), "b>c"),
    "a text that the writer tells to replace": (str, obeys, "by a", override("by b"), "b>c"),
    "a list that the writer tells to empty": (list, obeys, ["by a"], override([]), "b?c"),
    "a list that nobody tells to replace": (list, obeys, override(["by a"]), ["by b"], "a>c b>c"),
    "a number that the writer tells to replace": (int, obeys, 1, override(2), "a?c b?c"),
    "an overwritten list": (list, operator.add, ["by a"], Overwrite(["by b"]), "b>c"),
    "an overwritten text": (str, joined, "by a", Overwrite("by b"), "b>c"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reader_depends_on_those_of_whom_the_reducer_left_something(name: str, recorder: Recorder) -> None:
    kind, reducer, by_a, by_b, edges = CASES[name]
    keys = {"k": Annotated[kind, reducer], "q": str}
    schema = TypedDict("Reduced", keys, total=False)  # type: ignore[misc]
    graph = StateGraph(schema)
    graph.add_node("a", node_of(model, ["q"], {"k": by_a}))
    graph.add_node("b", node_of(model, ["q"], {"k": by_b}))
    graph.add_node("c", node_of(model, ["k"], {}))
    for src, dst in [(START, "a"), ("a", "b"), ("b", "c")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"q": ""})
    assert recorded_edges(recorder) == {"trigger": "a>b b>c", "data": edges}


def test_a_value_that_lasts_for_one_superstep_is_gone_after_it(recorder: Recorder) -> None:
    schema = TypedDict("Passing", {"k": Annotated[str, EphemeralValue], "q": str}, total=False)  # noqa: UP013
    graph = StateGraph(schema)
    graph.add_node("a", node_of(model, ["q"], {"k": "by a"}))
    for name in ("b", "c"):
        graph.add_node(name, lambda state: model.invoke(str(state.get("k"))) and {})
    for src, dst in [(START, "a"), ("a", "b"), ("b", "c")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"q": ""})
    assert recorded_edges(recorder) == {"trigger": "a>b b>c", "data": "a>b"}


def chat(*writes: Any) -> Any:
    """a, b, c ... in a row, each of which asks a model without reading, and writes; the last one reads the messages."""
    graph = StateGraph(MessagesState)
    earlier = START
    for name, write in zip("abcdefgh", writes, strict=False):
        graph.add_node(name, lambda state, write=write: model.invoke("?") and {"messages": write})
        graph.add_edge(earlier, name)
        earlier = name
    graph.add_node("reads", node_of(model, ["messages"], {}))
    graph.add_edge(earlier, "reads")
    return graph.compile()


def into_reads(recorder: Recorder) -> str:
    return " ".join(edge for edge in recorded_edges(recorder)["data"].split() if edge.endswith("reads"))


BY_A = [AIMessage("one", id="a1"), AIMessage("two", id="a2")]
MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "one of two is removed": ((BY_A, RemoveMessage("a1")), "a>reads b>reads"),
    "both are removed": ((BY_A, [RemoveMessage("a1"), RemoveMessage("a2")]), "b>reads"),
    "one after the other": ((BY_A, RemoveMessage("a1"), RemoveMessage("a2")), "b>reads c>reads"),
    "written over under its id": ((BY_A[:1], AIMessage("anew", id="a1")), "b>reads"),
    "all are removed": ((BY_A, [RemoveMessage(REMOVE_ALL_MESSAGES)]), "b>reads"),
    "all, and what comes before in the same write": (
        (BY_A, AIMessage("x", id="x"), [AIMessage("y"), RemoveMessage(REMOVE_ALL_MESSAGES), AIMessage("z")]),
        "c>reads",
    ),
    "another one's": ((BY_A, AIMessage("x", id="x"), RemoveMessage("x")), "a>reads c>reads"),
    "messages as pairs": (([("ai", "one")], [("ai", "two")]), "a>reads b>reads"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_reader_depends_on_those_whose_messages_are_left_and_on_those_who_removed(
    name: str, recorder: Recorder
) -> None:
    writes, edges = MESSAGES[name]
    wrap(chat(*([m.model_copy() for m in w] if w is BY_A else w for w in writes)), recorder).invoke(
        {"messages": [HumanMessage("hi")]}
    )
    assert into_reads(recorder) == edges


def test_messages_in_a_delta_channel_are_their_writers(recorder: Recorder) -> None:
    def extend(earlier: list[Any], writes: Any) -> list[Any]:
        return [*earlier, *(message for write in writes for message in write)]

    schema = TypedDict("Delta", {"messages": Annotated[list[Any], DeltaChannel(extend)]})  # noqa: UP013
    graph = StateGraph(schema)
    for name in ("a", "b"):
        reply = ToolMessage(name, tool_call_id=name)
        graph.add_node(name, lambda state, reply=reply: model.invoke("?") and {"messages": [reply]})
    graph.add_node("reads", node_of(model, ["messages"], {}))
    for src, dst in [(START, "a"), ("a", "b"), ("b", "reads")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"messages": [HumanMessage("hi")]})
    assert into_reads(recorder) == "a>reads b>reads"


def test_a_message_without_an_id_can_be_removed_by_the_one_that_it_was_given(recorder: Recorder) -> None:
    def remover(state: MessagesState) -> dict[str, Any]:
        model.invoke("?")
        return {"messages": [RemoveMessage(message.id) for message in state["messages"] if message.content == "one"]}

    graph = StateGraph(MessagesState)
    graph.add_node("a", lambda state: model.invoke("?") and {"messages": [("ai", "one")]})
    graph.add_node("b", lambda state: model.invoke("?") and {"messages": [AIMessage("two")]})
    graph.add_node("c", remover)
    graph.add_node("reads", node_of(model, ["messages"], {}))
    for src, dst in [(START, "a"), ("a", "b"), ("b", "c"), ("c", "reads")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"messages": [HumanMessage("hi")]})
    assert into_reads(recorder) == "b>reads c>reads"


def test_messages_removed_inside_a_subgraph_stay_in_the_graph_around_it(recorder: Recorder) -> None:
    inner = StateGraph(MessagesState)
    inner.add_node("drop", lambda state: {"messages": [RemoveMessage("a1"), RemoveMessage("a2")]})
    inner.add_node("reads_inside", node_of(model, ["messages"], {}))
    inner.add_edge(START, "drop")
    inner.add_edge("drop", "reads_inside")
    graph = StateGraph(MessagesState)
    graph.add_node("a", lambda state: model.invoke("?") and {"messages": [m.model_copy() for m in BY_A]})
    graph.add_node("b", lambda state: model.invoke("?") and {"messages": [AIMessage("two")]})
    graph.add_node("sub", inner.compile())
    graph.add_node("reads", node_of(model, ["messages"], {}))
    for src, dst in [(START, "a"), ("a", "b"), ("b", "sub"), ("sub", "reads")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"messages": [HumanMessage("hi")]})
    data = recorded_edges(recorder)["data"].split()
    assert "a>sub/reads_inside" not in data
    assert {"b>sub/reads_inside", "a>reads", "b>reads"} <= set(data)
