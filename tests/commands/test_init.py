"""Owns: `marft-bridge init` says what an app is made of, runs it only when told, and writes a file that works.

- A node's models and tools are found where an app keeps them, by the recorder's names; what cannot be told is said.
- With --probe it is run once: who really called which model, with which tools, also where the run failed.
- The file is valid and commented from the options; collecting with it reaches the nodes that it names.
- Without a terminal nothing is asked, and nothing that is there is overwritten.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import stat
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph_supervisor import create_supervisor
from rich.console import Console
from support.compare_rig import save_model
from support.edge_rig import calls_tool, recorded_trajectories, says
from support.fake_vllm import FakeVllm, running
from support.hub_cache import NAME, put_in_cache

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.commands.init import Flags, init
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import GraphOptions, toml_to_config
from marft_bridge.config.option_sentences import options_to_sentences
from marft_bridge.recording.instrument import uninstrument
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app_graph import load_app_object, open_graph
from marft_bridge.rollouts.app_models import InspectedNode, inspect_nodes
from marft_bridge.tasks.options import Gsm8kTasks
from trace_store.journal import Journal
from trace_store.store import TraceStore

APP = '''
import operator
from typing import Annotated, Any, TypedDict

import openai
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

RUN = []


class State(TypedDict):
    log: Annotated[list[str], operator.add]


def hosted(name):
    return ChatOpenAI(model=name, base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} is a bird"


GLOBAL = hosted("global-model")


def speaker(model):
    async def speak(state: State) -> dict[str, Any]:
        RUN.append(model)
        return {"log": [str((await model.ainvoke("; ".join(state["log"]))).text)]}

    return speak


def of_module(state: State) -> dict[str, Any]:
    return {"log": [GLOBAL.bind_tools([look_up]).invoke("x").text]}


def made(state: State) -> dict[str, Any]:
    return {"log": [ChatOpenAI(model="later").invoke("x").text]}


def other_client(state: State) -> dict[str, Any]:
    return {"log": [str(openai.OpenAI().models)]}


def imported_late(state: State) -> dict[str, Any]:
    import requests

    return {"log": [requests.get("x").text]}


def of_config(state: State, config: RunnableConfig) -> dict[str, Any]:
    return {"log": [config["configurable"]["llm"].invoke("x").text]}


def first_word(state: State) -> dict[str, Any]:
    return {"log": [word for line in state["log"] for word in line.split()][:1]}


class Critic:
    def __init__(self, model):
        self.model = model

    def check(self, state: State) -> dict[str, Any]:
        return self.answer("critic")

    def answer(self, text):
        return {"log": [self.model.invoke(text).text]}


class Maker:
    def make(self, state: State) -> dict[str, Any]:
        return {"log": [self.model().invoke("x").text]}

    def model(self):
        return ChatOpenAI(model="later")


def chain(**nodes):
    graph = StateGraph(State)
    for before, (name, node) in zip([START, *nodes], nodes.items()):
        graph.add_node(name, node)
        graph.add_edge(before, name)
    return graph.compile()


graph = chain(planner=speaker(hosted("big")), trim=first_word, writer=speaker(hosted("small")))
everywhere = chain(
    of_module=of_module,
    made=made,
    other=other_client,
    late=imported_late,
    of_config=of_config,
    method=Critic(hosted("of-method")).check,
    helper=Maker().make,
    sequence=ChatPromptTemplate.from_template("{log}") | hosted("of-chain").bind_tools([look_up]),
)
agent = create_agent(hosted("of-agent"), [look_up])
team = chain(researcher=agent, drafting=chain(draft=speaker(hosted("inner"))), trim=first_word)


def served(model: BaseChatModel):
    return chain(planner=speaker(model), writer=speaker(model), judge=speaker(hosted("big")))


def reward(task, state):
    return float(len(state["log"]))


def question(task):
    return {"log": [task["question"]]}
'''


DEEP = """

deep = chain(
    department_of_research=chain(
        team_for_questions=chain(draft_the_answer=speaker(hosted("big")), refine_the_answer=speaker(hosted("big")))
    )
)


@tool
def judge(word: str) -> str:
    \"\"\"Judges a word.\"\"\"
    return GLOBAL.invoke(word).text


