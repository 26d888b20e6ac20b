"""Owns: what the user names is loaded, or refused in one line before any episode starts.

- An app may be a graph, compiled or not, or a factory of any kind that LangGraph knows; the signature tells which.
- A graph of a langgraph.json is found by its name there, with what that file says it needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from graphs import math_duo
from marft_bridge.common.errors import GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.config.bridge import GraphOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.rollouts.agent_check import check_nodes
from marft_bridge.rollouts.app import options_to_app
from marft_bridge.rollouts.app_graph import load_app_object, open_graph
from marft_bridge.rollouts.app_models import inspect_nodes
from marft_bridge.tasks.reading import read_tasks

NOT_A_GRAPH = 3
TASK_LIST = [{"id": 1, "q": "a"}, {"id": 2, "q": "b"}]
WRONG_KIND = [1, 2]
UNSERIALISABLE = [{"id": 1, "q": {1, 2}}]


def not_a_builder(_model: Any) -> int:
    return 3


def broken_builder(_model: Any) -> None:
    raise RuntimeError("no database")


COMPILED = math_duo.build(ScriptedPolicy(script=lambda *_: "own 7"))
UNCOMPILED = COMPILED.builder
EVENTS: list[str] = []


def takes_a_model(llm: BaseChatModel) -> Any:
    return math_duo.build(llm)


def takes_anything(thing) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001  as an app that is not annotated
    return math_duo.build(thing)


def takes_nothing() -> Any:
    return UNCOMPILED


def takes_a_config(config: RunnableConfig) -> Any:
    assert config == {"configurable": {}}
    return COMPILED


def takes_an_optional_config(config: RunnableConfig | None = None, size: int = 3) -> Any:
    assert config is not None
    assert size == 3
    return COMPILED


def takes_a_runtime(runtime: Runtime[None]) -> Any:
    assert isinstance(runtime, Runtime)
    return COMPILED


async def is_async(config: RunnableConfig, model: BaseChatModel) -> Any:
    await asyncio.sleep(0)
    assert config is not None
    return math_duo.build(model)


@contextmanager
def is_a_context(model: BaseChatModel) -> Iterator[Any]:
    EVENTS.append("in")
    yield math_duo.build(model)
    EVENTS.append("out")


@asynccontextmanager
async def is_an_async_context() -> AsyncIterator[Any]:
    opened_by = asyncio.current_task()
    EVENTS.append("in")
    yield UNCOMPILED
    assert asyncio.current_task() is opened_by
    EVENTS.append("out")


@asynccontextmanager
async def breaks_while_it_opens() -> AsyncIterator[Any]:
    yield await asyncio.wait_for(no_database(), 5)


async def no_database() -> Any:
    raise ConnectionError("no\ndatabase")


def takes_two_models(planner: BaseChatModel, writer: BaseChatModel) -> Any:
    return planner, writer


def takes_a_number(size: int) -> int:
    return size


def duo_options(**changes: Any) -> GraphOptions:
    options = {
        "app": "graphs.math_duo:build",
        "nodes": ("reasoner", "actor"),
        "tasks": "graphs.math_duo:tasks",
        "reward": "graphs.math_duo:reward",
        "task_to_input": "graphs.math_duo:task_to_input",
        "task_fields": ("question", "answer"),
    }
    return GraphOptions.model_validate(options | changes)


def open_once(options: GraphOptions, model: BaseChatModel | None = None) -> Any:
    """What the duo answers, once the app is opened."""
    app, model = options_to_app(options), model or ScriptedPolicy(script=lambda node, *_: f"{node} 7")
    with asyncio.Runner() as runner, app.open_graph(model, runner) as graph:
        load_name(f"{HERE}:EVENTS", "k").append("use")  # the apps' list: by file, this module is loaded once more
        return runner.run(graph.ainvoke({"question": "3 + 4?"}))["answer"]


def refusal(**changes: Any) -> str:
    with pytest.raises(GraphError) as caught:
        open_once(duo_options(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


HERE = f"{Path(__file__)}"


def test_a_name_may_be_a_module_or_a_file(tmp_path: Path) -> None:
    assert load_name("graphs.math_duo:build", "k") is math_duo.build
    (tmp_path / "mine.py").write_text("class Box:\n    value = 5\n")
    assert load_name(f"{tmp_path / 'mine.py'}:Box.value", "k") == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"app": "graphs.math_duo"}, "is not a name of the form package.module:attribute"),
        ({"app": "graphs.nothing:build"}, "graph.app: importing 'graphs.nothing' failed: ModuleNotFoundError"),
        ({"app": "nowhere/app.py:build"}, "graph.app: there is no file 'nowhere/app.py'"),
        ({"app": "graphs.math_duo:bild"}, "graph.app: 'graphs.math_duo' has no 'bild'; it has: "),
        ({"nodes": ("reasoner", "critic")}, "has no node 'critic'; its nodes: reasoner, actor"),
        ({"app": f"{HERE}:NOT_A_GRAPH"}, "gave a int, not a LangGraph graph"),
        ({"app": f"{HERE}:not_a_builder"}, "gave a int, not a LangGraph graph"),
        ({"app": f"{HERE}:broken_builder"}, "failed: RuntimeError: no database"),
        ({"app": f"{HERE}:breaks_while_it_opens"}, "failed: ConnectionError: no database"),
        ({"app": f"{HERE}:takes_two_models"}, "takes 'planner' and 'writer'; a factory takes one chat model"),
        ({"app": f"{HERE}:takes_a_number"}, "needs 'size', which is neither a chat model nor a RunnableConfig"),
        ({"app": "agent"}, "(there is none here)"),
        ({"frozen": ("judge",)}, "graph.frozen: 'graphs.math_duo:build' has no node 'judge'"),
        ({"reward": f"{HERE}:NOT_A_GRAPH"}, "graph.reward: "),
        (
            {"task_fields": ("question", "solution")},
            "task 1 of 'graphs.math_duo:tasks' lacks 'solution'; it has: answer",
        ),
        ({"tasks": f"{HERE}:NOT_A_GRAPH"}, "is not a JSONL or Parquet file, an iterable, or a function that gives one"),
        ({"tasks": f"{HERE}:WRONG_KIND"}, "task 1 of"),
        ({"tasks": f"{HERE}:UNSERIALISABLE"}, "cannot be written as JSON"),
        ({"tasks": f"{HERE}:UNSERIALISABLE"}, "let graph.task_to_input (init: --task-to-input) make the graph's input"),
        ({"tasks": "none.jsonl"}, "cannot read 'none.jsonl'"),
        ({"tasks": f"{HERE}:TASK_LIST", "task_fields": (), "heldout": 0.0001}, "no held-out task is left of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_with_the_app_is_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": 1}\n{"id": 2', "line 2 of"),
        ("[1]\n", "line 1 of .* is not a JSON object"),
        ('{"id": 1}\n{"id": "1"}\n', "task 2 of .* repeats the id '1'"),
        ('{"question": "?"}\n', "task 1 of .* lacks 'id'"),
        ("\n", "holds no task"),
    ],
)
def test_a_bad_task_file_is_refused_with_the_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(lines)
    with pytest.raises(GraphError, match=message):
        read_tasks(str(path), ())


def test_tasks_from_a_file_keep_their_order_and_get_text_ids(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 2, "q": "b"}\n\n{"id": "one", "q": "a"}\n')
    assert read_tasks(str(path), ("q",)) == [{"id": "2", "q": "b"}, {"id": "one", "q": "a"}]


def test_the_duo_has_the_papers_two_nodes_and_over_a_hundred_heldout_tasks() -> None:
    assert [node.name for node in inspect_nodes(COMPILED)] == ["reasoner", "actor"]
    app = options_to_app(duo_options(heldout=0.33))
    assert len(app.heldout_tasks) >= 120
    assert len(app.train_tasks) + len(app.heldout_tasks) == 405
    assert {t["id"] for t in app.train_tasks}.isdisjoint(t["id"] for t in app.heldout_tasks)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The sum is 12.", {"correct": 1.0, "reward": 1.0}),
        ("12 apples, or is it 13", {"correct": 0.0, "reward": 0.1}),
        ("3 + 4", {"correct": 0.0, "reward": 0.0}),
        ("", {"correct": 0.0, "reward": 0.0}),
        ("-12", {"correct": 0.0, "reward": 0.0}),
    ],
)
def test_the_duos_reward_is_the_last_number_with_a_tenth_for_naming_it(answer: str, expected: dict[str, float]) -> None:
    assert math_duo.reward({"answer": 12}, {"answer": answer}) == expected


@pytest.mark.parametrize("app", ["takes_a_model", "takes_anything", "is_async", "is_a_context"])
def test_a_factory_that_takes_a_chat_model_gets_it(app: str) -> None:
    assert open_once(duo_options(app=f"{HERE}:{app}")) == "actor 7"


@pytest.mark.parametrize(
    "app",
    [
        *("COMPILED", "UNCOMPILED", "takes_nothing", "takes_a_config", "takes_an_optional_config", "takes_a_runtime"),
        "is_an_async_context",
    ],
)
def test_an_app_with_models_of_its_own_is_opened_as_it_is(app: str) -> None:
    assert open_once(duo_options(app=f"{HERE}:{app}")) == "own 7"


@pytest.mark.parametrize("app", ["is_a_context", "is_an_async_context"])
def test_what_an_app_opens_stays_open_while_it_is_used_and_is_closed_by_who_opened_it(app: str) -> None:
    events = load_name(f"{HERE}:EVENTS", "k")
    events.clear()
    open_once(duo_options(app=f"{HERE}:{app}"))
    assert events == ["in", "use", "out"]


class Nothing(TypedDict):
    pass


def test_nodes_of_a_subgraph_that_only_exists_at_run_time_are_taken_on_trust_and_no_others() -> None:
    inner = StateGraph(Nothing)
    inner.add_node("draft", lambda _: {})
    inner.add_edge(START, "draft")
    outer = StateGraph(Nothing)
    outer.add_node("hidden", lambda _: {})
    outer.add_node("team", inner.compile())
    outer.add_edge(START, "hidden")
    outer.add_edge("hidden", "team")
    outer.add_edge("team", END)
    graph = outer.compile()
    check_nodes(graph, ["hidden", "hidden/anything", "team/draft"], "app")
    for name in ("team/write", "nowhere/draft", "other"):
        with pytest.raises(GraphError, match=f"'app' has no node '{name}'; its nodes: hidden, team/draft"):
            check_nodes(graph, [name], "app")


LISTED = """
import os
import helper_of_the_app
from graphs.math_duo import build
SEEN = (os.environ["MARFT_TEST_ONE"], os.environ["MARFT_TEST_TWO"], os.environ["MARFT_TEST_SET"], helper_of_the_app.X)
def make(model):
    return build(model)
