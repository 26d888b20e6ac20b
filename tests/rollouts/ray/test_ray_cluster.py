"""Owns: collecting on a Ray cluster that somebody else started, of several nodes.

- Collectors are spread over the nodes; what they record comes back; the cluster is there afterwards, without them.
- The app goes to the nodes with `ray.working_dir`, without what is never sent; or they work in the command's folder.
- A node that goes away in mid-run loses only its unfinished episodes, whatever Ray says of it; who finds no place is
  said, and the others go on.
- An address where nothing is, or that is none, is one line; so is what a node lacks.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from support.duo_rig import TASKS
from support.fake_vllm import FakeVllm, running
from support.fault_server import write_model
from support.paths import ROOT
from support.ray_rig import CPUS, SURROUNDINGS, SomebodysCluster, cluster_in

from marft_bridge import cli
from marft_bridge.common.errors import ClusterError
from marft_bridge.config.ray import RayOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes
from marft_bridge.rollouts.ray.driver import Driver
from marft_bridge.rollouts.ray.messages import Assignment, Report
from marft_bridge.rollouts.ray.worker import Worker
from trace_store import conventions as c
from trace_store.journal import Journal, line_of
from trace_store.records import Reward, SpanRow, Trajectory
from trace_store.store import TraceStore

PATIENCE_S = 120  # of the stand-in for a model server, until both workers ask it

APP = '''
"""An app in two files; its reward says where it was computed."""
import os
from pathlib import Path
from typing import TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from words_of_the_app import ASK


class State(TypedDict, total=False):
    question: str
    answer: str


def build(model: BaseChatModel):
    async def adder(state: State) -> State:
        return {"answer": (await model.ainvoke(ASK.format(state["question"]))).text}

    graph = StateGraph(State)
    graph.add_node("adder", adder)
    graph.add_edge(START, "adder")
    graph.add_edge("adder", END)
    return graph.compile()


tasks = [{"id": f"t{n}", "question": f"{n} + 1?"} for n in range(12)]


def reward(task, state):
    unsent = Path(__file__).with_name("runs") / "unsent"
    return {"reward": 1.0, "raylet": float(os.getppid()), "unsent": float(unsent.exists())}
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SomebodysCluster]:
    """Its processes work in a folder where nothing of an app is."""
    with cluster_in(tmp_path_factory.mktemp("elsewhere"), {"LAB_KEY": "secret", "PYTHONPATH": str(ROOT)}) as found:
        yield found


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with running(FakeVllm(key="secret")) as server:
        yield server


class Place:
    """The folder in which a user starts the command."""

    def __init__(self, folder: Path, server: FakeVllm) -> None:
        self.folder, self.server = folder / "mine", server
        self.model = write_model(folder / "model")
        (self.folder / "runs").mkdir(parents=True)
        (self.folder / "runs/unsent").touch()
        (self.folder / "sums_of_the_app.py").write_text(APP)
        (self.folder / "words_of_the_app.py").write_text('ASK = "What is {}"\n')

    def configure(self, address: str, episodes: int, in_flight: int, **ray: Any) -> None:
        options = {"address": address, "endpoints": [self.server.url], "api_key_env": "LAB_KEY", **ray}
        said = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
        (self.folder / "bridge.toml").write_text(
            f"""
