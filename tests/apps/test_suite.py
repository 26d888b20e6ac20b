"""Owns: published apps go all the way as their authors wrote them: recorded, listed, collected, shown, checked.

- With two lines that record it, an app asks its provider the same and ends with the same; D is the one worked out by
  hand, and so are the links between its runs.
- What `init` writes, `collect` accepts unedited; it trains the agents that act, by their names, and the store is sound.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from apps.by_hand import FOLDER, RECORDED, SUITE, SuiteApp
from langchain_core.messages import BaseMessage
from pydantic import BaseModel
from rich.console import Console
from support.compare_rig import save_model
from support.edge_rig import edges_of
from support.fake_vllm import FakeVllm, running
from support.traces_rig import traces

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.rollouts.app import load_app
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trace_store.threads import episodes_to_links

# langgraph-supervisor 0.0.31 still builds on LangGraph's older agent.
pytestmark = pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")

FAST = "agents_as_tools"  # the one whose whole way is short enough for the fast tier


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an app, which is the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "hosted")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    save_model(tmp_path / "model")
    return tmp_path


@contextmanager
def provider(app: SuiteApp, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """Stands for the provider of gpt-4o-mini, and for the served model."""
    server, numbers = FakeVllm(), itertools.count()

    def with_own_ids(whole: dict[str, Any]) -> bytes:
        return re.sub(r'"id": "call-\d+"', lambda _: f'"id": "call-{next(numbers)}"', json.dumps(whole)).encode()

    server.adapters["gpt-4o-mini"] = "hosted"
    server.answer, server.auto_tools, server.spoil = app.answer, True, with_own_ids
    with running(server):
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        yield server


@contextmanager
def module_of(text: str, file: Path) -> Iterator[ModuleType]:
    """An app from its text, imported as its user would."""
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[file.stem]


def run_app(app: SuiteApp, module: ModuleType, *, is_async: bool) -> list[Any]:
    """The state after each of its runs, in a form that can be compared."""
    arguments: dict[str, Any] = {"config": {"configurable": {"thread_id": "t"}}}
    if (context := app.context or app.default_context) is not None:
        arguments["context"] = context

    async def invoke(graph_input: Any) -> Any:
        return await module.graph.ainvoke(graph_input, **arguments)

    def run(graph_input: Any) -> Any:
        return asyncio.run(invoke(graph_input)) if is_async else module.graph.invoke(graph_input, **arguments)

    return [to_plain(run(graph_input)) for graph_input in (module.tasks[0], *app.later_inputs)]


def to_plain(value: Any) -> Any:
    """Without the ids that are drawn anew in each run."""
    if isinstance(value, BaseMessage):
        calls = [(call["name"], call["args"]) for call in getattr(value, "tool_calls", [])]
        return (value.type, value.content, value.name, calls)
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return re.sub(r"id='\w+'", "id", repr(value))


def prompts(server: FakeVllm) -> list[str]:
    """What was asked, in an order that does not depend on which of two parallel calls came first."""
    drawn = re.compile(r"call-\d+|[0-9a-f]{8}-[0-9a-f-]{27}")
    return sorted(drawn.sub("id", json.dumps(body, sort_keys=True)) for body in server.asked)


def check_edges(trajectory: Trajectory, expected: dict[str, str]) -> None:
    recorded = {kind: set(text.split()) for kind, text in edges_of(trajectory).items()}
    by_hand = {kind: set(text.split()) for kind, text in expected.items()}
    kinds = sorted({*recorded, *by_hand})
    empty: set[str] = set()
    too_many = {kind: recorded.get(kind, empty) - by_hand.get(kind, empty) for kind in kinds}
    missing = {kind: by_hand.get(kind, empty) - recorded.get(kind, empty) for kind in kinds}
    assert {"too many": too_many, "missing": missing} == {
        "too many": dict.fromkeys(kinds, empty),
        "missing": dict.fromkeys(kinds, empty),
    }


def stored(path: Path) -> tuple[list[Trajectory], list[str | None]]:
    """The runs of a store in the order of their starts, and how each goes on with another."""
    with TraceStore.open(path, read_only=True) as store:
        episodes = store.episodes()
        links = episodes_to_links(store, [episode.episode_id for episode in episodes])
        trajectories = {trajectory.episode.episode_id: trajectory for trajectory in store.trajectories()}
    return [trajectories[episode.episode_id] for episode in episodes], [
        links[episode.episode_id].kind for episode in episodes
    ]


IS_ASYNC = {"react_template", "plan_and_execute", "reflection", "memory_store", "supervisor"}


@pytest.mark.parametrize("name", SUITE)
def test_an_app_runs_the_same_with_two_lines_that_record_it_and_its_d_is_the_one_by_hand(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, text = SUITE[name], (FOLDER / f"{name}.py").read_text()
    outcomes = []
    for file, lines in (("plain_app.py", ""), ("recorded_app.py", RECORDED)):
        with provider(app, monkeypatch) as server, module_of(text + lines, project / file) as module:
            outcomes.append((run_app(app, module, is_async=name in IS_ASYNC), prompts(server)))
            rewards = module.reward
    assert outcomes[0] == outcomes[1]
    assert app.result in repr(outcomes[0][0][0])
    assert callable(rewards)
    trajectories, links = stored(project / "traces.duckdb")
    assert Counter(str(action.node) for action in trajectories[0].actions) == Counter(app.agents)
    for trajectory, edges in zip(trajectories, (app.edges, *app.later_edges), strict=True):
        check_edges(trajectory, edges)
    assert links[0] is None
    assert links[1:] == (list(app.links) or [None] * len(app.later_inputs))


def go_all_the_way(
    app: SuiteApp, text: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` with a probe, `collect` with what it wrote, `traces show` and `doctor`; the record is the one by hand."""
    (project / "app.py").write_text(text)
    flags = ["--tasks", "app.py:tasks", "--reward", "app.py:reward", "--model", "model", "--probe", "--yes"]
    if app.context is not None:
        flags += ["--context", json.dumps(app.context)]
    with provider(app, monkeypatch) as server:
        assert cli.run(["init", "app.py:graph", *flags]) == 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert f"probe: {len(app.agents)} model calls on task" in captured.out
        assert "share one adapter" not in captured.out
        graph = toml_to_config(Path("bridge.toml")).graph
        assert set(graph.nodes) == set(app.agents)
        listed = "".join(captured.out.split())
        assert [agent for agent in app.silent_agents if agent not in listed] == []
        assert graph.context == (app.context if app.context is not None else app.default_context)
        server.asked.clear()
        config = toml_to_config(Path("bridge.toml"), {"collect.episodes": 2})
        config = config.model_copy(update={"serve": ServeOptions(attach=server.url)})  # in the place of a real server
        said = io.StringIO()
        collect(config, Reporter(Console(file=said, width=200)), resume=False)
        assert f"collected 2 {app.outcome}" in said.getvalue()
        assert {body["model"].rpartition("@")[2] for body in server.asked} == {"0"}  # no call went to the provider
    store = project / "runs/app/store.duckdb"
    trajectories, _ = stored(store)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert Counter(str(action.node) for action in trajectory.actions) == Counter(app.agents)
        check_edges(trajectory, app.edges)
        for action in trajectory.actions:
            assert action.trainable, action.untrainable_reason
    code, drawing, errors = traces(capsys, "show", trajectories[0].episode.episode_id, "--store", store, "--text")
    assert (code, errors) == (0, "")
    assert [agent for agent in set(app.agents) if agent not in drawing] == []
    code, checked, errors = traces(capsys, "doctor", "--store", store)
    assert (code, errors) == (0, ""), checked


