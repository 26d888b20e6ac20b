"""Owns: `train.rollouts = "ray"`: the rounds of `train` on a cluster give what they give on one machine.

- The same episodes, versions, tokens and weights, whoever played them, and whoever was lost meanwhile.
- A round is played by the newest version, or by one that is at most `max_staleness` older.
- A training that was stopped goes on; opponents of a league are those of one machine.
- A worker has a version before it has requests of it; what is out of service leaves its disk.
- What cannot be played there is refused in one line.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.duo_rig import TASKS
from support.fake_vllm import FakeVllm, running
from support.league_rig import OPTIONS, REWARD
from support.ray_school import ClusterSchool, cluster_school_in, read_asked, school_cluster
from support.school_rig import learned, runs_until

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.config.ray import RayOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes
from marft_bridge.rollouts.ray.driver import Driver
from marft_bridge.rollouts.ray.messages import AdapterFiles, Assignment, Report, config_to_digests
from marft_bridge.rollouts.ray.session import ClusterSession, refuse_unusable_rollouts
from marft_bridge.rollouts.ray.worker import Worker
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.model_versions import config_to_versions
from trace_store import conventions as c
from trace_store.journal import Journal, line_of
from trace_store.records import Reward, SpanRow
from trainers.errors import TrainError
from trainers.marft import MarftTrainer

pytestmark = pytest.mark.timeout(900)

ROUNDS: dict[str, Any] = {
    "rounds": 3,
    "episodes_per_round": 8,
    "stop_early": False,
    "trainer": {"importance": {"mismatch": "truncate"}},
}


@pytest.fixture(scope="module")
def asked_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One local cluster for the tests of this file: starting one takes longer than they do."""
    with school_cluster(tmp_path_factory.mktemp("path"), processors=2) as log:
        yield log


def played(school: ClusterSchool) -> list[tuple[Any, ...]]:
    """Every episode that was played, with its versions and tokens, in an order of its own."""
    with school.store() as store:
        return sorted(
            (
                each.episode.run_id,
                each.episode.round,
                each.episode.task_id,
                each.episode.sample,
                each.episode.seed,
                each.episode.outcome,
                tuple((a.node, a.adapter_version, tuple(a.prompt_ids), tuple(a.sampled_ids)) for a in each.actions),
            )
            for each in store.trajectories(run_ids=["train", "evaluate"])
            if each.rewards
        )


def worker_pids() -> list[int]:
    """The workers on Ray below this process."""
    processes = psutil.Process().children(recursive=True)
    return [process.pid for process in processes if process.name().startswith("ray::Worker")]


