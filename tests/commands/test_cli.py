"""Owns: the command line's manners.

- Every command has --help with an example, and the example parses.
- A user error is one line on stderr and exit code 2, never a traceback, and leaves nothing half written.
- What the system says of a file or a folder is a user error too; commands that are to be pasted are words of a shell.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import huggingface_hub.constants
import pytest
from support import fault_server
from support.hub_cache import NAME, put_in_cache
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.commands import status as status_command
from marft_bridge.commands.command_end import FILE_PROBLEMS, INTERRUPTED
from marft_bridge.common.errors import ConfigError, StoreError
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.erasure.command import Erasure, _erasure_to_lines
from marft_bridge.runs.run_choice import RunChoice
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.sandbox.programs import WALLS, Isolation, wall_refusal
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.migrations import newest_version
from trace_store.store import TraceStore

EXAMPLE = ROOT / "examples/math_duo/bridge.toml"
COMMANDS = ("collect", "train", "compare", "credit", "score", "serve", "status", "ingest", "export")


def variant(folder: Path, *changes: tuple[str, str]) -> list[str]:
    """The example's configuration with some text replaced, and a run folder of its own, as flags."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "bridge.toml"
    path.write_text(text)
    return ["--config", str(path), "--run", str(folder / "run")]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("marft-bridge: ")
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    example = shlex.split(shown.split("Example: ")[1])
    assert example[:2] == ["marft-bridge", command]
    assert str(EXAMPLE.relative_to(ROOT)) in example
    # --help after an example still parses every word before it.
    words = example[1 : example.index("--")] if "--" in example else example[1:]
    assert cli.run([*words, "--help"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("[collect]", "[colect]")], "unknown key 'colect'; did you mean 'collect'?"),
        ([('nodes = ["reasoner", "actor"]', 'nodes = ["reasoner", "critic"]')], "its nodes: reasoner, actor"),
        ([("graphs.math_duo:build", "graphs.nothing:build")], "importing 'graphs.nothing' failed"),
        ([('"question", "answer"]', '"question", "solution"]')], "lacks 'solution'"),
        ([('path = "smollm2-135m"', 'path = "no/such/model"')], "no/such/model"),
    ],
    ids=["key", "node", "import", "task-field", "model"],
)
def test_a_user_error_is_one_line_and_leaves_no_run_folder(
    tmp_path: Path, changes: list[tuple[str, str]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(["collect", *variant(tmp_path, *changes)], capsys)
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_directory_without_weights_is_not_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    flags = variant(tmp_path, ('path = "smollm2-135m"', f'path = "{tmp_path / "model"}"'))
    assert "safetensors" in refused(["collect", *flags], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "--config", "none.toml"], "no configuration at none.toml; name one with --config"),
        (["train", "--config", str(EXAMPLE), "--run", "none"], "run `marft-bridge collect` first"),
        (["compare", "--config", str(EXAMPLE), "--run", "none"], "run `marft-bridge collect` first"),
        (["status", "--config", str(EXAMPLE), "--run", "none"], "there is no run folder none"),
    ],
    ids=["config", "train", "compare", "status"],
)
def test_a_command_without_what_it_needs_says_what_to_do_first(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(arguments, capsys)


def test_an_engine_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["collect", *variant(tmp_path), "--engine", "slurm"], capsys)
    assert "collect.engine: Input should be 'local' or 'ray'" in error


def test_an_unknown_flag_is_refused_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["collect", "--episode", "3"]) == 2
    assert "No such option" in capsys.readouterr().err


def used_run(folder: Path, command: str) -> list[str]:
    """A run folder that holds a run of `command`."""
    from marft_bridge.runs.ledger import begin_run

    flags = variant(folder)
    config = toml_to_config(Path(flags[1]), {"run": flags[3]})
    run = RunFolder(config.run_folder)
    run.create()
    with TraceStore.open(run.store) as store:
        begin_run(store, command, command, config, run)
    return flags


