"""The share of what the machine can multiply that the trainer's optimiser step turns into useful work.

Useful are the operations of matrix products that the step cannot do without, of distinct tokens only: a prefix that
several actions share counts once, as it is computed once, so sharing does not flatter the figure.

- Every linear layer of the backbone, for every distinct token: 2 x inputs x outputs forward, and as much again for the
  gradient of its input, except in the first layer's query, key and value projections, below which nothing is trained.
- Attention, for every distinct token and each that it sees, itself among them: two products forward and four backward
  of 2 x heads x width each; the first layer's keys need no gradient. Nothing masked or computed again counts.
- The adapters' own products, for every distinct token: forward, and the gradients of both matrices and of the input.
- The output layer, for every sampled token: forward, and the gradient of its input.
- Norms, activations, softmax and the optimiser are left out, which a machine does not multiply in.

It is held against the larger of what torch and oneDNN reach with a 2048 x 2048 x 2048 product in the same precision and
threads, measured between the steps of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.flop_count import model_to_shape, rows_to_flops
from benchmarks.harness import Measurement, bench
from benchmarks.train_step import REPEATS, model_folder

if TYPE_CHECKING:
    from benchmarks.train_work import OurUpdate

SIDE = 2048


def useful_flops(update: OurUpdate) -> int:
    """Operations of one step of all agents, as the module's docstring counts them."""
    shape, total = model_to_shape(update.model), 0
    for agent, data in update.rounds.items():
        for batch in update.learners[agent].microbatches(data.items):
            items = [data.items[i] for i in batch.items]
            rows = [item.prompt_ids + item.sampled_ids[:-1] for item in items]
            total += rows_to_flops(shape, rows, sum(len(item.sampled_ids) for item in items))
    return total


def largest_flops_per_s() -> float:
    """What a large product reaches, by torch or by oneDNN."""
    import torch

    from trainers.scoring.fast_layers import linear

    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    best = 0.0
    for product in (torch.nn.functional.linear, linear):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            product(left, right)
            times.append(time.perf_counter() - began)
        best = max(best, 2 * SIDE**3 / median(times))
    return best


@bench
def train_flops_share(folder: Path) -> Iterator[Measurement]:
    """Useful FLOP/s over those of a large product, on the demo's batches; should be at least 0.5."""
    from benchmarks.train_work import OurUpdate, demo_work, step_to_seconds

    ours = OurUpdate(model_folder(), demo_work())
    flops = useful_flops(ours)
    step_to_seconds(ours)
    while True:
        pairs = [(largest_flops_per_s(), flops / step_to_seconds(ours)[0]) for _ in range(REPEATS)]
        limit, reached = (median(values) for values in zip(*pairs, strict=True))
        yield Measurement(reached / limit, "x", limit / 1e9, reached / limit)
