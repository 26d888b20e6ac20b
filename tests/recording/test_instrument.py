"""Owns: a whole process is recorded, exactly its graph runs, and can be given back as it was.

- Every way to run a graph is recorded once, whoever attached the recorder; chains and lone calls are not.
- instrument twice is once, another store is refused; uninstrument leaves LangChain and LangGraph as they were.
- A forked child records into segments of its own.
- `opentelemetry-instrument` finds it: an app that knows nothing of us is recorded where MARFT_STORE says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import langchain_core.callbacks.manager
import langchain_core.tracers.context
import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint
from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from langgraph.pregel._loop import PregelLoop
from support.paths import ROOT
from support.two_node_graph import Text, fake_model, graph_of

import marft_bridge
from marft_bridge.common.errors import BridgeError
from marft_bridge.recording.otel_entry import MarftInstrumentor
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal
from trace_store.records import Episode
from trace_store.store import TraceStore


def episodes_in(path: Path) -> list[Episode]:
    with TraceStore.open(path) as store:
        store.take_in()
        return store.episodes()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store.duckdb"


@pytest.fixture
def instrumented(store: Path) -> Iterator[Recorder]:
    yield marft_bridge.instrument(store)
    marft_bridge.uninstrument()


START_STATE: Any = {"text": "a fox"}


def test_every_way_to_run_a_graph_is_recorded_as_one_episode_each(instrumented: Recorder, store: Path) -> None:
    graph = graph_of(fake_model())

    async def async_ways() -> None:
        await graph.ainvoke(START_STATE)
        async for _ in graph.astream(START_STATE):
            pass
        await graph.abatch([START_STATE, START_STATE])
        async for _ in graph.astream_events(START_STATE, version="v2"):
            pass

    graph.invoke(START_STATE)
    list(graph.stream(START_STATE))
    graph.batch([START_STATE, START_STATE])
    asyncio.run(async_ways())
    thread = threading.Thread(target=graph.invoke, args=(START_STATE,))
    thread.start()
    thread.join()
    entrypoint()(lambda text: text).invoke("functional API")
    episodes = episodes_in(store)
    assert sorted(episode.span_count for episode in episodes) == [2] + [5] * 10  # run, and two nodes with a call each
    assert {episode.outcome for episode in episodes} == {"terminated"}
    assert instrumented.failures == 0


def test_results_are_those_of_the_process_before(instrumented: Recorder) -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("one"), AIMessage("two")]))
    assert graph_of(model).invoke(START_STATE) == {"text": "two"}


def test_what_is_no_graph_run_opens_no_episode(instrumented: Recorder, store: Path) -> None:
    model = fake_model()
    model.invoke("alone")
    chain = RunnableLambda(lambda text: text) | model
    chain.invoke("in a chain")
    asyncio.run(chain.ainvoke("in a chain"))
    assert episodes_in(store) == []
    assert instrumented._open_runs.snapshot() == {}


def test_a_graph_inside_a_chain_is_the_root_of_its_episode(instrumented: Recorder, store: Path) -> None:
    graph = graph_of(fake_model())
    (RunnableLambda(lambda text: {"text": text}) | graph | RunnableLambda(lambda state: state["text"])).invoke("a fox")
    RunnableLambda(lambda text: graph.invoke({"text": text})).invoke("a fox")
    assert [episode.span_count for episode in episodes_in(store)] == [5, 5]


def test_a_graph_inside_a_node_belongs_to_the_same_episode(instrumented: Recorder, store: Path) -> None:
    inner, model = graph_of(fake_model()), fake_model()
    outer = StateGraph(Text)
    outer.add_node("as_node", inner)
    outer.add_node("called", lambda state: inner.invoke({"text": model.invoke(state["text"]).text}))
    outer.add_edge(START, "as_node")
    outer.add_edge("as_node", "called")
    outer.compile().invoke(START_STATE)
    with TraceStore.open(store) as opened:
        opened.take_in()
        (trajectory,) = opened.trajectories()
    nodes = [action.node for action in trajectory.actions]
    assert sorted(nodes) == ["as_node/draft", "as_node/edit", "called", "called/draft", "called/edit"]


@pytest.mark.parametrize("callbacks", [[BaseCallbackHandler()], CallbackManager([BaseCallbackHandler()])])
def test_the_apps_own_callbacks_stay_and_are_not_changed(
    instrumented: Recorder, store: Path, callbacks: list[BaseCallbackHandler] | CallbackManager
) -> None:
    graph_of(fake_model()).invoke(START_STATE, {"callbacks": callbacks})
    handlers = callbacks if isinstance(callbacks, list) else callbacks.handlers
    assert len(handlers) == 1
    assert len(episodes_in(store)) == 1


def test_a_recorder_that_is_attached_already_records_once(instrumented: Recorder, store: Path) -> None:
    graph = graph_of(fake_model())
    marft_bridge.wrap(graph, instrumented).invoke(START_STATE)
    graph.with_config(callbacks=[instrumented]).invoke(START_STATE)
    graph.invoke(START_STATE, {"callbacks": CallbackManager([instrumented])})
    assert [episode.span_count for episode in episodes_in(store)] == [5, 5, 5]
    assert instrumented.failures == 0


def test_a_graph_wrapped_for_another_store_is_recorded_by_both(
    instrumented: Recorder, store: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.duckdb"
    marft_bridge.wrap(graph_of(fake_model()), other).invoke(START_STATE)
    assert [episode.span_count for episode in episodes_in(store) + episodes_in(other)] == [5, 5]


def test_both_recorders_hear_of_a_call_with_callbacks_of_its_own(
    instrumented: Recorder, store: Path, tmp_path: Path
) -> None:
    other, model = tmp_path / "other.duckdb", fake_model()
    graph = StateGraph(Text)
    graph.add_node("draft", lambda state: {"text": model.invoke(state["text"], {"callbacks": []}).text})
    graph.add_edge(START, "draft")
    marft_bridge.wrap(graph.compile(), other).invoke(START_STATE)
    assert [episode.span_count for episode in episodes_in(store) + episodes_in(other)] == [3, 3]


def test_instrumenting_twice_is_once_and_another_store_is_refused(instrumented: Recorder, store: Path) -> None:
    assert marft_bridge.instrument(store) is instrumented
    assert marft_bridge.instrument(str(store)) is instrumented
    with pytest.raises(BridgeError, match=f"records into {store} already; call marft_bridge.uninstrument"):
        marft_bridge.instrument(store.with_name("other.duckdb"))
    with pytest.raises(BridgeError, match="uninstrument"):
        marft_bridge.instrument(Recorder(Journal(store)))
    graph_of(fake_model()).invoke(START_STATE)
    assert len(episodes_in(store)) == 1


def test_a_recorder_may_be_given(store: Path, tmp_path: Path) -> None:
    recorder = Recorder(Journal(store.with_name("store.duckdb.journal")))
    try:
        assert marft_bridge.instrument(recorder) is recorder
        assert marft_bridge.instrument(recorder) is recorder
        graph_of(fake_model()).invoke(START_STATE)
    finally:
        marft_bridge.uninstrument()
    assert len(episodes_in(store)) == 1


def state_of_the_libraries() -> list[object]:
    modules = (langchain_core.callbacks.manager, langchain_core.tracers.context)
    kept = [dict(vars(module)) for module in modules]
    return [*kept, list(langchain_core.tracers.context._configure_hooks), dict(vars(Pregel)), dict(vars(PregelLoop))]


def test_uninstrument_leaves_the_libraries_as_they_were_and_may_be_repeated(store: Path) -> None:
    before = state_of_the_libraries()
    for _ in range(2):
        marft_bridge.instrument(store)
        assert state_of_the_libraries() != before
        marft_bridge.uninstrument()
        assert state_of_the_libraries() == before
        marft_bridge.uninstrument()
    graph_of(fake_model()).invoke(START_STATE)
    assert not store.with_name("store.duckdb.journal").exists()


def test_another_tool_that_wrapped_the_same_method_keeps_its_place(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marft_bridge.instrument(store)
    ours, seen = Pregel.stream, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append("theirs")
        return ours(*args, **kwargs)

    monkeypatch.setattr(Pregel, "stream", theirs)
    graph = graph_of(fake_model())
    graph.invoke(START_STATE)
    marft_bridge.uninstrument()
    assert Pregel.stream is theirs
    graph.invoke(START_STATE)
    assert seen == ["theirs", "theirs"]
    assert len(episodes_in(store)) == 1
    monkeypatch.undo()
    Pregel.stream = ours.__wrapped__  # type: ignore[attr-defined, method-assign]


def test_a_forked_child_records_into_segments_of_its_own(instrumented: Recorder, store: Path) -> None:
    graph = graph_of(fake_model())
    graph.invoke(START_STATE)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                graph.invoke(START_STATE)
                graph.invoke(START_STATE)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    graph.invoke(START_STATE)
    folder = store.with_name("store.duckdb.journal")
    assert sorted(int(path.name.split("-")[0]) for path in folder.iterdir()) == sorted([os.getpid(), *children])
    assert [episode.span_count for episode in episodes_in(store)] == [5] * 6


# The OpenTelemetry way in

APP = """
from typing import TypedDict
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph

model = GenericFakeChatModel(messages=iter([AIMessage("a small fox"), AIMessage("A small fox.")]))

class Text(TypedDict):
    text: str

graph = StateGraph(Text)
graph.add_node("draft", lambda state: {"text": model.invoke(state["text"]).text})
graph.add_node("edit", lambda state: {"text": model.invoke(state["text"]).text})
graph.add_edge(START, "draft")
graph.add_edge("draft", "edit")
graph.add_edge("edit", END)
print(graph.compile().invoke({"text": "a fox"})["text"])
"""


def run_under_opentelemetry(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The app under the real `opentelemetry-instrument`, which finds us by the entry point in pyproject.toml."""
    (folder / "app.py").write_text(APP)
    # What `pip install` would write, so that the test is about this checkout and not about when it was installed.
    about = folder / "site" / "marft_bridge-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: marft-bridge\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group,) = project["entry-points"]
    lines = [f"{name} = {target}" for name, target in project["entry-points"][group].items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "MARFT_"))}
    return subprocess.run(
        [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable, "app.py"],
        cwd=folder,
        env=inherited
        | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "OTEL_TRACES_EXPORTER": "none"}
        | {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_opentelemetry_instrument_records_an_app_that_knows_nothing_of_us(tmp_path: Path) -> None:
    store = tmp_path / "seen.duckdb"
    done = run_under_opentelemetry(tmp_path, MARFT_STORE=str(store))
    assert (done.returncode, done.stdout) == (0, "A small fox.\n"), done.stderr
    with TraceStore.open(store) as opened:
        opened.take_in()
        (trajectory,) = opened.trajectories()
    assert [(action.node, action.completion) for action in trajectory.actions] == [
        ("draft", "a small fox"),
        ("edit", "A small fox."),
    ]
    assert trajectory.episode.split == "live"


@pytest.mark.slow
def test_without_a_store_the_app_runs_and_one_line_says_that_nothing_is_recorded(tmp_path: Path) -> None:
    done = run_under_opentelemetry(tmp_path)
    assert (done.returncode, done.stdout) == (0, "A small fox.\n")
    assert done.stderr.count("no LangGraph run is recorded: set MARFT_STORE to the path of a store") == 1
    assert not list(tmp_path.rglob("*.segment"))


def test_the_instrumentor_is_instrument_and_takes_nothing_else(
    store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MARFT_STORE", raising=False)
    instrumentor = MarftInstrumentor()
    with pytest.raises(BridgeError, match="leave out tracer_provider"):
        instrumentor.instrument(tracer_provider=object())
    instrumentor.instrument(store=str(store))
    try:
        graph_of(fake_model()).invoke(START_STATE)
    finally:
        instrumentor.uninstrument()
    graph_of(fake_model()).invoke(START_STATE)
    assert len(episodes_in(store)) == 1
    with caplog.at_level(logging.WARNING):
        instrumentor.instrument()
    instrumentor.uninstrument()
    assert [record.getMessage() for record in caplog.records if record.name == "marft_bridge"] == [
        "no LangGraph run is recorded: set MARFT_STORE to the path of a store"
    ]
