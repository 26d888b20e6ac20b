"""Owns: collecting on a Ray cluster gives what collecting on one machine gives, whatever becomes of its workers.

- Two workers on a real local cluster finish exactly the requests that a local collect finishes, with its seeds.
- A worker that is killed loses its unfinished episodes to another worker; no request is finished twice.
- A run that was stopped is resumed; what is finished is not run again.
- A run that a limit cuts short earns the same wherever it is played.
- Driver and workers agree on configuration, code and model; what cannot work is refused in one line.
- Lines of a worker are filed whole and undamaged, or not at all; nothing ends before all of its lines are out.
- A worker whose shared server hangs ends with that reason; its calls do not wait for ever.
- A cluster that was started here listens on loopback only, and neither its processes nor its files outlive it.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from support.duo_rig import COMMON, TASKS
from support.fake_vllm import FakeVllm, running
from support.fault_server import FAULTS, write_model
from support.paths import ROOT
from support.ray_school import write_vllm_package

from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import ClusterError, ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.ray import RayOptions
from marft_bridge.config.serve import ServeOptions
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.episode_plan import EpisodeRequest, ForkPoint, plan_episodes, task_order
from marft_bridge.rollouts.ray import worker as worker_module
from marft_bridge.rollouts.ray.connection import connect_ray
from marft_bridge.rollouts.ray.driver import remember_interrupts
from marft_bridge.rollouts.ray.filing import Filing
from marft_bridge.rollouts.ray.messages import Assignment, Report, config_to_digests, digest_differences
from marft_bridge.rollouts.ray.worker import Worker
from marft_bridge.runs.run_folder import RunFolder
from trace_store import conventions as c
from trace_store.journal import Journal, line_of, record_of
from trace_store.records import OF_LIMIT, AdapterRow, Episode, Reward, SpanRow
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local cluster for the tests of this file: starting one takes longer than they do."""
    stand_in = tmp_path_factory.mktemp("path")
    write_vllm_package(
        stand_in, "import sys\nsys.argv += ['--wait', '0']\nfrom support.fault_server import main\n\nmain()\n"
    )
    with pytest.MonkeyPatch.context() as patch:  # before the workers' processes get their environment
        patch.setenv("LAB_KEY", "secret")
        patch.setenv("PYTHONPATH", f"{stand_in}:{ROOT}:{ROOT / 'tests'}")
        patch.setenv(FAULTS, str(stand_in / "none"))
        with connect_ray(RayOptions(workers=2), option="collect.engine", processors=2) as ray:
            session = Path(ray.get_runtime_context().get_temp_dir(), ray.get_runtime_context().get_session_name())
            assert list((session / "logs").glob("*"))
            yield
    assert not session.exists()  # what an app printed is in the logs
    assert [p.name() for p in psutil.Process().children(recursive=True) if "ray" in p.name()] == []


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with running(FakeVllm(key="secret")) as server:
        server.answer = lambda body: "the number is 5"
        yield server


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """As much of a model as an adapter of zeros needs."""
    return write_model(tmp_path / "model")


