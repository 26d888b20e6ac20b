"""What engine and trainer say of one call's tokens -> those that a grammar decided rather than the policy.

An engine that is held to a grammar leaves out what the grammar forbids, and shares its probability out among the rest:
its log-prob of a sampled token is the policy's less log Z, Z the part of the policy's probability that was allowed. So
it can only lie above the trainer's, and is 0 where one token was left. A policy that is certain gives 0 too, and there
the trainer agrees: such a token is the policy's own, and what an update does to it has to be seen.

Invariant: pure, and without the grammar at hand.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainers.batch import ActionItem

_MOST_EXCESS = math.log(2)  # nats, beyond which Z is below one half: the grammar took more than it left
_NOISE = 0.1  # nats; a bfloat16 engine differs by 0.03 on average, and by less where it is certain


def open_forced(item: ActionItem) -> ActionItem:
    """The call with none of its tokens forced: the engine's log-prob of those is 0."""
    if not item.forced or item.behaviour is None:
        return item
    logprob_of = dict(zip(item.decided, item.behaviour, strict=True))
    return replace(item, forced=(), behaviour=tuple(logprob_of.get(k, 0.0) for k in range(len(item.sampled_ids))))


def masked_tokens(item: ActionItem, logp_T: Sequence[float]) -> tuple[int, ...]:
    """Positions in `sampled_ids` of the tokens that a grammar decided.

    Those where it left one token that the policy was not certain of, or took more than half of the policy's
    probability. Empty for a call without a log-prob of 0: no grammar held it, and a difference means that another
    policy answered. One token is left at least, that where the policy was cut least.

    Args:
        item: of whose tokens none is forced (`open_forced`).
        logp_T: the policy's log-probs, as the trainer computes them, [T].
    """
    if item.behaviour is None or 0.0 not in item.behaviour:
        return ()
    excess_T = [engine - trainer for engine, trainer in zip(item.behaviour, logp_T, strict=True)]
    least = min(range(len(excess_T)), key=excess_T.__getitem__)
    return tuple(
        k
        for k, excess in enumerate(excess_T)
        if k != least and excess > (_NOISE if item.behaviour[k] == 0 else _MOST_EXCESS)
    )


def force_tokens(item: ActionItem, positions: Sequence[int]) -> ActionItem:
    """The call with these of its tokens forced, of which none was."""
    if not positions:
        return item
    others = [k for k in item.decided if k not in positions]
    behaviour = None if item.behaviour is None else tuple(item.behaviour[k] for k in others)
    return replace(item, forced=tuple(positions), behaviour=behaviour)
