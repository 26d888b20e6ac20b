"""Owns: `train.engine = "ray"`: learners on a Ray cluster learn what child processes learn, and a lost one is replaced.

- With as many learners the bits are the same, wherever they are, and whoever was lost meanwhile.
- A learner that is lost is one line that names it. The command goes on from the last update while there is
  room, a bounded number of times; else `--resume` does.
- What a machine of the cluster lacks is one line; the command is met at one address of its own only.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.learner_rig import OPTIONS, trained
from support.paths import ROOT, TESTS
from support.school_rig import School, learned, school_in
from support.tiny_policy import save_tiny_llama

from marft_bridge.common.errors import ClusterError, ConfigError
from marft_bridge.config.ray import RayOptions
from marft_bridge.devices.card_names import rows_to_uuids
from marft_bridge.rollouts.ray.messages import code_sha256
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from marft_bridge.training import learner_actor, ray_learners
from marft_bridge.training.learner_actor import Failure, LearnerActor, LearnerNeeds, Location, folder_to_sha256
from marft_bridge.training.learners import MAX_LOSSES, LearnerEnd, LostLearnerError, go_on_after_losses
from marft_bridge.training.ray_learners import RayLearners, devices_on_cluster
from trainers.common.files import weights_to_sha256
from trainers.config import TrainerOptions
from trainers.errors import LostProcessError, TrainError
from trainers.learners import group
from trainers.learners.calls import Calls
from trainers.learners.group import connect_to, interface_of, listen_at
from trainers.marft import MarftTrainer
from trainers.policies.adapter_learner import AdapterLearner

pytestmark = pytest.mark.timeout(900)


# -- whole runs -------------------------------------------------------------------------------------------------------


def actor_pids() -> list[int]:
    """The learners on Ray below this process, in the order of their start."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::Learner"):
                pids.append((process.create_time(), process.pid))
        except psutil.NoSuchProcess:
            continue
    return [pid for _, pid in sorted(pids)]


@pytest.mark.slow
def test_learners_on_ray_learn_the_bits_of_child_processes_and_a_killed_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions 1 and 2 are of the first learners, version 3 is of those after the kill."""
    undisturbed = trained(tmp_path / "children", monkeypatch, learners=3)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    (tmp_path / "ray").mkdir()
    killed: list[int] = []
    with school_in(tmp_path / "ray", monkeypatch) as school:
        school.collect()
        step = AdapterLearner.step

        def step_or_kill(self: AdapterLearner) -> float:
            if len(read_metrics(RunFolder(school.run).metrics)) == 2 and not killed:  # offline phase, round 1
                killed.extend(actor_pids())
                os.kill(killed[0], signal.SIGKILL)
            return step(self)

        monkeypatch.setattr(AdapterLearner, "step", step_or_kill)
        shown = school.train(without_signal=True, learners=3, engine="ray", **OPTIONS)
    assert len(killed) == 2
    assert actor_pids() == []
    (line,) = [line for line in shown.splitlines() if "going on from the last update with another one" in line]
    assert line.startswith("learner ")
    assert f"process {killed[0]}) died: " in line
    assert "learners: 2 on Ray, on this machine, beside this process, on 1 machine" in shown
    assert "resuming after round 1 of 2" in shown
    expected, actual = learned(undisturbed), learned(school)
    assert [name for name in expected if expected[name] != actual.get(name)] == []


# -- going on after a loss --------------------------------------------------------------------------------------------


class Runs:
    """A command that is tried again: each try makes some updates, and raises something."""

    def __init__(self, *tries: tuple[int, Exception | None]) -> None:
        self._tries, self.updates, self.lines = list(tries), 0, list[str]()

    def go_on(self) -> None:
        go_on_after_losses(self._try, lambda: self.updates, self.lines.append)

    def _try(self) -> None:
        updates, error = self._tries.pop(0)
        self.updates += updates
        if error is not None:
            raise error


LOST = LostLearnerError("learner 1 of 2 (there, process 7) died: of a cold")


def test_a_command_goes_on_after_losses_with_an_update_in_between_as_often_as_need_be() -> None:
    runs = Runs(*[(1, LOST)] * (3 * MAX_LOSSES), (1, None))
    runs.go_on()
    assert runs.lines == [f"{LOST}; going on from the last update with another one in its place"] * (3 * MAX_LOSSES)


def test_losses_without_an_update_in_between_end_the_command() -> None:
    runs = Runs((1, LOST), *[(0, LOST)] * MAX_LOSSES)
    with pytest.raises(TrainError, match=r"^learner 1 of 2 .*, the 4th loss without an update .* --resume goes on"):
        runs.go_on()
    assert len(runs.lines) == MAX_LOSSES


def test_a_cluster_without_room_for_another_names_who_was_lost_and_a_later_error_does_not() -> None:
    with pytest.raises(ClusterError, match=r"^learner 1 of 2 .* of a cold; no room; the round's episodes are kept"):
        Runs((1, LOST), (0, ClusterError("no room"))).go_on()
    with pytest.raises(ClusterError, match=r"^a worker lacks the code$"):
        Runs((1, LOST), (2, ClusterError("a worker lacks the code"))).go_on()  # whoever was lost had been replaced
    with pytest.raises(ClusterError, match=r"^no room$"):
        Runs((0, ClusterError("no room"))).go_on()


def test_the_models_of_a_lost_try_are_gone_before_the_next_one_begins(tmp_path: Path) -> None:
    """Else the next try's models would not fit beside them. Trainer and progress hold each other, as in `train`."""
    model = save_tiny_llama(tmp_path / "model")
    embeddings: list[weakref.ref[torch.Tensor]] = []
    living: list[bool] = []

    class Training:
        def __init__(self) -> None:
            self.trainer = MarftTrainer(TrainerOptions(), model, ["a"], seed=0, progress=self.show)
            embeddings.append(weakref.ref(self.trainer.policies.model.peft.get_input_embeddings().weight))

        def show(self, *figures: Any) -> None: ...

    def train() -> None:
        living.extend(embedding() is not None for embedding in embeddings)
        if not embeddings:
            Training()
            raise LostLearnerError("learner 1 of 2 died")

    gc.disable()
    try:
        go_on_after_losses(train, lambda: 0, lambda line: None)
    finally:
        gc.enable()
    assert living == [False]


