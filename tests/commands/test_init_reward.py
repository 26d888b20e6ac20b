"""Owns: `marft-bridge init` writes a `[[rewards]]` table that runs.

- The kind and its fields are those of `--reward`, else what the tasks expect and the graph's state holds.
- Collecting with the written file rewards every episode.
- Where nothing fits, or a task lacks what is expected, one line says so and no file is written.
"""

from __future__ import annotations

import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.commands.init import Flags, init
from marft_bridge.commands.reward_choice import RewardChoice, complete_choice, text_to_choice
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from trace_store.store import TraceStore

APP = """
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

model = ChatOpenAI(model="big", base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)


class State(TypedDict):
    question: str
    answer: str


async def say(state: State):
    return {"answer": str((await model.ainvoke(state["question"])).text)}


builder = StateGraph(State)
builder.add_node("say", say)
builder.add_edge(START, "say")
builder.add_edge("say", END)
graph = builder.compile()
"""
GIVEN = ["init", "sums.py:graph", "--yes", "--tasks", "tasks.jsonl", "--model", "model"]


class Graph:
    """As much of a compiled graph as a choice looks at."""

    def __init__(self, *fields: str) -> None:
        self.output_channels = list(fields)


def write_tasks(*expected: Any, field: str = "gold") -> None:
    """Twenty tasks, with what they expect."""
    tasks = [{"id": n, "question": f"{n}?", field: expected[n % len(expected)]} for n in range(20)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an app, and as much of a model as an adapter needs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(APP)
    save_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("reward", ["numeric", "numeric:answer", "numeric:answer=gold", "numeric:node:say=gold"])
def test_collecting_with_the_written_reward_scores_every_episode(reward: str, here: Path) -> None:
    write_tasks(3, "1,204")
    assert cli.run([*GIVEN, "--reward", reward]) == 0
    content = tomllib.loads(Path("bridge.toml").read_text())
    answer_from = "node:say" if "node:" in reward else "answer"
    assert content["rewards"] == [
        {"name": "reward", "kind": "numeric", "answer_from": answer_from, "expected_from": "gold"}
    ]
    assert "reward" not in content["graph"]
    assert max(map(len, Path("bridge.toml").read_text().splitlines())) <= 120
    with running(FakeVllm()) as ours:
        config = toml_to_config(Path("bridge.toml"), {"serve.attach": ours.url, "collect.episodes": 6})
        collect(config, Reporter(Console(file=io.StringIO())), resume=False)
    with TraceStore.open(here / "runs/sums/store.duckdb") as store:
        assert store.sql("SELECT count(*) FROM episode_reward WHERE name = 'reward'") == [(6,)]


@pytest.mark.parametrize(
    ("expected", "field", "kind"),
    [
        ((3, "1,204", "-0.5"), "gold", "numeric"),
        (("Paris", "the Nile"), "expected", "exact"),
        (("\\frac{1}{2}", "3"), "answer", "math"),
        (("1/2", "2x"), "target", "math"),
        ((["assert half(1) == 0.5"],), "tests", "code"),
    ],
)
def test_the_kind_fits_what_the_tasks_expect(expected: tuple[Any, ...], field: str, kind: str) -> None:
    tasks = [{"id": "a", "question": "?", field: value} for value in expected]
    choice = complete_choice(None, tasks, Graph("question", "answer"))
    assert choice == RewardChoice(kind, "answer", field)
    assert text_to_choice(str(choice)) == choice


def test_the_answer_is_the_last_message_where_no_field_is_called_so() -> None:
    tasks = [{"id": "a", "gold": 3}]
    assert str(complete_choice(None, tasks, Graph("messages"))) == "numeric:messages.-1.text=gold"
    choice = complete_choice(None, tasks, Graph("log"))
    assert choice is not None
    assert choice.answer_from is None


def test_what_the_graph_does_not_read_is_what_a_task_expects() -> None:
    task = {"id": "3+4", "question": "What is 3 + 4?", "sum": 7}
    assert str(complete_choice(None, [task], Graph("question", "answer"))) == "numeric:answer=sum"
    assert complete_choice(None, [task | {"level": 1}], Graph("question", "answer")) is None, "one of two is a guess"
    assert complete_choice(None, [task], Graph("log", "answer")) is None, "a graph that is given something else"


def test_tasks_that_expect_nothing_fit_no_kind() -> None:
    for task in ({"id": "a", "question": "?"}, {"id": "a", "answer": ["x"]}, {"id": "a", "answer": "x" * 300}):
        assert complete_choice(None, [task], Graph("answer")) is None
    assert text_to_choice("my_app.py:reward") is None


def test_a_terminal_is_offered_what_the_tasks_expect(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(3)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    offered: dict[str, str | None] = {}

    def take_default(question: str, default: str | None) -> str:
        offered[question.split(":")[0]] = default
        return str(default)

    flags = Flags((), "tasks.jsonl", None, "model", Path("asked.toml"), yes=True, force=False)
    init("sums.py:graph", flags, Reporter(Console(file=io.StringIO())), take_default)
    assert offered == {"Reward": "numeric:answer=gold"}
    assert toml_to_config(Path("asked.toml")).rewards[0].kind == "numeric"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "there is no terminal to ask on; give --reward; what the tasks expect fits --reward numeric:answer=gold"),
        (["--reward", "numeric:answer=golden"], "--reward numeric:answer=golden: no 'golden' in task '0'"),
        (["--reward", "code"], "--reward code:answer: it cannot be told where the answer is, or what a task expects"),
    ],
    ids=["nothing", "field", "kind"],
)
def test_what_cannot_be_a_reward_is_one_line(
    flags: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(3)
    assert cli.run([*GIVEN, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not Path("bridge.toml").exists()


def test_what_was_written_is_json_where_that_is_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tasks(3)
    assert cli.run([*GIVEN, "--reward", "numeric", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    node = {"node": "say", "models": ["big"], "tools": [], "calls": None, "trained": True}
    assert findings["nodes"] == [node]
    assert findings["train_tasks"] + findings["heldout_tasks"] == 20
    assert (findings["file"], findings["reward"]) == ("bridge.toml", "numeric:answer=gold")
