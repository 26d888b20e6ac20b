"""Owns: every command runs an app as the app wants it: its context, and LangGraph's config.

- A table holds for every run, a function is asked for each task; contexts of every kind reach the nodes.
- What the configuration or such a function says wrong is one line, before a server starts where that is possible.
- Where all episodes fail, the command says why, with the line of the app, and ends with 1; some failures are shown.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import ConfigError, EpisodesFailedError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.variants import Deployment
from marft_bridge.config.bridge import BridgeConfig, GraphOptions, toml_to_config
from marft_bridge.rollouts.app import load_app

APP = """
from dataclasses import dataclass, field
from typing import Any
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from pydantic import BaseModel
from typing_extensions import TypedDict

SEEN = []


@dataclass
class AsDataclass:
    tone: str = "plain"
    sizes: list[int] = field(default_factory=list)


class AsModel(BaseModel):
    tone: str
    sizes: list[int] = []


class AsTypedDict(TypedDict, total=False):
    tone: str
    sizes: list[int]


def build(schema):
    def say(state: MessagesState, config, runtime: Runtime[Any]) -> dict[str, Any]:
        context = runtime.context
        tone = context["tone"] if isinstance(context, dict) else context.tone
        team, tags = config["metadata"].get("team"), config.get("tags") or []
        SEEN.append((tone, config["configurable"].get("user"), config.get("recursion_limit"), team, tags))
        model = ChatOpenAI(model="base", base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
        return {"messages": [model.invoke(tone)]}

    def step(state: MessagesState) -> dict[str, Any]:
        return {}

    graph = StateGraph(MessagesState, context_schema=schema)
    graph.add_node("say", say)
    graph.add_edge(START, "say")
    before = "say"
    for number in range(4):
        graph.add_node(f"step{number}", step)
        graph.add_edge(before, before := f"step{number}")
    return graph.compile()


dataclass_app, model_app, typed_app, no_schema = map(build, (AsDataclass, AsModel, AsTypedDict, None))
tasks = [{"id": n, "messages": [("user", f"q{n}")]} for n in range(20)]


def reward(task, state):
    return 1.0


def to_context(task):
    return AsDataclass(tone=f"of {task['id']}")


def to_config(task):
    return {"configurable": {"user": f"user of {task['id']}"}, "metadata": {"team": "a"}}


def breaks(task):
    return task["nothing"]


def some_break(task):
    return AsDataclass(tone=None) if int(task["id"]) % 2 else AsDataclass()


def returns_a_list(task):
    return ["configurable"]


def sets_a_thread(task):
    return {"configurable": {"thread_id": "mine"}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("wants.py").write_text(APP)
    save_model(tmp_path / "model")
    return tmp_path


def config_of(url: str = "", app: str = "dataclass_app", episodes: int = 4, **graph: Any) -> BridgeConfig:
    table = {"app": f"wants.py:{app}", "nodes": ["say"], "tasks": "wants.py:tasks", "reward": "wants.py:reward"}
    serve = {"attach": url} if url else {}
    return BridgeConfig.model_validate(
        {"graph": table | graph, "model": {"path": "model"}, "serve": serve, "collect": {"episodes": episodes}}
    )


def collected(**graph: Any) -> tuple[list[Any], str]:
    """What the nodes were given in each episode, and what the user was told."""
    from marft_bridge.rollouts.app_graph import load_app_object

    seen = load_app_object("wants.py:SEEN", "k")
    seen.clear()
    text = io.StringIO()
    with running(FakeVllm()) as ours:
        collect(config_of(ours.url, **graph), Reporter(Console(file=text, width=400)), resume=False)
    return seen, text.getvalue()


@pytest.mark.parametrize("app", ["dataclass_app", "model_app", "typed_app", "no_schema"])
def test_a_context_of_the_configuration_reaches_the_nodes_whatever_the_schema(app: str, here: Path) -> None:
    seen, said = collected(app=app, context={"tone": "warm"}, config={"recursion_limit": 7, "tags": ["night"]})
    assert "4 terminated" in said
    assert [(tone, limit, "night" in tags) for tone, _, limit, _, tags in seen] == [("warm", 7, True)] * 4


def test_functions_of_the_task_are_asked_for_each_episode(here: Path) -> None:
    seen, _ = collected(context="wants.py:to_context", config="wants.py:to_config")
    tones = {tone for tone, *_ in seen}
    assert len(tones) == 4
    assert {(f"user {tone}", "a") for tone in tones} == {(user, team) for _, user, _, team, _ in seen}


def test_an_empty_context_is_that_of_the_schemas_defaults(here: Path) -> None:
    seen, _ = collected(context={})
    assert {tone for tone, *_ in seen} == {"plain"}


def test_a_limit_on_supersteps_cuts_an_episode_short(here: Path) -> None:
    _, said = collected(context={}, config={"recursion_limit": 2})
    assert "collected 4 truncated" in said


# What is wrong


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"context": {"tune": "x"}}, "graph.context: the app's AsDataclass has no 'tune'; it has tone, sizes"),
        ({"app": "model_app", "context": {}}, "graph.context: the app's AsModel needs 'tone'; add it to the table"),
        ({"context": "wants.py:tasks"}, "graph.context: 'wants.py:tasks' is a list, not a function"),
        ({"config": "wants.py:nothing"}, "graph.config: 'wants.py' has no 'nothing'"),
    ],
)
def test_what_is_wrong_with_the_runs_is_said_before_a_server_starts(
    graph: dict[str, Any], message: str, here: Path
) -> None:
    with pytest.raises(GraphError) as caught:
        load_app(config_of(**graph))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ({"context": "wants.py:breaks"}, r"graph.context: the function failed on task '\d+': KeyError: 'nothing'"),
        ({"config": "wants.py:returns_a_list"}, r"graph.config: for task '\d+' the function returned a list, not a"),
        ({"config": "wants.py:sets_a_thread"}, r"graph.config: for task '\d+': configurable: 'thread_id' is set for"),
    ],
)
def test_a_function_that_fails_ends_the_command_with_one_line(graph: dict[str, Any], message: str, here: Path) -> None:
    with pytest.raises(GraphError, match=message):
        collected(**({"context": {}} | graph))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{ recursion_limt = 3 }", "graph.config: unknown key 'recursion_limt'; did you mean 'recursion_limit'?"),
        ("{ recursion_limit = 0 }", "graph.config: recursion_limit: Input should be greater than or equal to 1"),
        ('{ configurable = { thread_id = "x" } }', "graph.config: configurable: 'thread_id' is set for every episode"),
    ],
)
def test_a_table_of_another_form_is_refused_by_name(table: str, message: str, here: Path) -> None:
    Path("bridge.toml").write_text(
        f'[graph]\napp = "wants.py:no_schema"\nnodes = ["say"]\ntasks = "t"\nreward = "r"\nconfig = {table}\n'
    )
    with pytest.raises(ConfigError) as caught:
        toml_to_config(Path("bridge.toml"))
    assert message in str(caught.value)