"""


@pytest.fixture
def listed_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as `langgraph new` lays it out."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "agent.py").write_text(LISTED)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_of_the_app.py").write_text("X = 5\n")
    (tmp_path / ".env").write_text(
        "# keys\nexport MARFT_TEST_ONE = 'a # b'\nMARFT_TEST_TWO=c # why\nMARFT_TEST_SET=no\n"
    )
    graphs = {"agent": "./src/agent.py:make", "seen": {"path": "./src/agent.py:SEEN"}, "wrong": 3}
    content = {"dependencies": ["./lib", "langchain_openai"], "graphs": graphs, "env": ".env"}
    (tmp_path / "langgraph.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARFT_TEST_SET", "kept")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(os.environ)
    yield tmp_path
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.parametrize("name", ["agent", "langgraph.json:agent", "{}/langgraph.json:agent"])
def test_a_graph_is_found_by_its_name_in_langgraph_json_with_what_it_needs(listed_app: Path, name: str) -> None:
    assert open_once(duo_options(app=name.format(listed_app))) == "actor 7"
    agent = load_name(f"{listed_app / 'src' / 'agent.py'}:SEEN", "k")
    assert agent == ("a # b", "c", "kept", 5)


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("agnet", "lists no graph 'agnet'; it lists: agent, seen, wrong"),
        ("wrong", "graph 'wrong' of 'langgraph.json' is not a name and has no 'path'"),
        ("seen", "gave a tuple, not a LangGraph graph"),
        ("none/langgraph.json:agent", "there is no file 'none/langgraph.json'"),
    ],
)
def test_what_is_wrong_with_a_listed_graph_is_named_in_one_line(listed_app: Path, app: str, message: str) -> None:
    assert listed_app.is_dir()
    assert message in refusal(app=app)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "is not a JSON object"), ("{", "cannot read"), ("{}", "has no table 'graphs'")],
)
def test_a_langgraph_json_of_another_form_is_named(listed_app: Path, content: str, message: str) -> None:
    (listed_app / "langgraph.json").write_text(content)
    assert message in refusal(app="agent")


def test_an_env_file_that_is_not_there_is_a_warning_and_one_that_cannot_be_read_is_refused(
    listed_app: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = listed_app / "langgraph.json"
    content = json.loads(file.read_text())
    (listed_app / "folder").mkdir()
    file.write_text(json.dumps(content | {"env": "folder"}))
    assert "cannot read the env file 'folder'" in refusal(app="agent")
    file.write_text(json.dumps(content | {"env": "none.env"}))
    monkeypatch.setenv("MARFT_TEST_ONE", "1")
    monkeypatch.setenv("MARFT_TEST_TWO", "2")
    assert [open_once(duo_options(app="agent")) for _ in range(2)] == ["actor 7"] * 2
    assert caplog.messages == [
        "graph.app: 'langgraph.json' names the env file 'none.env', which is not there; its variables are unset"
    ]


REMEMBERS = """
from typing import TypedDict
from langgraph.config import get_store
from langgraph.graph import START, StateGraph
from langgraph.store.memory import InMemoryStore

