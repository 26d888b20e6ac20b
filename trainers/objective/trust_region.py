"""An adapter's step of a round -> as much of it as keeps the policy near the one that sampled the round, and the rate
at which the next round's step will.

Clipping ends the gradient of an action that has moved far enough; it does not end the step that moves it there, and
nothing looks at a round's last one. So the step is looked at as a whole and, where it went too far, shortened along its
own line: the backtracking of TRPO (Schulman et al. 2015, appendix C), which HATRPO (Kuba et al. 2022, algorithm 3) does
agent by agent, so that a team's policy moves by a bounded amount. The direction stays the optimiser's, and so does its
state.

The rate follows, in the manner of PPO's adaptive penalty (Schulman et al. 2017, section 4): how far a rate moves a
policy depends on the model, the length of its calls and how many agents move at once. It is lowered and let back up,
never raised above what was set: where few actions teach, a step that is short is as it should be.

Invariant: afterwards the weights are `start_weights + share * step`, bit for bit those after the step where nothing was
shortened and `start_weights` where no part of the step stays near. It knows no losses and no actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TRIES = 10  # at the least halving each time, so a thousandth of the step is left at most
_SMALLEST, _LARGEST = 0.1, 0.5  # factor between one try and the next
_BELOW = 0.9  # how far below the limit the next try aims: the KL is a square of the share only near 0


_AIM = 2.0  # a lowered rate aims at the limit divided by this; below that divided by it again the rate is let back up
_FASTEST = 3.0  # how much a rate changes from one round to the next, at most


@dataclass(frozen=True, slots=True)
class Backtracked:
    """What became of a step. KLs are in the unit of what measured them."""

    share: float  # of the step that is left, 0 to 1
    kl: float  # with that
    whole_kl: float  # of the step as the optimiser made it


@torch.no_grad()
def backtrack(
    parameters: Sequence[Tensor], start_weights: Sequence[Tensor], kl_of: Callable[[], float], limit: float
) -> Backtracked:
    """Shortens the step from `start_weights` to the parameters' values until their policy is within `limit`.

    Args:
        parameters: changed in place.
        kl_of: measures the policy of the parameters as they are; called once for each try.
    """
    steps = [parameter - old for parameter, old in zip(parameters, start_weights, strict=True)]
    share, whole_kl = 1.0, math.nan
    for attempt in range(_TRIES):
        kl = kl_of()
        whole_kl = kl if attempt == 0 else whole_kl
        if kl <= limit:
            return Backtracked(share, kl, whole_kl)
        aimed = _BELOW * math.sqrt(limit / kl) if math.isfinite(kl) else 0.0
        share *= min(_LARGEST, max(_SMALLEST, aimed))
        for parameter, old, step in zip(parameters, start_weights, steps, strict=True):
            parameter.copy_(old + share * step)
    for parameter, old in zip(parameters, start_weights, strict=True):
        parameter.copy_(old)
    return Backtracked(0.0, 0.0, whole_kl)


def next_rate(rate: float, kl: float, limit: float) -> float:
    """The factor of an adapter's learning rate in the next round, at most 1.

    A KL grows as the square of the step, and a step with the rate; so beyond the limit the rate is multiplied by the
    root of limit / 2 by KL, and so it is below a quarter of the limit, at most by 3 or a third at a time.

    Args:
        rate: the factor of this round.
        kl: of the whole step, before any of it was taken back; 0 says nothing, as no step was taken.
        limit: in the same unit.
    """
    aim = limit / _AIM
    if kl == 0 or aim / _AIM <= kl <= limit:
        return rate
    change = math.sqrt(aim / kl) if math.isfinite(kl) else 0.0
    return min(1.0, rate * min(_FASTEST, max(1 / _FASTEST, change)))
