"""Owns: where a node's function is, wherever it runs, decides what it has read; where that is not proven, nothing is
certain.

Each test runs a real graph, and looks at what is said of the reads when a model is called in it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import PregelExecutableTask, RetryPolicy
from pydantic import BaseModel
from support.edge_rig import says
from support.function_rig import reads_to_text

from marft_bridge.recording import dependency_evidence
from marft_bridge.recording.function_reads import callable_to_reads, plain_fields
from marft_bridge.recording.node_hooks import watch_node
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.state_reads import Reads, state_keys
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal


class Keys(TypedDict, total=False):
    a: str
    b: str
    c: str


model = says()
VALUES = {"a": "1", "b": "2", "c": "3"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said at each call of a model, and last when the node ends."""
    texts: list[str] = []
    original = dependency_evidence.sources_to_reads

    def note(sources: Any, reads: Reads | None) -> Any:
        texts.append("not watched" if reads is None else reads_to_text(reads.so_far()))
        return original(sources, reads)

    monkeypatch.setattr(dependency_evidence, "sources_to_reads", note)
    return texts


def run(node: Any, tmp_path: Path, asynchronous: bool = False, schema: Any = Keys, **options: Any) -> None:
    builder = StateGraph(schema)
    builder.add_node("node", node, **options)
    builder.add_edge(START, "node")
    recorder = Recorder(Journal(tmp_path / "journal"))
    graph = wrap(builder.compile(), recorder)
    if asynchronous:
        asyncio.run(graph.ainvoke(dict(VALUES)))
    else:
        graph.invoke(dict(VALUES))
    assert recorder.failures == 0


