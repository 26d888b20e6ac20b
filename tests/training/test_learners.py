"""Owns: `train.learners`: a run with several learners learns what one learns, and survives the loss of one of them.

Two learners differ from one by rounding: a minibatch's micro-batches are cut for two, and its gradients are added in
another order. Between two runs with as many learners nothing differs.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support import impatient_learner
from support.learner_rig import OPTIONS, TOML, trained
from support.paths import ROOT
from support.school_rig import School, learned, school_in

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.serving import process_guard
from marft_bridge.serving.vllm_process import free_port
from marft_bridge.training import child_learners, learner_process
from marft_bridge.training.child_learners import ChildLearners
from marft_bridge.training.learner_actor import LearnerActor
from marft_bridge.training.learner_process import LOST
from marft_bridge.training.torchrun_learners import TorchrunLearners, count_learners, follow_torchrun, torchrun_rank
from trainers.common.card_order import card_order, refuse_other_order
from trainers.errors import LostProcessError, TrainError
from trainers.learners import group
from trainers.learners.calls import Calls
from trainers.learners.leader import IDLE
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring import model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> School:
    """A run with two learners that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        return trained(tmp_path_factory.mktemp("learners") / "two", patch, learners=2)


@pytest.mark.slow
def test_two_learners_learn_what_one_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: School) -> None:
    one = trained(tmp_path / "one", monkeypatch)
    files = [path.relative_to(one.run) for path in (one.run / "adapters").rglob("adapter_model.safetensors")]
    assert len(files) == 8  # versions 0 to 3 of two nodes
    assert_alike(one, two)
    newest = load_file(one.run / "adapters" / "actor" / "3" / "adapter_model.safetensors")
    assert min(float(weight.abs().max()) for weight in newest.values()) > 1e-4  # so that there is something to compare
    (line, *_), (other, *_) = (read_metrics(RunFolder(school.run).metrics)[1:] for school in (one, two))
    for agent, figures in line["agents"].items():
        for name in ("actions", "tokens", "steps", "stopped_early"):
            assert other["agents"][agent][name] == figures[name]
        for name in ("approx_kl", "grad_norm", "ratio_max", "adapter_moved"):
            assert other["agents"][agent][name] == pytest.approx(figures[name], rel=1e-3, abs=1e-6)
    assert two.run.joinpath("learner-1.log").read_text() == ""


def assert_alike(one: School, other: School) -> None:
    """The adapters of all versions are the same but for rounding."""
    files = [path.relative_to(one.run) for path in (one.run / "adapters").rglob("adapter_model.safetensors")]
    assert len(files) == 8  # versions 0 to 3 of two nodes
    for file in files:
        expected, actual = load_file(one.run / file), load_file(other.run / file)
        for name, weight in expected.items():
            torch.testing.assert_close(actual[name], weight, atol=1e-5, rtol=1e-3)


def learner_pids() -> list[int]:
    """The processes that follow this one: children of the guards that it started."""
    pids = []
    for line in subprocess.check_output(["ps", "-wweo", "pid,ppid,args"], text=True).splitlines()[1:]:
        pid, parent, command = line.split(None, 2)
        if "marft_bridge.training.learner_process" in command and "process_guard" not in command:
            guard_parent = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
            if int(guard_parent) == os.getpid():
                pids.append(int(pid))
    return pids


@pytest.mark.slow
def test_a_learner_that_dies_in_an_update_is_one_line_and_the_run_goes_on_from_its_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: School
) -> None:
    (tmp_path / "killed").mkdir()
    with school_in(tmp_path / "killed", monkeypatch) as killed:
        killed.collect()
        step = AdapterLearner.step

        def step_or_kill(self: AdapterLearner) -> float:
            if len(read_metrics(RunFolder(killed.run).metrics)) == 2:  # the offline phase and round 1 are over
                (pid,) = learner_pids()
                os.kill(pid, signal.SIGKILL)
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(AdapterLearner, "step", step_or_kill)
            with pytest.raises(
                TrainError, match=r"^learner 1 of 2 ended with exit code 137; .* --resume goes on"
            ) as said:
                killed.train(without_signal=True, learners=2, **OPTIONS)
        assert "\n" not in str(said.value)
        assert learner_pids() == []
        with killed.store() as store:
            episodes = {episode.episode_id for episode in store.episodes(run_id="train", round=2)}
        assert len(episodes) == 6
        killed.train(resume=True, learners=2, **OPTIONS)
        with killed.store() as store:
            assert {episode.episode_id for episode in store.episodes(run_id="train", round=2)} == episodes
    expected, actual = learned(two), learned(killed)
    assert [name for name in expected if expected[name] != actual.get(name)] == []


def sharded(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"trainer": options["trainer"] | {"system": {"shard_base": True}}}


