"""Finished runs -> docs/benchmarks.json and docs/benchmarks.md: `python -m examples.benchmarks.report --help`.

Invariant: the page follows from benchmarks.json and the tables of `examples.benchmarks.page` alone. What
benchmarks.json holds of a run that is no longer there is kept, so that settings can be run on different machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.benchmarks.page import runs_to_page
from examples.benchmarks.results import FILE, BenchmarkRun, json_to_run, read_run, run_to_json


def merge_runs(stored: Sequence[BenchmarkRun], finished: Sequence[BenchmarkRun]) -> list[BenchmarkRun]:
    """All of them, in the order of their names; where one is in both, that of a run folder."""
    merged = {_name(run): run for run in (*stored, *finished)}
    return [merged[name] for name in sorted(merged)]


def _name(run: BenchmarkRun) -> tuple[str, str, str, str, int]:
    return run.game, run.level, run.model, run.condition, run.seed


def read_runs(path: Path) -> list[BenchmarkRun]:
    """What a benchmarks.json holds; nothing where there is none."""
    if not path.exists():
        return []
    return [json_to_run(content) for content in json.loads(path.read_text(encoding="utf-8"))]


def find_runs(folder: Path) -> list[BenchmarkRun]:
    """The finished runs below the folder of the benchmarks."""
    runs = [read_run(path.parent) for path in sorted(folder.glob(f"*/*/*/{FILE}"))]
    return [run for run in runs if run is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the two files; 2 after a user error."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.report", description="Runs -> their page.")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks"), help="where the run folders are")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where benchmarks.json and benchmarks.md go")
    given = parser.parse_args(arguments)
    try:
        runs = merge_runs(read_runs(given.out / "benchmarks.json"), find_runs(given.folder))
        page = runs_to_page(runs)
    except (KeyError, OSError, TypeError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    text = json.dumps([run_to_json(run) for run in runs], indent=1, allow_nan=False) + "\n"
    for name, content in (("benchmarks.json", text), ("benchmarks.md", page)):
        (given.out / name).write_text(content, encoding="utf-8")
    print(f"{len(runs)} runs: {given.out / 'benchmarks.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
