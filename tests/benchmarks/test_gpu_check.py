"""Owns: `make gpu-check` in small, on the CPU, so that it is known to run before a card is at hand.

- Every stage runs, and the report has what a card will be judged by.
- A stage that fails, or comes too late, says so, and the others run; what a CPU cannot tell is null.
- It imports nothing that a bare machine with torch, transformers and peft lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT, TESTS
from support.shared_update import UPDATES

from benchmarks import gpu_check
from benchmarks.gpu_check import Report

BARE = """
import runpy, sys
LACKING = ("duckdb", "langgraph", "langchain_core", "opentelemetry", "vllm", "pytest", "marft_bridge", "rich", "httpx")
for name in LACKING:
    sys.modules[name] = None  # an import of it fails
sys.argv = ["gpu_check", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu_check", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_stage_runs_in_small_on_a_bare_machine(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--sizes", "tiny", "--out", str(tmp_path / "report")]
    run = subprocess.run(
        [sys.executable, "-c", BARE, *options],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    stages = report["stages"]
    states = {name: stage["state"] for name, stage in stages.items()}
    assert states.pop("4-bit") == ("seen" if find_spec("bitsandbytes") else "bitsandbytes is not there")
    assert states == dict.fromkeys(("attention", "ways", "resume", "dealt out", "tiny"), "seen")
    assert stages["dealt out"]["passed"]
    assert stages["attention"]["passed"]
    assert len(stages["attention"]["heads"]) == 4
    assert list(stages["ways"]["ways"]) == list(UPDATES)
    assert len(UPDATES) == 14
    assert {way["gap"] for way in stages["ways"]["ways"].values()} == {0.0}  # the CPU against itself
    assert stages["ways"]["passed"]
    assert stages["resume"]["passed"]
    tiny = stages["tiny"]
    assert tiny["attention"] == "marft_gathered"
    assert tiny["planned_gib"] > 0
    assert (tiny["allocated_gib"], tiny["driver_gib"], report["machine"]["name"], tiny["busy"]) == (None,) * 4
    assert tiny["share"] == pytest.approx(tiny["tflops"] / tiny["matmul_tflops"])
    assert tiny["tokens_per_s"] > 0
    assert 0.5 < sum(row["share"] for row in tiny["profile"]) <= 1
    assert (tmp_path / "report" / "report.md").read_text() == run.stdout[run.stdout.index("# GPU check") :]


def stages_of(tmp_path: Path, deadline: float = 1e9) -> dict[str, Any]:
    def fail() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access")

    report = Report(tmp_path, "cpu", time.monotonic() + deadline)
    report.run("broken", fail)
    report.run("whole", lambda: {"passed": True})
    return report.stages


def test_a_stage_that_fails_is_in_the_report_and_the_next_one_runs(tmp_path: Path) -> None:
    stages = stages_of(tmp_path)
    assert (stages["broken"]["state"], stages["whole"]["passed"]) == ("failed", True)
    page = (tmp_path / "report.md").read_text()
    assert "| broken | failed | - |" in page
    assert "RuntimeError: CUDA error: an illegal memory access" in page
    assert json.loads((tmp_path / "report.json").read_text())["stages"] == stages


def test_a_stage_that_comes_too_late_is_not_begun(tmp_path: Path) -> None:
    assert {stage["state"] for stage in stages_of(tmp_path, deadline=-1).values()} == {"no time was left"}


def test_an_update_that_differs_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One adapter of one way is off by a thousandth."""
    way = {"values": [[1.0]], "critics": [], "metrics": {"agents": 1}, "order": [0], "batches": [1]}
    answers = [dict.fromkeys(UPDATES, way), dict.fromkeys(UPDATES, way) | {"topr": way | {"values": [[1.002]]}}]
    monkeypatch.setattr(gpu_check, "updates", lambda *_: answers.pop())
    compared = gpu_check.compare_ways(tmp_path, "cpu")
    assert not compared["passed"]
    assert [name for name, seen in compared["ways"].items() if not seen["same"]] == ["topr"]


def test_without_a_card_it_says_how_to_try_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--device cpu --sizes tiny" in capsys.readouterr().err


def test_make_runs_it() -> None:
    command = ["make", "--no-print-directory", "-n", "gpu-check"]  # under another make it names its folder, too
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith("-m benchmarks.gpu_check")
