"""Lengths and episodes of an adapter's actions to how much each counts in its loss.

A share says what an action, or each of its tokens, counts in the whole round; all shares of a round add up to 1. The
optimiser adds up share * loss over a minibatch and multiplies by the number of minibatches. So a token weighs the
same in whatever minibatch and micro-batch it lands, and accumulation changes no result: a mean over each
micro-batch would make a token of a short one weigh more. It knows nothing of tensors, losses or agents.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from trainers.config import Granularity, Weighting


def unit_shares(
    lengths: Sequence[int],
    episodes: Sequence[int],
    weighting: Weighting,
    granularity: Granularity,
    stands_A: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> list[float]:
    """What each action counts in the round of one adapter; one number per action.

    With E episodes, A actions and T tokens in the round, and n tokens in the action:

        granularity   number                                  episode                       action      token
        "action"      share of the action; they sum to 1      1 / (E actions of episode)    1 / A       n / T
        "token"       share of EACH token; sum n share = 1    1 / (E tokens of episode)     1 / (A n)   1 / T

    Where runs fork others an action counts once for each run that it stands in, times that run's weight, so that a tree
    counts what its runs would if each had been sampled apart.

    `token` over tokens is DAPO's loss (arXiv 2503.14476, equation 8); `action` over tokens is GRPO's.

    Args:
        lengths: sampled tokens of each action, 1 or more.
        episodes: which episode each action belongs to. Episodes in which the adapter did not act do not count.
        stands_A: of each action, the runs that it stands in, with their weights; None: in its episode, with weight 1.

    Raises:
        ValueError: not one episode per length, or an action without tokens.
    """
    if len(lengths) != len(episodes):
        raise ValueError(f"{len(lengths)} lengths for {len(episodes)} actions with an episode")
    if any(n < 1 for n in lengths):
        raise ValueError("an action has no tokens")
    stands = [[(episode, 1.0)] for episode in episodes] if stands_A is None else stands_A
    weight_of: dict[int, float] = {}
    actions_of: dict[int, int] = defaultdict(int)
    tokens_of: dict[int, int] = defaultdict(int)
    for n, runs in zip(lengths, stands, strict=True):
        for run, weight in runs:
            weight_of[run] = weight
            actions_of[run] += 1
            tokens_of[run] += n
    units_of = actions_of if granularity == "action" else tokens_of
    run_count = math.fsum(weight_of.values())
    action_count = math.fsum(weight_of[run] * actions_of[run] for run in weight_of)
    token_count = math.fsum(weight_of[run] * tokens_of[run] for run in weight_of)
    shares = []
    for n, runs in zip(lengths, stands, strict=True):
        standing = math.fsum(weight for _, weight in runs)
        if weighting == "episode":
            shares.append(math.fsum(weight / (run_count * units_of[run]) for run, weight in runs))
        elif weighting == "action":
            shares.append(standing / (action_count * (1 if granularity == "action" else n)))
        else:
            shares.append(standing * (n if granularity == "action" else 1) / token_count)
    return shares