judged = create_agent(hosted("of-agent"), [judge])
first, second = create_agent(hosted("x"), []), create_agent(hosted("y"), [])


def both(state: State) -> dict[str, Any]:
    return {"log": [first.invoke({}), second.invoke({})]}


unnamed = chain(both=both)


def as_messages(task):
    return {"messages": task["log"]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the app, its langgraph.json, tasks, and as much of a model as an adapter needs."""
    monkeypatch.chdir(tmp_path)
    tasks = [{"id": n, "log": [f"q{n}"]} for n in range(40)]
    (tmp_path / "my_app.py").write_text(APP)
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"helper": "./my_app.py:team"}}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    save_model(tmp_path / "model")
    return tmp_path


def seen(name: str) -> dict[str, InspectedNode]:
    with asyncio.Runner() as runner, open_graph(load_app_object(name, "app"), name, runner) as graph:
        return {node.name: node for node in inspect_nodes(graph)}


@tool
def add(x: int, y: int) -> int:
    """Adds two numbers."""
    return x + y


GIVEN = ["--tasks", "tasks.jsonl", "--reward", "my_app.py:reward", "--model", "model"]


def written(app: str, *flags: str) -> dict[str, Any]:
    assert cli.run(["init", app, *GIVEN, *flags]) == 0
    return tomllib.loads(Path("bridge.toml").read_text())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["init", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def cells(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


# What is seen of an app


def test_a_model_is_found_wherever_an_app_keeps_it(here: Path) -> None:
    nodes = seen("my_app.py:everywhere")
    assert {name: list(node.models) for name, node in nodes.items()} == {
        "of_module": ["global-model"],
        "made": ["ChatOpenAI"],
        "other": [],
        "late": [],
        "of_config": [],
        "method": ["of-method"],
        "helper": ["ChatOpenAI"],
        "sequence": ["of-chain"],
    }
    assert nodes["made"].models == {"ChatOpenAI": None}  # there is none before the node runs
    assert {name for name, node in nodes.items() if node.tools} == {"of_module", "sequence"}
    assert list(nodes["of_module"].tools) == list(nodes["sequence"].tools) == ["look_up"]


def test_a_node_that_could_call_a_model_unseen_is_not_taken_for_one_without(here: Path) -> None:
    nodes = seen("my_app.py:everywhere")
    assert nodes["other"].may_hide_model
    assert nodes["late"].may_hide_model
    assert nodes["of_config"].may_hide_model
    trim = seen("my_app.py:graph")["trim"]
    assert (trim.models, trim.tools, trim.may_hide_model) == ({}, {}, False)


def test_an_agent_and_a_subgraph_have_the_names_that_the_recorder_uses(here: Path) -> None:
    assert list(seen("my_app.py:agent")) == ["model", "tools"]
    nodes = seen("helper")  # of the langgraph.json
    assert list(nodes) == ["trim", "researcher/model", "researcher/tools", "drafting/draft"]
    agent = nodes["researcher/model"]
    assert (list(agent.models), list(agent.tools)) == (["of-agent"], ["look_up"])
    assert list(nodes["drafting/draft"].models) == ["inner"]
    runs_tools = nodes["researcher/tools"]
    assert (runs_tools.models, runs_tools.tools, runs_tools.may_hide_model) == ({}, {}, False)


@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")  # of langgraph-supervisor
def test_the_nodes_of_a_published_app_that_hold_models_are_those_whose_calls_are_recorded(tmp_path: Path) -> None:
    solver = create_agent(says(calls_tool("add", x=1, y=2), "three"), [add], name="solver")
    writer = create_agent(says("the answer is three"), [], name="writer")
    boss = says(calls_tool("transfer_to_solver"), calls_tool("transfer_to_writer"), "done")
    graph = create_supervisor([solver, writer], model=boss, supervisor_name="boss").compile()
    nodes = {node.name: node for node in inspect_nodes(graph)}
    recorder = Recorder(Journal(tmp_path / "journal"))
    wrap(graph, recorder).invoke({"messages": [HumanMessage("1 + 2, in words")]})
    (trajectory,) = recorded_trajectories(recorder)
    called = {action.node for action in trajectory.actions}
    assert called == {"boss/agent", "solver", "writer"}
    assert {name for name, node in nodes.items() if node.models} == called
    assert not any(node.may_hide_model for node in nodes.values())
    assert list(nodes["solver"].tools) == ["add"]


def test_the_listing_shows_each_node_with_its_model_its_tools_and_whether_it_is_trained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("helper", "--nodes", "researcher/model")
    assert cells(capsys) == [
        ["trim", "none", "", ""],
        ["researcher/model", "of-agent", "look_up", "yes"],
        ["researcher/tools", "none", "", ""],
        ["drafting/draft", "inner", "", ""],
    ]
    written("my_app.py:everywhere", "--yes", "--force")
    assert [row[1] for row in cells(capsys)] == [
        "global-model",
        "ChatOpenAI (made when the node runs)",
        *["cannot tell"] * 3,
        "of-method",
        "ChatOpenAI (made when the node runs)",
        "of-chain",
    ]


def test_long_names_of_nodes_are_never_cut_to_the_same_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("deep.py").write_text(APP + DEEP)
    given = ["--tasks", "tasks.jsonl", "--reward", "deep.py:reward", "--model", "model"]
    assert cli.run(["init", "deep.py:deep", *given, "--yes"]) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith("│")]
    assert max(map(len, rows)) <= 80
    names = "".join(row.strip("│").split("│")[0].strip() for row in rows)  # a name that is folded goes on below
    paths = [f"department_of_research/team_for_questions/{node}_the_answer" for node in ("draft", "refine")]
    assert names == "".join(paths)
    assert list(toml_to_config(Path("bridge.toml")).graph.nodes) == paths


def test_a_node_that_runs_tools_is_trained_only_where_it_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("deep.py").write_text(APP + DEEP)
    given = ["--tasks", "tasks.jsonl", "--reward", "deep.py:reward", "--model", "model"]
    given += ["--task-to-input", "deep.py:as_messages"]
    assert cli.run(["init", "deep.py:judged", *given, "--yes"]) == 0
    assert toml_to_config(Path("bridge.toml")).graph.nodes == ("model",)
    assert "tools runs tools, one of which holds a model: --probe shows whether" in capsys.readouterr().out
    assert cli.run(["init", "deep.py:judged", *given, "--nodes", "model,tools", "--force"]) == 0
    assert toml_to_config(Path("bridge.toml")).graph.nodes == ("model", "tools")


def test_agents_that_share_a_name_are_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("deep.py").write_text(APP + DEEP)
    given = ["--tasks", "tasks.jsonl", "--reward", "deep.py:reward", "--model", "model"]
    assert cli.run(["init", "deep.py:unnamed", *given, "--yes"]) == 0
    assert "2 agents are called 'both/model' and share one adapter" in " ".join(capsys.readouterr().out.split())


def test_looking_runs_nothing(here: Path) -> None:
    written("my_app.py:graph", "--yes")
    assert load_app_object("my_app.py:RUN", "app") == []


# What is written


@pytest.mark.parametrize("given", [[], ["--model", "model"]])
def test_a_model_that_nobody_named_is_named(given: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "my_app.py:graph", *GIVEN[:4], *given, "--nodes", "planner"]) == 0
    said = "model.path is 'smollm2-135m', a small one to try things with; --model names another"
    assert (said in capsys.readouterr().out.splitlines()) == (not given)


def test_a_model_that_is_not_here_yet_is_said_with_what_fetches_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(here / "hub"))
    named = [*GIVEN[:4], "--model", NAME, "--nodes", "planner"]
    assert cli.run(["init", "my_app.py:graph", *named]) == 0
    assert f"{NAME!r} is neither a directory here nor in" in (text := " ".join(capsys.readouterr().out.split()))
    assert f"hf download {NAME}" in text
    assert toml_to_config(Path("bridge.toml")).model.path == NAME
    put_in_cache(here / "hub", here / "model", "a" * 40)
    assert cli.run(["init", "my_app.py:graph", *named, "--force"]) == 0
    assert "model.path" not in capsys.readouterr().out
    assert cli.run(["init", "my_app.py:graph", *GIVEN[:4], "--model", "/nowhere", "--yes", "--force"]) == 0
    assert "model.path: model directory '/nowhere' does not exist" in " ".join(capsys.readouterr().out.split())


def test_collecting_with_the_written_file_reaches_the_nodes_that_it_names(here: Path) -> None:
    content = written("my_app.py:graph", "--nodes", "planner,writer")
    assert content == {
        "name": "my_app",
        "graph": {
            "app": "my_app.py:graph",
            "nodes": ["planner", "writer"],
            "tasks": "tasks.jsonl",
            "reward": "my_app.py:reward",
        },
        "model": {"path": "model"},
    }
    with running(FakeVllm()) as ours:
        config = toml_to_config(Path("bridge.toml"), {"serve.attach": ours.url, "collect.episodes": 6})
        text = io.StringIO()
        collect(config, Reporter(Console(file=text, width=200)), resume=False)
        assert Counter(body["model"] for body in ours.asked) == {"planner@0": 6, "writer@0": 6}
    with TraceStore.open(here / "runs/my_app/store.duckdb") as store:
        assert store.sql("SELECT outcome, count(*) FROM episodes GROUP BY 1") == [("terminated", 6)]


def test_each_key_stands_below_the_sentence_of_its_option(here: Path) -> None:
    written("my_app.py:graph", "--yes")
    text = Path("bridge.toml").read_text()
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    for key in ("app", "nodes", "frozen", "tasks", "reward", "task_to_input"):
        assert options_to_sentences(GraphOptions)[key] in comments, key
    assert max(map(len, text.splitlines())) <= 120
    assert stat.S_IMODE(Path("bridge.toml").stat().st_mode) == 0o600


def test_a_line_that_is_commented_out_is_valid_once_it_is_not(here: Path) -> None:
    written("my_app.py:graph", "--nodes", "planner")
    text = Path("bridge.toml").read_text()
    assert '# task_to_input = "' in text
    Path("bridge.toml").write_text(text.replace("# task_to_input", "task_to_input").replace("# frozen", "frozen"))
    assert toml_to_config(Path("bridge.toml")).graph.task_to_input == "my_app.py:task_to_input"


def test_a_node_that_is_given_the_served_model_is_frozen_where_it_is_not_trained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = written("my_app.py:served", "--nodes", "planner")
    assert content["graph"]["frozen"] == ["writer"]
    assert [row[1] for row in cells(capsys)] == ["the one it is given", "the one it is given", "big"]


def test_what_the_server_needs_for_the_nodes_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = written("my_app.py:everywhere", "--nodes", "of_module,made,method")
    # three nodes, each with its version before and after; one of them offers a tool
    assert content["serve"] == {"max_loras": 6, "tool_call_parser": "hermes"}
    assert "of_module offers tools: serve.tool_call_parser is 'hermes'" in capsys.readouterr().out
    assert "serve" not in written("my_app.py:graph", "--yes", "--force")


def test_a_node_in_which_no_model_was_seen_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("my_app.py:everywhere", "--nodes", "other")
    assert "no model was seen in node 'other'" in capsys.readouterr().out


# Asking


def test_on_a_terminal_what_no_flag_says_is_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[tuple[str, str | None]] = []

    def ask(question: str, default: str | None) -> str:
        asked.append((question, default))
        return default or ("tasks.jsonl" if question.startswith("Tasks") else "my_app.py:reward")

    flags = Flags((), None, None, "model", Path("asked.toml"), yes=False, force=False)
    init("my_app.py:graph", flags, Reporter(Console(file=io.StringIO())), ask)
    assert [default for _, default in asked] == ["planner,writer", None, None]
    assert toml_to_config(Path("asked.toml")).graph.nodes == ("planner", "writer")


def test_what_makes_the_input_is_asked_for_where_the_graph_reads_nothing_of_a_task(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tasks.jsonl").write_text("".join(f'{{"id": "{n}", "question": "{n}?"}}\n' for n in range(40)))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []

    def ask(question: str, _default: str | None) -> str:
        asked.append(question.split(":")[0])
        return "my_app.py:question"

    flags = Flags(("planner",), "tasks.jsonl", "my_app.py:reward", "model", Path("asked.toml"), yes=False, force=False)
    said = io.StringIO()
    init("my_app.py:graph", flags, Reporter(Console(file=said, width=300)), ask)
    assert asked == ["Input"]
    assert "task '0' has id, question, and 'my_app.py:graph' reads log" in said.getvalue()
    assert toml_to_config(Path("asked.toml")).graph.task_to_input == "my_app.py:question"


def test_without_a_terminal_nothing_is_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "my_app.py:graph", *GIVEN)
    assert line == (
        "marft-bridge: init: there is no terminal to ask on; give --nodes (or --yes for every node with a model)"
    )
    line = refused(capsys, "my_app.py:graph", "--yes")
    assert line == "marft-bridge: init: there is no terminal to ask on; give --tasks, --reward"
    assert not Path("bridge.toml").exists()


def test_a_file_that_is_there_is_replaced_only_when_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bridge.toml").write_text("mine")
    line = refused(capsys, "my_app.py:graph", *GIVEN, "--yes")
    assert line == "marft-bridge: init: 'bridge.toml' exists; name another file with --out, or say --force"
    assert Path("bridge.toml").read_text() == "mine"
    assert written("my_app.py:graph", "--yes", "--force")["name"] == "my_app"


def test_a_folder_is_no_file_to_write_whether_told_to_replace_it_or_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs").mkdir()
    for force in ([], ["--force"]):
        line = refused(capsys, "my_app.py:graph", *GIVEN, "--yes", "--out", "configs", *force)
        assert line == "marft-bridge: init: 'configs' is a folder; name a file in it with --out"
    assert list((here / "configs").iterdir()) == []


def test_the_next_command_is_for_a_shell_whatever_the_file_is_called(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", "my_app.py:graph", *GIVEN, "--yes", "--out", "my app.toml"]) == 0
    command = capsys.readouterr().out.split("next: ")[1]
    assert shlex.split(command)[-2:] == ["--config", "my app.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_app.py:graph", *GIVEN, "--nodes", "boss"], "'my_app.py:graph' has no node 'boss'; its nodes: planner"),
        (["my_app.py:nothing", *GIVEN, "--yes"], "has no 'nothing'"),
        (["my_app.py:graph", "--yes", "--tasks", "none.jsonl", "--reward", "my_app.py:reward"], "graph.tasks: cannot"),
        (["my_app.py:graph", "--yes", "--tasks", "tasks.jsonl", "--reward", "my_app.py:no"], "has no 'no'"),
        (["my_app.py:graph", *GIVEN, "--yes", "--nodes", "planner"], "--nodes and --yes both say"),
        (["my_app.py:graph", *GIVEN, "--yes", "--out", "no/where.toml"], "there is no folder 'no'"),
    ],
)
def test_what_cannot_work_is_one_line_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments)
    assert not list(here.glob("*.toml"))


# Running it once


PROBED = """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph

from marft_bridge import instrument

instrument("app.duckdb")
MEMORY = InMemorySaver()


def add(a: int, b: int) -> int:
    \"\"\"Adds.\"\"\"
    return a + b


def hosted(name):
    return ChatOpenAI(model=name, base_url="{url}/v1", api_key="k", max_retries=0)


KEPT = {{"model": hosted}}


def late(state):
    agent = create_agent(KEPT["model"]("late"), [add])
    return {{"messages": agent.invoke(state)["messages"][-1:]}}


def rare(state, model=hosted("rare")):
    return {{"messages": [model.invoke(state["messages"])] if "rare" in state["messages"][0].text else []}}


builder = StateGraph(MessagesState)
for name, node in (("late", late), ("rare", rare), ("say", lambda state: {{"messages": [hosted("say").invoke("x")]}})):
    builder.add_node(name, node)
builder.add_edge(START, "late")
builder.add_edge("late", "rare")
builder.add_edge("rare", "say")
builder.add_edge("say", END)
graph = builder.compile(checkpointer=MEMORY)


def to_input(task):
    return {{"messages": [("user", task["log"][0])]}}


def reward(task, state):
    return 1.0
"""


def test_a_probe_says_which_nodes_call_which_model_with_which_tools_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeVllm()) as hosted:
        hosted.adapters |= {"late": "", "say": "", "rare": ""}
        hosted.auto_tools = True
        hosted.answer = lambda body: (
            [("add", {"a": 1, "b": 2})] if body.get("tools") and len(body["messages"]) == 1 else "3"
        )
        Path("probed.py").write_text(PROBED.format(url=hosted.url))
        given = ["--tasks", "tasks.jsonl", "--reward", "probed.py:reward", "--model", "model"]
        try:
            command = ["init", "probed.py:graph", *given, "--task-to-input", "probed.py:to_input", "--probe", "--yes"]
            assert cli.run(command) == 0
        finally:
            uninstrument()
        assert [body["model"] for body in hosted.asked] == ["late", "late", "say"]
        assert hosted.asked[0]["messages"] == [{"role": "user", "content": "q0"}]
    output = capsys.readouterr().out
    assert "probe: 3 model calls on task 0" in output
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in output.splitlines() if row.startswith("│")]
    assert {row[0]: row[2:] for row in rows if row[0]} == {  # a row without a name goes on with the one before
        "late": ["", "", ""],
        "late/model": ["add", "2 x late", "yes"],  # of an agent that is only made when the node runs
        "rare": ["", "", ""],
        "say": ["", "1 x say", "yes"],
    }
    graph = toml_to_config(Path("bridge.toml")).graph
    assert (graph.nodes, graph.task_to_input) == (("say", "late/model"), "probed.py:to_input")
    assert toml_to_config(Path("bridge.toml")).serve.tool_call_parser == "hermes"
    assert load_app_object("probed.py:MEMORY", "app").storage == {}
    with TraceStore.open(here / "app.duckdb") as store:
        store.take_in()
        assert store.episodes() == []


def test_a_probe_that_fails_says_why_and_what_was_called_before(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("my_app.py:graph", "--probe", "--nodes", "planner,writer")  # its models are nowhere
    output = capsys.readouterr().out
    assert re.search(r"probe: 1 model calls on task 0; \w+ConnectionError: Connection error\.", output)
    assert [row.split("│")[4].strip() for row in output.splitlines() if row.startswith("│")] == ["1 x big", "", ""]
    assert "no model was called on that task by node 'writer'" in output


def test_a_probe_that_fails_before_any_call_says_so_and_names_the_nodes_in_which_a_model_is_seen(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "def breaks(state):\n    raise RuntimeError('no database')\n"
    Path("broken.py").write_text(f"{APP}\n{broken}\ngraph = chain(first=breaks, last=speaker(hosted('big')))\n")
    given = ["--tasks", "tasks.jsonl", "--reward", "my_app.py:reward", "--model", "model"]
    assert refused(capsys, "broken.py:graph", *given, "--probe", "--yes") == (
        "marft-bridge: init: the run of --probe failed before a node called a model (RuntimeError: no database); "
        "mend that, or leave --probe out and name the nodes to train with --nodes: last"
    )


def test_an_app_that_is_given_its_model_is_probed_without_a_server(here: Path) -> None:
    Path("given.py").write_text(APP.replace('judge=speaker(hosted("big"))', "last=first_word"))
    given = ["--tasks", "tasks.jsonl", "--reward", "given.py:reward", "--model", "model"]
    assert cli.run(["init", "given.py:served", *given, "--probe", "--yes"]) == 0
    assert toml_to_config(Path("bridge.toml")).graph.nodes == ("planner", "writer")


def test_a_probe_asks_for_tasks_first_and_needs_a_terminal_to_do_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "my_app.py:graph", "--yes", "--probe", "--reward", "my_app.py:reward")
    assert line == "marft-bridge: init: there is no terminal to ask on; give --tasks"


def test_tasks_of_a_layout_are_written_as_a_table(here: Path) -> None:
    records = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    Path("train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["--tasks", "gsm8k:train.jsonl", "--reward", "my_app.py:reward", "--model", "model", "--yes"]
    assert cli.run(["init", "my_app.py:graph", *given, "--task-to-input", "my_app.py:question"]) == 0
    assert 'tasks = { kind = "gsm8k", path = "train.jsonl" }\n' in Path("bridge.toml").read_text()
    assert toml_to_config(Path("bridge.toml")).graph.tasks == Gsm8kTasks(path="train.jsonl")


def test_help_ends_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "--help"]) == 0
    example = " ".join(capsys.readouterr().out.split()).split("Example: marft-bridge ")[1]
    assert cli.run([*example.split(), "--help"]) == 0
