"""An adapter's step of a round -> as much of it as keeps the policy near the one that sampled the round.

Clipping ends the gradient of an action that has moved far enough; it does not end the step that moves it there, and
nothing looks at a round's last one. So the step is looked at as a whole and, where it went too far, shortened along its
own line: the backtracking of TRPO (Schulman et al. 2015, appendix C), which HATRPO (Kuba et al. 2022, algorithm 3) does
agent by agent, so that a team's policy moves by a bounded amount. The direction stays the optimiser's, and so does its
state.

Invariant: afterwards the weights are `start_weights + share * step`, bit for bit those after the step where nothing was
shortened and `start_weights` where no part of the step stays near. It knows no losses and no actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_TRIES = 10  # at the least halving each time, so a thousandth of the step is left at most
_SMALLEST, _LARGEST = 0.1, 0.5  # factor between one try and the next
_BELOW = 0.9  # how far below the limit the next try aims: the KL is a square of the share only near 0


@torch.no_grad()
def backtrack(
    parameters: Sequence[Tensor], start_weights: Sequence[Tensor], kl_of: Callable[[], float], limit: float
) -> tuple[float, float]:
    """Shortens the step from `start_weights` to the parameters' values until their policy is within `limit`.

    Args:
        parameters: changed in place.
        kl_of: measures the policy of the parameters as they are, nats per token; called once for each try.

    Returns:
        The share of the step that is left, 0 to 1, and the KL that was measured with it.
    """
    steps = [parameter - old for parameter, old in zip(parameters, start_weights, strict=True)]
    share = 1.0
    for _ in range(_TRIES):
        kl = kl_of()
        if kl <= limit:
            return share, kl
        aimed = _BELOW * math.sqrt(limit / kl) if math.isfinite(kl) else 0.0
        share *= min(_LARGEST, max(_SMALLEST, aimed))
        for parameter, old, step in zip(parameters, start_weights, steps, strict=True):
            parameter.copy_(old + share * step)
    for parameter, old in zip(parameters, start_weights, strict=True):
        parameter.copy_(old)
    return 0.0, 0.0
