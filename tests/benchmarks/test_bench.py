"""Owns: `make bench` measures what is registered, twice, and leaves a file that tools can read; never its speed."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.paths import ROOT

from benchmarks import harness, trace_overhead
from benchmarks.harness import Figure, Measurement, bench_to_measurements, figures_to_file, measurements_to_figure
from benchmarks.learning import DEMO_REPORT, demo_after_correct, rollouts_to
from marft_bridge.common.errors import BridgeError


def run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *names],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_bench_is_measured_twice_and_cleans_up_and_its_figure_is_the_mean(tmp_path: Path) -> None:
    events: list[str] = []

    def two_numbers(folder: Path) -> Iterator[Measurement]:
        assert folder == tmp_path
        try:
            for value in (2.0, 4.0, 1000.0):
                events.append("measured")
                yield Measurement(value, "us", 10 * value, 1 + value)
        finally:
            events.append("cleaned up")

    measured = bench_to_measurements(two_numbers, tmp_path)
    assert events == ["measured", "measured", "cleaned up"]
    assert measurements_to_figure("two", measured) == Figure("two", value=3.0, unit="us", baseline=30.0, ratio=4.0)
    console = Console(record=True, width=120, file=io.StringIO())
    harness.print_figures(console, {"two": measured})
    assert re.search(r"two +│ 3 +│ us +│ 30 +│ 4 +│ 2 ", console.export_text())  # the spread is 4 - 2


def test_a_new_figure_takes_the_place_of_its_own_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "latest.json"
    figures_to_file([Figure("a", 1.0, "us", 2.0, 1.5), Figure("b", 3.0, "%", 100.0, 1.03)], path)
    figures_to_file([Figure("a", 7.0, "us", 2.0, 4.5)], path)
    assert json.loads(path.read_text()) == [
        {"name": "a", "value": 7.0, "unit": "us", "baseline": 2.0, "ratio": 4.5},
        {"name": "b", "value": 3.0, "unit": "%", "baseline": 100.0, "ratio": 1.03},
    ]


def test_the_overhead_of_recording_is_measured_on_seven_real_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_overhead, "WARM", 1)
    monkeypatch.setattr(trace_overhead, "PAIRS", 3)
    measured = bench_to_measurements(trace_overhead.trace_overhead_us_per_span, tmp_path)
    assert {one.unit for one in measured} == {"us"}
    for one in measured:
        assert one.ratio == pytest.approx(1 + one.value / one.baseline)
    lines = b"".join(path.read_bytes() for path in (tmp_path / "journal").iterdir()).splitlines()
    assert len(lines) == 7 * (1 + 2 * 3)  # one recorded run to warm up, and twice three pairs


@pytest.mark.slow
def test_the_command_knows_the_benches_of_the_project_and_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "nonsense")
    assert done.returncode == 2
    assert "no bench is called nonsense" in done.stdout
    assert "trace_overhead_us_per_span" in done.stdout
    assert "trace_overhead_percent_real_model" in done.stdout


def test_make_bench_runs_the_command(tmp_path: Path) -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "bench", "BENCH=one"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m benchmarks 'one'" in shown


@pytest.mark.slow
def test_the_command_writes_the_file_and_prints_the_table(tmp_path: Path) -> None:
    done = run(tmp_path, "trace_overhead_us_per_span")
    assert done.returncode == 0, done.stderr
    assert re.search(r"trace_overhead_us_per_span .* us ", done.stdout)
    (figure,) = json.loads((tmp_path / "runs" / "bench" / "latest.json").read_text())
    assert list(figure) == ["name", "value", "unit", "baseline", "ratio"]
    assert figure["name"] == "trace_overhead_us_per_span"
    assert figure["ratio"] == pytest.approx(1 + figure["value"] / figure["baseline"], rel=0.5)
    assert [path.name for path in (tmp_path / "runs" / "bench").iterdir()] == ["latest.json"]


def test_rollouts_to_a_level_are_those_of_the_rounds_before_it_is_earned() -> None:
    assert rollouts_to([0.1, 0.3, 0.5], 0.3) == 64
    assert rollouts_to([0.4], 0.3) == 0
    assert rollouts_to([0.1, 0.2], 0.3) == 128


def test_the_demo_s_figure_is_that_of_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BridgeError, match="run `make demo` first"):
        bench_to_measurements(demo_after_correct, tmp_path)
    variants = [{"name": "before", "score": {"mean": 0.125}}, {"name": "after", "score": {"mean": 0.75}}]
    DEMO_REPORT.parent.mkdir(parents=True)
    DEMO_REPORT.write_text(json.dumps({"variants": variants}))
    assert bench_to_measurements(demo_after_correct, tmp_path) == [Measurement(0.75, "share", 0.125, 6.0)]
