"""Owns: every block and every command in the documentation is run or checked.

- Python runs: here, or in the page's own test, which is named. TOML is a part of a valid bridge.toml. SQL runs on a
  store.
- Shell is well-formed; commands of ours are parsed by the real command line, wherever on a page they stand; targets of
  make, modules and programs exist.
- test_snippets_run.py runs the commands.
- What is not run says why, and there is little of it.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from support.fake_vllm import FakeVllm, running
from support.growth_rig import fill
from support.paths import source_of_test
from support.sample_spans import START, chain
from support.snippets import (
    DOCS,
    PROGRAM,
    ROOT,
    Snippet,
    command_problem,
    line_to_words,
    page_to_commands,
    pages,
    snippets,
    text_to_snippets,
)

from marft_bridge import cli
from marft_bridge.config.bridge import toml_to_config
from trace_store.store import TraceStore

OUTPUT = {"text", "json", "diff"}
# Pages whose Python a test of their own runs, as it needs more than a folder.
RUN_BY_THEIR_TEST = {
    "README.md": "test_readme.py",
    "docs/gpus.md": "test_four_bit.py",
    "docs/index.md": "test_snippets_run.py",
    "docs/start.md": "test_snippets_run.py",
    "docs/replay.md": "test_replay_page.py",
    "docs/store.md": "test_store_page.py",
    "docs/training.md": "test_training_page.py",
    "docs/tasks.md": "test_tasks_page.py",
}
RUN_BELOW = {"docs/serving.md"}
# What stands before and after the Python of a page, so that it runs and is seen to do what the page says.
AROUND = {
    "docs/recording.md": (
        """
import asyncio
from graphs import math_duo
from marft_bridge import ScriptedPolicy
graph = math_duo.build(ScriptedPolicy(script=lambda node, prompt, random: "7"))
""",
        """
asyncio.run(recorded.ainvoke({"question": "3 + 4?"}))
with TraceStore.open("traces.duckdb") as store:
    assert store.take_in() and [len(t.actions) for t in store.trajectories()] == [2]
assert recorded.unwrap() is graph
""",
    ),
    "docs/promotion.md": (
        "from types import SimpleNamespace as Case",
        """
run = Case(task={"id": "t1"}, answer={"node:writer": "my password"}.__getitem__)
assert suite(Case(runs=[run])) == "task t1 leaks a password"
assert suite(Case(runs=[])) is True
""",
    ),
    "docs/rewards.md": (
        "from types import SimpleNamespace as Run",
        """
actions = [Run(action_id="a", sampled_ids=[1] * 49), Run(action_id="b", sampled_ids=[1] * 50)]
run = Run(game=lambda: Run(actions=actions))
assert reward({"answer": "7"}, {"answer": "7"}, run) == {
    "reward": 1.0, "short": {"step:a": 1.0}, "helped": {"agent:reasoner": 0.5}
}
""",
    ),
}
NODES = ("planner", "executor", "writer", "worker", "reasoner", "actor", "critic", "helper")


def of_kind(*kinds: str) -> list[Any]:
    return [pytest.param(found, id=found.place) for found in snippets() if found.kind in kinds and not found.not_run]


def lines_of(snippet: Snippet) -> list[str]:
    return [line for line in snippet.text.splitlines() if line.split("#")[0].strip()]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Every block is of a kind that is checked


def test_every_block_says_what_it_is_or_why_it_is_not_run() -> None:
    checked = {"python", "toml", "sh", "sql"} | OUTPUT
    assert [found.place for found in snippets() if found.kind not in checked and not found.not_run] == []


def test_few_blocks_are_not_run() -> None:
    assert len([found for found in snippets() if found.not_run]) <= 3


def test_a_block_is_found_wherever_it_stands() -> None:
    text = "a\n<!-- not run: why -->\n```sh\nx\n```\n- b\n\n    ```toml\n    y = 1\n    ```\n"
    assert list(text_to_snippets(text, "p")) == [
        Snippet("p", 4, "sh", "x\n", "why"),
        Snippet("p", 9, "toml", "y = 1\n", None),
    ]
    with pytest.raises(ValueError, match="p:1: the block is not closed"):
        list(text_to_snippets("```sh\nx\n", "p"))


def test_json_is_valid() -> None:
    for found in snippets():
        assert found.kind != "json" or json.loads(found.text)


# Python


def test_python_that_is_not_run_here_is_run_by_the_test_that_is_named() -> None:
    for page, test in RUN_BY_THEIR_TEST.items():
        if (ROOT / page).is_file() and any(found.kind == "python" for found in snippets() if found.page == page):
            source = source_of_test(test)
            assert Path(page).name in source, test
            assert re.search(r"subprocess|exec\(|run\(", source), test
            assert "python" in source, test


PYTHON_PAGES = sorted({found.page for found in snippets() if found.kind == "python"} - RUN_BELOW - {*RUN_BY_THEIR_TEST})


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    before, after = AROUND.get(page, ("", ""))
    blocks = [found.text for found in snippets() if found.page == page and found.kind == "python" and not found.not_run]
    run([sys.executable, "-W", "error", "-c", "\n".join([before, *blocks, after])], tmp_path)


def test_the_call_that_the_page_on_live_traffic_shows_reaches_the_server() -> None:
    (shown,) = [found.text for found in snippets() if found.page == "docs/serving.md" and found.kind == "python"]
    address = "http://127.0.0.1:8100"
    with running(FakeVllm()) as server:
        assert address in shown
        server.adapters["planner"] = "planner"
        names = {
            "ChatOpenAI": ChatOpenAI,
            "key": "k",
            "messages": "hello",
            "config": {"configurable": {"thread_id": "thread-7"}},
        }
        code = compile(shown.replace(address, server.url), "serving.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        asyncio.run(awaited(eval(code, names)))  # noqa: S307 - a block of our own page
        (asked,) = server.asked
    assert (asked["model"], asked["user"]) == ("planner", "thread-7")


async def awaited(value: Any) -> None:
    if inspect.isawaitable(value):
        await value


# TOML


def merged(base: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, **{key: {**base[key], **value} if key in base else value for key, value in shown.items()}}


@pytest.mark.parametrize("snippet", of_kind("toml"))
def test_toml_is_a_part_of_a_valid_configuration(snippet: Snippet, tmp_path: Path) -> None:
    shown = tomllib.loads(snippet.text)
    named = [node for node in NODES if re.search(rf"\b{node}\b", snippet.text)]
    graph = {"app": "a:b", "nodes": named or ["reasoner", "actor"], "tasks": "t.jsonl"}
    if "reward" not in {reward.get("name") for reward in shown.get("rewards", ())}:
        graph["reward"] = "a:r"
    raw = merged({"graph": graph, "compare": {"metric": "reward"}, "serve": {"max_loras": 16}}, shown)
    path = tmp_path / "bridge.toml"
    path.write_text(dict_to_toml(raw))
    assert tomllib.loads(path.read_text()) == raw
    toml_to_config(path)


def dict_to_toml(raw: Mapping[str, Any]) -> str:
    """Tables as inline values, which TOML takes as well."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in raw.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


