"""Owns: who may open a store and work in a run folder, with real processes.

- While a command runs its episodes, others read and write the store; it takes in the journal at its end.
- Who has the store open is waited for in bounded time, and named; what could not be taken in is taken in next time.
- One command at a time works in a run folder; a killed one lets go of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import start_command
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT
from support.sample_spans import chain
from support.store_holder import another_process

from marft_bridge.commands.status import status
from marft_bridge.common.errors import ConfigError, StoreError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.runs.run_store import open_run_store, take_in_journal, take_in_on_failure
from trace_store.errors import StoreBusyError
from trace_store.journal import Journal
from trace_store.store import TraceStore

EPISODES = 6


@dataclass
class Lab:
    """A run folder, a server that answers only once the gate is open, and what happened to both."""

    server: FakeVllm
    folder: Path
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder / "run")
        self.server.answer = self._answer
        model = save_model(self.folder / "model")
        serve = f'[serve]\nattach = "{self.server.url}"\n'
        text = (ROOT / "examples/math_duo/bridge.toml").read_text()
        before, _, after = text.partition("[serve]\n")
        text = before + serve + after[after.index("\n[sampling]") :]
        self.config = self.folder / "bridge.toml"
        self.config.write_text(text.replace("smollm2-135m", str(model)))

    def _answer(self, body: dict[str, Any]) -> str:
        self.gate.wait(60)
        return "7"

    def start(self, command: str, *flags: str) -> subprocess.Popen[str]:
        return start_command(command, self.config, self.run.path, *flags)

    def collect(self, *flags: str) -> subprocess.Popen[str]:
        return self.start("collect", "--episodes", str(EPISODES), "--in-flight", "2", *flags)

    def until_asked(self, process: subprocess.Popen[str]) -> None:
        """Returns once the command's episodes are running."""
        until(lambda: bool(self.server.asked), process)

    def episodes(self) -> int:
        with TraceStore.open(self.run.store, read_only=True, wait_s=30) as store:
            return len(store.episodes())

    def status(self, folder: RunFolder) -> str:
        console = Console(record=True, width=500, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        with console.file:
            status(toml_to_config(self.config, {"run": str(folder.path)}), Reporter(console))
        return console.export_text()


def until(happened: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running(FakeVllm()) as server:
        made = Lab(server, tmp_path)
        yield made
        made.gate.set()  # lets a handler that a failed test left waiting go


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_others_read_and_write_the_store_while_a_command_runs_episodes(lab: Lab) -> None:
    running_collect = lab.collect()
    lab.until_asked(running_collect)
    with TraceStore.open(lab.run.store, read_only=True) as store:
        assert [run.command for run in store.runs()] == ["collect"]
    with TraceStore.open(lab.run.store) as store:  # another writer, such as `ingest`
        store.take_in()
    assert "in use" not in lab.status(lab.run)
    lab.gate.set()
    output, _ = running_collect.communicate(timeout=60)
    assert running_collect.returncode == 0, output
    assert f"collected {EPISODES} terminated" in output
    assert lab.episodes() == EPISODES
    assert f"collect: {EPISODES} episodes terminated" in lab.status(lab.run)
    assert list(lab.run.journal.glob("*.segment")) == []


@pytest.mark.slow
def test_a_second_command_in_the_same_run_folder_is_refused_with_the_first_ones_name(lab: Lab) -> None:
    first = lab.collect()
    lab.until_asked(first)
    second = lab.collect("--resume")
    said, _ = second.communicate(timeout=60)
    assert (second.returncode, said.count("\n")) == (2, 1)
    expected = f"collect: {lab.run.path} is in use by `marft-bridge collect` (process {first.pid}); wait until it ends"
    assert expected in said
    # What is killed lets go, and the next one goes on.
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    lab.gate.set()
    third = lab.collect("--resume")
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 0, output
    assert lab.episodes() >= EPISODES


@pytest.mark.slow
def test_a_reader_delays_the_start_and_the_end_of_a_run_but_not_the_run(lab: Lab) -> None:
    lab.run.create()
    TraceStore.open(lab.run.store).close()
    with another_process(lab.run.store, "reads") as reader:
        collect = lab.collect()
        assert collect.stdout is not None
        waiting = collect.stdout.readline()
        assert f"is in use by process {reader.pid} (" in waiting
        assert "; waiting up to 60 s for it" in waiting
        assert lab.server.asked == []
    lab.until_asked(collect)
    with another_process(lab.run.store, "reads"):
        lab.gate.set()
        line = ""
        while "waiting up to" not in line:
            line = collect.stdout.readline()
            assert line, "collect ended without waiting"
    output, _ = collect.communicate(timeout=60)
    assert collect.returncode == 0, output
    assert f"collected {EPISODES} terminated" in output
    assert lab.episodes() == EPISODES


TRAIN = """
import sys
from types import ModuleType, SimpleNamespace
from pathlib import Path
from marft_bridge.serving.zero_adapter import write_zero_adapter

class Trainer:
    # In the place of the one that needs torch: it learns nothing, and an update lasts until standard input closes.
    def __init__(self, options, model_dirs, nodes, seed, progress, lineage, is_heldout):
        self.rounds, self.nodes = 0, nodes
        save = lambda node, folder: write_zero_adapter(folder, model_dirs[node], ("q_proj",))
        self.policies = SimpleNamespace(save_adapter=save, trained=(), models={})
    def begin_from(self, adapters, learned_tasks):
        pass
    def warm_up(self, episodes):
        return {"critic": {"explained_variance": None}}
    def replay(self, episodes):
        return {"mode": "filtered", "used": 0, "agents": {}}
    def teaching_episodes(self, episodes, replayed=()):
        return {trajectory.episode.episode_id for trajectory in episodes}
    def update(self, episodes, older, credited, *, newest):
        print("updating", flush=True)
        sys.stdin.read()
        self.rounds += 1
        agents, seconds = {node: {} for node in self.nodes}, {"score": 0.0, "update": 0.0}
        return {"agents": agents, "critic": {"flat_groups": None}, "warnings": [], "seconds": seconds}

marft, checkpoint = ModuleType("trainers.marft"), ModuleType("trainers.checkpoint")
marft.MarftTrainer, marft.Progress, marft.DISTIL_ON_POLICY = Trainer, object, "distil_on_policy"
checkpoint.STATE_FILE = "state.json"
checkpoint.save = checkpoint.load = lambda trainer, folder: None
checkpoint.is_saved = lambda folder: False
import trainers
sys.modules |= {"trainers.marft": marft, "trainers.checkpoint": checkpoint}
trainers.checkpoint = checkpoint
from marft_bridge import cli
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_store_is_free_while_the_trainer_works_and_then_says_what_it_learned_from(lab: Lab) -> None:
    lab.gate.set()
    lab.config.write_text(lab.config.read_text().replace("episodes_per_round = 64", "episodes_per_round = 4"))
    collect = lab.collect()
    said, _ = collect.communicate(timeout=60)
    assert collect.returncode == 0, said
    flags = ["--config", str(lab.config), "--run", str(lab.run.path), "--rounds", "1", "--without-signal"]
    argv = [sys.executable, "-c", TRAIN, "train", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as train:
        assert train.stdout is not None
        assert train.stdin is not None
        output = ""
        while "updating" not in output:
            line = train.stdout.readline()
            assert line, output
            output += line
        with TraceStore.open(lab.run.store) as store:
            collected = {episode.episode_id for episode in store.episodes(run_id="collect")}
            of_round = {episode.episode_id for episode in store.episodes(run_id="train", round=1)}
            assert [(row.node, row.version) for row in store.adapters()] == [("actor", 1), ("reasoner", 1)]
        second = lab.collect("--resume")
        assert "is in use by `marft-bridge train`" in second.communicate(timeout=60)[0]
        train.stdin.close()
        output += train.stdout.read()
    assert train.returncode == 0, output
    assert (len(collected), len(of_round)) == (EPISODES, 4)
    with TraceStore.open(lab.run.store, read_only=True) as store:
        learned = store.sql(
            "SELECT version, node, list_sort(list(episode_id)) FROM adapter_episodes GROUP BY ALL ORDER BY ALL"
        )
        assert learned == [
            *((1, node, sorted(collected)) for node in ("actor", "reasoner")),
            *((2, node, sorted(of_round)) for node in ("actor", "reasoner")),
        ]
        assert [(row.node, row.version, row.parent) for row in store.adapters()] == [
            *(("actor", 1, 0), ("actor", 2, 1), ("reasoner", 1, 0), ("reasoner", 2, 1)),
        ]
    assert list(lab.run.journal.glob("*.segment")) == []


# -- its parts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(folder: RunFolder) -> RunFolder:
    """Here with an empty store, and the five spans of an episode in its journal."""
    TraceStore.open(folder.store).close()
    journal = Journal(folder.journal)
    for span in chain().spans():
        journal.append(span)
    journal.close()
    return folder


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    with (tmp_path / "said").open("w+") as file:
        yield Reporter(Console(file=file, width=500))


def said(reporter: Reporter) -> str:
    file: Any = reporter.console.file
    file.seek(0)
    return str(file.read())


@pytest.mark.parametrize("does", ["reads", "writes"])
def test_a_run_that_cannot_take_in_says_so_and_loses_nothing(folder: RunFolder, reporter: Reporter, does: str) -> None:
    with another_process(folder.store, does) as other:
        take_in_journal(folder, reporter, lambda _: pytest.fail("the store is not open"), wait_s=0.2)
    waiting, gave_up = said(reporter).splitlines()
    assert waiting.startswith(f"store {folder.store} is in use by process {other.pid} (")
    assert waiting.endswith("; waiting up to 0.2 s for it")
    assert gave_up.endswith(f"what was recorded is kept in {folder.journal}, and the next command takes it in")
    take_in_journal(folder, reporter, lambda store: reporter.say(f"{len(store.episodes())} episode"))
    assert said(reporter).endswith("1 episode\n")


def test_waiting_for_the_store_is_bounded_and_names_the_holder(folder: RunFolder, reporter: Reporter) -> None:
    with another_process(folder.store, "writes") as other:
        began = time.monotonic()
        with pytest.raises(StoreBusyError, match=f"in use by process {other.pid} ") as busy:
            TraceStore.open(folder.store, read_only=True, wait_s=0.3)
        assert 0.3 <= time.monotonic() - began < 5
        assert str(other.pid) in busy.value.lock_holder
        with pytest.raises(StoreBusyError), open_run_store(folder, reporter, 0.1):
            pytest.fail("the store is not open")
    with open_run_store(folder, reporter) as store:
        assert len(store.episodes()) == 1


def test_a_command_that_gave_up_on_the_store_says_how_to_go_on(folder: RunFolder, reporter: Reporter) -> None:
    with (
        another_process(folder.store, "reads") as other,
        pytest.raises(StoreError, match=f"in use by process {other.pid} ") as failed,
        take_in_on_failure(folder, reporter),
        open_run_store(folder, reporter, 0.1),
    ):
        pytest.fail("the store is not open")
    assert str(failed.value).endswith(f"is kept in {folder.journal}: the same command with --resume goes on")


def test_what_fails_in_a_run_leaves_its_episodes_in_the_store(folder: RunFolder, reporter: Reporter) -> None:
    with pytest.raises(KeyboardInterrupt), take_in_on_failure(folder, reporter):
        raise KeyboardInterrupt
    with TraceStore.open(folder.store, read_only=True) as store:
        assert len(store.episodes()) == 1
    assert said(reporter) == ""


def test_a_run_folder_is_free_again_when_its_command_ends(folder: RunFolder) -> None:
    for first, second in (("collect", "train"), ("compare", "collect")):
        expected = rf"{second}: .* is in use by `marft-bridge {first}` \(process {os.getpid()}\); wait until it ends"
        with folder.lock_for(first), pytest.raises(ConfigError, match=expected), folder.lock_for(second):
            pytest.fail("the folder is held")
    assert (folder.path / "lock").stat().st_mode & 0o777 == 0o600