class Lab:
    """Collecting the duo on a stand-in for the model server, here and on the cluster."""

    def __init__(self, server: FakeVllm, model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.model_dir, self.folder = server, model_dir, folder
        monkeypatch.chdir(ROOT)

    def config(self, run: str, engine: str, episodes: int, **changes: Any) -> BridgeConfig:
        graph = {
            "app": "graphs.math_duo:build",
            "nodes": ["reasoner", "actor"],
            "tasks": "graphs.math_duo:tasks",
            "task_to_input": "graphs.math_duo:task_to_input",
            "reward": "graphs.math_duo:reward",
        } | changes.pop("graph", {})
        where: dict[str, Any] = {"serve": {"attach": self.server.url, "api_key_env": "LAB_KEY"}}
        if engine == "ray each":
            where = {}
        elif engine == "ray":
            where = {"ray": {"endpoints": [self.server.url], "api_key_env": "LAB_KEY"} | changes.pop("ray", {})}
        where |= {"models": changes.pop("models", {})}
        return BridgeConfig.model_validate(
            {
                "run": str(self.folder / run),
                "graph": graph,
                "model": {"path": str(self.model_dir)},
                "collect": {"episodes": episodes, "engine": engine.split()[0], "in_flight": 4} | changes,
                **where,
            }
        )

    def collect(self, config: BridgeConfig, resume: bool = False) -> list[str]:
        self.server.adapters.clear()  # a server serves one run folder
        shown = io.StringIO()
        collect(config, Reporter(Console(file=shown, width=200)), resume)
        return shown.getvalue().splitlines()

    def episodes(self, config: BridgeConfig) -> list[Episode]:
        with TraceStore.open(RunFolder(config.run_folder).store) as store:
            store.take_in()
            rewarded = {row[0] for row in store.sql("SELECT DISTINCT episode_id FROM episode_reward")}
            found = store.episodes(run_id="collect")
        # One that ended, and whose worker was lost before its reward came, is not finished.
        return [e for e in found if e.outcome != "terminated" or e.episode_id in rewarded]


@pytest.fixture
def lab(server: FakeVllm, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: None) -> Lab:
    return Lab(server, model_dir, tmp_path, monkeypatch)


def finished(episodes: list[Episode]) -> Counter[tuple[str, int, int | None]]:
    """(task, sample, seed) of every episode that counts as finished, and how often."""
    return Counter((e.task_id, e.sample, e.seed) for e in episodes if e.outcome == "terminated")


def planned(config: BridgeConfig) -> Counter[tuple[str, int, int | None]]:
    """The same of what a collect with this configuration asks for."""
    tasks = task_order(load_app(config).train_tasks, config.seed)
    options, common = config.collect, COMMON | {"run_id": "collect"}
    plan = plan_episodes(tasks, options.episodes, options.samples_per_task, seed=config.seed, **common)
    return Counter((request.task["id"], request.sample, request.seed) for request in plan)


@pytest.mark.slow
def test_two_workers_finish_what_a_local_collect_finishes(lab: Lab) -> None:
    here, there = (lab.config(engine, engine, 24, samples_per_task=2) for engine in ("local", "ray"))
    lab.collect(here)
    said = lab.collect(there)
    local, remote = lab.episodes(here), lab.episodes(there)
    assert finished(remote) == finished(local) == planned(there)
    assert set(finished(remote).values()) == {1}
    assert {e.outcome for e in remote} == {"terminated"}
    assert [e.lineage for e in remote] == [e.lineage for e in local]
    assert any(line.startswith("collected 24 terminated; 48 of 48 actions trainable") for line in said)
    assert any(line.startswith("collect 24/24") for line in said)
    journal = list(RunFolder(there.run_folder).journal.glob("*"))
    assert journal == []  # taken in: nobody writes there any more


def busy_worker(server: FakeVllm) -> psutil.Process:
    """A worker's process that has asked this server for something."""
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::Worker") and any(
            connection.raddr and connection.raddr.port == server.server_address[1]
            for connection in process.net_connections("inet")
        ):
            return process
    raise AssertionError("no worker asks")


@pytest.mark.slow
def test_a_killed_worker_loses_its_unfinished_episodes_to_another(lab: Lab) -> None:
    config = lab.config("run", "ray", 60)
    killed: list[int] = []
    one_at_a_time = threading.Lock()

    def slowly(_: dict[str, Any]) -> str:
        time.sleep(0.1)
        with one_at_a_time:
            if len(lab.server.asked) > 20 and not killed:
                killed.append(busy_worker(lab.server).pid)
                os.kill(killed[0], signal.SIGKILL)
        return "5"

    lab.server.answer = slowly
    said = lab.collect(config)
    assert killed
    lost = [line for line in said if "unfinished episodes go to another worker" in line]
    assert len(lost) == 1
    assert f"process {killed[0]}) died" in lost[0]
    assert finished(lab.episodes(config)) == planned(config)