# SQL


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    with TraceStore.open(tmp_path_factory.mktemp("store") / "traces.duckdb") as store:
        yield store


@pytest.mark.parametrize("snippet", of_kind("sql"))
def test_sql_runs_on_a_store(snippet: Snippet, store: TraceStore) -> None:
    store.sql(snippet.text)


# Shell, and commands in the text


@pytest.mark.parametrize("snippet", of_kind("sh"))
def test_shell_is_well_formed_and_every_command_in_it_exists(snippet: Snippet, tmp_path: Path) -> None:
    (tmp_path / "block.sh").write_text(snippet.text)
    run(["sh", "-n", "block.sh"], tmp_path)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in lines_of(snippet):
        if line.startswith("("):
            continue  # a script of its own, which the page's test runs
        words = line_to_words(line)
        while "=" in words[0] and not words[0].startswith("-"):
            words.pop(0)  # a variable for this command
        if words[0] == PROGRAM:
            assert command_problem(words) is None, line
        elif words[0] == "make":
            assert set(words[1:]) <= targets, line
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, line
        elif words[0] in (".", "source"):
            assert words[1] == ".venv/bin/activate", line
        else:
            assert shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"), line


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_that_the_text_shows_or_mentions_exists(page: Path) -> None:
    for line, whole in page_to_commands(page.read_text()):
        assert command_problem(line_to_words(line), whole) is None, line


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("marft-bridge colect", "there is no command 'colect'"),
        ("marft-bridge collect --epsiodes 3", "No such option: --epsiodes"),
        ("marft-bridge collect --episodes many", "Invalid value for '--episodes'"),
        ("marft-bridge export actor", "Missing argument 'folder'"),
        ("marft-bridge serve --splt 90/10", "No such option: --splt"),
        ("marft-bridge traces", "no command is named"),
    ],
)
def test_a_command_that_does_not_exist_is_seen(line: str, problem: str) -> None:
    assert problem in str(command_problem(line_to_words(line)))


def test_a_command_that_exists_has_no_problem() -> None:
    for line in ("marft-bridge serve --split 90/10 ... -- python app.py", "marft-bridge export actor out [--merged]"):
        assert command_problem(line_to_words(line)) is None
    assert command_problem(["marft-bridge", "export", "--merged"], whole=False) is None
    assert command_problem(["marft-bridge", "export", "--mergd"], whole=False) == "export has no --mergd"


@pytest.mark.slow
def test_commands_that_look_into_a_store_or_change_it_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/try/store.duckdb", "traces.duckdb", "other.duckdb"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        traces = [chain("4be1".ljust(32, "0"), START).spans(SUBJECT_ID="u-17"), chain("2", START + 1).spans()]
        fill(Path(name), traces if name != "other.duckdb" else [])
    shown = [
        line for found in snippets() if found.page == "docs/store.md" and found.kind == "sh" for line in lines_of(found)
    ]
    shown += [line for line, whole in page_to_commands((DOCS / "store.md").read_text()) if whole]
    commands = [words for line in shown if (words := line_to_words(line))[:2] == [PROGRAM, "traces"]]
    assert commands
    for words in commands:
        assert cli.run(words[1:]) == 0, (words, capsys.readouterr())
    said = capsys.readouterr().out
    assert said
    # What it erased is gone, and what it did not is there.
    with TraceStore.open(Path("runs/try/store.duckdb")) as store:
        assert store.counts()["episodes"] == 0  # both are years old
    with TraceStore.open(Path("other.duckdb")) as store:
        assert store.counts()["episodes"] == 2


def test_every_page_is_looked_at() -> None:
    seen = {found.page for found in snippets()}
    assert {"README.md", "docs/start.md", "docs/training.md", "docs/store.md"} <= seen
    assert {path.relative_to(ROOT).as_posix() for path in pages()} >= {
        f"docs/{path.name}" for path in DOCS.glob("*.md")
    }
