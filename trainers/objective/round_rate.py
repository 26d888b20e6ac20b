"""Advantages of an adapter's actions in a round -> the part of its learning rate that the round is worth.

AdamW's steps have one size, whatever the size of the gradient. Where one run of 48 failed, the 47 others are better
than expected by a hair, and would be imitated by as many whole steps as in a round that tells half from half: what such
steps follow is which tasks were drawn. So the rate goes down with how little better the better actions were.

Invariant: 1, bit for bit, where the better actions are no more than the worse ones, or where both signs count in full.
It knows no losses and no optimiser.

Shape: _U one entry per unit of the round.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def advantages_to_rate_share(advantage_U: Sequence[float] | Tensor, negative_weight: float) -> float:
    """How large what is learned from is, beside all that the round says: a ratio of root mean squares, at most 1.

    Of runs that are right or wrong alike, a share p of them right, the better ones are better by (1 - p) / s and the
    worse ones worse by p / s, with s^2 = p (1 - p); so with `negative_weight` 0 it is

        1 up to p = 1/2, and the root of (1 - p) / p beyond: 0.33 at 0.9, 0.15 at 47 of 48.

    The unit of the advantages does not matter. What says nothing (an advantage of 0, such as those of a group that all
    earned the same) does not count, so the steps that one telling group takes are as long as those that many take.

    Args:
        advantage_U: normalised or not; of the units that one adapter learns from in this round.
        negative_weight: `objective.negative_weight`, what a negative one counts.
    """
    told = [float(advantage) for advantage in advantage_U if advantage != 0]
    learned = [a if a > 0 else negative_weight * a for a in told if a > 0 or negative_weight > 0]
    if not learned:
        return 1.0
    return min(1.0, _root_mean_square(learned) / _root_mean_square(told))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
