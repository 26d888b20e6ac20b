"""Owns: the dependency function of a recorded run is the one worked out by hand, for every construct of LangGraph.

Each test says the edges in words first. `a>b` is exact, `a?b` a bound from above. `data` means: b read a state key
whose value a wrote, or b's prompt holds a's message; `trigger`: a's writes made b run.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel
from support.edge_rig import (
    calls_tool,
    edges_of,
    node_of,
    recorded_edges,
    recorded_traces,
    recorded_trajectories,
    says,
    source_to_function,
)

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as names
from trace_store.journal import Journal


class Keys(TypedDict, total=False):
    a: str
    b: str
    c: str
    d: str
    log: Annotated[list[str], operator.add]


class KeysModel(BaseModel):
    a: str = ""
    b: str = ""
    c: str = ""
    d: str = ""
    log: Annotated[list[str], operator.add] = []


@dataclass
class KeysData:
    a: str = ""
    b: str = ""
    c: str = ""
    d: str = ""
    log: Annotated[list[str], operator.add] = field(default_factory=list)


class Turns(TypedDict):
    turns: list[str]


KEEPS = """
def node(state):
    model.invoke(str(state.get("c")))
    return {"c": "kept"}
"""
KEEPS_STATE = [None, True]
"""Checkpointers of a subgraph: True is the one that keeps its own state on the thread from run to run."""
THREAD = {"thread_id": "t"}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


model = says()


def run(graph: Any, recorder: Recorder, start: Any, asynchronous: bool = False, **config: Any) -> Any:
    recorded = wrap(graph, recorder)
    if asynchronous:
        return asyncio.run(recorded.ainvoke(start, config or None))
    return recorded.invoke(start, config or None)


def chain(schema: Any) -> Any:
    """a -> b -> c -> d; b reads a, c reads b, d reads a and c."""
    graph, by_attribute = StateGraph(schema), schema is not Keys
    graph.add_node("a", node_of(model, ["d"], {"a": "1"}, attributes=by_attribute))
    graph.add_node("b", node_of(model, ["a"], {"b": "2"}, attributes=by_attribute))
    graph.add_node("c", node_of(model, ["b"], {"c": "3"}, attributes=by_attribute))
    graph.add_node("d", node_of(model, ["a", "c"], {}, attributes=by_attribute))
    for src, dst in [(START, "a"), ("a", "b"), ("b", "c"), ("c", "d")]:
        graph.add_edge(src, dst)
    return graph.compile()


CHAIN = {"trigger": "a>b b>c c>d", "data": "a>b a>d b>c c>d"}


@pytest.mark.parametrize("schema", [Keys, KeysModel, KeysData])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_chain_depends_on_what_it_read_whatever_the_state_is(
    schema: Any, asynchronous: bool, recorder: Recorder
) -> None:
    start = {"a": "", "b": "", "c": "", "d": ""}
    expected = chain(schema).invoke(start)
    assert run(chain(schema), recorder, start, asynchronous) == expected
    assert recorded_edges(recorder) == CHAIN


def test_the_way_a_run_is_streamed_does_not_change_its_edges(recorder: Recorder) -> None:
    recorded = wrap(chain(Keys), recorder)
    for mode in ("values", "updates", "messages", "tasks", "debug", "checkpoints", "custom"):
        list(recorded.stream({"d": ""}, stream_mode=mode))

    async def events() -> list[Any]:
        return [event async for event in recorded.astream_events({"d": ""}, version="v2")]

    asyncio.run(events())
    assert [edges_of(trajectory) for trajectory in recorded_trajectories(recorder)] == [CHAIN] * 8


def test_branches_of_one_superstep_do_not_depend_on_each_other_and_a_join_depends_on_both(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("p", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("q", node_of(model, ["d"], {"b": "1"}))
    graph.add_node("r", node_of(model, ["b"], {}))  # triggered by both, reads only q's
    graph.add_edge(START, "p")
    graph.add_edge(START, "q")
    graph.add_edge(["p", "q"], "r")
    run(graph.compile(), recorder, {"d": ""})
    assert recorded_edges(recorder) == {"trigger": "p>r q>r", "data": "q>r"}


def test_a_join_that_is_only_half_written_triggers_nothing(recorder: Recorder) -> None:
    # a -> r directly, and r also waits for the join of a and c. c runs later: r runs twice.
    graph = StateGraph(Keys)
    graph.add_node("a", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("b", node_of(model, ["d"], {}))
    graph.add_node("c", node_of(model, ["d"], {}))
    graph.add_node("r", node_of(model, ["a"], {}))
    for src, dst in [(START, "a"), (START, "b"), ("a", "r"), ("b", "c")]:
        graph.add_edge(src, dst)
    graph.add_edge(["a", "c"], "r")
    run(graph.compile(), recorder, {"d": ""})
    # Superstep 2: r1 by a, and c by b. Superstep 3: r2 by the join of a and c.
    assert recorded_edges(recorder) == {"trigger": "a>r1 a>r2 b>c c>r2", "data": "a>r1 a>r2"}


def test_a_reducer_keeps_all_writers_and_a_plain_key_the_last_one(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"log": ["x"], "a": "x"}))
    graph.add_node("y", node_of(model, ["d"], {"log": ["y"], "a": "y"}))
    graph.add_node("reads_log", node_of(model, ["log"], {}))
    graph.add_node("reads_a", node_of(model, ["a"], {}))
    for src, dst in [(START, "x"), ("x", "y"), ("y", "reads_log"), ("reads_log", "reads_a")]:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"d": "", "log": []})
    assert recorded_edges(recorder) == {
        "trigger": "reads_log>reads_a x>y y>reads_log",
        "data": "x>reads_log y>reads_a y>reads_log",
    }


def test_a_state_that_leaves_as_a_whole_is_a_bound_and_says_so(recorder: Recorder) -> None:
    def whole(state: Keys) -> dict[str, Any]:
        model.invoke(str(dict(state)))
        return {}

    def one_and_whole(state: Keys) -> dict[str, Any]:
        model.invoke(f"{state['b']} {state}")
        return {}

    def untouched(state: Keys) -> dict[str, Any]:
        model.invoke("hello")
        return {}

    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("y", node_of(model, ["d"], {"b": "1"}))
    graph.add_node("whole", whole)
    graph.add_node("one_and_whole", one_and_whole)
    graph.add_node("untouched", untouched)
    edges = [(START, "x"), ("x", "y"), ("y", "whole"), ("whole", "one_and_whole"), ("one_and_whole", "untouched")]
    for src, dst in edges:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"d": ""})
    assert recorded_edges(recorder) == {
        "trigger": "one_and_whole>untouched whole>one_and_whole x>y y>whole",
        # The code of `untouched` does not mention its state, so it has read none of it.
        "data": "x?one_and_whole x?whole y>one_and_whole y?whole",
    }


def test_what_is_read_after_a_call_is_no_dependency_of_it(recorder: Recorder) -> None:
    def early_and_late(state: Keys) -> dict[str, Any]:
        model.invoke(state["a"])
        model.invoke(state["b"])
        return {}

    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("y", node_of(model, ["d"], {"b": "1"}))
    graph.add_node("z", early_and_late)
    for src, dst in [(START, "x"), (START, "y"), (["x", "y"], "z")]:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"d": ""})
    # z2 follows z1 in one node: what the node did in between is not seen, so that is a bound.
    assert recorded_edges(recorder) == {"trigger": "x>z1 y>z1", "data": "x>z1 x>z2 y>z2 z1?z2"}


@pytest.mark.parametrize("schema", [Keys, KeysModel])
def test_a_conditional_edge_triggers_the_branch_that_it_chose(schema: Any, recorder: Recorder) -> None:
    graph, by_attribute = StateGraph(schema), schema is not Keys
    graph.add_node("judge", node_of(model, ["d"], {"a": "no"}, attributes=by_attribute))
    graph.add_node("yes", node_of(model, ["a"], {}, attributes=by_attribute))
    graph.add_node("no", node_of(model, ["a"], {}, attributes=by_attribute))
    graph.add_node("after", node_of(model, ["d"], {}, attributes=by_attribute))
    graph.add_edge(START, "judge")
    graph.add_conditional_edges("judge", lambda state: "no" if state else "yes", ["yes", "no"])
    graph.add_edge("yes", "after")
    graph.add_edge("no", "after")
    run(graph.compile(), recorder, {"d": "", "a": "", "b": "", "c": ""})
    assert recorded_edges(recorder) == {"trigger": "judge>no no>after", "data": "judge>no"}


def test_a_loop_depends_on_the_turn_before(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("writer", node_of(model, ["b"], {"a": "text"}))
    graph.add_node("critic", node_of(model, ["a"], {"b": "more", "log": ["turn"]}))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "critic")
    graph.add_conditional_edges("critic", lambda state: END if len(state["log"]) == 3 else "writer")
    run(graph.compile(), recorder, {"b": "", "log": []})
    turns = "critic1>writer2 critic2>writer3 writer1>critic1 writer2>critic2 writer3>critic3"
    assert recorded_edges(recorder) == {"trigger": turns, "data": turns}


def test_a_send_is_an_edge_from_its_sender_even_when_two_send_equal_things(recorder: Recorder) -> None:
    def sender(state: Keys) -> Command[Any]:
        model.invoke(state["d"])
        return Command(goto=[Send("worker", "same"), Send("worker", "same")])

    def worker(state: Any) -> dict[str, Any]:
        model.invoke(str(state))
        return {"log": ["done"]}

    graph = StateGraph(Keys)
    graph.add_node("one", sender, destinations=("worker",))
    graph.add_node("two", sender, destinations=("worker",))
    graph.add_node("worker", worker)
    graph.add_node("sum", node_of(model, ["log"], {}))
    graph.add_edge(START, "one")
    graph.add_edge(START, "two")
    graph.add_edge("worker", "sum")
    run(graph.compile(), recorder, {"d": "", "log": []})
    (trajectory,) = recorded_trajectories(recorder)
    edges = edges_of(trajectory)
    assert [edge.exact for edge in trajectory.edges] == [True] * len(trajectory.edges)
    sent = edges["send"].split()
    assert sorted(edge.partition(">")[0] for edge in sent) == ["one", "one", "two", "two"]
    assert sorted(edge.partition(">")[2] for edge in sent) == ["worker1", "worker2", "worker3", "worker4"]
    assert edges["trigger"] == edges["data"] == "worker1>sum worker2>sum worker3>sum worker4>sum"


def test_map_reduce_by_a_conditional_edge_that_sends(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("plan", node_of(model, ["d"], {"a": "plan"}))
    graph.add_node("worker", lambda part: {"log": [model.invoke(part["topic"]).content]})
    graph.add_node("sum", node_of(model, ["log", "a"], {}))
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda _: [Send("worker", {"topic": t}) for t in "xyz"], ["worker"])
    graph.add_edge("worker", "sum")
    run(graph.compile(), recorder, {"d": "", "log": []})
    workers = "worker1>sum worker2>sum worker3>sum"
    assert recorded_edges(recorder) == {
        "send": "plan>worker1 plan>worker2 plan>worker3",
        "trigger": workers,
        "data": f"plan>sum {workers}",
    }


def test_a_command_triggers_where_it_goes(recorder: Recorder) -> None:
    def chooser(state: Keys) -> Command[Literal["left", "right"]]:
        model.invoke(state["d"])
        return Command(goto="right", update={"a": "r"})

    graph = StateGraph(Keys)
    graph.add_node("chooser", chooser)
    graph.add_node("left", node_of(model, ["a"], {}))
    graph.add_node("right", node_of(model, ["a"], {}))
    graph.add_edge(START, "chooser")
    run(graph.compile(), recorder, {"d": ""})
    assert recorded_edges(recorder) == {"trigger": "chooser>right", "data": "chooser>right"}


@pytest.mark.parametrize("keeps_state", KEEPS_STATE)
@pytest.mark.parametrize("schema", [Keys, KeysModel, KeysData])
def test_a_subgraph_only_passes_on_what_it_did_not_write(schema: Any, keeps_state: Any, recorder: Recorder) -> None:
    inner, by_attribute = StateGraph(schema), schema is not Keys
    inner.add_node("i1", node_of(model, ["a"], {"b": "inner"}, attributes=by_attribute))
    inner.add_node("i2", node_of(model, ["b"], {}, attributes=by_attribute))
    inner.add_edge(START, "i1")
    inner.add_edge("i1", "i2")
    outer = StateGraph(schema)
    outer.add_node("before", node_of(model, ["d"], {"a": "1", "c": "1"}, attributes=by_attribute))
    outer.add_node("sub", inner.compile(checkpointer=keeps_state))
    outer.add_node(
        "after", node_of(model, ["c"], {}, attributes=by_attribute)
    )  # written by before, given out again by sub
    outer.add_node("last", node_of(model, ["b"], {}, attributes=by_attribute))  # written by i1
    for src, dst in [(START, "before"), ("before", "sub"), ("sub", "after"), ("after", "last")]:
        outer.add_edge(src, dst)
    run(
        outer.compile(checkpointer=InMemorySaver()), recorder, {"d": "", "a": "", "b": "", "c": ""}, configurable=THREAD
    )
    assert recorded_edges(recorder) == {
        "trigger": "after>last before>sub/i1 sub/i1>sub/i2 sub/i2>after",
        "data": "before>after before>sub/i1 sub/i1>last sub/i1>sub/i2",
    }


@pytest.mark.parametrize("keeps_state", KEEPS_STATE)
def test_a_subgraph_that_a_node_calls_is_bounded_by_what_the_node_had(keeps_state: Any, recorder: Recorder) -> None:
    inner = StateGraph(Keys)
    inner.add_node("i", node_of(model, ["a"], {"b": "inner"}))
    inner.add_edge(START, "i")
    compiled = inner.compile(checkpointer=keeps_state)

    def calls_it(state: Keys) -> dict[str, Any]:
        return {"b": compiled.invoke({"a": state["a"] + "!"})["b"]}

    outer = StateGraph(Keys)
    outer.add_node("before", node_of(model, ["d"], {"a": "1"}))
    outer.add_node("calls_it", calls_it)
    outer.add_node("after", node_of(model, ["b"], {}))
    for src, dst in [(START, "before"), ("before", "calls_it"), ("calls_it", "after")]:
        outer.add_edge(src, dst)
    run(outer.compile(checkpointer=InMemorySaver()), recorder, {"d": ""}, configurable=THREAD)
    assert recorded_edges(recorder) == {
        "trigger": "before>calls_it/i calls_it/i>after",
        "data": "before?calls_it/i calls_it/i>after",
    }


@pytest.mark.parametrize("keeps_state", KEEPS_STATE)
@pytest.mark.parametrize(("change", "edge"), [("", "before>node/i"), ("state['a'] = 'own'; ", "before?node/i")])
def test_a_state_that_a_node_changed_before_it_passed_it_on_is_a_bound(
    change: str, edge: str, keeps_state: Any, recorder: Recorder
) -> None:
    inner = StateGraph(Keys)
    inner.add_node("i", node_of(model, ["a"], {"b": "inner"}))
    inner.add_edge(START, "i")
    source = f"def node(state):\n    {change}return {{'b': graph.invoke(state)['b']}}\n"
    outer = StateGraph(Keys)
    outer.add_node("before", node_of(model, ["d"], {"a": "1"}))
    outer.add_node("node", source_to_function(source, graph=inner.compile(checkpointer=keeps_state)))
    outer.add_edge(START, "before")
    outer.add_edge("before", "node")
    run(outer.compile(checkpointer=InMemorySaver()), recorder, {"d": ""}, configurable=THREAD)
    assert recorded_edges(recorder) == {"trigger": "before>node/i", "data": edge}


@pytest.mark.parametrize("keeps_state", KEEPS_STATE)
def test_a_command_to_the_parent_graph_is_the_writing_of_the_node_that_gave_it(
    keeps_state: Any, recorder: Recorder
) -> None:
    def hands_off(state: Keys) -> Command[Any]:
        model.invoke(state["a"])
        return Command(graph=Command.PARENT, goto="next", update={"b": "from inside"})

    inner = StateGraph(Keys)
    inner.add_node("i1", node_of(model, ["d"], {"a": "1"}))
    inner.add_node("i2", hands_off)
    inner.add_edge(START, "i1")
    inner.add_edge("i1", "i2")
    outer = StateGraph(Keys)
    outer.add_node("sub", inner.compile(checkpointer=keeps_state), destinations=("next",))
    outer.add_node("next", node_of(model, ["b"], {}))
    outer.add_edge(START, "sub")
    run(outer.compile(checkpointer=InMemorySaver()), recorder, {"d": ""}, configurable=THREAD)
    assert recorded_edges(recorder) == {"trigger": "sub/i1>sub/i2 sub/i2>next", "data": "sub/i1>sub/i2 sub/i2>next"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("in_function", [False, True])
def test_a_command_to_the_parent_graph_ends_there_and_the_graphs_around_it_write_for_themselves(
    in_function: bool, asynchronous: bool, recorder: Recorder
) -> None:
    def hands_off(state: Keys) -> Command[Any]:
        model.invoke(state["a"])
        return Command(graph=Command.PARENT, goto="next", update={"b": "from inside"})

    inner = StateGraph(Keys)
    inner.add_node("i", hands_off)
    inner.add_edge(START, "i")
    inner_graph = inner.compile()
    team = StateGraph(Keys)
    team.add_node("sub", (lambda state: inner_graph.invoke(state)) if in_function else inner_graph)
    team.add_node("next", node_of(model, ["b"], {"c": "1"}))
    team.add_edge(START, "sub")
    outer = StateGraph(Keys)
    outer.add_node("team", team.compile())
    outer.add_node("after", node_of(model, ["c"], {}))
    outer.add_edge(START, "team")
    outer.add_edge("team", "after")
    run(outer.compile(), recorder, {"a": ""}, asynchronous=asynchronous)
    edges = "team/next>after team/sub/i>team/next"
    assert recorded_edges(recorder) == {"trigger": edges, "data": edges}


def test_what_a_subgraph_keeps_from_one_run_to_the_next_is_read_from_who_wrote_it(recorder: Recorder) -> None:
    # c is a key of the subgraph alone: its second run reads what its first one wrote.
    inner = StateGraph(Keys)
    inner.add_node("i", node_of(model, ["a"], {"b": "inner"}))
    inner.add_node("keeps", source_to_function(KEEPS, model=model))
    inner.add_edge(START, "i")
    inner.add_edge("i", "keeps")
    compiled = inner.compile(checkpointer=True)
    outer = StateGraph(Turns)
    outer.add_node("sub", lambda state: {"turns": state["turns"] + [compiled.invoke({"a": "x"})["b"]]})
    outer.add_edge(START, "sub")
    outer.add_conditional_edges("sub", lambda state: "sub" if len(state["turns"]) < 2 else END, ["sub", END])
    run(outer.compile(checkpointer=InMemorySaver()), recorder, {"turns": []}, configurable=THREAD)
    assert "sub/keeps1>sub/keeps2" in recorded_edges(recorder)["data"].split()


def test_a_retried_node_depends_through_the_attempt_that_counts(recorder: Recorder) -> None:
    attempts: list[int] = []

    def shaky(state: Keys) -> dict[str, Any]:
        attempts.append(1)
        if len(attempts) == 1:
            model.invoke(state["c"])  # this attempt reads another key, and is lost
            raise ConnectionError("once")
        model.invoke(state["a"])
        return {"b": "1"}

    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("w", node_of(model, ["d"], {"c": "1"}))
    graph.add_node("shaky", shaky, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=2))
    graph.add_node("last", node_of(model, ["b"], {}))
    for src, dst in [(START, "x"), (START, "w"), (["x", "w"], "shaky"), ("shaky", "last")]:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"d": ""})
    (trajectory,) = recorded_trajectories(recorder)
    lost = [action for action in trajectory.actions if action.untrainable_reason == "attempt failed and was retried"]
    assert len(lost) == 1
    assert not {lost[0].action_id} & {end for edge in trajectory.edges for end in (edge.src, edge.dst)}
    number = {"shaky1": "S", "shaky2": "S"}  # the lost attempt is one of the two
    edges = {kind: " ".join(sorted(_rename(text, number).split())) for kind, text in edges_of(trajectory).items()}
    assert edges == {"trigger": "S>last w>S x>S", "data": "S>last x>S"}


def _rename(text: str, names_of: dict[str, str]) -> str:
    for old, new in names_of.items():
        text = text.replace(old, new)
    return text


def test_a_cached_node_is_a_span_without_calls_that_passes_dependencies_on(recorder: Recorder) -> None:
    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("cached", node_of(model, ["a"], {"b": "1"}), cache_policy=CachePolicy(key_func=lambda s: s["a"]))
    graph.add_node("y", node_of(model, ["b"], {}))
    for src, dst in [(START, "x"), ("x", "cached"), ("cached", "y")]:
        graph.add_edge(src, dst)
    recorded = wrap(graph.compile(cache=InMemoryCache()), recorder)
    results = [recorded.invoke({"d": ""}) for _ in range(2)]
    assert results[0] == results[1]
    first, second = recorded_trajectories(recorder)
    assert edges_of(first) == {"trigger": "cached>y x>cached", "data": "cached>y x>cached"}
    assert [action.node for action in second.actions] == ["x", "y"]
    assert edges_of(second) == {"trigger": "x>y", "data": "x>y"}
    spans = [span for span in recorded_traces(recorder)[1] if span.attributes.get(names.CACHED)]
    assert [span.attributes[names.NODE] for span in spans] == ["cached"]


def test_a_run_that_is_interrupted_and_its_resume_are_two_linked_episodes(recorder: Recorder) -> None:
    def asks(state: Keys) -> dict[str, Any]:
        model.invoke(state["a"])
        return {"b": interrupt("sure?")}

    graph = StateGraph(Keys)
    graph.add_node("x", node_of(model, ["d"], {"a": "1"}))
    graph.add_node("asks", asks)
    graph.add_node("y", node_of(model, ["b"], {}))
    for src, dst in [(START, "x"), ("x", "asks"), ("asks", "y")]:
        graph.add_edge(src, dst)
    recorded = wrap(graph.compile(checkpointer=InMemorySaver()), recorder)
    thread: Any = {"configurable": {"thread_id": "t"}}
    recorded.invoke({"d": ""}, thread)
    recorded.invoke(Command(resume="yes"), thread)
    first, second = recorded_trajectories(recorder)
    assert (first.episode.outcome, first.episode.reason) == ("truncated", "interrupted")
    assert edges_of(first) == {"trigger": "x>asks", "data": "x>asks"}
    # The resume runs `asks` again from its top; x belongs to the episode before.
    assert second.episode.outcome == "terminated"
    assert second.episode.parent_episode == first.episode.episode_id
    assert edges_of(second) == {"trigger": "asks>y", "data": "asks>y"}


def test_a_breakpoint_truncates_the_episode_too(recorder: Recorder) -> None:
    recorded = wrap(_chain_with_breakpoint(), recorder)
    thread: Any = {"configurable": {"thread_id": "t"}}
    recorded.invoke({"d": ""}, thread)
    recorded.invoke(None, thread)
    first, second = recorded_trajectories(recorder)
    assert [(t.episode.outcome, t.episode.reason) for t in (first, second)] == [
        ("truncated", "interrupted"),
        ("terminated", None),
    ]
    assert second.episode.parent_episode == first.episode.episode_id
    assert edges_of(first) == {"trigger": "a>b", "data": "a>b"}
    assert edges_of(second) == {"trigger": "c>d", "data": "c>d"}  # what a and b wrote comes from the episode before


def _chain_with_breakpoint() -> Any:
    return chain(Keys).builder.compile(checkpointer=InMemorySaver(), interrupt_before=["c"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_functional_task_depends_on_the_results_that_it_is_given(asynchronous: bool, recorder: Recorder) -> None:
    both_run = threading.Barrier(2, timeout=30)  # so that neither returns before the other is called

    @task
    def draft(topic: str) -> list[str]:
        both_run.wait()
        return [str(model.invoke(topic).content)]

    @task
    def unrelated() -> list[str]:
        both_run.wait()
        return [str(model.invoke("aside").content)]

    @task
    def review(text: list[str], note: str) -> str:
        return str(model.invoke(f"{text} {note}").content)

    @entrypoint()
    def app(topic: str) -> str:
        text, aside = draft(topic), unrelated()
        given, _ = text.result(), aside.result()
        return review(given, note="!").result()

    run(app, recorder, "tides", asynchronous)
    # review is given draft's result. It also started after `unrelated` had returned: no more than a bound.
    assert recorded_edges(recorder) == {"data": "app/draft>app/review app/unrelated?app/review"}


def fails_after_a_call() -> Any:
    """A graph of one node, which calls the model and then fails."""
    graph = StateGraph(Keys)
    graph.add_node("x", source_to_function("def node(state):\n    model.invoke('x')\n    1 / 0\n", model=model))
    graph.add_edge(START, "x")
    return graph.compile()


def test_what_a_function_does_after_a_failure_that_it_caught_is_bounded_by_it(recorder: Recorder) -> None:
    inner = fails_after_a_call()

    def caller(state: Keys) -> dict[str, Any]:
        with suppress(ZeroDivisionError):
            inner.invoke({"d": state["d"]})
        return {"a": str(model.invoke(state["d"]).content)}

    graph = StateGraph(Keys)
    graph.add_node("caller", caller)
    graph.add_node("after", node_of(model, ["a"], {}))
    graph.add_edge(START, "caller")
    graph.add_edge("caller", "after")
    run(graph.compile(), recorder, {"d": ""})
    # The node inside failed, and the call after it may have been told how.
    assert recorded_edges(recorder) == {"trigger": "caller>after", "data": "caller/x?caller caller>after"}
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.untrainable_reason for action in trajectory.actions if action.node == "caller/x"] == [
        "attempt failed"
    ]


def test_what_reads_the_error_that_a_tool_caught_is_bounded_by_what_failed_in_it(recorder: Recorder) -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    inner = fails_after_a_call()

    @tool
    def research(q: str) -> str:
        """Asks another agent."""
        try:
            return str(inner.invoke({"d": q}))
        except ZeroDivisionError as error:
            return str(error)

    agent = create_agent(says(calls_tool("research", q="x"), "done"), [research], name="lead")
    run(agent, recorder, {"messages": [HumanMessage("go")]})
    # `x` is what the node of the tools did last: what that node wrote may be of `x`, and may be of the error alone.
    assert recorded_edges(recorder) == {
        "send": "lead1>lead/tools/x",
        "tool": "lead1>lead2",
        "data": "lead/tools/x?lead2 lead1>lead2",
        "trigger": "lead/tools/x?lead2",
    }


def test_a_functional_task_that_runs_after_a_failure_that_was_caught_is_bounded_by_it(recorder: Recorder) -> None:
    @task
    def dies(topic: str) -> str:
        raise ValueError(str(model.invoke(topic).content))

    @task
    def review(text: str) -> str:
        return str(model.invoke(text).content)

    @entrypoint()
    def app(topic: str) -> str:
        text = "no error"
        try:
            text = dies(topic).result()
        except ValueError as error:
            text = str(error)
        return review(text).result()

    run(app, recorder, "tides")
    assert recorded_edges(recorder) == {"data": "app/dies?app/review"}


def test_the_react_loop_of_create_agent_depends_by_tools_messages_and_triggers(recorder: Recorder) -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    @tool
    def add(x: int) -> str:
        """Adds."""
        return str(x + 1)

    agent = create_agent(says(calls_tool("add", x=1), calls_tool("add", "add", x=2), "done"), [add])
    result = run(agent, recorder, {"messages": [HumanMessage("go")]})
    assert result["messages"][-1].content == "done"
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["model"] * 3
    everything = "model1>model2 model1>model3 model2>model3"  # all of the past is in each prompt
    assert edges_of(trajectory) == {"trigger": "model1>model2 model2>model3", "data": everything, "tool": everything}
    tools = [span for span in recorded_traces(recorder)[0] if span.operation == names.EXECUTE_TOOL]
    assert len(tools) == 3
    assert all(span.attributes[names.TOOL_CALL_ID].startswith("call-") for span in tools)


def test_messages_that_were_removed_are_no_dependency(recorder: Recorder) -> None:
    from langchain_core.messages import RemoveMessage
    from langgraph.graph.message import REMOVE_ALL_MESSAGES

    def speaker(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [model.invoke(state["messages"])]}

    def forget(state: MessagesState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("anew")]}

    graph = StateGraph(MessagesState)
    graph.add_node("x", speaker)
    graph.add_node("forget", forget)
    graph.add_node("y", speaker)
    for src, dst in [(START, "x"), ("x", "forget"), ("forget", "y")]:
        graph.add_edge(src, dst)
    run(graph.compile(), recorder, {"messages": [HumanMessage("hi")]})
    # y reads what `forget` wrote, and `forget` ran because of x: that much is data, though no message of x is left.
    assert recorded_edges(recorder) == {"trigger": "x>y", "data": "x>y"}
    (trace,) = recorded_traces(recorder)
    last = max((span for span in trace if span.operation == names.CHAT), key=lambda span: span.start_ns)
    assert names.SAW_ANSWERS not in last.attributes
