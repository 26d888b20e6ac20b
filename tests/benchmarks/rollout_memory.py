"""Peak memory of what collects and of the server it collects from, 64 episodes in flight.

`marft-bridge collect` runs in a process of its own, as a user starts it. Memory is the proportional set size: pages
that several processes share count once. The baseline is the same processes once the server is ready, before any
episode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.harness import Measurement, bench
from benchmarks.rollout_rig import bench_config, bench_model
from examples.study.run import dict_to_toml

IN_FLIGHT, EPISODES = 64, 192
EVERY_S = 0.5  # the kernel walks through all of a process's pages each time


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of the two, at one time or at their peaks."""

    collector: float
    server: float


@bench
def collector_peak_mib(folder: Path) -> Iterator[Measurement]:
    """Peak memory of `marft-bridge collect` itself at 64 in flight."""
    idle, peak = _collected()
    yield Measurement(peak.collector, "MiB", idle.collector, peak.collector / idle.collector)


@bench
def server_peak_mib(folder: Path) -> Iterator[Measurement]:
    """Peak memory of the model server's processes at 64 in flight, with 1 GiB of KV cache."""
    idle, peak = _collected()
    yield Measurement(peak.server, "MiB", idle.server, peak.server / idle.server)


@cache
def _collected() -> tuple[Memory, Memory]:
    """(idle, peak) of one run, for both benches: it takes minutes, and its memory hardly differs from run to run."""
    with tempfile.TemporaryDirectory(dir="runs/bench", prefix=".memory-") as folder:
        return _run_to_memory(Path(folder))


def _run_to_memory(folder: Path) -> tuple[Memory, Memory]:
    config = folder / "bench.toml"
    model_dir = bench_model().resolve()
    content = bench_config(folder, model_dir, EPISODES, IN_FLIGHT).model_dump(mode="json", exclude_unset=True)
    config.write_text(dict_to_toml(content))
    command = [sys.executable, "-m", "marft_bridge", "collect", "--config", str(config)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ready = threading.Event()
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if "ready, " in line:
                    ready.set()

        reader = threading.Thread(target=read)
        reader.start()
        while not ready.wait(EVERY_S) and process.poll() is None:
            pass
        idle = peak = _memory_of(process.pid)
        while process.poll() is None:
            now = _memory_of(process.pid)
            peak = Memory(max(peak.collector, now.collector), max(peak.server, now.server))
            ready.clear()
            ready.wait(EVERY_S)
        reader.join()
    assert process.returncode == 0, "".join(said)
    return idle, peak


def _memory_of(collector: int) -> Memory:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:
            continue  # it has just ended
    below, waiting = 0.0, list(children.get(collector, ()))
    while waiting:
        process = waiting.pop()
        below += _mib_of(process)
        waiting += children.get(process, ())
    return Memory(_mib_of(collector), below)


def _mib_of(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0  # it has just ended
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
