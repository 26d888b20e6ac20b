"""Owns: a recorded graph does what the graph does, and its record is whole.

- Results, streams and batches are those of the unwrapped graph; wrapping twice is wrapping once; unwrap undoes it.
- Spans form one tree per run, named after the GenAI conventions, and the root counts them.
- Triggers are exact for chains, joins, loops and branches, worked out by hand.
- Concurrent runs do not mix; a failed or cut-short run says why; a recorder that breaks harms nobody.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompt_values import StringPromptValue
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel._loop import PregelLoop
from langgraph.types import Send

from graphs import math_duo
from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.model_calls.scripted_model import END_OF_TURN, ScriptedPolicy, text_to_ids
from marft_bridge.recording.episode_context import EpisodeContext, current_episode
from marft_bridge.recording.langgraph_hooks import task_hooks
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import RecordedGraph, wrap
from marft_bridge.recording.write_ledger import WriteLedger
from trace_store import conventions as names
from trace_store.assemble import spans_to_trajectory
from trace_store.errors import StoreError
from trace_store.journal import Journal, read_segment
from trace_store.records import SpanRow, Trajectory


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def speaker(name: str, model: ScriptedPolicy | None) -> Any:
    def node(state: dict[str, Any]) -> dict[str, Any]:
        if model is not None:
            model.invoke(f"{name} after {len(state.get('log', []))}")
        return {"log": [name]}

    return node


def graph_of(edges: list[tuple[Any, str]], model: ScriptedPolicy, silent: str = "") -> StateGraph[Any]:
    nodes = sorted({end for edge in edges for part in edge for end in ([part] if isinstance(part, str) else part)})
    graph = StateGraph(Log)
    for name in nodes:
        if name not in (START, END):
            graph.add_node(name, speaker(name, None if name in silent else model))
    for start, end in edges:
        graph.add_edge(start, end)
    return graph


def echo() -> ScriptedPolicy:
    return ScriptedPolicy(script=lambda node, _prompt, _random: node)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def spans_of(recorder: Recorder) -> dict[str, list[SpanRow]]:
    recorder.journal.sync()
    traces: dict[str, list[SpanRow]] = {}
    for segment in Path(recorder.journal._folder).glob("*.segment"):
        for record in read_segment(segment)[0]:
            if isinstance(record, SpanRow):
                traces.setdefault(record.trace_id, []).append(record)
    return traces


def only_trajectory(recorder: Recorder) -> Trajectory:
    (spans,) = spans_of(recorder).values()
    return spans_to_trajectory(spans)


def triggers(trajectory: Trajectory) -> set[tuple[str, str]]:
    """Trigger edges as pairs like ("a1", "b2"): node and superstep."""
    label = {action.action_id: f"{action.node}{action.step}" for action in trajectory.actions}
    return {(label[e.src], label[e.dst]) for e in trajectory.edges if e.kind == "trigger"}


def test_a_recorded_graph_returns_what_the_graph_returns(recorder: Recorder) -> None:
    edges = [(START, "a"), ("a", "b"), ("a", "c"), (["b", "c"], "d"), ("d", END)]
    plain = graph_of(edges, echo()).compile()
    recorded = wrap(graph_of(edges, echo()).compile(), recorder)
    start = {"log": ["start"]}
    assert recorded.invoke(start) == plain.invoke(start)
    assert asyncio.run(recorded.ainvoke(start)) == asyncio.run(plain.ainvoke(start))
    modes = {"stream_mode": "updates"}
    ordered = [sorted(map(str, stream)) for stream in (recorded.stream(start, **modes), plain.stream(start, **modes))]
    assert ordered[0] == ordered[1]
    assert recorded.batch([start, start]) == plain.batch([start, start])
    assert recorded.nodes.keys() == plain.nodes.keys()
    assert len(spans_of(recorder)) == 5  # invoke, ainvoke, stream and two of the batch


class Delegating(CompiledStateGraph[Any, Any, Any, Any]):
    """A graph as some libraries make their agents: its own methods run another one."""

    def __init__(self, inner: Any) -> None:
        self.__dict__.update({**vars(inner), "inner": inner})

    def invoke(self, graph_input: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.inner.invoke(graph_input, config, **kwargs)

    async def ainvoke(self, graph_input: Any, config: Any = None, **kwargs: Any) -> Any:
        return await self.inner.ainvoke(graph_input, config, **kwargs)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_graph_whose_own_invoke_runs_another_one_is_recorded(is_async: bool, recorder: Recorder) -> None:
    agent = Delegating(graph_of([(START, "a"), ("a", END)], echo()).compile())
    recorded = wrap(agent, recorder)
    result = asyncio.run(recorded.ainvoke({"log": []})) if is_async else recorded.invoke({"log": []})
    assert result == agent.invoke({"log": []})  # which is not recorded
    assert [action.node for action in only_trajectory(recorder).actions] == ["a"]


RUNS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda graph: graph.invoke({"log": []}, CONFIG),
    "ainvoke": lambda graph: asyncio.run(graph.ainvoke({"log": []}, config=CONFIG)),
    "stream": lambda graph: list(graph.stream({"log": []}, CONFIG))[-1],
    "batch": lambda graph: graph.batch([{"log": []}], [CONFIG])[0],
    "astream_events": lambda graph: asyncio.run(result_of_events(graph)),
}
CONFIG = {"tags": ["mine"]}


async def result_of_events(graph: Any) -> Any:
    events = [event async for event in graph.astream_events({"log": []}, config=CONFIG, version="v2")]
    return events[-1]["data"]["output"]


def as_named(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda graph_input, config=None, **options: original(graph_input, config, **options)


def as_any(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: original(*args, **options)


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("form", [as_named, as_any])
def test_a_graph_onto_which_the_app_put_a_method_of_its_own_is_recorded_through_its_config(
    how: str, form: Callable[[Callable[..., Any]], Callable[..., Any]], recorder: Recorder
) -> None:
    """As tracers and toolkits do: `graph.stream = traced`, which runs the graph that it was made for."""
    graph = graph_of([(START, "a"), ("a", END)], echo()).compile()
    own, calls = form(getattr(graph, how)), []

    @functools.wraps(own, assigned=())
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(how)
        return own(*args, **options)

    setattr(graph, how, counted)
    expected = RUNS[how](graph)
    recorded = wrap(graph, recorder)
    assert RUNS[how](recorded) == expected
    assert calls == [how, how]
    assert [action.node for action in only_trajectory(recorder).actions] == ["a"]
    recorded.unwrap()
    RUNS[how](recorded)
    assert len(spans_of(recorder)) == 1


def with_bound_config(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(original, config=THREAD)


def with_default_config(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda graph_input, config=None: original(graph_input, config or THREAD)


def with_config_of_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda graph_input, thread="t", **options: original(graph_input, {"configurable": {"thread_id": thread}})


THREAD = {"configurable": {"thread_id": "t"}}


@pytest.mark.parametrize("form", [with_bound_config, with_default_config, with_config_of_thread])
def test_a_method_of_the_apps_own_that_makes_up_its_config_keeps_it_and_is_named_once(
    form: Callable[[Callable[..., Any]], Callable[..., Any]], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    graph = graph_of([(START, "a"), ("a", END)], echo()).compile(checkpointer=InMemorySaver())
    setattr(graph, "invoke", form(graph.invoke))  # noqa: B010 - no method of a class is replaced
    recorded = wrap(graph, recorder)
    for _ in range(2):
        assert recorded.invoke({"log": []})["log"] != []  # without its thread it would not run at all
    assert recorded.get_state(THREAD).values["log"] != []
    assert spans_of(recorder) == {}
    assert [record.message for record in caplog.records] == [
        "wrap: the graph's own 'invoke' was given no config: such runs are not recorded"
    ]


def test_a_method_of_the_apps_own_that_takes_no_config_is_left_alone_and_named(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    graph = graph_of([(START, "a"), ("a", END)], echo()).compile()
    original = graph.invoke

    def closed(graph_input: Any) -> Any:
        return original(graph_input)

    setattr(graph, "invoke", closed)  # noqa: B010 - no method of a class is replaced
    assert wrap(graph, recorder).invoke({"log": []}) == {"log": ["a"]}
    assert spans_of(recorder) == {}
    assert [record.message for record in caplog.records] == [
        "wrap: the graph's own 'invoke' takes no config: its runs are not recorded"
    ]


def test_an_astream_is_passed_on_part_by_part(recorder: Recorder) -> None:
    recorded = wrap(graph_of([(START, "a"), ("a", "b"), ("b", END)], echo()).compile(), recorder)

    async def parts() -> list[Any]:
        return [part async for part in recorded.astream({"log": []}, stream_mode="updates")]

    assert asyncio.run(parts()) == [{"a": {"log": ["a"]}}, {"b": {"log": ["b"]}}]


def test_the_span_tree_is_run_node_chat_and_the_root_counts_it(recorder: Recorder) -> None:
    duo = math_duo.build(ScriptedPolicy(answers={"reasoner": ["add"], "actor": ["7"]}))
    asyncio.run(wrap(duo, recorder).ainvoke({"question": "3 + 4?"}))
    (spans,) = spans_of(recorder).values()
    by_id = {span.span_id: span for span in spans}
    tree = {(by_id[s.parent_span_id].name if s.parent_span_id else None, s.name) for s in spans}
    assert tree == {
        (None, "invoke_workflow math_duo"),
        ("invoke_workflow math_duo", "invoke_agent reasoner"),
        ("invoke_workflow math_duo", "invoke_agent actor"),
        ("invoke_agent reasoner", "chat"),
        ("invoke_agent actor", "chat"),
    }
    root = next(span for span in spans if span.parent_span_id is None)
    assert root.attributes[names.SPAN_COUNT] == 5
    assert root.attributes[names.OUTCOME] == "terminated"
    assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in spans)


def test_an_action_holds_the_exact_tokens_that_the_model_handed_over(recorder: Recorder) -> None:
    policy = ScriptedPolicy(answers={"reasoner": ["add"], "actor": ["7 of them"]}, logprob=-0.25)
    asyncio.run(wrap(math_duo.build(policy), recorder).ainvoke({"question": "3 + 4?"}))
    for action, call in zip(only_trajectory(recorder).actions, policy.asked, strict=True):
        assert action.node == call.node
        assert action.prompt_ids == tuple(text_to_ids(call.prompt))
        assert action.sampled_ids == (*text_to_ids(call.answer), END_OF_TURN)
        assert action.logprobs == (-0.25,) * len(action.sampled_ids)
        assert action.trainable


def test_triggers_of_a_join_inside_a_loop(recorder: Recorder) -> None:
    graph = graph_of([(START, "a"), ("a", "b"), ("a", "c"), (["b", "c"], "d")], echo())
    graph.add_conditional_edges("d", lambda state: "a" if len(state["log"]) < 8 else END)
    wrap(graph.compile(), recorder).invoke({"log": []})
    assert triggers(only_trajectory(recorder)) == {
        *(("a1", "b2"), ("a1", "c2"), ("b2", "d3"), ("c2", "d3")),
        ("d3", "a4"),
        *(("a4", "b5"), ("a4", "c5"), ("b5", "d6"), ("c5", "d6")),
    }


def test_a_join_remembers_branches_of_different_length(recorder: Recorder) -> None:
    edges = [(START, "a"), ("a", "b"), ("a", "c"), ("c", "e"), (["b", "e"], "d"), ("d", END)]
    wrap(graph_of(edges, echo()).compile(), recorder).invoke({"log": []})
    assert triggers(only_trajectory(recorder)) == {("a1", "b2"), ("a1", "c2"), ("c2", "e3"), ("b2", "d4"), ("e3", "d4")}


def test_a_silent_node_passes_its_triggers_on(recorder: Recorder) -> None:
    edges = [(START, "a"), ("a", "s"), ("s", "b"), ("b", END)]
    wrap(graph_of(edges, echo(), silent="s").compile(), recorder).invoke({"log": []})
    assert triggers(only_trajectory(recorder)) == {("a1", "b3")}


def test_fanned_out_workers_depend_on_their_sender_and_not_on_each_other(recorder: Recorder) -> None:
    graph = graph_of([("w", "z"), ("z", END), (START, "a")], echo())
    graph.add_conditional_edges("a", lambda _: [Send("w", {"log": []}) for _ in range(3)], ["w"])
    wrap(graph.compile(), recorder).invoke({"log": []})
    trajectory = only_trajectory(recorder)
    pairs = [(e.src, e.dst) for e in trajectory.edges if e.kind in ("trigger", "send")]
    node = {action.action_id: action.node for action in trajectory.actions}
    assert sorted((node[a], node[b]) for a, b in pairs) == [("a", "w")] * 3 + [("w", "z")] * 3
    assert not any(node[e.src] == node[e.dst] == "w" for e in trajectory.edges)


def test_nodes_of_a_subgraph_are_named_with_their_path(recorder: Recorder) -> None:
    inner = graph_of([(START, "x"), ("x", "y"), ("y", END)], model := echo()).compile()
    outer = StateGraph(Log)
    outer.add_node("first", speaker("first", model))
    outer.add_node("team", inner)
    outer.add_edge(START, "first")
    outer.add_edge("first", "team")
    outer.add_edge("team", END)
    wrap(outer.compile(), recorder).invoke({"log": []})
    assert [action.node for action in only_trajectory(recorder).actions] == ["first", "team/x", "team/y"]


def test_concurrent_runs_do_not_mix(recorder: Recorder) -> None:
    recorded = wrap(graph_of([(START, "a"), ("a", "b"), ("b", END)], echo()).compile(), recorder)

    async def one(number: int) -> None:
        current_episode.set(EpisodeContext("run", f"task-{number}", "train", task={"number": number}))
        await recorded.ainvoke({"log": [str(number)]})

    async def many() -> None:
        await asyncio.gather(*(one(number) for number in range(50)))

    asyncio.run(many())
    traces = spans_of(recorder)
    assert len(traces) == 50
    assert {spans_to_trajectory(spans).episode.task_id for spans in traces.values()} == {f"task-{n}" for n in range(50)}
    assert all(len(spans) == 5 for spans in traces.values())
    assert recorder.failures == 0
    assert recorder._open_runs.snapshot() == {}  # nothing is kept of a run that ended


def test_a_run_that_raises_is_a_failed_episode_and_the_error_reaches_the_caller(recorder: Recorder) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("boom")

    graph = StateGraph(Log)
    graph.add_node("a", broken)
    graph.add_edge(START, "a")
    with pytest.raises(ZeroDivisionError, match="boom"):
        wrap(graph.compile(), recorder).invoke({"log": []})
    episode = only_trajectory(recorder).episode
    assert (episode.outcome, episode.reason) == ("failed", "ZeroDivisionError: boom")


def test_a_recursion_limit_truncates(recorder: Recorder) -> None:
    graph = graph_of([(START, "a")], echo())
    graph.add_conditional_edges("a", lambda _: "a")
    with pytest.raises(RecursionError):
        wrap(graph.compile(), recorder).invoke({"log": []}, {"recursion_limit": 4})
    episode = only_trajectory(recorder).episode
    assert (episode.outcome, episode.reason) == ("truncated", "recursion limit reached")


def test_a_recorder_that_breaks_changes_no_result_and_is_counted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(recorder, "_open_node", broken)
    monkeypatch.setattr(WriteLedger, "note_writes", broken)
    recorded = wrap(graph_of([(START, "a"), ("a", END)], echo()).compile(), recorder)
    assert recorded.invoke({"log": []}) == {"log": ["a"]}
    assert recorder.failures == 3  # two commits of writes and one node


def test_wrapping_twice_records_once_and_unwrap_takes_the_hook_away(recorder: Recorder) -> None:
    gc.collect()  # wrappers that nobody holds let go of the hook
    others = task_hooks._user_count  # a failed test's traceback may hold a wrapper
    plain = graph_of([(START, "a"), ("a", END)], echo()).compile()
    once = wrap(plain, recorder)
    assert wrap(once, recorder) is once
    assert task_hooks._user_count == others + 1
    assert hasattr(PregelLoop.put_writes, "__wrapped__")
    once.invoke({"log": []})
    assert len(spans_of(recorder)) == 1
    assert once.unwrap() is plain
    once.unwrap()
    assert task_hooks._user_count == others
    assert hasattr(PregelLoop.put_writes, "__wrapped__") == (others > 0)


def test_a_wrapped_graph_is_a_graph_and_every_use_of_it_is_recorded(recorder: Recorder) -> None:
    plain = graph_of([(START, "a"), ("a", "b"), ("b", END)], echo()).compile(name="inner")
    recorded = wrap(plain, recorder)
    assert isinstance(recorded, type(plain))
    assert recorded.get_graph().draw_mermaid() == plain.get_graph().draw_mermaid()
    start = {"log": []}
    recorded.with_config(tags=["mine"]).invoke(start)
    (recorded | (lambda state: state["log"])).invoke(start)
    recorded.with_retry().invoke(start)
    list(recorded.batch_as_completed([start, start]))
    asyncio.run(recorded.abatch([start]))
    outer = StateGraph(Log)
    outer.add_node("team", recorded)  # the graph around it is not recorded, so each is an episode of its own
    outer.add_edge(START, "team")
    outer.compile().invoke(start)
    trajectories = [spans_to_trajectory(spans) for spans in spans_of(recorder).values()]
    assert [trajectory.episode.outcome for trajectory in trajectories] == ["terminated"] * 7
    assert [len(trajectory.edges) for trajectory in trajectories[:6]] == [2] * 6  # a trigger, and what b may have read
    assert plain.invoke(start) == {"log": ["a", "b"]}
    assert len(spans_of(recorder)) == 7


def test_a_graph_that_was_given_as_something_else_is_refused(recorder: Recorder) -> None:
    with pytest.raises(GraphError, match=r"a StateGraph is not a compiled graph; call \.compile\(\)"):
        wrap(graph_of([(START, "a")], echo()), recorder)


def test_a_stream_that_is_not_read_to_its_end_truncates_its_episode(recorder: Recorder) -> None:
    recorded = wrap(graph_of([(START, "a"), ("a", "b"), ("b", END)], echo()).compile(), recorder)
    stream = recorded.stream({"log": []}, stream_mode="updates")
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    episode = only_trajectory(recorder).episode
    assert (episode.outcome, episode.reason) == ("truncated", "the stream was closed before its end")


def test_a_run_that_its_caller_cancels_is_truncated(recorder: Recorder) -> None:
    async def slow(_: Any) -> Any:
        await asyncio.sleep(60)

    graph = StateGraph(Log)
    graph.add_node("a", slow)
    graph.add_edge(START, "a")

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wrap(graph.compile(), recorder).ainvoke({"log": []}), 0.05)

    asyncio.run(impatient())
    episode = only_trajectory(recorder).episode
    assert (episode.outcome, episode.reason) == ("truncated", "cancelled")


def test_a_call_that_is_given_callbacks_of_its_own_is_an_action_of_its_node_all_the_same(recorder: Recorder) -> None:
    heard: list[str] = []

    class Mine(BaseCallbackHandler):
        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            heard.append("call")

    model = echo()
    chain = model | (lambda message: message.content)
    inner = graph_of([(START, "x"), ("x", END)], model).compile()

    def direct(_: Log) -> Log:
        return {"log": [str(model.invoke("hello", {"callbacks": [Mine()]}).content)]}

    async def through_others(state: Log) -> Log:
        said = await chain.ainvoke("hello", {"callbacks": [Mine()]})
        return {"log": [said, *(await inner.ainvoke(state, {"callbacks": [Mine()]}))["log"]]}

    graph = StateGraph(Log)
    graph.add_node("direct", direct)
    graph.add_node("through_others", through_others)
    graph.add_edge(START, "direct")
    graph.add_edge("direct", "through_others")
    asyncio.run(wrap(graph.compile(), recorder).ainvoke({"log": []}))
    assert len(heard) == 3
    nodes = [action.node for action in only_trajectory(recorder).actions]
    assert nodes == ["direct", "through_others", "through_others/x"]
    assert recorder._open_runs.snapshot() == {}


@tool
def ask_model(question: str) -> str:
    """Asks the model."""
    return str(echo().invoke(question).content)


GENERATING: dict[str, Callable[[], Any]] = {
    "generate": lambda: echo().generate([[HumanMessage("hello")]]),
    "callbacks": lambda: echo().generate([[HumanMessage("hello")]], callbacks=[BaseCallbackHandler()]),
    "generate_prompt": lambda: echo().generate_prompt([StringPromptValue(text="hello")]),
    "completion": lambda: FakeListLLM(responses=["hello"]).generate(["hello"]),
    "agenerate": lambda: echo().agenerate([[HumanMessage("hello")]]),
    "run": lambda: ask_model.run("hello"),
    "arun": lambda: ask_model.arun("hello"),
}


@pytest.mark.parametrize("way", GENERATING)
def test_a_call_for_which_langchain_names_no_parent_is_an_action_of_its_node_all_the_same(
    way: str, recorder: Recorder
) -> None:
    async def node(_: Log) -> Log:
        result = GENERATING[way]()
        if way.startswith("a"):
            await result
        return {"log": []}

    graph = StateGraph(Log)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    asyncio.run(wrap(graph.compile(), recorder).ainvoke({"log": []}))
    (action,) = only_trajectory(recorder).actions
    assert (action.node, action.step) == ("node", 1)
    (rows,) = spans_of(recorder).values()
    spans = {row.span_id: row for row in rows}
    parent_span = spans[str(spans[action.action_id].parent_span_id)]
    assert parent_span.operation == (names.EXECUTE_TOOL if way in ("run", "arun") else names.INVOKE_AGENT)
    assert recorder.failures == 0


def test_a_generated_answer_of_an_episode_has_its_tokens(recorder: Recorder) -> None:
    model = echo()
    graph = StateGraph(Log)
    graph.add_node("node", lambda _: {"log": [model.generate([[HumanMessage("hello")]] * 2).generations[1][0].text]})
    graph.add_edge(START, "node")
    routing = Routing({"node": Route("m", "node", 0, 1.0, 16)}, seed=1, chat=model)

    async def run() -> None:
        current_routing.set(routing)
        await wrap(graph.compile(), recorder).ainvoke({"log": []})

    asyncio.run(run())
    actions = only_trajectory(recorder).actions
    assert [action.untrainable_reason for action in actions] == [None, None]
    assert routing.routed_calls["node"] == len(actions)


class Wrapping(BaseChatModel):
    """A model that asks another one."""

    inner: Any
    how: str

    @property
    def _llm_type(self) -> str:
        return "wrapping"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        configs = {"handlers": lambda: {"callbacks": run_manager.handlers}, "own": lambda: {"callbacks": []}}
        answer = self.inner.invoke(messages, configs.get(self.how, lambda: None)())
        return ChatResult(generations=[ChatGeneration(message=answer)])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        if self.how == "executor":
            return await super()._agenerate(messages, stop, run_manager)
        return ChatResult(generations=[ChatGeneration(message=await self.inner.ainvoke(messages))])


@pytest.mark.parametrize("how", ["handlers", "own", "inherits", "executor"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_model_that_wraps_another_makes_one_action_with_the_inner_ones_tokens(
    how: str, is_async: bool, recorder: Recorder
) -> None:
    model = Wrapping(inner=echo(), how=how)

    async def node(_: Log) -> Log:
        answer = await model.ainvoke("hello") if is_async else model.invoke("hello")
        return {"log": [str(answer.content)]}

    graph = StateGraph(Log)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    asyncio.run(wrap(graph.compile(), recorder).ainvoke({"log": []}))
    (action,) = only_trajectory(recorder).actions
    assert action.completion == "node"
    assert action.sampled_ids is not None
    assert recorder.failures == 0


def test_a_call_beside_a_stream_that_is_still_open_is_an_action_of_its_own(recorder: Recorder) -> None:
    def node(_: Log) -> Log:
        stream = echo().stream("one")
        next(stream)
        echo().invoke("two")
        return {"log": [str(part.content) for part in stream]}

    graph = StateGraph(Log)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    wrap(graph.compile(), recorder).invoke({"log": []})
    assert len(only_trajectory(recorder).actions) == 2


def test_an_episode_belongs_to_the_recorder_that_it_was_made_for(recorder: Recorder, tmp_path: Path) -> None:
    other = Recorder(Journal(tmp_path / "other"))
    recorded = wrap(graph_of([(START, "a"), ("a", END)], echo()).compile(), recorder)
    episode = EpisodeContext("run", "task", "train", recorder=recorder)

    async def run() -> None:
        current_episode.set(episode)
        await recorded.ainvoke({"log": []}, {"callbacks": [other]})

    asyncio.run(run())
    assert episode.episode_id == only_trajectory(recorder).episode.episode_id
    assert only_trajectory(other).episode.split == "live"


def test_losses_are_counted_and_said_in_words(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = wrap(graph_of([(START, "a"), ("a", END)], echo()).compile(), recorder)
    recorded.invoke({"log": []})
    assert str(recorder.losses) == ""

    def refuses(_: Any) -> None:
        raise StoreError("no space left")

    monkeypatch.setattr(recorder.journal, "append_all", refuses)
    monkeypatch.setattr(recorder, "_open_call", lambda *_: 1 / 0)
    assert recorded.invoke({"log": []}) == {"log": ["a"]}
    assert str(recorder.losses) == "1 callbacks could not be recorded, 2 spans could not be written"


def test_a_path_records_into_the_journal_beside_that_store(tmp_path: Path) -> None:
    recorded = wrap(graph_of([(START, "a"), ("a", END)], echo()).compile(), tmp_path / "traces.duckdb")
    assert isinstance(recorded, RecordedGraph)
    recorded.invoke({"log": []})
    assert list((tmp_path / "traces.duckdb.journal").glob("*.segment"))
    recorded.unwrap()
