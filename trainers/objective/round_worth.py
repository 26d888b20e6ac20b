"""Advantages of an adapter's actions in a round -> the parts of its steps and of its learning rate that it is worth.

AdamW's steps have one size, whatever the size of the gradient. Where one run of 48 failed, the 47 others are better
than expected by a hair, and would be imitated by twice as many whole steps as in a round that tells half from half:
what such steps follow is which tasks were drawn. So an adapter goes as far as the better actions are better: it goes
through them once more only where they are worth it, and where they are not worth one pass its steps are shorter.

Invariant: all steps at the whole rate, bit for bit, where the better actions weigh no less than the worse ones, or
where both signs count in full; steps times rate are the same whatever `epochs`. It knows no losses and no optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundWorth:
    """What an adapter does of a round. The product of both is how far it goes."""

    steps: float = 1.0  # the part of its `epochs` x minibatches
    rate: float = 1.0  # the part of its learning rate


def worth_of_round(advantages: Iterable[float], negative_weight: float, epochs: int) -> RoundWorth:
    """What the better actions of a round are worth: fewer passes over them first, then shorter steps.

    The first pass is always whole, since every better action is an example of its own. What a further one adds is the
    length of the way, which a round that is worth little is spared, and its time with it.

    Args:
        advantages, negative_weight: as in `advantages_to_share`.
        epochs: `optimizer.epochs`, passes over the better actions.
    """
    share = advantages_to_share(advantages, negative_weight)
    steps = max(share, 1 / epochs)
    return RoundWorth(steps=steps, rate=share / steps)


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
