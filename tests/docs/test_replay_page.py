"""Owns: docs/replay.md: its commands and its Python do what it says, and its counts are those of the tests."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from apps.by_hand import SUITE
from examples.test_wrapping import EXPECTED
from replay.test_command import APP, ids, load
from support.pages.zoo_page import configs
from support.snippets import snippets
from support.traces_rig import traces

from marft_bridge import cli, wrap

PAGE = "docs/replay.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of one episode, and the app beside it, whose model has no answer left."""
    monkeypatch.chdir(tmp_path)
    recorded = wrap(load(tmp_path / "recorded_app.py", APP.replace("ANSWERS", "10")), "traces.duckdb")
    recorded.invoke({"question": "How fast?"})
    recorded.recorder.journal.close()
    (tmp_path / "app.py").write_text(APP.replace("ANSWERS", "0"))
    return tmp_path


def blocks(kind: str) -> list[str]:
    return [found.text for found in snippets() if found.page == PAGE and found.kind == kind]


def test_the_commands_of_the_page_run_as_they_are_written(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks("sh")
    for line in shown.splitlines():
        assert cli.run(shlex.split(line)[1:]) == 0
        assert "same" in capsys.readouterr().out


def test_the_python_of_the_page_runs_on_the_file_that_it_names(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = blocks("python")  # of docs/replay.md
    _, text, _ = traces(capsys, "show", ids(project / "traces.duckdb")[0], "--store", "traces.duckdb", "--json")
    (project / "tests").mkdir()
    (project / "tests/monday.json").write_text(text)
    names = {"graph": load(project / "app.py", APP.replace("ANSWERS", "0"))}
    exec(shown, names)  # noqa: S102 - a block of our own page
    names["test_the_answer_of_monday"]()


def test_the_counts_of_the_page_are_those_of_the_tests() -> None:
    counts = {"graphs of the [zoo]": len(configs()), "[apps of the suite]": len(SUITE)}
    for row, count in (counts | {"[guides]": len(EXPECTED)}).items():
        (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {row}"))
        assert line.split("|")[2].strip() == str(count)
