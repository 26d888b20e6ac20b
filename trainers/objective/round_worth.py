"""Advantages of an adapter's actions in a round -> the part of its learning rate that the round is worth.

AdamW's steps have one size, whatever the size of the gradient. Where one run of 48 failed, the 47 others are better
than expected by a hair, and would be imitated by twice as many whole steps as in a round that tells half from half:
what such steps follow is which tasks were drawn. So steps are as long as the better actions are better. As many fewer
steps of the whole length were tried in their place: half the time, and less learned on a real model.

Invariant: 1, bit for bit, where the better actions weigh no less than the worse ones, or where both signs count in
full. It knows no losses and no optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def advantages_to_share(advantages: Iterable[float], negative_weight: float) -> float:
    """The better actions' advantages over those of the worse ones, as roots of their squares, at most 1.

    Of runs that are right or wrong alike, a share p of them right, the better ones are better by (1 - p) / s and the
    worse ones worse by p / s, with s^2 = p (1 - p). The ratio is then the root of (1 - p) / p, by how many deviations
    a better one is better: 0.33 at 0.9 and 0.15 at 47 of 48. Up to p = 1/2 nothing changes. The same holds inside one
    telling group among many that say nothing, whose advantages are 0, and in whatever unit.

    Args:
        advantages: normalised or not, centred in either case; of all units of one adapter in this round.
        negative_weight: `objective.negative_weight`, what a negative one counts.
    """
    better, worse = list[float](), list[float]()
    for advantage in advantages:
        (better if advantage > 0 else worse).append(advantage * advantage)
    against = math.fsum(worse)
    learned = math.fsum(better) + negative_weight**2 * against
    return min(1.0, math.sqrt(learned / against)) if learned and against else 1.0