def kill_a_worker_that_plays(version: int, log: Path, seen: int, killed: list[int]) -> None:
    """Kills the worker whose server is the first to answer as this version, in the middle of its episodes."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for asked in read_asked(log)[seen:]:
            if asked.model == f"actor@{version}":
                above = psutil.Process(asked.process).parents()
                killed.append(next(process.pid for process in above if process.name().startswith("ray::Worker")))
                os.kill(killed[0], signal.SIGKILL)
                return
        time.sleep(0.005)


@pytest.mark.slow
def test_rounds_of_two_workers_are_those_of_one_machine_even_where_one_is_killed(
    asked_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_school_in(tmp_path / "here", monkeypatch) as here:
        here.collect()
        here.train(without_signal=True, evaluation_episodes=3, **ROUNDS)
    killed: list[int] = []
    with cluster_school_in(tmp_path / "there", monkeypatch) as there:
        there.collect()
        there.server.asked.clear()
        seen = len(read_asked(asked_log))
        killer = threading.Thread(target=kill_a_worker_that_plays, args=(2, asked_log, seen, killed), daemon=True)
        killer.start()
        shown = there.train(without_signal=True, rollouts="ray", evaluation_episodes=3, **ROUNDS)
        killer.join()
        assert there.server.asked == []
    (line,) = [line for line in shown.splitlines() if "unfinished episodes go to another worker" in line]
    assert f"process {killed[0]}) died: " in line
    assert played(there) == played(here)
    assert Counter((run, number) for run, number, *_ in played(there)) == {
        ("train", 1): 8,
        ("train", 2): 8,
        ("train", 3): 8,
        ("evaluate", 4): 3,
    }
    for _, number, *_, actions in played(there):
        assert [(node, version) for node, version, *_ in actions] == [("reasoner", number), ("actor", number)]
    expected, actual = learned(here), learned(there)
    assert [name for name in expected if expected[name] != actual.get(name)] == []
    answering = {asked.process for asked in read_asked(asked_log)[seen:]}
    assert len(answering) in (2, 3)  # whoever comes in the lost one's place may find nothing left to play
    assert worker_pids() == []
    assert [pid for pid in answering if psutil.pid_exists(pid)] == []


@pytest.mark.slow
def test_rounds_that_are_played_during_updates_are_as_old_as_may_be(
    asked_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_school_in(tmp_path / "school", monkeypatch) as school:
        school.collect()
        school.train(without_signal=True, rollouts="ray", max_staleness=1, **ROUNDS)
    versions = {number: {version for _, version, *_ in actions} for _, number, *_, actions in played(school)}
    assert versions == {1: {1}, 2: {1}, 3: {2}}
    assert len(played(school)) == 24


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["in its rollouts", "in its update"])
def test_a_training_that_was_stopped_goes_on_with_what_was_played(
    asked_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    with cluster_school_in(tmp_path / "whole", monkeypatch) as whole:
        whole.collect()
        whole.train(without_signal=True, **ROUNDS)
    with cluster_school_in(tmp_path / "school", monkeypatch) as school:
        school.collect()
        with monkeypatch.context() as patch:
            if stopped == "in its rollouts":
                patch.setattr(ClusterSession, "run", runs_until(11, ClusterSession.run))
            else:
                patch.setattr(MarftTrainer, "update", ends_in_round(2, MarftTrainer.update))
            with pytest.raises(TrainError, match="killed"):
                school.train(without_signal=True, rollouts="ray", **ROUNDS)
        before = len(played(school))
        assert before == (11 if stopped == "in its rollouts" else 16)
        school.train(resume=True, rollouts="ray", **ROUNDS)
    assert played(school) == played(whole)
    expected, actual = learned(whole), learned(school)
    assert [name for name in expected if expected[name] != actual.get(name)] == []


def ends_in_round(number: int, update: Any) -> Any:
    """An update that fails, once so many were asked for."""
    calls = iter(range(1, number + 1))

    def counted(trainer: MarftTrainer, *inputs: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise TrainError("killed")
        return update(trainer, *inputs, **options)

    return counted


@pytest.mark.slow
def test_opponents_of_a_league_are_served_by_workers_as_here(
    asked_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schools = []
    for rollouts in ("local", "ray"):
        with cluster_school_in(tmp_path / rollouts, monkeypatch) as school:
            school.use_reward(REWARD, "game")
            school.collect(**OPTIONS)
            school.train(without_signal=True, rollouts=rollouts, **OPTIONS)
            schools.append(school)
    here, there = schools
    assert played(there) == played(here)
    met = {version for _, number, *_, actions in played(there) for _, version, *_ in actions if version != number}
    assert met == {0, 1, 2}  # earlier ones than the round's
    assert learned(there) == learned(here)


# -- what a worker serves ---------------------------------------------------------------------------------------------


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterSchool]:
    with cluster_school_in(tmp_path / "school", monkeypatch) as school:
        yield school


@pytest.fixture
def registry(school: ClusterSchool) -> AdapterRegistry:
    """The command's, with versions 0 to 2 of both nodes."""
    versions = config_to_versions(school.config(), school.run / "adapters", lambda _: None)
    versions.register_zero(["reasoner", "actor"])
    for node in ("reasoner", "actor"):
        content = (Path(versions.registry.get(node, 0).path) / "adapter_model.safetensors").read_bytes()
        config = (Path(versions.registry.get(node, 0).path) / "adapter_config.json").read_bytes()
        for version in (1, 2):
            folder = versions.registry.new_folder(node, version)
            (folder / "adapter_model.safetensors").write_bytes(content)
            (folder / "adapter_config.json").write_bytes(config)
            versions.registry.register(node, version, version - 1, metrics={})
    return versions.registry