run = "runs/try"
[graph]
app = "sums_of_the_app:build"
nodes = ["adder"]
tasks = "sums_of_the_app:tasks"
reward = "sums_of_the_app:reward"
[model]
path = {json.dumps(str(self.model))}
[collect]
engine = "ray"
episodes = {episodes}
in_flight = {in_flight}
[ray]
{said}"""
        )

    def collect(self) -> str:
        """What the command says, in a process of its own."""
        environment = {**os.environ, **SURROUNDINGS, "LAB_KEY": "secret", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        command = [sys.executable, "-m", "marft_bridge", "collect"]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def episodes(self) -> list[Trajectory]:
        """Those that count: one whose worker was lost between its end and its reward is run again."""
        with TraceStore.open(self.folder / "runs/try/store.duckdb") as store:
            return [found for found in store.trajectories(run_ids=["collect"]) if found.rewards]


@pytest.fixture
def place(tmp_path: Path, server: FakeVllm) -> Place:
    return Place(tmp_path, server)


def finished(episodes: Sequence[Trajectory]) -> Counter[tuple[str, int]]:
    return Counter((e.episode.task_id, e.episode.sample) for e in episodes if e.episode.outcome == "terminated")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_collectors_spread_over_the_nodes_of_a_cluster_that_stays(cluster: SomebodysCluster, place: Place) -> None:
    cluster.have_nodes(2)
    assert CPUS == 2  # so both collectors would find a place on one node
    raylets = list(cluster.raylets)
    together, began = threading.Barrier(2), iter(range(1000))

    def answer(_: dict[str, Any]) -> str:
        if next(began) < 2:  # each collector runs one episode at a time: neither is done before the other one is there
            together.wait(PATIENCE_S)
        return "5"

    place.server.answer = answer
    place.configure(cluster.address, episodes=10, in_flight=1, workers=2, working_dir=".")
    said = place.collect()
    assert "collected 10 terminated; 10 of 10 actions trainable" in said
    episodes = place.episodes()
    assert (finished(episodes).total(), set(finished(episodes).values())) == (10, {1})
    assert {e.team_reward("raylet") for e in episodes} == set(raylets)
    assert {e.team_reward("unsent") for e in episodes} == {0.0}  # they worked in a copy, which lacks the run folders

    cluster.have_nodes(2)  # its owner still reaches it
    assert cluster.raylets == raylets
    assert all(psutil.pid_exists(pid) for pid in raylets)
    deadline = time.monotonic() + 60
    while collectors_below(raylets):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def collectors_below(raylets: Sequence[int]) -> list[str]:
    """What Ray calls the processes of our actors on these nodes."""
    names = []
    for raylet in raylets:
        for process in psutil.Process(raylet).children():
            try:
                names.append(process.name())
            except psutil.NoSuchProcess:
                continue
    return [name for name in names if name.startswith("ray::Worker")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_goes_away_loses_its_unfinished_episodes_to_another(
    cluster: SomebodysCluster, place: Place
) -> None:
    cluster.have_nodes(2)
    lock, busy, taken = threading.Condition(), [0], threading.Event()

    def answer(_: dict[str, Any]) -> str:
        """Takes a node away when some episodes are done, and each collector is in the middle of others."""
        with lock:
            busy[0] += 1
            lock.notify_all()
            assert taken.is_set() or lock.wait_for(lambda: busy[0] > 2 or taken.is_set(), PATIENCE_S)
            if len(place.server.asked) > 12 and not taken.is_set():
                cluster.have_nodes(1)
                taken.set()
        time.sleep(0.05)
        with lock:
            busy[0] -= 1
        return "5"

    place.server.answer = answer
    place.configure(cluster.address, episodes=36, in_flight=2, workers=2)
    said = place.collect()
    assert taken.is_set()
    lost = [line for line in said.splitlines() if re.search("[1-9][0-9]* unfinished episodes go to another", line)]
    assert len(lost) == 1, said
    assert ") died: " in lost[0]
    episodes = place.episodes()
    assert (finished(episodes).total(), set(finished(episodes).values())) == (36, {1})
    assert {e.team_reward("unsent") for e in episodes if e.episode.outcome == "terminated"} == {1.0}


# -- addresses ----------------------------------------------------------------------------------------------------


def test_an_address_where_nothing_is_is_one_line(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in SURROUNDINGS:
        monkeypatch.setenv(name, SURROUNDINGS[name])  # Ray reads them when it is imported, for all tests of a process
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place.configure(address, episodes=2, in_flight=1)
        monkeypatch.chdir(place.folder)
        assert cli.run(["collect"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"ray.address: nothing answers at {address} (Connection refused); is the cluster up, and is this" in line
    assert not (place.folder / "runs/try").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://127.0.0.1:10001", "is that of Ray's client, which is not supported: start the command on a machine"),
        ("local", "'local' is not of the form HOST:PORT, as `ray start --head` shows it; or give 'auto'"),
        ("127.0.0.1", "not of the form HOST:PORT"),
        ("127.0.0.1:0", "not of the form HOST:PORT"),
        ("127.0.0.1:70000", "not of the form HOST:PORT"),
        ("::1:6379", "not of the form HOST:PORT"),
        ("", "not of the form HOST:PORT"),
    ],
)
def test_what_is_no_address_of_a_cluster_is_refused(address: str, message: str) -> None:
    with pytest.raises(ValueError, match="address") as raised:
        RayOptions(address=address)
    assert message in str(raised.value)


@pytest.mark.parametrize("address", ["auto", "head:6379", "127.0.0.1:6379", "[::1]:6379", None])
def test_an_address_of_a_cluster_is_taken_as_it_is(address: str | None) -> None:
    assert RayOptions(address=address).address == address


# -- what a node lacks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "changes", "failure"),
    [
        (
            "gone",
            {},
            "ClusterError: cannot work in '{folder}', the folder of the command: No such file or directory; have it on "
            "this machine under the same path, or send a folder with ray.working_dir",
        ),
        (
            "there",
            {"app": "sums.py:build"},
            "GraphError: graph.app: there is no file 'sums.py' (looked for in '{folder}'; the command's machine has "
            "it: install it on this one, share the folder, or send one with ray.working_dir)",
        ),
        (
            "there",
            {"model": "weights"},
            "ServingError: model directory 'weights' does not exist; give a Hugging Face model directory or Hub name "
            "(looked for in '{folder}'; the command's machine has it: ",
        ),
    ],
    ids=["folder", "app", "model"],
)
def test_what_a_node_lacks_is_said_with_where_it_was_looked_for(
    folder: str, changes: dict[str, str], failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    model = str(write_model(tmp_path / "model"))
    config = {
        "graph": {
            "app": changes.get("app", "graphs.math_duo:build"),
            "nodes": ["reasoner"],
            "tasks": "graphs.math_duo:tasks",
            "task_to_input": "graphs.math_duo:task_to_input",
            "reward": "graphs.math_duo:reward",
        },
        "model": {"path": changes.get("model", model)},
    }
    worker = Worker(Assignment(1, config, str(tmp_path / folder), None, {}))
    try:
        while (report := worker.exchange(0, [])).phase != "ended":
            assert report.phase == "starting"
    finally:
        worker.stop()
    assert report.failure is not None
    assert ": ".join(report.failure).startswith(failure.format(folder=tmp_path / folder))


# -- what Ray says of a worker, by a stand-in for Ray that says it ------------------------------------------------


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Ray's own errors."""
    for name in SURROUNDINGS:
        monkeypatch.setenv(name, SURROUNDINGS[name])
    import ray.exceptions

    return ray.exceptions