@pytest.mark.slow
def test_a_base_that_is_dealt_out_learns_the_bits_of_a_whole_one_and_a_learner_lost_in_a_pass_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: School
) -> None:
    """The leader alone scores calls of its server too; meanwhile the other goes through the layers for nobody."""
    (tmp_path / "killed").mkdir()
    with school_in(tmp_path / "killed", monkeypatch) as killed:
        killed.collect()
        hidden_at = model.hidden_at

        def hidden_or_kill(*inputs: Any, **options: Any) -> Any:
            if len(read_metrics(RunFolder(killed.run).metrics)) == 2:  # the offline phase and round 1 are over
                (pid,) = learner_pids()
                os.kill(pid, signal.SIGKILL)
            return hidden_at(*inputs, **options)

        with monkeypatch.context() as patch:
            patch.setattr(model, "hidden_at", hidden_or_kill)
            with pytest.raises(TrainError, match=r"^learner 1 of 2 ended with exit code 137; .* --resume goes on"):
                killed.train(without_signal=True, learners=2, **sharded(OPTIONS))
        assert learner_pids() == []
        with mock.patch.object(Calls, "send", autospec=True, side_effect=Calls.send) as send:
            killed.train(resume=True, learners=2, **sharded(OPTIONS))
    said = [(call.args[1], call.args[2]) for call in send.call_args_list]
    assert sum(values["passes"] for name, values in said if name == IDLE) > 0
    expected, actual = learned(two), learned(killed)
    assert [name for name in expected if expected[name] != actual.get(name)] == []


def test_a_base_is_not_dealt_out_over_one_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        school_in(tmp_path, monkeypatch) as school,
        pytest.raises(ConfigError, match=r"set train\.learners to 2"),
    ):
        school.train(**sharded(OPTIONS))


