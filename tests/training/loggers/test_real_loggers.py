"""Owns: the loggers on the real libraries, which are installed for these tests alone (requirements/loggers.txt).

- As they are, they write below the run's folder and nowhere else, and try to reach nothing but this machine: they run
  where there is no other, and the kernel counts what finds no way.
- Each one's own library finds every step once, and after a resume one run; what the user's environment says of
  servers and projects sends nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.own_environment import make_environment
from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
# What a user may have set for other programs: none of it is asked for here.
FOREIGN = {
    "MLFLOW_TRACKING_URI": "http://192.0.2.7:5000",
    "TRACKIO_SERVER_URL": "http://192.0.2.7:7860",
    "TRACKIO_SPACE_ID": "acme/figures",
    "TRACKIO_WEBHOOK_URL": "http://192.0.2.7/hook",
    "WANDB_API_KEY": "0" * 40,
    "WANDB_BASE_URL": "http://192.0.2.7:8080",
    "WANDB_MODE": "online",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the loggers' packages, which sees those of this one behind them."""
    return make_environment(tmp_path_factory.mktemp("loggers"), ROOT / "requirements/loggers.txt")


class Machine:
    """Runs the program where nothing but loopback exists, and nothing but one folder can be written."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python, self.folder = python, folder
        for name in ("home", "work"):
            (folder / name).mkdir()
        (folder / "resolv.conf").write_text("nameserver 192.0.2.53\n")

    def run(self, *arguments: str) -> tuple[Any, int]:
        """What the program printed: its result, and how many packets found no way."""
        read_only = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", tempfile.gettempdir()]
        own = ["--bind", str(self.folder), str(self.folder), "--ro-bind", *[str(self._python.parents[1])] * 2]
        resolver = ["--ro-bind", str(self.folder / "resolv.conf"), "/etc/resolv.conf"]
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
        environment = kept | FOREIGN | {"HOME": str(self.folder / "home"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run(
            [
                *("bwrap", "--unshare-net", *read_only, *own, *resolver, "--chdir", str(self.folder / "work")),
                *(str(self._python), "-W", "ignore", "-m", "support.logger_program", *arguments),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed = json.loads(done.stdout.splitlines()[-1])
        return printed["result"], printed["unreachable"]


@pytest.fixture
def machine(python: Path, tmp_path: Path) -> Machine:
    return Machine(python, tmp_path)


def test_the_kernel_counts_what_finds_no_way(machine: Machine) -> None:
    assert machine.run("reach")[1] >= 2


@pytest.mark.parametrize("name", NAMES)
def test_as_it_is_a_logger_writes_below_the_run_and_reaches_for_nothing(machine: Machine, name: str) -> None:
    run = machine.folder / "runs/duo"
    run.parent.mkdir()
    loggers = json.dumps([name])
    assert machine.run("log", str(run), loggers, "no", "0", "1", "2") == ([], 0)
    assert machine.run("log", str(run), loggers, "yes", "0", "1", "2", "3", "4") == ([], 0)
    found, unreachable = machine.run("read", str(run), name)
    assert found == {"runs": 1, "steps": [[step, step / 4] for step in range(5)], "seed": 0}
    assert unreachable == 0
    stray = [path for place in ("home", "work") for path in (machine.folder / place).rglob("*") if path.is_file()]
    assert stray == []
    assert {path.name for path in run.iterdir()} <= {"loggers", "tensorboard"}
    assert {folder.stat().st_mode & 0o077 for folder in (run, *run.iterdir())} == {0}


def test_all_of_them_go_together_and_training_that_begins_again_has_a_run_of_its_own(machine: Machine) -> None:
    run = machine.folder / "run"
    loggers = json.dumps(NAMES)
    assert machine.run("log", str(run), loggers, "no", "0", "1") == ([], 0)
    assert machine.run("log", str(run), loggers, "no", "0") == ([], 0)
    runs = {name: machine.run("read", str(run), name)[0]["runs"] for name in NAMES}
    assert runs == {"tensorboard": 1, "wandb": 2, "mlflow": 2, "trackio": 2}


def test_a_server_that_is_not_there_costs_one_line(machine: Machine) -> None:
    loggers = [{"name": "mlflow", "tracking_uri": "http://127.0.0.1:9"}, "tensorboard"]
    complaints, unreachable = machine.run("log", str(machine.folder / "run"), json.dumps(loggers), "no", "0", "1")
    (line,) = complaints
    assert line.startswith("logger mlflow failed and is left out, training goes on (")
    assert unreachable == 0
    assert machine.run("read", str(machine.folder / "run"), "tensorboard")[0]["steps"] == [[0, 0.0], [1, 0.25]]
