"""Steps that every comparison or every round takes once, beside the plainest pass over the same numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Measurement, bench
from marft_bridge.statistics.paired import paired_difference
from trainers.checks.reality import tensors_to_fingerprint

RUNS = 3


def _least_seconds(work: Callable[[], object]) -> float:
    """Processor seconds, the least of several runs."""
    best = float("inf")
    for _ in range(RUNS):
        began_s = time.process_time()
        work()
        best = min(best, time.process_time() - began_s)
    return best


def _beside(work: Callable[[], object], plain: Callable[[], object]) -> Iterator[Measurement]:
    while True:
        baseline, seconds = _least_seconds(plain), _least_seconds(work)
        yield Measurement(seconds, "s", baseline, seconds / baseline)


@bench
def paired_resamples(_folder: Path) -> Iterator[Measurement]:
    """Ten thousand resamples of a thousand pairs, beside drawing as many numbers. Under a second of processor time."""
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 1000))
    return _beside(lambda: paired_difference("x", a, b, seed=0), lambda: rng.random((10_000, 1000)))


@bench
def frozen_fingerprint(_folder: Path) -> Iterator[Measurement]:
    """The fingerprint of 135 million frozen weights, beside their sum. Under a second of processor time."""
    weights = {str(i): torch.full((576, 1536), 0.1 * i) for i in range(153)}
    return _beside(
        lambda: tensors_to_fingerprint(weights), lambda: [float(weight.sum()) for weight in weights.values()]
    )