def test_an_error_of_a_learner_itself_is_not_tried_again() -> None:
    runs = Runs((0, TrainError("out of memory")))
    with pytest.raises(TrainError, match=r"^out of memory$"):
        runs.go_on()
    assert runs.lines == []


def test_the_leader_hears_at_once_that_a_learner_failed_whose_process_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray keeps an actor's process, so that nobody but the learner itself closes its connections."""
    monkeypatch.setattr(group, "_PATIENCE", timedelta(minutes=3))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = listen_at("127.0.0.1", 2)
    argv = [sys.executable, str(TESTS / "support/failing_follower.py"), str(store.port)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as follower:
        assert follower.stdout is not None
        try:
            group.join_group_at(0, 2, store=store, own_host="127.0.0.1")
            calls = Calls()
            assert follower.stdout.readline() == b"failing\n"
            failed = time.monotonic()
            with pytest.raises(LostProcessError):
                group.workers_on("cpu", [2, 2]).add([1.0])
            assert time.monotonic() - failed < 60  # a busy machine; the patience is three times as much
            with pytest.raises(LostProcessError):
                calls.send("update", {})
            assert b"Failure(text='out of memory beside Calls', is_lost=False)" in follower.stdout.readline()
            assert follower.poll() is None
        finally:
            group.leave_group()
            follower.kill()


# -- who is said to have ended, by a stand-in for Ray -----------------------------------------------------------------


class PretendError(Exception):
    """Ray's."""


class PretendDeathError(PretendError):
    """Of an actor, its machine or its process."""


class PretendTaskError(PretendError):
    """Of a method that raised."""


class PretendRay:
    """Answers are values or errors; None never comes."""

    exceptions = SimpleNamespace(
        RayError=PretendError,
        RayTaskError=PretendTaskError,
        RayActorError=PretendDeathError,
        NodeDiedError=PretendDeathError,
        WorkerCrashedError=PretendDeathError,
        OutOfMemoryError=PretendDeathError,
    )

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [ref for ref in refs if ref.answer is not None]
        return ready[:num_returns], ready[num_returns:]

    def get(self, ref: Any) -> Any:
        if isinstance(ref.answer, PretendError):
            raise ref.answer
        return ref.answer


def learners_with_ends(monkeypatch: pytest.MonkeyPatch, *answers: Any, **options: Any) -> RayLearners:
    monkeypatch.setattr(ray_learners, "_NOTICE_S", 0.1)
    learners = RayLearners(
        RayOptions(**options),
        ["cuda:0"] * (len(answers) + 1),
        needs=lambda: NEEDS,
        taken_cards=["0", "2"],
        notify=lambda line: None,
    )
    learners._ray = PretendRay()
    learners._host = "10.0.0.1"
    for rank, answer in enumerate(answers, start=1):
        follower = ray_learners._Follower(rank, None, f"learner {rank}", Location("10.0.0.1", "h, process 1", ("2",)))
        follower.end_ref = SimpleNamespace(answer=answer)
        learners._followers.append(follower)
    return learners


WITNESS, BROKEN = Failure("another has ended", is_lost=True), Failure("out of memory", is_lost=False)


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([WITNESS, PretendDeathError("of a cold")], LearnerEnd("learner 2 died: of a cold", may_be_replaced=True)),
        ([WITNESS, PretendTaskError("Traceback:\n  line 1\nKeyError: 7")], LearnerEnd("learner 2 ended: KeyError: 7")),
        ([WITNESS, PretendError("no such thing")], LearnerEnd("learner 2 ended: no such thing")),
        ([WITNESS, BROKEN], LearnerEnd("learner 2 ended: out of memory")),
        ([None, WITNESS], LearnerEnd("learner 2 ended: another has ended", may_be_replaced=True)),
        ([None, None], None),
    ],
    ids=["killed", "an error in our code", "an error of Ray's", "an error of its own", "a lost connection", "nobody"],
)
def test_who_died_is_named_before_who_noticed_it_and_only_the_dead_are_replaced(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], end: LearnerEnd | None
) -> None:
    assert learners_with_ends(monkeypatch, *answers).first_end() == end


