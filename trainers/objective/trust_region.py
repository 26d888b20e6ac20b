"""What a round says of an adapter's actions -> how far its policy should move in it, as much of its step as stays near
that, and the rate of the next one.

How far: a round in which one run of ten went well knows more that is new than one in which nine did, and says it by
fewer examples. The relative entropy between the better actions, weighted by their advantages, and all that were sampled
is what the best policy that imitates them would be away (the KL of REPS, Peters et al. 2010, and of the E-step of MPO,
Abdolmaleki et al. 2018): -log of the share of the better, where they count alike. Few examples are trusted less.

Clipping ends the gradient of an action that has moved far enough; it does not end the step that moves it there, and
nothing looks at a round's last one. So the step is looked at as a whole and, where it went too far, shortened along its
own line: the backtracking of TRPO (Schulman et al. 2015, appendix C), which HATRPO (Kuba et al. 2022, algorithm 3) does
agent by agent, so that a team's policy moves by a bounded amount. The direction stays the optimiser's, and so does its
state.

The rate follows, up and down, in the manner of PPO's adaptive penalty (Schulman et al. 2017, section 4): how far a
rate moves a policy depends on the model, the length of its calls and how many agents move at once.

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


SLACK = 2.0  # a KL within the target times or divided by this is as it should be; beyond, the step is shortened
_FASTEST = 3.0  # how much a rate changes from one round to the next, at most
_DOUBT = 8.0  # so many examples are trusted by half


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


def information(advantages: Sequence[float]) -> float:
    """What a round says of an adapter's actions, in nats an action: 0 where none was better, or all were alike.

    With w the positive advantages, made to add up to 1, and N the number of actions: sum of w log(N w), times
    n / (n + 8), where n = 1 / (sum of w^2) is how many examples that is worth.

    Args:
        advantages: one per action of the round, good and bad; and 0 for each run that went on without one.
    """
    better = [advantage for advantage in advantages if advantage > 0]
    total = math.fsum(better)
    if total == 0:
        return 0.0
    weights = [advantage / total for advantage in better]
    entropy = math.fsum(w * math.log(len(advantages) * w) for w in weights)
    examples = 1 / math.fsum(w * w for w in weights)
    return max(0.0, entropy) * examples / (examples + _DOUBT)


def next_rate(rate: float, kl: float, target: float) -> float:
    """The factor of an adapter's learning rate in the next round.

    A KL grows as the square of the step, and a step with the rate; so beyond twice the target, and below half of it,
    the rate is multiplied by the root of target by KL, at most by 3 or a third at a time.

    Args:
        rate: the factor of this round.
        kl: of the whole step, before any of it was taken back; 0 says nothing, as no step was taken.
        target: in the same unit; 0 says nothing either.
    """
    if kl == 0 or target == 0 or target / SLACK <= kl <= SLACK * target:
        return rate
    change = math.sqrt(target / kl) if math.isfinite(kl) else 0.0
    return rate * min(_FASTEST, max(1 / _FASTEST, change))