def one_call(state: Keys) -> dict[str, Any]:
    model.invoke(state["a"])
    return {"c": state["b"]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_has_read_what_comes_before_its_call(asynchronous: bool, seen: list[str], tmp_path: Path) -> None:
    run(one_call, tmp_path, asynchronous)
    assert seen == ["a | a", "a b | a b"]


def test_a_coroutine_has_read_what_comes_before_what_it_waits_for(seen: list[str], tmp_path: Path) -> None:
    async def node(state: Keys) -> dict[str, Any]:
        await model.ainvoke(state["a"])
        second = state["b"]
        await asyncio.gather(model.ainvoke(second), model.ainvoke(second))
        task = asyncio.create_task(model.ainvoke("not yet"))
        third = state["c"]
        await task
        return {"c": third}

    run(node, tmp_path, asynchronous=True)
    # The task begins when the node waits for it, and has read c by then.
    assert seen == ["a | a", "a b | a b", "a b | a b", "a b c | a b c", "a b c | a b c"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_calls_in_threads_of_a_plain_nodes_own_making_know_is_a_bound(
    asynchronous: bool, seen: list[str], tmp_path: Path
) -> None:
    def node(state: Keys) -> dict[str, Any]:
        first = state["a"]
        model.batch([first, first])
        second = state["b"]
        with ThreadPoolExecutor(2) as pool:
            pool.submit(contextvars.copy_context().run, model.invoke, second).result()
        return {"c": state["c"]}

    run(node, tmp_path, asynchronous)
    assert seen == ["| a b c", "| a b c", "| a b c", "a b c | a b c"]


def test_a_function_that_runs_itself_is_where_the_outermost_of_it_is(seen: list[str], tmp_path: Path) -> None:
    def node(state: Any, depth: int = 0) -> dict[str, Any]:
        first = state["a"]
        if depth == 0:
            return node({"a": "4", "b": "5"}, depth=1)
        model.invoke(first + state["b"])
        return {}

    run(node, tmp_path)
    # The node itself has not read b: what the inner one read was another dict.
    assert seen[0] == "a | a"


def test_the_same_function_in_a_thread_of_its_own_is_not_taken_for_the_node(seen: list[str], tmp_path: Path) -> None:
    def node(state: Any, depth: int = 0) -> dict[str, Any]:
        if depth == 0:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(contextvars.copy_context().run, node, {"a": "4", "b": "5"}, 1).result()
        first = state["a"]
        model.invoke(first + state["b"])
        return {}

    for asynchronous in (False, True):
        run(node, tmp_path / str(asynchronous), asynchronous)
    assert seen[0] == "| a b"
    assert seen[2] == "| a b"


def test_the_same_coroutine_in_a_task_of_its_own_is_not_taken_for_the_node(seen: list[str], tmp_path: Path) -> None:
    async def node(state: Any, depth: int = 0) -> dict[str, Any]:
        if depth == 0:
            return await asyncio.create_task(node({"a": "4", "b": "5"}, 1))
        first = state["a"]
        await model.ainvoke(first + state["b"])
        return {}

    run(node, tmp_path, asynchronous=True)
    assert seen[0] == "|"


def test_two_runs_of_one_function_at_once_are_each_where_they_are(seen: list[str], tmp_path: Path) -> None:
    both_run = threading.Barrier(2, timeout=30)

    def node(state: Keys) -> dict[str, Any]:
        if both_run.wait() == 0:
            model.invoke(state["a"])
        else:
            model.invoke(state["b"])
        both_run.wait()
        return {}

    builder = StateGraph(Keys)
    for name in ("left", "right"):
        builder.add_node(name, node)
        builder.add_edge(START, name)
    asyncio.run(wrap(builder.compile(), Recorder(Journal(tmp_path / "journal"))).ainvoke(dict(VALUES)))
    assert sorted(seen) == ["a | a", "b | b", "| a b", "| a b"]


def test_a_retry_has_not_read_what_the_lost_attempt_read(seen: list[str], tmp_path: Path) -> None:
    attempts: list[int] = []

    def node(state: Keys) -> dict[str, Any]:
        attempts.append(1)
        if len(attempts) == 1:
            model.invoke(state["a"])
            raise ConnectionError("once")
        model.invoke(state["b"])
        return {}

    run(node, tmp_path, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=2))
    # Where an attempt failed is not known, so nothing is certain at its end.
    assert seen == ["a | a", "| a b", "b | b", "b | b"]


def test_a_runnable_that_the_node_returns_may_read_everything(seen: list[str], tmp_path: Path) -> None:
    class Own(Runnable[Any, Any]):
        def invoke(self, input: Any, config: Any = None, **_: Any) -> Any:  # noqa: A002 - LangChain's name
            model.invoke(input["b"], config)
            return {}

    def node(state: Keys) -> Any:
        model.invoke(state["a"])
        return Own()

    for asynchronous in (False, True):
        run(node, tmp_path / str(asynchronous), asynchronous)
    assert seen == ["a | a", "| *", "| *"] * 2


# -- what LangGraph calls ---------------------------------------------------------------------------------------------


class Callables:
    def method(self, state: Keys) -> dict[str, Any]:
        return one_call(state) if state["c"] == "never" else one_read(self, state)

    def __call__(self, state: Keys) -> dict[str, Any]:
        model.invoke(state["a"])
        return {}


def one_read(unused: Any, state: Keys) -> dict[str, Any]:
    model.invoke(state["a"])
    return {}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


CALLABLES: dict[str, tuple[Any, str]] = {
    "a function": (one_call, "a | a"),
    "a lambda": (lambda state: model.invoke(state["a"]) and {}, "a | a"),
    "an object with a call": (Callables(), "a | a"),
    "a partial": (functools.partial(one_read, None), "a | a"),
    "a partial of a partial": (functools.partial(functools.partial(one_read), None), "a | a"),
    "a method that passes it on": (Callables().method, "c | *"),
    "a wrapper": (wrapped(one_call), "| *"),
    "a runnable": (RunnableLambda(one_call), "| *"),
    "a chain": (RunnableLambda(lambda state: state["a"]) | model | (lambda _: {}), "| *"),
    "a function that takes any arguments": (lambda *args: model.invoke(args[0]["a"]) and {}, "| *"),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", CALLABLES)
def test_what_langgraph_calls_is_seen_through_or_a_bound(
    name: str, asynchronous: bool, seen: list[str], tmp_path: Path
) -> None:
    node, expected = CALLABLES[name]
    run(node, tmp_path, asynchronous)
    assert seen[0] == expected


def test_functions_in_c_and_classes_are_not_known() -> None:
    for function in (dict, len, Callables, str.format, functools.partial(wrapped(one_call)), None):
        assert callable_to_reads(cast(Any, function), {"a": 1}) is None


def test_langgraphs_own_tool_node_reads_the_messages_and_what_its_tools_declare() -> None:

    @tool
    def plain(text: str) -> str:
        """Says it."""
        return text

    @tool
    def greedy(text: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
        """Says all."""
        return f"{text} {state}"

    def reads_of(node: ToolNode, state: Any) -> str:
        class Proc:
            steps = (node,)

        task = PregelExecutableTask("tools", state, Proc(), None, {}, (), None, None, "", ())  # type: ignore[arg-type]
        return reads_to_text(watch_node(task)[1].so_far())

    state = {"messages": [AIMessage("")], "a": "1"}
    assert reads_of(ToolNode([plain]), state) == "messages | messages"
    assert reads_of(ToolNode([plain, greedy]), state) == "messages | *"
    assert (
        reads_of(ToolNode([plain], wrap_tool_call=lambda request, execute: execute(request)), state) == "messages | *"
    )
    assert reads_of(ToolNode([plain], messages_key="other"), state) == "| *"
    assert reads_of(ToolNode([plain]), state["messages"]) == "| *"


# -- kinds of state ---------------------------------------------------------------------------------------------------


class Model(BaseModel):
    a: str = ""
    b: str = ""
    c: str = ""


@dataclass
class Data:
    a: str = ""
    b: str = ""
    c: str = ""


class Loud(Model):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


@dataclass
class Half(Data):
    @property
    def b(self) -> str:  # type: ignore[override]
        return self.a

    @b.setter
    def b(self, value: str) -> None:
        pass


@pytest.mark.parametrize("schema", [Model, Data])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_object_is_read_by_its_fields(schema: Any, asynchronous: bool, seen: list[str], tmp_path: Path) -> None:
    def node(state: Any) -> dict[str, Any]:
        model.invoke(state.a)
        return {"c": state.b}

    run(node, tmp_path, asynchronous, schema=schema)
    assert seen == ["a | a", "a b | a b"]


def test_a_field_whose_reading_runs_code_of_the_app_is_not_known() -> None:
    assert plain_fields(Model) == plain_fields(Data) == {"a", "b", "c"}
    assert plain_fields(Loud) == frozenset()
    assert plain_fields(Half) == {"a", "c"}


def test_the_keys_of_a_state() -> None:
    assert state_keys({"a": 1, "b": 2}) == ("a", "b")
    assert state_keys(Model()) == state_keys(Data()) == ("a", "b", "c")
    for other in ([1], "text", None, 3, object(), {1: 2}):
        assert state_keys(other) is None


@pytest.fixture(autouse=True)
def _no_state_is_kept() -> Iterator[None]:
    yield
    assert "__getattribute__" not in vars(Model)
