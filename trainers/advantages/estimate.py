"""Advantages with the part of each that came from each reward: what every estimator returns, and its normalisation.

Invariant: the parts sum to the advantage, before and after normalisation, because every estimate is linear in the
rewards once its baseline and gain are fixed. It knows nothing of where the numbers came from.

Shapes: _U one entry per unit that is credited: an action (MARFT-A) or a sampled token (MARFT-T) of the round.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.advantages.arrays import NO_SPREAD, Floats, rows_by_key
from trainers.advantages.settings import Normalization

BASELINE = "baseline"
"""The source that is no reward: the critic's values, or the baseline of a group."""

EPSILON = 1e-6  # beside a deviation that is divided by; DeepSeekMath's and Dr. MAS's


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
        earned_alike = return_U is not None and np.ptp(return_U[rows]) <= NO_SPREAD * np.abs(return_U[rows]).max()
        if deviation > NO_SPREAD * np.abs(advantages).max() and not earned_alike:
            gain_U[rows] = 1.0 / (deviation + EPSILON)

    def scaled(part_U: Floats) -> Floats:
        mean_U = np.zeros_like(part_U)
        for rows in groups:
            mean_U[rows] = part_U[rows].mean()
        return gain_U * (part_U - mean_U)

    return Estimate(scaled(estimate.advantage_U), {name: scaled(part) for name, part in estimate.by_source.items()})


def without_noise(
    estimate: Estimate, key_U: Sequence[Hashable], return_U: Floats, least_of: Callable[[Hashable], float]
) -> Estimate:
    """The advantages of those whose returns deviate by less than counts become 0, and so do their parts.

    Dividing by no less than that would not do: an optimiser's step is as long for small advantages as for large ones,
    and goes along the gradients of earlier rounds where this one's are next to nothing.

    Args:
        key_U: whose each unit is; those of one key are compared with each other.
        return_U: what each unit earned; NaN where that is not known, which tells it from all others.
        least_of: of a key, the smallest deviation of returns that counts.
    """
    kept_U: Floats = np.ones_like(estimate.advantage_U)
    for key, rows in rows_by_key(key_U).items():
        if return_U[rows].std() < least_of(key):
            kept_U[rows] = 0.0
    if kept_U.all():
        return estimate
    return Estimate(kept_U * estimate.advantage_U, {name: kept_U * part for name, part in estimate.by_source.items()})