def test_learners_are_counted_by_the_machine_whose_memory_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    learners = learners_with_ends(monkeypatch, None, None, None)
    assert learners.count_sharers() == [4, 4, 4, 4]
    for follower in learners._followers[1:]:
        follower.location = Location("10.0.0.2", "other, process 1", ())
    assert learners.count_sharers() == [2, 2, 2, 2]
    learners._followers[2].location = Location("10.0.0.3", "third, process 1", ())
    assert learners.count_sharers() == [2, 2, 1, 1]


def test_a_card_of_this_machine_that_the_command_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="learner 1 was given card 2 of this machine, which the command uses itself"):
        learners_with_ends(monkeypatch, None, address="auto")._refuse_taken_cards()
    learners_with_ends(monkeypatch, None)._refuse_taken_cards()  # on this machine alone cards are planned


@pytest.mark.parametrize(("ours", "given"), [("GPU-aaaa", "0"), ("0", "GPU-aaaa1111-0000"), ("0", "0")])
def test_a_card_that_the_command_uses_is_refused_however_either_side_names_it(
    monkeypatch: pytest.MonkeyPatch, ours: str, given: str
) -> None:
    rows = "0, GPU-aaaa1111-0000\n1, GPU-bbbb2222-0000\n"
    monkeypatch.setattr(ray_learners, "names_to_uuids", partial(rows_to_uuids, rows))
    learners = learners_with_ends(monkeypatch, None, address="auto")
    learners._taken_cards = frozenset([ours])
    monkeypatch.setattr(learner_actor, "names_to_uuids", partial(rows_to_uuids, rows))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    learners._host = "127.0.0.1"
    learners._followers[0].location = LearnerActor(None).locate("127.0.0.1")
    with pytest.raises(ClusterError, match="was given card GPU-aaaa1111-0000 of this machine"):
        learners._refuse_taken_cards()
    learners._taken_cards = frozenset(["1"])
    learners._refuse_taken_cards()


def test_the_command_computes_on_its_own_device_and_the_others_on_what_ray_gives_them() -> None:
    options = TrainerOptions()
    on_cpu = options.model_copy(update={"system": options.system.model_copy(update={"device": "cpu"})})
    assert devices_on_cluster(on_cpu, 3) == ["cpu", "cpu", "cpu"]


# -- what a machine lacks ---------------------------------------------------------------------------------------------