@pytest.mark.parametrize(
    "name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in SUITE]
)
def test_what_init_writes_collect_accepts_and_the_store_is_sound(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    go_all_the_way(SUITE[name], text, project, monkeypatch=monkeypatch, capsys=capsys)


NESTED = """

def nested(inner, node):
    builder = StateGraph(GraphState)
    builder.add_node(node, inner)
    builder.add_edge(START, node)
    return builder.compile()


graph = nested(nested(nested(graph, "desk"), "team"), "office")
"""


@pytest.mark.slow
def test_what_init_writes_collect_accepts_of_routers_three_graphs_deep(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app, text = SUITE["adaptive_rag"], (FOLDER / "adaptive_rag.py").read_text()
    inner = "office/team/desk/"
    edges = {
        kind: " ".join(inner + re.sub(r"([>?])", rf"\1{inner}", edge) for edge in text.split())
        for kind, text in app.edges.items()
    }
    agents, silent_agents = ([inner + agent for agent in agents] for agents in (app.agents, app.silent_agents))
    deep_app = replace(app, agents=agents, silent_agents=silent_agents, edges=edges)
    go_all_the_way(deep_app, text + NESTED, project, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("name", SUITE)
def test_without_a_probe_init_lists_the_agents_that_show_and_opens_what_it_wrote(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = SUITE[name]
    (project / "app.py").write_text((FOLDER / f"{name}.py").read_text())
    flags = ["--tasks", "app.py:tasks", "--reward", "app.py:reward", "--model", "model", "--yes"]
    assert cli.run(["init", "app.py:graph", *flags]) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    config = toml_to_config(Path("bridge.toml"))
    assert set(config.graph.nodes) == {*app.agents, *app.silent_agents}
    load_app(config)


def test_every_app_of_the_folder_is_in_the_suite() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"by_hand", "test_suite"}
    assert files == set(SUITE)
    assert len(SUITE) >= 12
