"""A round and its estimates -> what each action was credited with: its advantages under the names of the record.

Invariant: parts by source sum to the advantage, before normalisation; what the loss took is kept beside it. It knows
nothing of where that is kept, or for whom.

Shapes: _U one entry per unit of the action: one (MARFT-A), or one per decided token (MARFT-T).
"""

# ruff: noqa: N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainers.advantages.arrays import Floats
from trainers.advantages.estimate import Estimate
from trainers.batch import Round
from trainers.credit.units import Units


@dataclass(frozen=True, slots=True)
class ActionCredit:
    """What one action of a round was credited with."""

    episode_id: str
    action_id: str
    advantage_U: Floats  # in units of the reward
    normalised_U: Floats  # as the loss took it
    by_source_U: Mapping[str, Floats]  # what each reward, or the baseline, contributed to `advantage_U`
    token_U: tuple[int, ...] | None = None  # the unit's position among the sampled tokens; None: the action is the unit


Credited = Callable[[Sequence[ActionCredit]], None]
"""Is told what the actions of a round were credited with, once the round was learned from."""


def round_to_credits(data: Round, units: Units, estimate: Estimate, normal: Estimate) -> list[ActionCredit]:
    """Every action of the round, in its order."""
    names = [(episode.episode_id, action_id) for episode in data.episodes for action_id in episode.action_ids]
    return [
        ActionCredit(
            episode_id=episode_id,
            action_id=action_id,
            advantage_U=estimate.advantage_U[part],
            normalised_U=normal.advantage_U[part],
            by_source_U={source: values_U[part] for source, values_U in estimate.by_source.items()},
            token_U=token_U,
        )
        for (episode_id, action_id), part, token_U in zip(names, units.slices, units.tokens, strict=True)
    ]