Answer = Report | BaseException | None
"""None: it never comes."""


class PretendRay:
    """Places actors that answer as they are told: each a function (requests) -> answer."""

    def __init__(self, exceptions: ModuleType, *actors: Callable[[Sequence[EpisodeRequest]], Answer]) -> None:
        self.exceptions, self._actors = exceptions, list(actors)
        self.stopped: list[int] = []
        self.killed: list[int] = []

    def remote(self, _: Any) -> PretendRay:
        return self

    def options(self, **asked: Any) -> Any:
        assert asked["scheduling_strategy"] == "SPREAD"
        return SimpleNamespace(remote=self._place)

    def _place(self, assignment: Assignment) -> Any:
        answer = self._actors.pop(0)
        return SimpleNamespace(
            number=assignment.number,
            exchange=SimpleNamespace(remote=lambda _, requests, *__, **___: Asked(answer(requests))),
            stop=SimpleNamespace(remote=lambda: self.stopped.append(assignment.number)),
        )

    def wait(self, asked: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [each for each in asked if each is None or each.answer is not None]
        return ready, [each for each in asked if each not in ready]

    def get(self, asked: Asked) -> Any:
        if isinstance(asked.answer, BaseException):
            raise asked.answer
        return asked.answer

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.number)

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


class Asked:
    """A reference: two are never equal."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def works() -> Callable[[Sequence[EpisodeRequest]], Answer]:
    """Finishes what it is given at once."""
    sent = 0

    def answer(requests: Sequence[EpisodeRequest]) -> Answer:
        nonlocal sent
        lines = b""
        for request in requests:
            trace = f"{request.task['id']}-{request.sample}"
            said = {c.OPERATION: c.INVOKE_WORKFLOW, c.RUN_ID: "collect", c.TASK_ID: request.task["id"]}
            said |= {c.SAMPLE: request.sample, c.OUTCOME: "terminated"}
            lines += line_of(SpanRow(trace, "s", None, "run", c.INVOKE_WORKFLOW, 1, 2, "ok", None, "v", said))
            lines += line_of(Reward(trace, "reward", 1.0, "a:r", 3))
        sent += len(lines)
        return Report("working", "there, process 7", lines, sent, tuple(request.key for request in requests))

    return answer


def goes_away(with_error: BaseException) -> Callable[[Sequence[EpisodeRequest]], Answer]:
    """Takes requests, and ends with an error before any is done."""

    def answer(requests: Sequence[EpisodeRequest]) -> Answer:
        return with_error if requests else Report("working", "there, process 6")

    return answer


def drive(ray: PretendRay, folder: Path, **options: Any) -> tuple[Driver, list[str]]:
    """The driver after twelve requests, and what it said."""
    said: list[str] = []
    journal = Journal(folder)
    assigned = lambda number: Assignment(number, {}, None, None, {})  # noqa: E731
    driver = Driver(ray, RayOptions(workers=2, **options), 4, assigned, journal, said.append)
    requests = plan_episodes(TASKS, 12, 1, seed=0, run_id="collect", split="train", adapters={})
    try:
        with driver:
            driver.run(requests, lambda done, _: None)
    finally:
        journal.close()
    return driver, said


def lost_objects(known: ModuleType) -> list[BaseException]:
    """What Ray says where a node went away: of its actor, or of an answer that lay there."""
    return [
        known.ActorUnavailableError("the node does not answer", None),
        known.ActorDiedError(),
        known.ObjectLostError("f" * 56, None, ""),
        known.ObjectFetchTimedOutError("f" * 56, None, ""),
        known.NodeDiedError("the node went away"),
    ]


@pytest.mark.parametrize("kind", range(5))
def test_whatever_ray_says_of_a_node_that_went_away_another_worker_goes_on(
    kind: int, known: ModuleType, tmp_path: Path
) -> None:
    ray = PretendRay(known, goes_away(lost_objects(known)[kind]), works(), works())
    driver, said = drive(ray, tmp_path)
    assert driver.done == 12
    (line,) = said
    assert line.startswith("worker 1 (there, process 6) died: ")
    assert line.endswith("; 5 unfinished episodes go to another worker")  # four, and a quarter more
    assert ray.killed[0] == 1


def test_a_worker_that_cannot_be_made_ends_the_command_with_the_reason(known: ModuleType, tmp_path: Path) -> None:
    traceback = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'marft_bridge'\n"
    failed = known.ActorDiedError(known.RayTaskError("Worker.__init__", traceback, ValueError("unknown")))
    ray = PretendRay(known, lambda _: failed, works())
    with pytest.raises(ClusterError) as raised:
        drive(ray, tmp_path)
    assert str(raised.value).startswith("worker 1 could not be made where Ray put it: ModuleNotFoundError: No module ")
    assert "every machine of the cluster needs marft-bridge and what the app imports" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_worker_without_a_place_is_said_once_and_the_others_go_on(known: ModuleType, tmp_path: Path) -> None:
    ray = PretendRay(known, works(), lambda _: None)
    driver, said = drive(ray, tmp_path, start_timeout_s=1e-9)
    assert driver.done == 12
    assert said == [
        "worker 2 could not run episodes after 1e-09 s (ray.start_timeout_s); the cluster has 0 of 4 CPUs free and "
        "0 of 0 GPUs free, a worker asks for 1 CPUs and 0 GPUs; the others go on without it"
    ]
    assert (ray.stopped, ray.killed) == ([1], [1, 2])  # who was never there is not asked to tidy up, and waited for


def test_without_any_worker_that_finds_a_place_the_command_ends(known: ModuleType, tmp_path: Path) -> None:
    ray = PretendRay(known, lambda _: None, lambda _: None)
    with pytest.raises(ClusterError, match=r"^worker 1 could not run episodes after .* a worker asks for 1 CPUs"):
        drive(ray, tmp_path, start_timeout_s=1e-9)
    assert ray.killed == [1, 2]
