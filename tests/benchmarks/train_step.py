"""The trainer's optimiser step against a naive one on the same actions: speed, memory, share of the machine.

Every ratio is of medians of steps that took turns, so that another process that slows the machine slows both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import Measurement, bench
from marft_bridge.serving.prepare_model import prepare_smollm2

if TYPE_CHECKING:
    from benchmarks.train_work import NaiveUpdate, OurUpdate, Work

REPEATS = 3


def model_folder() -> Path:
    """The model of the demo, converted at first use."""
    return prepare_smollm2(Path(os.environ.get("MARFT_CACHE") or ".cache"))


def make_updates(work: Work) -> tuple[OurUpdate, NaiveUpdate]:
    """Both sides with the same adapters, after one step that is not counted and whose gradients must agree."""
    from benchmarks.train_work import NaiveUpdate, OurUpdate

    ours = OurUpdate(model_folder(), work)
    old = {agent: list(data.old_T) for agent, data in ours.rounds.items()}
    naive = NaiveUpdate(model_folder(), work, old, ours.model)
    expected, found = naive.step(), ours.step()
    for agent, norm in expected.items():
        assert abs(found[agent] - norm) <= 1e-3 * norm, f"{agent}: gradient norm {found[agent]}, naively {norm}"
    return ours, naive


def speeds(make_work: Callable[[], Work]) -> Iterator[Measurement]:
    """Sampled tokens a second."""
    from benchmarks.train_work import sampled_tokens, step_to_seconds

    work = make_work()
    ours, naive = make_updates(work)
    while True:
        pairs = [(step_to_seconds(ours)[0], step_to_seconds(naive)[0]) for _ in range(REPEATS)]
        mine, theirs = (sampled_tokens(work) / median(times) for times in zip(*pairs, strict=True))
        yield Measurement(mine, "tok/s", theirs, mine / theirs)


@bench
def train_vs_naive(folder: Path) -> Iterator[Measurement]:
    """Sampled tokens a second on the demo's batches; the ratio should be at least 4."""
    from benchmarks.train_work import demo_work

    yield from speeds(demo_work)


@bench
def train_vs_naive_unshared(folder: Path) -> Iterator[Measurement]:
    """The same on batches in which no two actions begin alike; the ratio should be at least 2."""
    from benchmarks.train_work import unshared_work

    yield from speeds(unshared_work)


@bench
def train_threads(folder: Path) -> Iterator[Measurement]:
    """Sampled tokens a second with a thread on every core, over those with one thread."""
    import torch

    from benchmarks.train_work import OurUpdate, demo_work, sampled_tokens, step_to_seconds

    work, every = demo_work(), torch.get_num_threads()
    ours = OurUpdate(model_folder(), work)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        return step_to_seconds(ours)[0]

    while True:
        pairs = [(seconds(every), seconds(1)) for _ in range(REPEATS)]
        torch.set_num_threads(every)
        many, one = (sampled_tokens(work) / median(times) for times in zip(*pairs, strict=True))
        yield Measurement(many, "tok/s", one, many / one)


@bench
def train_peak_memory_ratio(folder: Path) -> Iterator[Measurement]:
    """Peak resident memory of a process that takes two steps, with all that it imports; the ratio should be <= 0.5."""
    while True:
        mine, theirs = (peak_mib(side) for side in ("ours", "naive"))
        yield Measurement(mine / theirs, "x", theirs, mine / theirs)


def peak_mib(side: str) -> float:
    """Runs one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train_peak", side, str(model_folder())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))