def test_variants_that_differ_in_their_context_do_not_run_the_same_thing() -> None:
    def key(**runs: Any) -> Any:
        return Deployment(GraphOptions(app="a:b", nodes=("x",), tasks="t", reward="r", **runs)).key

    keys = {key(), key(context={}), key(context={"tone": "x"}), key(context="a:b"), key(config={"tags": ["a"]})}
    assert len(keys) == 5


# Failures


@pytest.mark.slow
def test_where_all_episodes_fail_the_command_ends_with_1_and_the_reason_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(number for number, text in enumerate(APP.splitlines(), start=1) if "tone = context" in text)
    reason = f"AttributeError: 'NoneType' object has no attribute 'tone' (wants.py:{line})"
    for count in (4, 20):  # few, and so many that the rest need not run
        with running(FakeVllm()) as ours:
            Path("bridge.toml").write_text(
                '[graph]\napp = "wants.py:dataclass_app"\nnodes = ["say"]\ntasks = "wants.py:tasks"\n'
                f'reward = "wants.py:reward"\n[model]\npath = "model"\n[serve]\nattach = "{ours.url}"\n'
            )
            assert cli.run(["collect", "--episodes", str(count), "--run", f"runs/{count}"]) == 1
        said = capsys.readouterr().err
        assert "episodes failed" in said
        assert reason in said.replace("\n", " ")


def test_where_some_episodes_fail_the_reasons_are_shown(here: Path) -> None:
    _, said = collected(episodes=12, context="wants.py:some_break")
    shown = [line for line in said.splitlines() if " of 12 episodes failed: " in line]
    assert len(shown) == 1, said
    assert "wants.py:" in shown[0]


def test_all_failed_is_an_error_of_its_own(here: Path) -> None:
    with pytest.raises(EpisodesFailedError, match=r"4 of 4 episodes failed, 4 of them with: AttributeError"):
        collected()


# A probe

GIVEN = ["--tasks", "wants.py:tasks", "--reward", "wants.py:reward", "--model", "model", "--nodes", "say"]


def test_init_gives_a_probe_the_context_and_writes_it(here: Path) -> None:
    given = [*GIVEN, "--probe"]
    runs = ["--context", json.dumps({"tone": 'a "b"', "sizes": [1, 2]}), "--run-config", '{"recursion_limit": 9}']
    assert cli.run(["init", "wants.py:model_app", *given, *runs]) == 0
    graph = toml_to_config(Path("bridge.toml")).graph
    assert graph.context == {"tone": 'a "b"', "sizes": [1, 2]}
    assert graph.model_dump()["config"]["recursion_limit"] == 9
    from marft_bridge.rollouts.app_graph import load_app_object

    assert [entry[:3] for entry in load_app_object("wants.py:SEEN", "k")][-1] == ('a "b"', None, 9)


def test_init_gives_a_schema_with_defaults_the_empty_context_and_says_what_another_needs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = GIVEN
    assert cli.run(["init", "wants.py:dataclass_app", *given]) == 0
    assert toml_to_config(Path("bridge.toml")).graph.context == {}
    assert cli.run(["init", "wants.py:model_app", *given, "--out", "b.toml"]) == 0
    assert "the app's runs need a context with tone: give it with --context" in capsys.readouterr().out
    assert toml_to_config(Path("b.toml")).graph.context is None


@pytest.mark.parametrize("text", ["{", '{"tone": null}', '{"tone": 1'])
def test_a_context_that_cannot_be_written_is_refused(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = GIVEN
    assert cli.run(["init", "wants.py:no_schema", *given, "--context", text]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
