"""A model's work -> the passes of each process that shares it, in step with the others' where layers are dealt out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from trainers.common.workers import Workers
from trainers.scoring.model import PolicyModel

X = TypeVar("X")


def scoring_passes(model: PolicyModel, workers: Workers, batches: Sequence[X]) -> Iterator[X]:
    """This process's share of batches that each take one pass without a gradient.

    With a sharded base the processes must all come to the end: one whose share is smaller makes a pass for nobody.
    """
    for batch in workers.turns(batches):
        if batch is not None:
            yield batch
        else:
            with torch.no_grad():
                model.idle_pass(None)
