"""Owns: what was recorded is seen at once: by every command that reads, in the viewer, without a step in between.

- A script with `wrap`, one with `instrument`, and one under `opentelemetry-instrument`, run as users run them.
- The process says in one line, once, what it recorded and how to see it; or nothing, where there is nothing to say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.traces_rig import traces
from support.view_rig import TOKEN, serving

from marft_bridge import cli

APP = """
import sys
from typing import TypedDict
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
model = GenericFakeChatModel(messages=(AIMessage(f"answer {number}") for number in range(99)))
class State(TypedDict):
    q: str
    a: str
builder = StateGraph(State)
builder.add_node("writer", lambda state: {"a": model.invoke(state["q"]).content})
builder.add_edge(START, "writer")
graph = builder.compile()
"""
RUNS = "for question in sys.argv[1:]:\n    graph.invoke({'q': question})\n"
USES = {
    "wrap": "import marft_bridge\ngraph = marft_bridge.wrap(graph, 'x.duckdb')\n",
    "instrument": "import marft_bridge\nmarft_bridge.instrument('x.duckdb')\n",
    "two graphs": "import marft_bridge\nmarft_bridge.wrap(graph, 'x.duckdb').invoke({'q': 'first'})\n"
    "graph = marft_bridge.wrap(graph, 'x.duckdb')\n",
    "opentelemetry": "",
}


def _loud() -> dict[str, str]:
    """An environment in which a process speaks at its end; pytest's own does not."""
    return {name: value for name, value in os.environ.items() if name != "MARFT_QUIET"} | {"PYTHONPATH": str(ROOT)}


def run_app(folder: Path, use: str, *questions: str, **environment: str) -> str:
    """Runs the script as a user does, and returns its stderr."""
    (folder / "app.py").write_text(APP + USES[use] + RUNS)
    command = [sys.executable, "app.py"]
    if use == "opentelemetry":
        tool = shutil.which("opentelemetry-instrument", path=str(Path(sys.executable).parent))
        if tool is None:
            pytest.skip("opentelemetry-instrument is not installed")
        command = [tool, *command]
        environment |= {"MARFT_STORE": str(folder / "x.duckdb"), "OTEL_TRACES_EXPORTER": "none"}
        environment |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    environment = {**_loud(), **environment}
    done = subprocess.run(
        [*command, *questions], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
    return done.stderr


def listed(capsys: pytest.CaptureFixture[str], store: Path) -> list[dict[str, object]]:
    code, out, err = traces(capsys, "list", "--store", store, "--json")
    assert (code, err) == (0, "")
    episodes: list[dict[str, object]] = json.loads(out)
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_script_that_records_says_so_and_every_command_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str
) -> None:
    store = tmp_path / "x.duckdb"
    number = 3 if use == "two graphs" else 2
    line = f"marft-bridge recorded {number} episodes; see them with: marft-bridge traces list --store {store}\n"
    assert run_app(tmp_path, use, "one", "two") == line
    assert not store.exists()
    episodes = listed(capsys, store)
    assert [episode["actions"] for episode in episodes] == [1] * number
    code, out, _ = traces(capsys, "show", str(episodes[0]["short_id"]), "--text", "--store", store)
    assert code == 0
    assert "answer" in out
    assert traces(capsys, "doctor", "--store", store)[0] == 0
    assert traces(capsys, "sql", "SELECT count(*) FROM episode_summary", "--store", store)[1].split()[-1] == str(number)
    with serving(store) as served:
        for episode in episodes:
            assert str(episode["short_id"]) in served.text("/run?id=" + str(episode["run_id"]))
        assert "answer" in served.text("/episode?id=" + str(episodes[0]["episode_id"]))
        # Once a store exists, what comes later is shown too; the open viewer shows it as well.
        assert traces(capsys, "take-in", "--store", store)[0] == 0
        assert store.exists()
        run_app(tmp_path, use, "three")
        later = listed(capsys, store)
        assert [e["episode_id"] for e in later[-number:]] == [e["episode_id"] for e in episodes]
        assert len(later) == (5 if use == "two graphs" else 3)
        assert str(later[0]["run_id"]) in served.text("/")
    assert traces(capsys, "export", tmp_path / "archive", "--store", store)[0] == 0
    assert len(listed(capsys, tmp_path / "archive")) == len(later)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no `chromium` on PATH: the pages were not rendered")
def test_a_browser_shows_what_a_script_recorded_a_moment_ago(tmp_path: Path) -> None:
    run_app(tmp_path, "wrap", "one")
    with serving(tmp_path / "x.duckdb") as served:
        address = f"{served.url}/?token={TOKEN}"
        command = [str(shutil.which("chromium")), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
        page = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "session-" in page
    assert '<td data-label="episodes">1</td>' in page


@pytest.mark.slow
def test_a_process_that_recorded_nothing_or_was_told_to_be_quiet_says_nothing(tmp_path: Path) -> None:
    assert run_app(tmp_path, "wrap") == ""
    assert run_app(tmp_path, "wrap", "one", MARFT_QUIET="1") == ""
    assert "recorded 1 episode;" in run_app(tmp_path, "wrap", "one")


@pytest.mark.slow
def test_a_forked_child_speaks_of_its_own_episodes_only(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        APP + USES["wrap"] + "import os\ngraph.invoke({'q': 'x'})\npid = os.fork()\n"
        "if pid == 0:\n    [graph.invoke({'q': 'x'}) for _ in range(2)]\n    sys.exit()\nos.waitpid(pid, 0)\n"
    )
    environment = _loud()
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line.split(";")[0] for line in done.stderr.splitlines()] == [
        "marft-bridge recorded 2 episodes",
        "marft-bridge recorded 1 episode",
    ]


def test_a_path_where_nothing_was_recorded_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "x.duckdb"
    for words in (["traces", "list", "--store"], ["traces", "take-in", "--store"], ["view", "--no-browser"]):
        assert cli.run([*words, str(store)]) == 2
        assert str(store) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