@pytest.mark.slow
def test_a_learner_that_is_ready_waits_for_the_command_longer_than_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model server may take longer to start than any learner may wait for another."""
    monkeypatch.setattr(learner_process, "__name__", impatient_learner.__name__)
    monkeypatch.setattr(group, "_PATIENCE", timedelta(seconds=60))
    learners = ChildLearners(2, lambda rank: tmp_path / f"learner-{rank}.log")
    try:
        learners.start()
        (guard,) = learners._guards
        select.select([guard.stdout], [], [])  # until it says that it is ready
        time.sleep(impatient_learner.PATIENCE_S + 2)
        assert guard.poll() is None
        learners.join()
        assert guard.wait(60) == 0
    finally:
        learners.end()
        group.leave_group()


@pytest.mark.slow
def test_a_process_of_torchrun_waits_for_the_command_longer_than_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command looks at models, stores and a teacher before it comes; torchrun ends all where it ends."""
    monkeypatch.setattr(group, "_PATIENCE", timedelta(seconds=60))
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port(None)),
    }
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **shared}.items():
        monkeypatch.setenv(name, value)
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    argv = [sys.executable, "-m", impatient_learner.__name__]
    with (tmp_path / "said").open("wb") as said, subprocess.Popen(argv, env=environment, stderr=said) as follower:
        try:
            time.sleep(impatient_learner.PATIENCE_S + 10)  # it imports torch before it waits
            assert follower.poll() is None, (tmp_path / "said").read_text()
            TorchrunLearners(2).join()
            assert follower.wait(60) == 0, (tmp_path / "said").read_text()
        finally:
            follower.kill()
            group.leave_group()


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["while a model server starts", "while torch waits for it"])
def test_a_learner_that_dies_before_all_have_met_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Torch would wait for it for ten minutes. A process that says that it is ready, and ends, stands for it."""
    met = threading.Event()
    monkeypatch.setattr(group, "join_group", lambda *_, **__: met.wait(60))
    learners = ChildLearners(2, lambda rank: tmp_path / f"learner-{rank}.log")
    (tmp_path / "learner-1.log").write_text("learner 1: out of memory\n")
    program = f"import sys, time; print('ready', flush=True); time.sleep({seconds}); sys.exit(1)"
    argv = [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), "--", sys.executable, "-c", program]
    guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    learners._guards.append(guard)
    try:
        if not seconds:
            guard.wait(60)
        begun = time.monotonic()
        with pytest.raises(LostProcessError, match="a learner has ended before all had met"):
            learners.join()
        assert time.monotonic() - begun < 30
        end = learners.first_end()
        assert end is not None
        assert end.text == "learner 1 of 2 ended with exit code 1: out of memory"
    finally:
        met.set()
        learners.end()


def test_what_goes_wrong_while_all_meet_is_raised_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(*_: object, **__: object) -> None:
        raise LostProcessError("torch says why")

    monkeypatch.setattr(group, "join_group", join)
    learners = ChildLearners(1, lambda rank: tmp_path / f"learner-{rank}.log")
    with pytest.raises(LostProcessError, match="torch says why"):
        learners.join()
    learners.end()


@pytest.mark.parametrize(
    ("exits", "end"),
    [
        ([(0, LOST), (0, 1)], "learner 2 of 3 ended with exit code 1: said by 2"),
        ([(0, LOST), (1, -9)], "learner 2 of 3 ended with exit code 137: said by 2"),  # the witness is heard first
        ([(0, 1), (0, LOST)], "learner 1 of 3 ended with exit code 1: said by 1"),
        ([(0, LOST), (60, 0)], f"learner 1 of 3 ended with exit code {LOST}: said by 1"),
        ([(60, 0), (60, 0)], None),
    ],
    ids=["an error of its own", "killed later", "the first", "a lost connection", "nobody"],
)
def test_the_learner_that_failed_is_named_before_those_that_noticed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: list[tuple[float, int]], end: str | None
) -> None:
    """Processes that sleep for some seconds and end with a code, or by a signal, stand for the learners."""
    is_waited_for = end is None or f"code {LOST}" in end
    monkeypatch.setattr(child_learners, "_END_S", 1.0 if is_waited_for else 30.0)
    learners = ChildLearners(3, lambda rank: tmp_path / f"learner-{rank}.log")
    for rank, (seconds, code) in enumerate(exits, start=1):
        (tmp_path / f"learner-{rank}.log").write_text(f"learner {rank}: said by {rank}\n")
        last = f"os.kill(os.getpid(), {-code})" if code < 0 else f"sys.exit({code})"
        program = [sys.executable, "-c", f"import os, sys, time; time.sleep({seconds}); {last}"]
        guard = [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), "--", *program]
        learners._guards.append(subprocess.Popen(guard, stdin=subprocess.PIPE))
    try:
        if exits[0][0] == 0:
            learners._guards[0].wait(60)
        found = learners.first_end()
        assert (None if found is None else found.text) == end
        assert found is None or not found.may_be_replaced
    finally:
        learners.end()


@pytest.mark.parametrize(
    ("learners", "environment", "said"),
    [
        (1, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        (2, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        (3, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, r"train\.learners is 3, but torchrun started 2 processes"),
        (1, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "started 4 processes, 2 of them on this machine"),
    ],
    ids=["its number", "the same number", "another number", "several machines"],
)
def test_torchrun_and_the_configuration_agree_on_the_number(
    monkeypatch: pytest.MonkeyPatch, learners: int, environment: dict[str, str], said: str | None
) -> None:
    assert (torchrun_rank(learners), count_learners(learners)) == (None, learners)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    if said is None:
        assert (torchrun_rank(learners), count_learners(learners)) == (1, 2)
        return
    with pytest.raises(ConfigError, match=said):
        torchrun_rank(learners)


@pytest.fixture
def unset_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is restored
    monkeypatch.delenv("CUDA_DEVICE_ORDER")


def test_torchrun_s_processes_count_cards_as_the_driver_before_they_look_at_one(
    monkeypatch: pytest.MonkeyPatch, unset_order: None
) -> None:
    orders: list[str] = []
    monkeypatch.setattr(group, "join_torchrun_group", lambda *_: orders.append(card_order()))
    monkeypatch.setattr("trainers.learners.follower.follow", lambda: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert card_order() == "FASTEST_FIRST"  # CUDA's own
    follow_torchrun()
    assert orders == ["PCI_BUS_ID"]


def test_learners_on_a_cluster_count_cards_as_the_driver(unset_order: None) -> None:
    LearnerActor(None)
    assert card_order() == "PCI_BUS_ID"


def test_a_learner_that_counts_cards_otherwise_than_the_command_does_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    refuse_other_order("FASTEST_FIRST", cards=2)
    refuse_other_order("PCI_BUS_ID", cards=1)  # one card is the first in any order
    with pytest.raises(TrainError, match="by FASTEST_FIRST, and those of the command by PCI_BUS_ID: set CUDA_DEVICE_"):
        refuse_other_order("PCI_BUS_ID", cards=2)


@pytest.mark.slow
def test_torchrun_starts_the_learners_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: School) -> None:
    (tmp_path / "torchrun").mkdir()
    with school_in(tmp_path / "torchrun", monkeypatch) as school:
        school.collect()
        config = school.folder / "bridge.toml"
        config.write_text(
            TOML.format(
                run=school.run,
                apps=school.folder / "apps.py",
                tasks=school.tasks,
                model=school.model,
                url=school.server.url,
            )
        )
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
        launch += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "marft_bridge"]
        launch += ["train", "--config", str(config), "--without-signal"]
        paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            launch, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_alike(two, school)
