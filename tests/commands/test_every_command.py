"""Owns: what holds of every command of the command line, by going through all that the typer app has.

- A run is named in the same words everywhere, and two runs are refused in one line, as no run is.
- With `--json`, standard output is one JSON value and nothing else; its keys are in the help.
- Whatever is wrong with a run is one line: what, where, what to do.
- Summaries fit 80 columns, help costs less than half a second, and a shell completes commands and run folders.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pytest
import typer
from support.commands import no_rights, write_bridge_toml
from support.pages.commands_page import commands
from support.paths import ROOT
from support.school_rig import school_in
from support.traces_rig import sound_store
from support.two_node_graph import fake_model, graph_of

from marft_bridge import cli
from marft_bridge.commands.command_end import RESUMABLE
from marft_bridge.config.bridge import notes_to_config, toml_to_config
from marft_bridge.recording.wrap import wrap
from marft_bridge.runs.run_folder import RunFolder
from trace_store.migrations import newest_version

COMMANDS = {" ".join(words): command for words, command in commands(typer.main.get_command(cli.app))}
WITHOUT_RUN = {"init"}  # it writes the bridge.toml that names one
WITHOUT_FINDINGS = {"serve", "view"}  # they go on until they are stopped
MANY_RUNS = {"ingest": "[FILES]... [RUN]"}  # files without a number stand before RUN
BEHIND_RUN = {"replay": 1}  # arguments without a number that stand behind RUN
REQUIRED = {
    "distil": ["runs/team", "--into", "solver"],
    "export": ["actor", "exported"],
    "fork": ["4be1", "--at", "actor"],
    "ingest": ["spans.json"],
    "promote": ["--by", "Jane Doe"],
    "rank": ["--rubric", "r.txt", "--base-url", "http://127.0.0.1:9/v1", "--model", "j"],
    "traces erase": ["--subject", "u-17"],
    "traces export": ["archive"],
    "traces import": ["archive"],
    "traces mark": ["4be1", "--good"],
    "traces show": ["4be1"],
    "traces sql": ["FROM episodes"],
}  # what a command line needs besides the run
WITH_RUN = sorted(COMMANDS.keys() - WITHOUT_RUN)
READS_NO_STORE = {
    "collect",
    "compare",
    "distil",
    "export",
    "promote",
    "serve",
}  # before something else that a bare store lacks
MAKES_FOLDER = {"ingest", "traces import"}  # for what they take in


def told(capsys: pytest.CaptureFixture[str], command: str, *words: object) -> tuple[int, str, str]:
    """What one command line gives: exit code, output, errors."""
    code = cli.run([*command.split(), *REQUIRED.get(command, []), *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_line(command: str, result: tuple[int, str, str]) -> str:
    """The line of a user error."""
    code, _, errors = result  # progress may have come before it
    assert code == 2, errors
    assert errors.startswith("marft-bridge: "), command
    assert errors.count("\n") == 1, errors
    return errors


# -- RUN -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_run_as_argument_by_config_and_by_run(command: str) -> None:
    options = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    arguments = [p.metavar for p in COMMANDS[command].params if p.param_type_name == "argument"]
    if command in WITHOUT_RUN:
        assert not {"--config", "--run"} & options
        return
    assert {"--config", "--run"} <= options
    assert arguments[-1 - BEHIND_RUN.get(command, 0)] == MANY_RUNS.get(command, "[RUN]")


@pytest.mark.parametrize("command", WITH_RUN)
def test_two_runs_are_refused_and_no_run_too(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = one_line(command, told(capsys, command))
    assert "there is no bridge.toml here; name a run folder, or a configuration with --config" in line
    write_bridge_toml(tmp_path / "own.toml", run="own")
    (tmp_path / "another").mkdir()
    for flags in (["--config", "own.toml"], ["--run", "own"]):
        line = one_line(command, told(capsys, command, "another", *flags))
        assert "another and " in line
        assert "own" in line
        assert "are two runs; leave one out" in line
    assert [path.name for path in tmp_path.iterdir() if path.name == "own"] == []


def noted_run(folder: Path, command: str = "collect") -> Path:
    """A run folder with a sound store, in which `command` has noted its options."""
    folder.mkdir(mode=0o700)
    sound_store(folder)
    config = toml_to_config(write_bridge_toml(folder / "given.toml", run=str(folder)), {"collect.episodes": 7})
    RunFolder(folder).record_config(command, config)
    return folder


def test_a_run_folder_alone_has_the_options_that_it_notes(tmp_path: Path) -> None:
    folder = noted_run(tmp_path / "run")
    given = toml_to_config(folder / "given.toml", {"collect.episodes": 7})
    assert notes_to_config(folder, "train") == given
    assert notes_to_config(folder, "train").model_fields_set == given.model_fields_set
    newer = toml_to_config(folder / "given.toml", {"collect.episodes": 9})
    RunFolder(folder).record_config("train", newer)
    RunFolder(folder).record_config("collect", given)
    assert notes_to_config(folder, "train").collect.episodes == 9, "a command has what it was given itself"
    assert notes_to_config(folder, "compare").collect.episodes == 7, "another one what the newest was"
    assert notes_to_config(folder, "train", {"train.rounds": 3}).train.rounds == 3


def test_the_bridge_toml_of_a_run_folder_is_asked_before_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    noted_run(tmp_path / "run")
    write_bridge_toml(tmp_path / "bridge.toml", run="run", rounds=11)
    assert json.loads(told(capsys, "status", "run", "--json")[1])["rounds"] == 11
    assert told(capsys, "status", "--json") == told(capsys, "status", "run", "--json")
    assert told(capsys, "status", "run", "--config", "bridge.toml")[0] == 0, "both name one run"
    write_bridge_toml(tmp_path / "bridge.toml", run="elsewhere", rounds=11)
    assert json.loads(told(capsys, "status", "run", "--json")[1])["rounds"] == 8


def test_a_store_of_which_there_is_only_the_journal_is_a_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrap(graph_of(fake_model()), "traces.duckdb").invoke({"text": "a"})
    assert not (tmp_path / "traces.duckdb").exists()
    assert len(json.loads(told(capsys, "traces list", "traces.duckdb", "--json")[1])) == 1
    assert told(capsys, "traces take-in", "traces.duckdb")[0] == 0
    assert "or the store traces.duckdb" in one_line("traces list", told(capsys, "traces list"))


def test_what_a_served_program_is_called_with_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = one_line("serve", told(capsys, "serve", "run", "--", "sleep", "--config", "60"))
    assert "there is no run folder run" in line
    assert "No such option: --nonsense" in told(capsys, "serve", "--nonsense")[2]


# -- JSON ----------------------------------------------------------------------------------------------------------


def test_a_stopped_command_that_can_resume_says_so_and_no_other() -> None:
    resumable = {
        name for name, command in COMMANDS.items() if any("--resume" in option.opts for option in command.params)
    }
    assert resumable == set(RESUMABLE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_which_keys_its_json_has(command: str) -> None:
    helps = [p.help for p in COMMANDS[command].params if "--json" in p.opts]
    assert bool(helps) == (command not in WITHOUT_FINDINGS)
    assert all(text.startswith("Print JSON") and ": " in text for text in helps)


def json_keys(command: str) -> set[str]:
    """The keys that the help of `--json` names, of the command without an option that changes them."""
    (text,) = (p.help for p in COMMANDS[command].params if "--json" in p.opts)
    names = text.partition(": ")[2].partition(";")[0].removesuffix(".").split(", ")
    return {name.partition(" (")[0] for name in names}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("status", []),
        ("plan", ["--model", "none"]),
        ("plan", ["--calibration", "run"]),
        ("traces list", []),
        ("traces show", []),
        ("traces mark", []),
        ("traces doctor", []),
        ("traces export", []),
        ("traces take-in", []),
        ("traces vacuum", []),
        ("traces erase", ["--dry-run"]),
    ],
)
def test_the_json_of_a_run_has_the_keys_of_the_help_and_nothing_stands_beside_it(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = noted_run(tmp_path / "run")
    episode = json.loads(told(capsys, "traces list", folder, "--json")[1])[0]["episode_id"]
    monkeypatch.setitem(REQUIRED, "traces show", [episode])
    monkeypatch.setitem(REQUIRED, "traces mark", [episode, "--good"])
    code, output, _ = told(capsys, command, folder, *words, "--json")
    assert code == 0
    findings: Any = json.loads(output)
    assert set(findings[0] if isinstance(findings, list) else findings) == json_keys(command)


@pytest.mark.slow
def test_a_run_folder_alone_is_collected_trained_compared_and_told_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with school_in(tmp_path, monkeypatch) as school:
        apps = tmp_path / "apps.py"
        apps.write_text(apps.read_text().replace("    correct =", "    print('a reward that prints')\n    correct ="))
        school.run.mkdir(mode=0o700)
        RunFolder(school.run).record_config("collect", school.config())
        spans = tmp_path / "spans.json"
        spans.write_text('{"resourceSpans": []}')
        monkeypatch.setitem(REQUIRED, "ingest", [str(spans)])
        findings = {}
        for command, words, codes in (
            ("collect", [], {0}),
            ("train", [], {0}),
            ("compare", ["--promote-if", "correct>0"], {0, 3, 4}),
            ("promote", ["--yes"], {0, 3, 4}),
            ("credit", ["--tasks", "2", "--version", "newest"], {0}),
            ("score", [], {0}),
            ("export", [], {0}),
            ("ingest", [], {0}),
            ("status", [], {0}),
        ):
            code, output, errors = told(capsys, command, school.run, *words, "--json")
            assert code in codes, errors
            findings[command] = json.loads(output)
            assert set(findings[command]) == json_keys(command)
            assert "a reward that prints" in errors or command not in ("collect", "train", "compare", "credit", "score")
    assert findings["collect"]["outcomes"] == {"terminated": 20}
    assert findings["train"]["versions"] == {"reasoner": 2, "actor": 2}
    assert findings["compare"]["report"] == json.loads((school.run / "report.json").read_text())
    assert findings["compare"]["gate"]["outcome"] == findings["promote"]["gate"]["outcome"]
    assert [agent["agent"] for agent in findings["credit"]["agents"]] == ["reasoner", "actor"]
    assert {row["run"] for row in findings["status"]["episodes"]} == {"collect", "train", "compare-1", "credit-1"}


# -- what can be wrong with a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", WITH_RUN)
def test_a_run_that_is_not_there_or_empty_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nothing-here" in one_line(command, told(capsys, command, "nothing-here")) or command in MAKES_FOLDER
    (tmp_path / "empty").mkdir(mode=0o700)
    line = one_line(command, told(capsys, command, "empty"))
    assert "empty" in line or command in MAKES_FOLDER
    assert [*(tmp_path / "empty").iterdir()] == [] or command in MAKES_FOLDER


@pytest.mark.parametrize("command", sorted(set(WITH_RUN) - READS_NO_STORE))
def test_a_store_of_another_version_is_one_line_with_both_versions(
    command: str,
    tmp_path: Path,
    smollm2_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    folder = noted_run(tmp_path / "run")
    with duckdb.connect(str(folder / "store.duckdb")) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    spans = tmp_path / "spans.json"
    spans.write_text('{"resourceSpans": []}')
    monkeypatch.setitem(REQUIRED, "ingest", [str(spans)])
    result = told(capsys, command, folder, *(["--no-browser"] if command == "view" else []))
    text = result[1] if command == "status" else one_line(command, result)
    assert "99" in text
    assert f"knows up to {newest_version()}" in text


@pytest.mark.parametrize("command", WITH_RUN)
def test_a_run_that_may_not_be_read_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryDirectory() as place:  # tmp_path lies in folders that are closed to others
        monkeypatch.chdir(place)
        folder = noted_run(Path(place) / "run")
        (Path(place) / "spans.json").write_text('{"resourceSpans": []}')
        Path(place).chmod(0o755)
        folder.chmod(0o000)
        told(capsys, command, "nothing-here")  # imports what the command needs, which others may not read
        with no_rights():
            result = told(capsys, command, "run")
        folder.chmod(0o700)
    line = one_line(command, result)
    assert "run" in line
    assert "ermission denied" in line


# -- help and completion -------------------------------------------------------------------------------------------


def shown(*words: str, **environment: str) -> str:
    """What the program prints, in a process of its own."""
    argv = [sys.executable, "-c", "import sys; sys.argv[0] = 'marft-bridge'; from marft_bridge.cli import main; main()"]
    process = subprocess.run(
        [*argv, *words],
        cwd=environment.pop("PWD", ROOT),
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout


@pytest.mark.parametrize("group", sorted({" ".join(name.split()[:-1]) for name in COMMANDS}))
def test_every_summary_fits_a_line_of_80_columns(group: str) -> None:
    summaries = shown(*group.split(), "--help").partition("Commands:\n")[2].splitlines()
    names = {name.removeprefix(group).split()[0] for name in COMMANDS if name.startswith(group)}
    assert len(summaries) == len(names)
    assert not [line for line in summaries if "..." in line or len(line) > 80 or line.split()[0] not in names]


def test_help_costs_less_than_half_a_second() -> None:
    """Of a processor: on a machine that does nothing else it is there as soon."""
    before = os.times()
    shown("--help")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu_s < 0.5


def completion_of(line: str) -> dict[str, str]:
    """The environment in which bash asks for the words behind a line."""
    words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
    return {"_MARFT_BRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}


@pytest.fixture
def runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two runs, and folders that are none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("src/app", "runs/three", "runs/two/store.duckdb.journal"):
        (tmp_path / folder).mkdir(parents=True)
    noted_run(tmp_path / "runs/one")
    return tmp_path


def test_a_shell_completes_commands_and_their_options(runs_here: Path) -> None:
    names = shown(PWD=str(runs_here), **completion_of("marft-bridge ")).split()
    assert set(names) == {name.split()[0] for name in COMMANDS}
    assert shown(**completion_of("marft-bridge traces v")).split() == ["vacuum"]
    assert shown(**completion_of("marft-bridge collect --ep")).split() == ["--episodes"]


@pytest.mark.parametrize("command", sorted(set(WITH_RUN) - MANY_RUNS.keys()))
def test_a_shell_completes_run_folders(
    command: str, runs_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["marft-bridge"])
    required = shlex.join(REQUIRED.get(command, []))
    for words, completions in (
        (f"{command} {required} ", ["runs/one", "runs/two"]),
        (f"{command} --run ", ["runs/one", "runs/two"]),
        (f"{command} {required} runs/t", ["runs/two"]),
        (f"{command} {required} ./runs/o", ["./runs/one"]),
    ):
        for name, value in completion_of(f"marft-bridge {words}").items():
            monkeypatch.setenv(name, value)
        assert cli.run([]) == 0
        assert capsys.readouterr().out.split() == completions, words