@pytest.mark.slow
def test_a_stopped_run_is_resumed_without_running_anything_twice(lab: Lab) -> None:
    config = lab.config("run", "ray", 40)
    stopped: list[bool] = []
    one_at_a_time = threading.Lock()

    def slowly(_: dict[str, Any]) -> str:
        time.sleep(0.1)
        with one_at_a_time:
            if len(lab.server.asked) >= 50 and not stopped:
                stopped.append(True)
                os.kill(os.getpid(), signal.SIGINT)
        return "5"

    lab.server.answer = slowly
    with pytest.raises(KeyboardInterrupt):
        lab.collect(config)
    before = finished(lab.episodes(config))
    assert 0 < before.total() < 40
    lab.collect(config, resume=True)
    after = finished(lab.episodes(config))
    assert (after.total(), set(after.values())) == (40, {1})


@pytest.mark.slow
def test_workers_pay_for_a_limit_what_a_local_collect_pays(lab: Lab) -> None:
    earned: dict[str, set[tuple[Any, ...]]] = {}
    lab.server.answer = lambda body: "an answer of many tokens"
    for engine in ("local", "ray"):
        graph = {"limit_reward": -0.5}
        config = lab.config(engine, engine, 6, graph=graph, max_tokens_per_episode=10)
        said = lab.collect(config)
        assert any(line.startswith("collected 6 truncated") for line in said)
        with TraceStore.open(RunFolder(config.run_folder).store) as store:
            store.take_in()
            runs = list(store.trajectories())
        earned[engine] = {(t.episode.task_id, r.name, r.value, r.source) for t in runs for r in t.rewards}
    assert earned["local"] == earned["ray"]
    assert {entry[1:] for entry in earned["ray"]} == {("reward", -0.5, OF_LIMIT)}
    assert len(earned["ray"]) == 6


@pytest.mark.slow
def test_workers_that_start_servers_of_their_own_leave_none_running(lab: Lab) -> None:
    config = lab.config("run", "ray each", 12)
    lab.collect(config)
    assert finished(lab.episodes(config)) == planned(config)
    assert lab.server.asked == []
    servers = [p for p in psutil.process_iter(["cmdline"]) if str(lab.model_dir) in (p.info["cmdline"] or ())]
    assert servers == []


@pytest.mark.slow
def test_workers_start_a_server_for_each_base_model(lab: Lab) -> None:
    other = fault_model(lab.folder / "other")
    config = lab.config("run", "ray each", 12, models={"big": {"path": str(other), "nodes": ["actor"]}})
    lab.collect(config)
    assert finished(lab.episodes(config)) == planned(config)
    with TraceStore.open(RunFolder(config.run_folder).store) as store:
        (base, of_actor) = {(e.lineage["base"], e.lineage["base/actor"]) for e in store.episodes()}.pop()
    assert (base, of_actor) == (weights_to_sha256(lab.model_dir), weights_to_sha256(other))
    shared = lab.config("other", "ray", 12, models=config.model_dump()["models"])
    with pytest.raises(
        ConfigError, match=r"ray\.endpoints are servers of one base model each; with \[models\] workers"
    ):
        lab.collect(shared)


