"""What our own code adds to the start of a program, in processor seconds: wrapping an app, and `--help`."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

from benchmarks.harness import Measurement, bench

RUNS = 5


def processor_seconds(code: str) -> float:
    """Processor seconds of the interpreter on `code`, the least of several runs: what it takes on a quiet machine."""
    best = float("inf")
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return best


def _seconds_beside(code: str, baseline: str) -> Iterator[Measurement]:
    while True:
        without, seconds = processor_seconds(baseline), processor_seconds(code)
        yield Measurement(seconds - without, "s", without, seconds / without)


@bench
def import_beside_langgraph(_folder: Path) -> Iterator[Measurement]:
    """What `from marft_bridge import wrap` adds to a program that imports LangGraph. It should be under 0.6 s."""
    return _seconds_beside("import langgraph.graph; from marft_bridge import wrap", "import langgraph.graph")


@bench
def help_beside_python(_folder: Path) -> Iterator[Measurement]:
    """What `marft-bridge --help` takes more than an empty program. It should be under 0.5 s."""
    return _seconds_beside("from marft_bridge.cli import run; run(['--help'])", "pass")
