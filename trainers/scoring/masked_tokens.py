"""What engine and trainer say of one call's tokens -> those that a grammar decided more than the policy did.

An engine that is held to a grammar leaves out what the grammar forbids, and shares its probability out among the rest:
its log-prob of a sampled token is the policy's less log Z, Z the part of the policy's probability that was allowed. So
it can only lie above the trainer's, by how much it was cut. Invariant: pure, and without the grammar at hand.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainers.batch import ActionItem

_MOST_EXCESS = math.log(2)  # nats: Z below one half, where the grammar took more than it left


def masked_tokens(item: ActionItem, logp_T: Sequence[float]) -> tuple[int, ...]:
    """Positions in `sampled_ids` of the decided tokens of which less than half of the policy's probability was allowed.

    Empty for a call without a forced token: no grammar held it, and a difference means that another policy answered.
    One decided token is left at least, the one that was cut least.

    Args:
        logp_T: log-probs of the decided tokens by the policy that sampled them, as the trainer computes them, [T].
    """
    if not item.forced or item.behaviour is None:
        return ()
    excess_T = [engine - trainer for engine, trainer in zip(item.behaviour, logp_T, strict=True)]
    least = min(range(len(excess_T)), key=excess_T.__getitem__)
    return tuple(k for t, k in enumerate(item.decided) if excess_T[t] > _MOST_EXCESS and t != least)


def force_tokens(item: ActionItem, positions: Sequence[int]) -> ActionItem:
    """The call with these of its decided tokens forced too."""
    others = [t for t, k in enumerate(item.decided) if k not in positions]
    behaviour = None if item.behaviour is None else tuple(item.behaviour[t] for t in others)
    return replace(item, forced=tuple(sorted({*item.forced, *positions})), behaviour=behaviour)