NEEDS = LearnerNeeds(
    options={"system": {"device": "auto"}, "lora": {"rank": 4}},
    model_dirs={},
    weights={},
    teacher_dir=None,
    checkpoint=None,
    code=code_sha256(),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LearnerNeeds:
    """What is there, on this machine."""
    folder = tmp_path_factory.mktemp("needs")
    model = save_tiny_llama(folder / "model")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/trainer.json").write_text("{}")
    return replace(
        NEEDS,
        model_dirs={"reasoner": str(model), "actor": str(model)},
        weights={str(model): weights_to_sha256(model)},
        teacher_dir=str(model),
        checkpoint=(str(folder / "checkpoint"), folder_to_sha256(folder / "checkpoint")),
    )


LACKS: dict[str, tuple[Callable[[LearnerNeeds], LearnerNeeds], str]] = {
    "nothing": (lambda needs: needs, ""),
    "code": (
        lambda needs: replace(needs, code="other"),
        "the code of marft-bridge differs from the",
    ),
    "weights": (
        lambda needs: replace(needs, weights=dict.fromkeys(needs.weights, "0")),
        "the weights in /.* differ ",
    ),
    "model": (lambda needs: replace(needs, weights={"/none/model": "0"}), r"/none/model has no \*\.safetensors"),
    "checkpoint": (lambda needs: replace(needs, checkpoint=("/none", "0")), "cannot read '/none': No such file"),
    "newer": (lambda needs: replace(needs, checkpoint=(next(iter(needs.weights)), "0")), "the checkpoint "),
}


@pytest.mark.parametrize("kind", LACKS)
def test_what_a_learner_does_not_find_on_its_machine_is_one_line(kind: str, whole: LearnerNeeds) -> None:
    change, text = LACKS[kind]
    failure = LearnerActor(None).check(change(whole), "cpu", 1, learners=2)
    if not text:
        assert failure is None
        return
    assert failure is not None
    assert re.search(text, failure), failure
    assert "\n" not in failure


def test_memory_is_looked_at_where_the_learner_will_be_and_for_all_that_share_it(whole: LearnerNeeds) -> None:
    assert LearnerActor(None).check(whole, "cpu", 1, learners=2) is None
    failure = LearnerActor(None).check(whole, "cpu", 10**9, learners=2)
    assert failure is not None
    assert failure.startswith("training needs about ")


def test_a_folder_of_the_command_that_is_not_there_is_one_line(whole: LearnerNeeds) -> None:
    failure = LearnerActor("/none/of/these").check(whole, "cpu", 1, learners=2)
    assert failure == (
        "cannot read '/none/of/these': No such file or directory; every machine of the cluster needs it under the same "
        "path"
    )


# -- where the processes meet -----------------------------------------------------------------------------------------


def test_the_command_is_met_at_one_address_only() -> None:
    """torch would listen on all of them."""
    store = listen_at("127.0.0.2", 2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)
    other = connect_to("127.0.0.2", store.port, 2)
    other.set("greeting", "hello")
    assert store.get("greeting") == b"hello"


def test_an_address_is_of_the_interface_that_has_it() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_learner_says_from_which_address_the_command_is_reached() -> None:
    location = LearnerActor(None).locate("127.0.0.1")
    assert location.host == "127.0.0.1"
    assert f"process {os.getpid()}" in location.process


def test_a_learner_that_cannot_reach_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str, port: int, count: int) -> None:
        raise LostProcessError("nobody is there")

    monkeypatch.setattr("trainers.learners.group.connect_to", refuse)
    text = LearnerActor(None).connect("10.0.0.1", 4711, 2)
    assert text == "cannot reach port 4711 of 10.0.0.1, the command's machine: nobody is there"


# -- what the configuration says --------------------------------------------------------------------------------------


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as school:
        yield school


def test_without_ray_the_command_says_what_to_install(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^train\.engine is ray, which is not installed: .*marft-bridge\[ray\]"):
        school.train(learners=2, engine="ray")


def test_torchrun_does_not_start_learners_of_a_cluster(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="start the command without torchrun"):
        school.train(learners=2, engine="ray")


def test_one_learner_needs_no_cluster_and_cards_are_those_of_this_machine(school: School) -> None:
    with pytest.raises(ValueError, match="engine is 'ray', but learners is 1"):
        school.config(engine="ray")
    with pytest.raises(ValueError, match=r"train\.devices names 1 card for 2 learners"):
        school.config(engine="ray", learners=2, devices=[0])
    on_cluster = school.config().model_dump(exclude_unset=True) | {"ray": {"address": "auto"}}
    on_cluster["train"] |= {"engine": "ray", "learners": 2}
    config = type(school.config()).model_validate(on_cluster)
    assert (config.learners_here, school.config(engine="ray", learners=2).learners_here) == (1, 2)
    on_cluster["train"]["devices"] = [0, 1]
    with pytest.raises(ValueError, match="names 2 cards, but one learner is on this machine, and Ray places"):
        type(config).model_validate(on_cluster)
