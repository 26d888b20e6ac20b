"""Owns: what is new in LangGraph and LangChain leaves the record whole: D, spans, inputs and outputs are as without it.

- One team of five nodes has the D that was worked out by hand, and the same calls, however it is traced
  (`trace_policy`), defaulted (`set_node_defaults`), timed, streamed (v1, v2, v3) and kept (durability).
- What a node read is told apart from what the tracers of its run read, whatever a `trace_policy` hands them.
- A deferred node depends on all that it waited for. An error handler is an agent beside the node that it serves:
  what failed made it run, and the rest of the run depends on it.
"""

from __future__ import annotations

import asyncio
import json
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeError
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, TimeoutPolicy, TracePolicy, omit_payload
from support.edge_rig import (
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
from marft_bridge.rollouts.app_models import inspect_nodes
from trace_store import conventions as c
from trace_store.journal import Journal


class Keys(TypedDict, total=False):
    q: str
    plan: str
    left: str
    right: str
    more: str
    out: str


model = says()
READS = {"plan": ["q"], "left": ["plan"], "right": ["plan"], "more": ["left"], "judge": ["more", "right"]}
WRITES = {node: {"out" if node == "judge" else node: node.upper()} for node in READS}
# plan -> left -> more -> judge and plan -> right -> judge; each node reads only what the one before it wrote.
BY_HAND = {
    "trigger": "left>more more>judge plan>left plan>right right>judge",
    "data": "left>more more>judge plan>left plan>right right>judge",
}
# What each node asks the model, in the order of the nodes.
PROMPTS = {
    "plan": "['?']",
    "left": "['PLAN']",
    "right": "['PLAN']",
    "more": "['LEFT']",
    "judge": "['MORE', 'RIGHT']",
}
NODES = sorted([*READS, *READS])


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


@pytest.fixture(autouse=True)
def experimental() -> Iterator[None]:
    """LangGraph warns that its v3 streams may change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*v3 streaming protocol.*")
        yield


def async_node_of(asks: Any, reads: Sequence[str], writes: dict[str, Any]) -> Callable[[Any], Any]:
    """As `node_of`, for an event loop; the model is asked in a thread."""
    seen = ", ".join(f"state[{key!r}]" for key in reads)
    source = f"async def node(state):\n    await to_thread(model.invoke, str([{seen}]))\n    return dict(writes)\n"
    return source_to_function(source, model=asks, writes=writes, to_thread=asyncio.to_thread)


def team(
    *,
    policy: TracePolicy | None = None,
    deferred: bool = False,
    asynchronous: bool = False,
    checkpointer: Any = None,
    cache: Any = None,
    asks: Any = model,
    **defaults: Any,
) -> Any:
    """The five nodes; `judge` waits for both by a join, or, deferred, because everything else comes first."""
    graph = StateGraph(Keys)
    if defaults:
        graph.set_node_defaults(**defaults)
    for name, reads in READS.items():
        node = (async_node_of if asynchronous else node_of)(asks, reads, WRITES[name])
        graph.add_node(name, node, trace_policy=policy, defer=deferred and name == "judge")
    for src, dst in [(START, "plan"), ("plan", "left"), ("plan", "right"), ("left", "more")]:
        graph.add_edge(src, dst)
    if deferred:
        graph.add_edge("more", "judge")
        graph.add_edge("right", "judge")
    else:
        graph.add_edge(["more", "right"], "judge")
    return graph.compile(checkpointer=checkpointer, cache=cache)


def assert_whole(recorder: Recorder) -> None:
    """The only run has the D by hand, all spans, every prompt and answer, and its input and output."""
    (spans,) = recorded_traces(recorder)
    assert recorded_edges(recorder) == BY_HAND
    nodes = sorted(span.attributes[c.NODE] for span in spans if span.parent_span_id is not None)
    assert nodes == NODES
    chats = {span.attributes[c.NODE]: span for span in spans if span.operation == c.CHAT}
    for node, prompt in PROMPTS.items():
        assert prompt in json.dumps(json.loads(chats[node].attributes[c.INPUT_MESSAGES]))
        assert "ok" in chats[node].attributes[c.OUTPUT_MESSAGES]
    (root,) = [span for span in spans if span.parent_span_id is None]
    assert json.loads(root.attributes[c.INPUT]) == {"q": "?"}
    assert json.loads(root.attributes[c.OUTPUT])["out"] == "JUDGE"
    assert root.attributes[c.OUTCOME] == "terminated"
    assert all(span.status == "ok" for span in spans)
    assert not str(recorder.losses)


class ReadingTracer(BaseTracer):
    """A tracer as the app may have one: it looks at all that it is handed."""

    run_inline = True

    def _persist_run(self, run: Run) -> None: ...

    def _on_chain_start(self, run: Run) -> None:
        self.seen = str(run.inputs)

    def _on_chain_end(self, run: Run) -> None:
        self.seen = str(run.outputs)


class WaitingTracer(ReadingTracer):
    """One that an event loop runs in a thread, beside the other handlers."""

    run_inline = False


POLICIES = {
    "none": None,
    "omit": TracePolicy(process_inputs=omit_payload, process_outputs=omit_payload),
    "wrap": TracePolicy(process_inputs=lambda state: [state], process_outputs=lambda update: [update]),
    "choose": TracePolicy(process_inputs=lambda state: {"plan": state.get("plan"), "whole": state}),
    "raise": TracePolicy(process_inputs=lambda state: state["nothing"]),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tracer", [None, ReadingTracer, WaitingTracer])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_trace_policy_hands_to_tracers_is_no_read_of_the_node(
    policy: str, tracer: type[BaseTracer] | None, asynchronous: bool, recorder: Recorder
) -> None:
    graph = wrap(team(policy=POLICIES[policy], asynchronous=asynchronous), recorder)
    config: Any = {"callbacks": [] if tracer is None else [tracer()]}
    if asynchronous:
        asyncio.run(graph.ainvoke({"q": "?"}, config))
    else:
        graph.invoke({"q": "?"}, config)
    assert_whole(recorder)


def fails(state: Keys) -> dict[str, Any]:
    pytest.fail("no node failed")


DEFAULTS: dict[str, dict[str, Any]] = {
    "retry": {"retry_policy": RetryPolicy(max_attempts=2)},
    "handler": {"error_handler": fails},
    "cache": {"cache_policy": CachePolicy()},
    "all": {"retry_policy": RetryPolicy(max_attempts=2), "error_handler": fails, "cache_policy": CachePolicy()},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_nodes_change_nothing_while_no_node_fails(name: str, recorder: Recorder) -> None:
    cache = InMemoryCache() if "cache_policy" in DEFAULTS[name] else None
    wrap(team(cache=cache, **DEFAULTS[name]), recorder).invoke({"q": "?"})
    assert_whole(recorder)


TIMEOUTS = [5.0, TimeoutPolicy(run_timeout=5, idle_timeout=5), TimeoutPolicy(idle_timeout=5, refresh_on="heartbeat")]


@pytest.mark.parametrize("timeout", TIMEOUTS, ids=["wall", "idle", "heartbeat"])
def test_timeouts_of_nodes_change_nothing(timeout: Any, recorder: Recorder) -> None:
    asyncio.run(wrap(team(asynchronous=True, timeout=timeout), recorder).ainvoke({"q": "?"}))
    assert_whole(recorder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_deferred_node_depends_on_all_that_it_waited_for(asynchronous: bool, recorder: Recorder) -> None:
    graph = wrap(team(deferred=True, asynchronous=asynchronous), recorder)
    if asynchronous:
        asyncio.run(graph.ainvoke({"q": "?"}))
    else:
        graph.invoke({"q": "?"})
    assert_whole(recorder)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_how_durably_a_thread_is_kept_changes_nothing(durability: Any, recorder: Recorder) -> None:
    graph = wrap(team(checkpointer=InMemorySaver()), recorder)
    graph.invoke({"q": "?"}, {"configurable": {"thread_id": "t"}}, durability=durability)
    assert_whole(recorder)


MODES = ["values", "updates", "messages", "custom", "tasks", "debug", "checkpoints", ["values", "messages", "tasks"]]


def streaming() -> Any:
    """A model that streams its answer, a word at a time."""
    return GenericFakeChatModel(messages=iter([AIMessage("ok it is") for _ in range(5)]))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_stream_mode_of_both_versions_records_the_same(
    mode: Any, asynchronous: bool, version: Any, recorder: Recorder
) -> None:
    saver = InMemorySaver()
    graph = wrap(team(checkpointer=saver, asynchronous=asynchronous, asks=streaming()), recorder)
    config: Any = {"configurable": {"thread_id": "t"}}

    async def consume() -> int:
        return len([part async for part in graph.astream({"q": "?"}, config, stream_mode=mode, version=version)])

    if asynchronous:
        asyncio.run(consume())
    else:
        list(graph.stream({"q": "?"}, config, stream_mode=mode, version=version))
    assert_whole(recorder)


@pytest.mark.parametrize("consumed", ["events", "messages", "output", "values"])
def test_a_v3_stream_records_the_same_however_it_is_consumed(consumed: str, recorder: Recorder) -> None:
    stream: Any = wrap(team(asks=streaming()), recorder).stream_events({"q": "?"}, version="v3")
    if consumed == "events":
        assert list(stream)
    elif consumed == "messages":
        assert [message.output.text for message in stream.messages] == ["ok it is"] * 5
    elif consumed == "values":
        assert list(stream.values)
    assert stream.output["out"] == "JUDGE"
    assert_whole(recorder)


@pytest.mark.parametrize("consumed", ["events", "messages"])
def test_an_async_v3_stream_records_the_same(consumed: str, recorder: Recorder) -> None:
    async def consume() -> list[Any]:
        graph = wrap(team(asynchronous=True, asks=streaming()), recorder)
        stream: Any = await graph.astream_events({"q": "?"}, version="v3")
        return [part async for part in (stream if consumed == "events" else stream.messages)]

    assert asyncio.run(consume())
    assert_whole(recorder)


def test_a_v3_stream_that_is_given_up_ends_its_record(recorder: Recorder) -> None:
    stream: Any = wrap(team(asks=streaming()), recorder).stream_events({"q": "?"}, version="v3")
    with stream:
        next(iter(stream))
        stream.abort()
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "truncated"


def test_a_result_with_its_interrupts_apart_records_the_same(recorder: Recorder) -> None:
    result: Any = wrap(team(), recorder).invoke({"q": "?"}, version="v2")
    assert result.value["out"] == "JUDGE"
    assert_whole(recorder)


def test_a_node_with_a_runtime_and_its_context_is_watched_as_one_without(recorder: Recorder) -> None:
    class Context(TypedDict):
        style: str

    def left(state: Keys, runtime: Runtime[Context]) -> dict[str, Any]:
        model.invoke(f"{state['plan']} {runtime.context['style']}")
        runtime.heartbeat()
        return {"left": "LEFT"}

    graph = StateGraph(Keys, context_schema=Context)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "PLAN"}))
    graph.add_node("left", left)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "left")
    wrap(graph.compile(), recorder).invoke({"q": "?"}, context={"style": "short"})
    assert recorded_edges(recorder) == {"trigger": "plan>left", "data": "plan>left"}


# -- error handlers -----------------------------------------------------------------------------------------------


def breaks(state: Keys) -> dict[str, Any]:
    model.invoke(state["plan"])
    raise ValueError("broken")


def handles(state: Keys, error: NodeError) -> Any:
    model.invoke(f"{state['plan']} {error.error}")
    return Command(update={"out": "mended"}, goto="after")


def broken(work: Any, handler: Any = handles, **options: Any) -> Any:
    """plan -> work, which fails; its handler goes to `after`, which reads what the handler wrote."""
    graph = StateGraph(Keys)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "PLAN"}))
    graph.add_node("work", work, error_handler=handler, **options)
    graph.add_node("after", node_of(model, ["out"], {}))
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "work")
    return graph.compile()


# The handler was given the input of what failed, of which it read the plan, and the error, which may hold anything.
HANDLED = {
    "trigger": "plan>work work:error_handler>after work>work:error_handler",
    "data": "plan>work plan>work:error_handler work:error_handler>after work?work:error_handler",
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_handler_acts_beside_its_node_and_the_run_goes_on_from_it(
    asynchronous: bool, recorder: Recorder
) -> None:
    graph = wrap(broken(breaks), recorder)
    result = asyncio.run(graph.ainvoke({"q": "?"})) if asynchronous else graph.invoke({"q": "?"})
    assert result["out"] == "mended"
    assert recorded_edges(recorder) == HANDLED
    (trajectory,) = recorded_trajectories(recorder)
    reasons = {action.node: action.untrainable_reason for action in trajectory.actions}
    assert reasons["work"] == "attempt failed"
    assert reasons["work:error_handler"] == "no prompt token ids from the engine"


def test_a_default_error_handler_acts_beside_each_node(recorder: Recorder) -> None:
    graph = StateGraph(Keys).set_node_defaults(error_handler=handles)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "PLAN"}))
    graph.add_node("work", breaks)
    graph.add_node("after", node_of(model, ["out"], {}))
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "work")
    wrap(graph.compile(), recorder).invoke({"q": "?"})
    assert recorded_edges(recorder) == HANDLED


def test_only_the_last_of_several_attempts_led_to_the_handler(recorder: Recorder) -> None:
    twice = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=ValueError)
    wrap(broken(breaks, retry_policy=twice), recorder).invoke({"q": "?"})
    # The first attempt is an action without edges, the second is `work2`.
    assert recorded_edges(recorder) == {
        "trigger": "plan>work2 work2>work:error_handler work:error_handler>after",
        "data": "plan>work2 plan>work:error_handler work2?work:error_handler work:error_handler>after",
    }


def test_a_timeout_leads_to_the_handler_too(recorder: Recorder) -> None:
    async def hangs(state: Keys) -> dict[str, Any]:
        await model.ainvoke(state["plan"])
        await asyncio.sleep(30)
        return {}

    asyncio.run(wrap(broken(hangs, timeout=0.3), recorder).ainvoke({"q": "?"}))
    assert recorded_edges(recorder) == HANDLED


def graph_of_one(name: str, node: Any, **options: Any) -> Any:
    graph = StateGraph(Keys)
    graph.add_node(name, node, **options)
    graph.add_edge(START, name)
    return graph.compile()


def test_the_calls_inside_a_subgraph_that_failed_led_to_the_handler_of_its_node(recorder: Recorder) -> None:
    wrap(broken(graph_of_one("inner", breaks)), recorder).invoke({"q": "?"})
    assert recorded_edges(recorder) == {
        "trigger": "plan>work/inner work/inner>work:error_handler work:error_handler>after",
        "data": "plan>work/inner plan>work:error_handler work/inner?work:error_handler work:error_handler>after",
    }


def test_a_handler_inside_a_subgraph_is_an_agent_of_the_subgraph(recorder: Recorder) -> None:
    def mends(state: Keys, error: NodeError) -> dict[str, Any]:
        model.invoke(f"{state['plan']} {error.error}")
        return {"out": "mended"}

    graph = StateGraph(Keys)
    graph.add_node("plan", node_of(model, ["q"], {"plan": "PLAN"}))
    graph.add_node("work", graph_of_one("inner", breaks, error_handler=mends))
    graph.add_node("after", node_of(model, ["out"], {}))
    for src, dst in [(START, "plan"), ("plan", "work"), ("work", "after")]:
        graph.add_edge(src, dst)
    wrap(graph.compile(), recorder).invoke({"q": "?"})
    handler = "work/inner:error_handler"
    assert recorded_edges(recorder) == {
        "trigger": f"plan>work/inner {handler}>after work/inner>{handler}",
        "data": f"plan>work/inner plan>{handler} {handler}>after work/inner?{handler}",
    }


def test_a_graph_that_a_handler_runs_lies_below_it(recorder: Recorder) -> None:
    helper = graph_of_one("fix", node_of(model, ["plan"], {"out": "fixed"}))

    def asks(state: Keys, error: NodeError) -> Any:
        return Command(update={"out": helper.invoke({"plan": state["plan"]})["out"]}, goto="after")

    wrap(broken(breaks, asks), recorder).invoke({"q": "?"})
    fix = "work:error_handler/fix"
    assert recorded_edges(recorder) == {
        "trigger": f"plan>work {fix}>after work>{fix}",
        "data": f"plan>work plan?{fix} {fix}>after work?{fix}",
    }


def test_a_handler_of_what_was_sent_was_sent_the_same(recorder: Recorder) -> None:
    class Collected(TypedDict, total=False):
        q: str
        plan: str
        out: Annotated[list[str], operator.add]

    def plan(state: Collected) -> Any:
        model.invoke(state["q"])
        return Command(goto=[Send("work", {"plan": "left"})])

    def mends(state: Any, error: NodeError) -> dict[str, Any]:
        model.invoke(str(state))
        return {"out": ["mended"]}

    graph = StateGraph(Collected)
    graph.add_node("plan", plan)
    graph.add_node("work", breaks, error_handler=mends)
    graph.add_edge(START, "plan")
    wrap(graph.compile(), recorder).invoke({"q": "?"})
    assert recorded_edges(recorder) == {
        "send": "plan>work plan>work:error_handler",
        "trigger": "work>work:error_handler",
        "data": "work?work:error_handler",
    }


def test_a_handler_that_fails_is_tried_again_by_the_run_that_resumes(recorder: Recorder) -> None:
    tries: list[str] = []

    def crashes_once(state: Keys, error: NodeError) -> Any:
        tries.append(state["plan"])
        if len(tries) == 1:
            raise RuntimeError("crashed")
        return handles(state, error)

    graph = broken(breaks, crashes_once)
    graph.checkpointer = InMemorySaver()
    recorded, config = wrap(graph, recorder), {"configurable": {"thread_id": "t"}}
    with pytest.raises(RuntimeError, match="crashed"):
        recorded.invoke({"q": "?"}, config)
    recorded.invoke(None, config)
    _, resumed = recorded_trajectories(recorder)
    assert edges_of(resumed) == {"trigger": "work:error_handler>after", "data": "work:error_handler>after"}


def test_handlers_that_ask_a_model_are_listed_as_they_are_recorded() -> None:
    def handler(state: Keys, error: NodeError) -> dict[str, Any]:
        return {"out": str(model.invoke(str(error.error)).content)}

    graph = StateGraph(Keys)
    graph.add_node("work", lambda state: {}, error_handler=handler)
    graph.add_node("team", graph_of_one("inner", lambda state: {}, error_handler=handler))
    graph.add_edge(START, "work")
    graph.add_edge("work", "team")
    listed = {node.name for node in inspect_nodes(graph.compile(), __name__) if node.models}
    assert listed == {"work:error_handler", "team/inner:error_handler"}