@pytest.fixture
def worker(school: ClusterSchool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One that works, in this process, at a server of its own."""
    with running(FakeVllm()) as server:
        school.server = server
        server.adapters = {f"{node}@0": f"/{node}" for node in ("reasoner", "actor")}
        monkeypatch.chdir(school.folder)
        config = school.config()
        versions = config_to_versions(config, school.folder / "mine", lambda _: None)
        content = config.model_dump(mode="json", exclude_unset=True)
        digests = config_to_digests(config, versions.lineage)
        worker = Worker(Assignment(1, content, str(school.folder), endpoint=server.url, digests=digests))
        try:
            while (report := worker.exchange(0, [])).phase == "starting":
                pass
            assert report.phase == "working", report.failure
            yield worker
        finally:
            worker.stop()


def sent(registry: AdapterRegistry, node: str, version: int) -> AdapterFiles:
    return AdapterFiles(node, version, registry.files(node, version))


def test_a_worker_serves_what_was_published_last_and_keeps_no_more_of_it(
    worker: Worker, registry: AdapterRegistry, school: ClusterSchool
) -> None:
    worker.publish(0, [("actor", 1)], sent(registry, "actor", 1))
    zeros = {"reasoner@0", "actor@0"}  # of this shared server, which whoever started it published
    assert set(school.server.adapters) == {*zeros, "actor@1"}
    folder = Path(school.server.adapters["actor@1"])
    assert folder != Path(registry.get("actor", 1).path)
    files = [path for path in folder.iterdir() if path.is_file()]
    assert {file.name: file.read_bytes() for file in files} == registry.files("actor", 1)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    worker.publish(0, [("actor", 2)], sent(registry, "actor", 2))
    assert set(school.server.adapters) == {*zeros, "actor@2"}
    assert not folder.exists()
    assert worker.exchange(0, []).phase == "working"


def test_a_version_that_was_changed_on_its_way_ends_the_worker_with_the_reason(
    worker: Worker, registry: AdapterRegistry, school: ClusterSchool
) -> None:
    files = registry.files("actor", 1)
    files["adapter_model.safetensors"] += b" "
    worker.publish(0, [("actor", 1)], AdapterFiles("actor", 1, files))
    report = worker.exchange(0, [])
    assert report.phase == "ended"
    assert report.failure is not None
    assert report.failure[0] == "ServingError"
    assert "actor@1" not in school.server.adapters


def test_a_version_of_another_base_model_is_not_taken_over(registry: AdapterRegistry, tmp_path: Path) -> None:
    other = AdapterRegistry(tmp_path / "other", "0" * 64)
    with pytest.raises(ServingError, match="adapter v1 of node 'actor' was trained on another base model"):
        other.adopt("actor", 1, registry.files("actor", 1))


# -- what the driver sends, by a stand-in for Ray ---------------------------------------------------------------------


class Reply:
    """A reference: two are never equal."""

    def __init__(self, answer: Report) -> None:
        self.answer = answer


class PretendRay:
    """Workers that finish what they are given at once; `calls`: what each was told, in order."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayActorError=(), ObjectLostError=(), NodeDiedError=())

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stored: list[Any] = []

    def remote(self, _: Any) -> PretendRay:
        return self

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=self._place)

    def put(self, adapter: AdapterFiles) -> AdapterFiles:
        self.stored.append((adapter.node, adapter.version))
        return adapter

    def _place(self, assignment: Assignment) -> Any:
        number, sent_bytes = assignment.number, [0]

        def exchange(_: int, requests: Sequence[EpisodeRequest], list_number: int = 0, **__: int) -> Any:
            lines = b"".join(map(_finished, requests))
            sent_bytes[0] += len(lines)
            tally = Tally()
            if requests:
                self.calls.append(("play", number, list_number, {request.adapters["actor"] for request in requests}))
                tally.finished = len(requests)
            ended = tuple(request.key for request in requests)
            return Reply(Report("working", "there", lines, sent_bytes[0], ended, tally, list_number=list_number))

        def publish(_: int, served: Sequence[Any], *adapters: AdapterFiles) -> Any:
            self.calls.append(("serve", number, sorted(served), [adapter.version for adapter in adapters]))
            return exchange(_, [], -1)

        return SimpleNamespace(
            exchange=SimpleNamespace(remote=exchange),
            publish=SimpleNamespace(remote=publish),
            stop=SimpleNamespace(remote=lambda: None),
        )

    def wait(self, asked: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return list(asked)[:num_returns], list(asked)[num_returns:]

    def get(self, asked: Any) -> Any:
        return asked.answer

    def kill(self, actor: Any) -> None:
        """Nothing runs."""


def _finished(request: EpisodeRequest) -> bytes:
    trace = f"{request.round}-{request.task['id']}-{request.sample}"
    said = {c.OPERATION: c.INVOKE_WORKFLOW, c.RUN_ID: request.run_id, c.TASK_ID: request.task["id"]}
    said |= {c.SAMPLE: request.sample, c.ROUND: request.round, c.OUTCOME: "terminated"}
    span = SpanRow(trace, "s", None, "run", c.INVOKE_WORKFLOW, 1, 2, "ok", None, "v", said)
    return line_of(span) + line_of(Reward(trace, "reward", 1.0, "a:r", 3))


def test_a_worker_gets_each_version_once_and_before_the_requests_of_it(tmp_path: Path) -> None:
    ray, journal = PretendRay(), Journal(tmp_path)
    assigned = lambda number: Assignment(number, {}, None, None, {})  # noqa: E731
    try:
        with Driver(ray, RayOptions(workers=1), 4, assigned, journal, lambda _: None) as driver:
            for version, served in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
                driver.publish([("actor", v) for v in served], lambda key: AdapterFiles(*key, files={}))
                requests = plan_episodes(
                    TASKS, 2, 1, seed=0, run_id="train", split="train", adapters={"actor": version}, round=version
                )
                tally = driver.run(requests, lambda done, _: None)
                assert (driver.done, tally.finished) == (2, 2)  # of this list alone
    finally:
        journal.close()
    assert ray.stored == [("actor", 1), ("actor", 2), ("actor", 3)]
    assert ray.calls == [
        ("serve", 1, [("actor", 1)], [1]),
        ("play", 1, 0, {1}),
        ("serve", 1, [("actor", 1), ("actor", 2)], [2]),
        ("play", 1, 1, {2}),
        ("serve", 1, [("actor", 2), ("actor", 3)], [3]),
        ("play", 1, 2, {3}),
    ]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "more", "message"),
    [
        ({"trees": {}}, {}, "train.trees: forks are played on the command's machine only: leave it out, or leave"),
        ({"hosted_answers": "recorded_first"}, {}, "train.hosted_answers: the recorded answers are there only"),
        (
            {"teacher_rounds": 1, "trainer": {"offline": {"mode": "filtered"}}},
            {},
            "train.teacher_rounds: own models of nodes are asked there only",
        ),
        ({}, {"ray": {"endpoints": ["http://127.0.0.1:1"]}}, "ray.endpoints: with train.rollouts = ray each worker"),
        ({}, {"serve": {"attach": "http://127.0.0.1:1"}}, "serve.attach names one server for one machine; with train"),
        ({}, {"serve": {"port": 8000}}, "serve.port: several workers may run on one machine; leave it out with train"),
        ({}, {"ray": {"gpus_per_worker": 1}}, "ray.gpus_per_worker: on a cluster of this machine alone"),
    ],
    ids=["trees", "hosted answers", "teacher", "endpoints", "attach", "port", "cards"],
)
def test_what_cannot_be_played_on_a_cluster_is_refused(
    school: ClusterSchool, train: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = school.config(rollouts="ray", **train)
    config = type(config).model_validate(config.model_dump(mode="json", exclude_unset=True) | more)
    with pytest.raises(ConfigError) as raised:
        refuse_unusable_rollouts(config)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