class State(TypedDict, total=False):
    out: list

def embed(texts):
    return [[1.0, 0.0] if text in ("owl", "bird") else [0.0, 1.0] for text in texts]

def act(state):
    store = get_store()
    if store is None:
        return {"out": []}
    for text in ("tea", "owl"):
        store.put(("mine",), text, {"text": text})
    return {"out": [item.key for item in store.search(("mine",), query="bird", limit=1)]}

builder = StateGraph(State)
builder.add_node("act", act)
builder.add_edge(START, "act")
graph = builder.compile()
own = InMemoryStore()
with_own = builder.compile(store=own)
"""


@pytest.mark.parametrize(
    ("app", "store", "found"),
    [
        ("graph", None, ["tea"]),  # the first: nothing says how to search
        ("graph", {"index": {"dims": 2, "embed": "./memory_app.py:embed", "fields": ["text"]}}, ["owl"]),
        ("with_own", {"index": {"dims": 2, "embed": "./memory_app.py:embed"}}, ["tea"]),
        ("unlisted", {"index": {"dims": 2}}, []),
        ("memory_app.py:graph", None, []),  # not by the langgraph.json: as the app itself runs it
    ],
)
def test_a_listed_graph_without_a_store_has_one_as_from_langgraphs_server(
    app: str, store: Any, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory_app.py").write_text(REMEMBERS)
    graphs = {name: f"./memory_app.py:{name}" for name in ("graph", "with_own")}
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": graphs, "store": store}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load_app_object("memory_app.py:graph" if app == "unlisted" else app, "graph.app")
    with asyncio.Runner() as runner, open_graph(loaded, app, runner) as graph:
        assert graph.invoke({})["out"] == found
        assert (graph is loaded) is (app not in graphs or app == "with_own")  # the app's own is not touched


def test_a_store_that_cannot_be_made_as_the_langgraph_json_says_is_refused(listed_app: Path) -> None:
    file = listed_app / "langgraph.json"
    index = {"dims": 2, "embed": "nobody:model"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"store": {"index": index}}))
    said = refusal(app="agent")
    assert said.startswith("graph.app: the store.index of 'langgraph.json' cannot be made: ")
    assert "nobody" in said


@pytest.mark.parametrize("app", ["agent", "my_agent.graph:make"])
def test_an_app_of_a_src_layout_that_is_not_installed_is_told_to_be(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "my_agent"
    package.mkdir(parents=True)
    (package / "state.py").touch()
    (package / "graph.py").write_text("from my_agent.state import X\n")
    content = {"dependencies": ["."], "graphs": {"agent": "./src/my_agent/graph.py:make"}}
    (tmp_path / "langgraph.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = refusal(app=app)
    assert said.endswith("ModuleNotFoundError: No module named 'my_agent'; install the app first: pip install -e .")
    (package / "graph.py").write_text("import another_package\n")
    assert "pip install" not in refusal(app="agent")


def test_the_env_of_langgraph_json_may_be_a_table(listed_app: Path) -> None:
    file = listed_app / "langgraph.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"env": {"MARFT_TEST_ONE": "1", "MARFT_TEST_TWO": 2}}))
    assert open_once(duo_options(app="agent")) == "actor 7"
    assert (os.environ["MARFT_TEST_ONE"], os.environ["MARFT_TEST_TWO"]) == ("1", "2")
