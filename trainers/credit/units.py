"""A round to its units, the things that have an advantage: its actions (MARFT-A), or their decided tokens (MARFT-T).

Invariant: units are laid end to end in the order of the actions. It knows nothing of how advantages come about.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trainers.advantages.arrays import Floats
from trainers.batch import Round
from trainers.config import Granularity


class Units:
    """Where the units of each action lie among those of the round."""

    def __init__(self, data: Round, granularity: Granularity) -> None:
        # of each action: the positions of its units among its sampled tokens; None where the action is one unit
        self.tokens = [None if granularity == "action" else item.decided for item in data.items]
        counts = [1 if decided is None else len(decided) for decided in self.tokens]
        ends = list(accumulate(counts))
        self.slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.agents = [item.agent for item, count in zip(data.items, counts, strict=True) for _ in range(count)]

    def repeat(self, values_A: Floats) -> Floats:
        """A value of each action to one for each of its units, shape [U]."""
        return np.repeat(values_A, [part.stop - part.start for part in self.slices])

    def split(self, values_U: Floats, rows: Sequence[int], device: torch.device) -> list[Tensor]:
        """The values of some actions, one float32 tensor each."""
        return [torch.from_numpy(values_U[self.slices[i]]).float().to(device) for i in rows]

    def select(self, values_U: Floats, rows: Sequence[int]) -> Floats:
        """The values of some actions, end to end."""
        return np.concatenate([values_U[self.slices[i]] for i in rows]) if rows else np.zeros(0)
