"""Advantages with the part of each that came from each reward: what every estimator returns, and its normalisation.

Invariant: the parts sum to the advantage, before and after normalisation, because every estimate is linear in the
rewards once its baseline and gain are fixed. It knows nothing of where the numbers came from.

Shapes: _U one entry per unit that is credited: an action (MARFT-A) or a sampled token (MARFT-T) of the round.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.advantages.arrays import Floats, rows_by_key
from trainers.advantages.settings import Normalization

BASELINE = "baseline"
"""The source that is no reward: the critic's values, or the baseline of a group."""

_EPSILON = 1e-6
_NO_SPREAD = 1e-12  # relative: what float64 leaves of equal advantages


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages of a round, and by reward name (or `BASELINE`) what it contributed; all of shape [U]."""

    advantage_U: Floats
    by_source: dict[str, Floats]


def normalize_estimate(
    estimate: Estimate, agent_U: Sequence[Hashable], mode: Normalization, return_U: Floats | None = None
) -> Estimate:
    """Advantages to zero mean and unit (population) deviation, over the batch or over each agent's units.

    Per agent is Dr. MAS's choice: agents whose rewards have another mean or spread would otherwise inflate each other's
    gradients. Every unit counts once. A source is centred by its own mean and divided by the advantage's deviation, so
    the parts still sum. A single unit, or equal advantages, become 0, and so do their parts; and so do units that all
    earned the same: what spread their advantages have is the error of the critic, which would be blown up to 1.

    Args:
        return_U: what each unit earned; NaN where that is not known, which tells it from all others. None: not known.
    """
    if mode == "none":
        return estimate
    groups = rows_by_key(["all"] * len(agent_U) if mode == "batch" else agent_U).values()
    gain_U: Floats = np.zeros_like(estimate.advantage_U)
    for rows in groups:
        advantages = estimate.advantage_U[rows]
        deviation = advantages.std()
        earned_alike = return_U is not None and np.ptp(return_U[rows]) <= _NO_SPREAD * np.abs(return_U[rows]).max()
        if deviation > _NO_SPREAD * np.abs(advantages).max() and not earned_alike:
            gain_U[rows] = 1.0 / (deviation + _EPSILON)

    def scaled(part_U: Floats) -> Floats:
        mean_U = np.zeros_like(part_U)
        for rows in groups:
            mean_U[rows] = part_U[rows].mean()
        return gain_U * (part_U - mean_U)

    return Estimate(scaled(estimate.advantage_U), {name: scaled(part) for name, part in estimate.by_source.items()})