@pytest.mark.slow
def test_a_used_run_folder_is_refused_with_the_ways_out(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = used_run(tmp_path, "collect")
    error = refused(["collect", *flags], capsys)
    assert "already holds a run of it; go on with --resume, or choose another --run folder" in error


def test_resuming_what_never_began_is_refused(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing to resume" in refused(["collect", *variant(tmp_path), "--resume"], capsys)


def test_training_without_a_collected_episode_is_refused(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no collected episode" in refused(["train", *used_run(tmp_path, "collect")], capsys)


def test_a_store_of_a_newer_version_is_refused_with_both_versions(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import duckdb

    flags = used_run(tmp_path, "collect")
    with duckdb.connect(str(tmp_path / "run/store.duckdb")) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    error = refused(["train", *flags], capsys)
    assert "99" in error
    assert f"knows up to {newest_version()}" in error


@pytest.mark.parametrize(
    ("refused", "required", "text"),
    [
        ({}, [], "behind 'bubblewrap'; this machine also has 'namespaces' and 'landlock'"),
        (
            {"bubblewrap": "bubblewrap (the program bwrap) is not installed", "namespaces": "not permitted"},
            [],
            "behind 'landlock'; not 'bubblewrap': bubblewrap (the program bwrap) is not installed; "
            "not 'namespaces': not permitted",
        ),
        ({}, ["landlock"], "behind 'landlock', as the configuration says; this machine also has 'bubblewrap' and"),
        (dict.fromkeys(WALLS, "no"), [], "refused, since no wall holds here; not 'bubblewrap': no; not 'namespaces'"),
    ],
)
def test_status_tells_which_walls_a_machine_has_and_which_one_is_used(
    refused: dict[str, str], required: list[Isolation], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "wall_refusal", refused.get)
    assert status_command._walls_to_text(required).startswith(text)


def test_status_says_the_walls_that_hold_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = variant(tmp_path)
    Path(flags[-1]).mkdir()
    assert cli.run(["status", *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "programs that models write" in line]
    refusals = {wall: wall_refusal(wall) for wall in WALLS}
    held = [wall for wall in WALLS if refusals[wall] is None]
    if held:
        assert f"programs that models write: behind {held[0]!r}" in line
    assert [wall for wall in WALLS if f"not {wall!r}: " in line] == [wall for wall in WALLS if refusals[wall]]


def test_status_tells_what_a_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = used_run(tmp_path, "collect")
    agent = {"actions": 3, "drops": {"episode failed": 2}, "epochs": 1}
    offline = {"phase": "offline", "round": 0, "replay": {"mode": "filtered", "agents": {"reasoner": agent}}}
    RunFolder(Path(flags[-1])).metrics.write_text(json.dumps(offline))
    assert cli.run(["status", *flags]) == 0
    shown = capsys.readouterr().out
    assert "  offline, reasoner: learned from 3 of 5 stored calls; 1 pass\n" in shown
    assert "  offline, reasoner: not 2: episode failed\n" in shown
    assert "reasoner: no adapter yet" in shown
    assert "server: none running" in shown


def test_status_lists_the_versions_that_are_registered_whatever_their_node_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["team/planner", "math expert"]
    flags = variant(tmp_path, ('nodes = ["reasoner", "actor"]', f"nodes = {json.dumps(nodes)}"))
    run = RunFolder(tmp_path / "run")
    run.create()
    registry = AdapterRegistry(run.adapters, "b" * 64)
    for node in nodes:
        for version in (0, 2, 10):
            (registry.new_folder(node, version) / "adapter_model.safetensors").touch()
            registry.register(node, version, None, {})
    shutil.copytree(run.adapters / "team.2Fplanner/2", run.adapters / "team.2Fplanner/2-backup")
    assert cli.run(["status", *flags, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["adapters"] == {node: [0, 2, 10] for node in nodes}
    for node in nodes:
        assert f"  {node}: adapters 0, 2, 10\n" in captured.err


@pytest.mark.parametrize("is_cached", [True, False])
def test_status_says_the_devices_of_a_name_of_the_hub_once_it_is_in_the_cache(
    is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    if is_cached:
        put_in_cache(tmp_path / "hub", fault_server.write_model(tmp_path / "model"), "a" * 40)
    flags = variant(tmp_path, ('path = "smollm2-135m"', f'path = "{NAME}"'))
    (tmp_path / "run").mkdir(mode=0o700)
    assert cli.run(["status", *flags, "--json"]) == 0
    assert bool(json.loads(capsys.readouterr().out)["devices"]) is is_cached


# -- commands to paste ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--config", "my runs/b.toml", "--promote-if", "correct>0 and tokens<1.2x"],
        ["fork", "4be1", "--at", "actor", "--say", "it's $HOME; rm *"],
        ["train", "", "--rounds", "2"],
    ],
)
def test_the_hint_of_a_stopped_command_is_for_a_shell_the_same_arguments_with_resume(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: list[str]) -> None:
        raise SystemExit(INTERRUPTED)

    monkeypatch.setattr(cli, "app", stopped)
    for given in (arguments, [arguments[0], "--resume", *arguments[1:]]):
        assert cli.run(given) == INTERRUPTED
        hint = capsys.readouterr().err.split("go on with: ")[1]
        assert shlex.split(hint) == ["marft-bridge", *arguments, "--resume"]
    cli.run(["collect", "--", "--run"])
    assert shlex.split(capsys.readouterr().err.split("go on with: ")[1])[1:] == ["collect", "--resume", "--", "--run"]


def test_a_path_in_a_command_to_paste_is_one_word_of_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my run; x"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(StoreError) as refused:
        RunFolder(folder).refuse_unsafe()
    (command,) = re.findall("`(.*)`", str(refused.value))
    assert shlex.split(command) == ["chmod", "-R", "go-w", str(folder)]
    variant(tmp_path)
    with pytest.raises(ConfigError) as refused:
        RunChoice("train", folder, config=tmp_path / "bridge.toml").to_config()
    assert shlex.split(str(refused.value).split("or say ")[1])[:2] == ["--run", str(folder)]
    left = Erasure(dry_run=True, exports_left={str(folder): {"a": 1}}, distilled_left={str(folder): 1})
    of_export, of_store = (line for line in _erasure_to_lines(left) if line.startswith("left: "))
    assert shlex.split(of_export)[-2:] == ["--exports", str(folder)]
    assert shlex.split(of_store)[-2:] == ["--store", str(folder)]


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", sorted(FILE_PROBLEMS))
def test_what_the_system_says_of_a_file_of_the_user_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: list[str]) -> None:
        raise OSError(number, os.strerror(number), "some\nfile")

    monkeypatch.setattr(cli, "app", failing)
    error = refused(["collect"], capsys)
    assert error.count("\n") == 1
    assert error.startswith(f"marft-bridge: some: {os.strerror(number)}; ")


def test_an_error_of_the_system_that_no_place_explains_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.EBADF, "bad"), OSError(errno.EISDIR, "of no file"), OSError("no number")):

        def failing(_: list[str], error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(cli, "app", failing)
        with pytest.raises(OSError, match=re.escape(str(error))):
            cli.run(["collect"])


@pytest.mark.parametrize("command", ["collect", "train", "compare", "credit", "serve", "score", "status", "promote"])
@pytest.mark.parametrize("name", ["file/run", "n" * 300])
def test_a_run_folder_below_a_file_or_of_a_name_too_long_is_one_line(
    command: str, name: str, tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = variant(tmp_path)
    words = ["--by", "Jane"] if command == "promote" else []
    error = refused([command, *flags[:2], "--run", str(tmp_path / name), *words], capsys)
    assert error.count("\n") == 1


def test_the_version_is_that_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"marft-bridge {project['version']}\n"
