"""Owns: runs whose checkpoints are on SQLite; the package is installed for these tests alone (requirements/savers.txt).

- A run that one process recorded is entered by forks in another one, sync and async; they are those of a replay, and
  the app's checkpointer is read and not written.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.own_environment import make_environment
from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the checkpointer's packages, which sees those of this one behind them."""
    return make_environment(tmp_path_factory.mktemp("savers"), ROOT / "requirements/savers.txt")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_whose_checkpoints_are_on_sqlite_is_entered_in_another_process(
    kind: str, python: Path, tmp_path: Path
) -> None:
    def run(phase: str) -> Any:
        program = [str(python), "-W", "ignore", "-m", "support.saver_program", kind, phase, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    run("record")
    assert run("fork") == {"entered": 2, "replayed": True, "is_same": True, "is_read_only": True}
