"""Owns: `train` with learners and rollouts on a Ray cluster of several nodes goes on when one of them goes away.

Whenever that happens, the versions and metrics are the bits of an undisturbed run on one machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.compare_rig import APPS
from support.paths import ROOT, TESTS
from support.ray_rig import SURROUNDINGS, SomebodysCluster, cluster_in
from support.ray_school import LOG, read_asked, write_vllm_package
from support.school_rig import TASKS, learned, save_school_model

from marft_bridge.runs.run_folder import RunFolder, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEARNERS, WORKERS = 3, 2  # a learner is the command; the others are spread, one on each node
CPUS = 4  # of a node: all of them find room on one as well
CONFIG = """
run = "run"
[graph]
app = "apps.py:duo"
nodes = ["reasoner", "actor"]
tasks = "tasks.jsonl"
task_to_input = "apps.py:to_input"
reward = "apps.py:reward"
heldout = 0.25
[model]
path = {model}
[serve]
max_loras = 8
[sampling]
max_tokens = 8
[collect]
episodes = 20
in_flight = 4
[train]
learners = {learners}
rounds = 3
episodes_per_round = 8
stop_early = false
{places}
[train.trainer]
lora = {{ rank = 4 }}
importance = {{ mismatch = "truncate", engine_tolerance = 1000.0 }}
replay = {{ share = 0.5 }}
"""
ON_THE_CLUSTER = 'engine = "ray"\nrollouts = "ray"\n[ray]\nworkers = {workers}\nin_flight = 2\naddress = {address}\n'


class Machine:
    """A folder in which a user starts commands; model servers are stand-ins."""

    def __init__(self, folder: Path, packages: Path, model: Path) -> None:
        folder.mkdir()
        self.folder, self.log, self._model = folder, folder / "asked.jsonl", model
        self.log.touch()
        paths = os.pathsep.join(map(str, (packages, ROOT, TESTS)))
        self.surroundings = {"PYTHONPATH": paths, LOG: str(self.log), "OMP_NUM_THREADS": "1"}
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
        (folder / "apps.py").write_text(APPS)

    def configure(self, places: str = "") -> None:
        text = CONFIG.format(model=json.dumps(str(self._model)), learners=LEARNERS, places=places)
        (self.folder / "bridge.toml").write_text(text)

    def run(self, *command: str) -> str:
        environment = {**os.environ, **SURROUNDINGS, **self.surroundings, "COLUMNS": "300"}
        done = subprocess.run(
            [sys.executable, "-m", "marft_bridge", *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def learned(self) -> dict[str, Any]:
        school: Any = SimpleNamespace(run=self.folder / "run")
        return learned(school)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    write_vllm_package(folder, "from support.ray_school import main\n\nmain()\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def undisturbed(packages: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same run learns on one machine, its learners child processes."""
    machine = Machine(tmp_path_factory.mktemp("here") / "mine", packages, model)
    machine.configure()
    machine.run("collect")
    machine.run("train", "--without-signal")
    return machine.learned()


@pytest.fixture
def machine(packages: Path, model: Path, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "mine", packages, model)


@pytest.fixture
def cluster(machine: Machine, tmp_path: Path) -> Iterator[SomebodysCluster]:
    surroundings = {**machine.surroundings, "RAY_raylet_start_wait_time_s": "300"}  # a busy machine
    with cluster_in(tmp_path, surroundings, cpus=CPUS) as found:
        found.have_nodes(2)
        yield found


def second_round_is_played(machine: Machine) -> bool:
    """Both kinds are there: workers in the middle of their episodes, learners that wait for them."""
    return sum(asked.model == "actor@2" for asked in read_asked(machine.log)) >= 2


def second_round_is_learned(machine: Machine) -> bool:
    """All calls of the second round were answered, and its line of the metrics is not there yet."""
    return sum(asked.model == "actor@2" for asked in read_asked(machine.log)) >= 8


@pytest.mark.parametrize("moment", [second_round_is_played, second_round_is_learned])
def test_a_node_that_goes_away_with_a_learner_and_a_worker_changes_nothing_that_is_learned(
    moment: Callable[[Machine], bool],
    machine: Machine,
    cluster: SomebodysCluster,
    undisturbed: dict[str, Any],
) -> None:
    machine.configure()
    machine.run("collect")
    lines_then: list[int] = []

    def take_a_node_away() -> None:
        deadline = time.monotonic() + 500
        while time.monotonic() < deadline:
            if moment(machine):
                lines_then.append(len(read_metrics(RunFolder(machine.folder / "run").metrics)))
                cluster.have_nodes(1)
                return
            time.sleep(0.01)

    machine.configure(ON_THE_CLUSTER.format(workers=WORKERS, address=json.dumps(cluster.address)))
    taker = threading.Thread(target=take_a_node_away, daemon=True)
    taker.start()
    shown = machine.run("train", "--without-signal")
    taker.join()
    assert lines_then == [2]  # the offline phase and the first round
    assert f"learners: 2 on Ray, {cluster.address}, beside this process" in shown
    (line,) = [line for line in shown.splitlines() if "going on from the last update with another one" in line]
    assert re.match(r"learner [12] of 3 \(.*\) died: ", line)
    assert "resuming after round 1 of 3" in shown
    actual = machine.learned()
    assert [name for name in undisturbed if undisturbed[name] != actual.get(name)] == []
