"""Lengths and episodes of an adapter's actions to how much each counts in its loss.

A share says what an action, or each of its tokens, counts in the whole round; all shares of a round add up to 1. The
optimiser adds up share * loss over a minibatch and multiplies by the number of minibatches. So a token weighs the
same in whatever minibatch and micro-batch it lands, and accumulation changes no result: a mean over each
micro-batch would make a token of a short one weigh more. It knows nothing of tensors, losses or agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainers.config import Granularity, Weighting


def unit_shares(
    lengths: Sequence[int],
    episodes: Sequence[int],
    weighting: Weighting,
    granularity: Granularity,
) -> list[float]:
    """What each action counts in the round of one adapter; one number per action.

    With E episodes, A actions and T tokens in the round, and n tokens in the action:

        granularity   number                                  episode                       action      token
        "action"      share of the action; they sum to 1      1 / (E actions of episode)    1 / A       n / T
        "token"       share of EACH token; sum n share = 1    1 / (E tokens of episode)     1 / (A n)   1 / T

    `token` over tokens is DAPO's loss (arXiv 2503.14476, equation 8); `action` over tokens is GRPO's.

    Args:
        lengths: sampled tokens of each action, 1 or more.
        episodes: which episode each action belongs to. Episodes in which the adapter did not act do not count.

    Raises:
        ValueError: not one episode per length, or an action without tokens.
    """
    if len(lengths) != len(episodes):
        raise ValueError(f"{len(lengths)} lengths for {len(episodes)} actions with an episode")
    if any(n < 1 for n in lengths):
        raise ValueError("an action has no tokens")
    actions_of = Counter(episodes)
    tokens_of: Counter[int] = Counter()
    for n, episode in zip(lengths, episodes, strict=True):
        tokens_of[episode] += n
    total = sum(lengths)
    shares = []
    for n, episode in zip(lengths, episodes, strict=True):
        if weighting == "episode":
            units = actions_of[episode] if granularity == "action" else tokens_of[episode]
            shares.append(1 / (len(actions_of) * units))
        elif weighting == "action":
            shares.append(1 / len(lengths) if granularity == "action" else 1 / (len(lengths) * n))
        else:
            shares.append(n / total if granularity == "action" else 1 / total)
    return shares