def fault_model(folder: Path) -> Path:
    """Another model than `write_model` makes."""
    write_model(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def test_a_local_cluster_listens_on_loopback_only_and_reports_to_nobody(cluster: None) -> None:
    processes = psutil.Process().children(recursive=True)
    assert any(process.name() == "raylet" for process in processes)
    for process in processes:
        try:
            connections = process.net_connections("inet")
        except psutil.NoSuchProcess:  # Ray starts some that end by themselves
            continue
        for connection in connections:
            assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (process.name(), connection)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("noted", [True, False])
def test_a_ctrl_c_inside_a_destructor_is_not_lost(noted: bool) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with remember_interrupts() if noted else nullcontext(lambda: None) as check:
        Dropped()  # Python says "Exception ignored", and goes on
        if noted:
            with pytest.raises(KeyboardInterrupt):
                check()
        else:
            check()
    assert signal.getsignal(signal.SIGINT) is before


# -- without a cluster --------------------------------------------------------------------------------------------


@pytest.fixture
def hired(server: FakeVllm, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes a worker in this process, and stops it at the end."""
    monkeypatch.setenv("LAB_KEY", "secret")
    lab = Lab(server, model_dir, tmp_path, monkeypatch)
    config = lab.config("run", "ray", 8).model_copy(update={"serve": ServeOptions(hang_s=2.0)})
    server.adapters |= {"reasoner@0": "there", "actor@0": "there"}
    made = []

    def hire(**changes: Any) -> Worker:
        digests = config_to_digests(config, {"base": weights_to_sha256(model_dir)}) | changes
        content = config.model_dump(mode="json", exclude_unset=True)
        made.append(Worker(Assignment(1, content, None, server.url, digests)))
        return made[0]

    yield hire
    for each in made:
        each.stop()
        assert not each._scratch.path.exists()


def until(worker: Worker, phase: str) -> Report:
    while (report := worker.exchange(0, [])).phase != phase:
        assert report.phase == "starting"
    return report


def test_a_worker_that_differs_from_the_driver_does_not_work(hired: Any) -> None:
    report = until(hired(**{"base model": "0" * 64, "configuration": "f" * 64}), "ended")
    assert report.failure is not None
    kind, message = report.failure
    assert kind == "ClusterError"
    assert message.startswith("the configuration differs (ffffffffffff here, ")
    assert "the base model differs (000000000000 here, " in message


def test_agreement_names_everything_that_differs(server: FakeVllm, model_dir: Path) -> None:
    config = BridgeConfig.model_validate({"graph": {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}})
    ours = config_to_digests(config, {"base": "one"})
    assert digest_differences(ours, dict(ours)) == []
    warmer = config.model_copy(update={"seed": 1})
    assert [
        line.split(" differs")[0] for line in digest_differences(ours, config_to_digests(warmer, {"base": "other"}))
    ] == [
        "the configuration",
        "the base model",
    ]
    assert "none there" in digest_differences(ours, {})[1]


def test_nothing_ends_before_all_of_its_lines_are_out(hired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CHUNK_BYTES", 1500)  # less than many a line
    worker = hired()
    until(worker, "working")
    requests = plan_episodes(TASKS, 3, 1, seed=0, **COMMON | {"run_id": "collect", "adapters": COMMON["adapters"]})
    requests = [replace(request, adapters={"reasoner": 0, "actor": 0}) for request in requests]
    report, have, lines, ended = worker.exchange(0, requests), 0, b"", []
    while True:
        lines, have = lines + report.lines, report.end
        assert len(lines) == have
        whole = Counter(
            record.trace_id if isinstance(record, SpanRow) else record.rewards[0].episode_id  # type: ignore[union-attr]
            for record in map(record_of, lines.splitlines(keepends=True))
        )
        ended += report.ended
        assert len([count for count in whole.values() if count == 5 + 1]) >= len(ended)  # five spans and the rewards
        if len(ended) == 3:
            break
        report = worker.exchange(have, [])
    assert set(ended) == {request.key for request in requests}
    assert report.tally.outcomes == {"terminated": 3}
    (segment,) = worker._scratch.journal.iterdir()
    assert lines == segment.read_bytes()


@pytest.mark.slow
def test_a_worker_whose_shared_server_hangs_says_so_instead_of_waiting(hired: Any, server: FakeVllm) -> None:
    released = threading.Event()

    def answer(_: dict[str, Any]) -> str:
        released.wait(60)
        return "7"

    server.answer, server.samples = answer, lambda: bool(server.asked) and released.wait(60)
    try:
        worker = hired()
        until(worker, "working")
        worker.exchange(0, [replace(r, adapters={"reasoner": 0, "actor": 0}) for r in requests_of(3)])
        have = 0
        while (report := worker.exchange(have, [])).phase != "ended":
            have = report.end
    finally:
        released.set()
    assert report.failure is not None
    kind, message = report.failure
    assert kind == "ServingError"
    assert re.search(r"hangs: 3 calls wait, no answer in 2 s", message)
    assert report.tally.outcomes == {}  # nothing ended


def requests_of(episodes: int) -> list[EpisodeRequest]:
    return plan_episodes(TASKS, episodes, 1, seed=0, **COMMON | {"run_id": "collect"})


def root(outcome: str, reason: str | None = None, run: str = "collect", trace: str = "t1") -> SpanRow:
    attributes = {c.OPERATION: c.INVOKE_WORKFLOW, c.RUN_ID: run, c.TASK_ID: "sum", c.SAMPLE: 2, c.OUTCOME: outcome}
    if reason is not None:
        attributes[c.OUTCOME_REASON] = reason
    return SpanRow(trace, "s1", None, "run", c.INVOKE_WORKFLOW, 1, 2, "ok", None, "v", attributes)


KEY = ("sum", 2, None, None, None)
REWARD = Reward("t1", "reward", 1.0, "a:r", 3)


@pytest.mark.parametrize(
    ("records", "done"),
    [
        ([root("terminated"), REWARD], True),
        ([REWARD, root("terminated")], True),
        ([root("terminated")], False),
        ([root("terminated"), replace(REWARD, scope="agent", node="actor")], False),
        ([root("terminated"), replace(REWARD, episode_id="t2")], False),
        ([root("truncated", "longer than 3 s")], True),
        ([replace(REWARD, source=OF_LIMIT), root("truncated", "longer than 3 s")], True),
        ([root("truncated", "cancelled")], False),
        ([root("failed", "KeyError: 'x'"), REWARD], False),
    ],
    ids=[
        *("rewarded", "reward-first", "no-reward", "agent-reward", "other-reward"),
        *("truncated", "limit-reward-first", "cancelled", "failed"),
    ],
)
def test_a_request_is_done_by_the_records_that_are_filed(tmp_path: Path, records: list[Any], done: bool) -> None:
    filing = Filing(Journal(tmp_path), "collect")
    lines = b"".join(map(line_of, records))
    filing.add(lines, "worker 1")
    filing.sync()
    assert filing.is_done(KEY) == done
    (segment,) = tmp_path.iterdir()
    assert segment.read_bytes() == lines


def test_a_fork_does_not_end_the_request_of_the_chain(tmp_path: Path) -> None:
    filing, chain = Filing(Journal(tmp_path), "collect"), root("terminated")
    fork = replace(chain, attributes={**chain.attributes, c.PARENT_EPISODE: "p", c.FORK_ACTION: "y"})
    filing.add(b"".join(map(line_of, [fork, REWARD])), "worker 1")
    assert not filing.is_done(KEY)
    assert filing.is_done((*KEY[:-1], ForkPoint("p", "y")))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (line_of(root("terminated")).replace(b"sum", b"sun"), "worker 1 sent a damaged line"),
        (line_of(root("terminated"))[:-1], "worker 1 sent a damaged line"),
        (line_of(AdapterRow("n", 9, None, "there", "a", "b", 1)), "worker 1 sent a AdapterRow"),
        (line_of(root("terminated", run="train")), "an episode of the run 'train', not 'collect'"),
    ],
    ids=["damaged", "torn", "adapter", "other-run"],
)
def test_what_no_worker_records_is_not_filed(tmp_path: Path, lines: bytes, message: str) -> None:
    filing = Filing(Journal(tmp_path), "collect")
    with pytest.raises(ClusterError, match=message):
        filing.add(line_of(REWARD) + lines, "worker 1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"serve": {"attach": "http://127.0.0.1:1"}}, "use ray.endpoints"),
        ({"serve": {"port": 8000}}, "serve.port: several workers"),
        ({"ray": {"working_dir": "no/such"}}, "ray.working_dir: there is no folder 'no/such'"),
    ],
    ids=["attach", "port", "folder"],
)
def test_what_cannot_work_on_a_cluster_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    graph = {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}
    where = {"run": str(tmp_path / "run"), "graph": graph, "collect": {"engine": "ray"}}
    with pytest.raises(ConfigError, match=message):
        collect(BridgeConfig.model_validate(where | changes), Reporter(Console(quiet=True)), resume=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "on_cpu", "is_refused"),
    [
        ({}, False, True),
        ({"workers": 1}, False, False),
        ({"gpus_per_worker": 1}, False, False),
        ({"gpus_per_worker": 0.5}, False, False),
        ({"endpoints": ["http://127.0.0.1:1"]}, False, False),  # whose cards are not ours to give
        ({}, True, False),
    ],
    ids=["no cards", "one worker", "a card", "half a card", "servers that run", "a CPU build"],
)
def test_workers_do_not_start_servers_on_cards_that_nobody_set_aside(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], on_cpu: bool, is_refused: bool
) -> None:
    monkeypatch.setattr(worker_module, "vllm_runs_on_cpu", lambda: on_cpu)
    with (
        pytest.raises(ConfigError, match=r"^ray\.gpus_per_worker is 0, .* Set it to 1") if is_refused else nullcontext()
    ):
        worker_module.refuse_server_without_card(RayOptions.model_validate(options))


def test_on_this_machine_alone_that_is_known_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "vllm_runs_on_cpu", lambda: False)
    graph = {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}
    config = BridgeConfig.model_validate({"run": str(tmp_path / "run"), "graph": graph, "collect": {"engine": "ray"}})
    with pytest.raises(ConfigError, match=r"^ray\.gpus_per_worker is 0"):
        collect(config, Reporter(Console(quiet=True)), resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_was_given_the_trainer_s_card_ends_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "names_to_uuids", lambda _: frozenset({"GPU-a"}))
    config = {"graph": {"app": "no:such", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}}
    for taken, failure in (
        (("GPU-a",), "ClusterError: this worker was given card GPU-a, on which the command trains: start Ray there"),
        (("GPU-b",), "GraphError"),  # goes on to the app, which there is not
    ):
        worker = Worker(Assignment(1, config, None, None, {}, taken_cards=taken))
        try:
            while (report := worker.exchange(0, [])).phase != "ended":
                pass
        finally:
            worker.stop()
        assert report.failure is not None
        assert ": ".join(report.failure).startswith(failure)


def test_without_ray_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    graph = {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}
    config = BridgeConfig.model_validate({"graph": graph, "collect": {"engine": "ray"}})
    with pytest.raises(ConfigError, match=r"pip install 'marft-bridge\[ray\]'"):
        collect(config, Reporter(Console(quiet=True)), resume=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key_env": "KEY"}, "api_key_env applies to endpoints only"),
        ({"endpoints": ["127.0.0.1:8000"]}, "is not an address like http"),
        ({"endpoints": ["http://gpu7:8000"], "api_key_env": "KEY"}, "a key does not go to another machine over http"),
        ({"workers": 0}, "greater than or equal to 1"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayOptions.model_validate(options)


def test_lines_of_segments_that_the_driver_has_are_sent_once_and_their_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [Reward("e", "reward", float(number), "test", number) for number in range(100, 120)]
    line_bytes = len(line_of(rewards[0]))
    monkeypatch.setattr("trace_store.journal.SEGMENT_BYTES", 4 * line_bytes)
    monkeypatch.setattr(worker_module, "CHUNK_BYTES", 3 * line_bytes)
    worker = worker_module.Worker.__new__(worker_module.Worker)  # without its thread and its app
    worker._scratch, worker._deleted_bytes = RunFolder(tmp_path), 0
    assert worker._lines_from(0) == (b"", True)
    journal, sent = Journal(worker._scratch.journal), b""
    for reward in rewards:
        journal.append(reward)
        journal.sync()
        if reward.created_ns % 3 == 0:  # so that the driver is behind, and catches up
            lines, _ = worker._lines_from(len(sent))
            sent += lines
    while True:
        lines, is_complete = worker._lines_from(len(sent))
        sent += lines
        if is_complete:
            break
    assert sent == b"".join(map(line_of, rewards))
    worker._lines_from(len(sent))
    assert (
        len(list(worker._scratch.journal.iterdir())) == 1
    )  # 5 segments of 4: the last one is not let go by a newer one
    journal.close()
