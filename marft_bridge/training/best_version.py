"""Episodes with their version and task -> an estimate of every version's reward, the version to name, whether to stop.

Means of rounds cannot be compared as they are: rounds play different tasks, and the highest of many means is partly
luck. So reward = version effect + task effect + noise, where task effects are draws from one normal distribution
(shrunk towards each other), and a version's effect is that of the version before it plus a normal step (smoothed).
Both variances, in units of the noise's, are averaged over a grid by their restricted likelihood; version 0 and
version 1 begin anywhere, since what is between them is no round. Invariants: everything is in closed form, so equal
episodes name equal versions; the newest version is named unless an earlier one is credibly better. The two
probabilities and the patience were chosen by the runs that tests/training/test_best_version.py invents.

Shapes: _E one entry per episode, _T per task, _V per version, _G per pair of variances. Sources:

- Henderson (1975), Biometrics 31: fixed and random effects by one set of equations.
- Harville (1977), JASA 72: restricted likelihood.
- Durbin and Koopman (2012), "Time series analysis by state space methods", 2.1: the local level model.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marft_bridge.runs.named_version import VersionEvidence
from marft_bridge.statistics.distributions import ndtr

Floats = NDArray[np.float64]

CREDIBLE = 0.6  # an earlier version is named where it is better than the newest with this probability
STOP_PROBABILITY, PATIENCE = 0.9, 3  # rounds stop where it is this surely better, and this many versions back
TASK_VARIANCES = (0.0, 0.1, 0.3, 1.0, 3.0)  # over the noise's
STEP_VARIANCES = tuple(float(10.0**power) for power in np.arange(-3.0, 0.1, 0.5))  # over the noise's
_Z95 = 1.959963984540054
_ROUNDING = 1e-12  # of the rewards' sum of squares: less is no noise, but rounding


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """The team reward that one version of all nodes earned on a task; version 0 is the graph before training."""

    version: int
    task: str
    reward: float | None  # None: it failed, or was cut short without one


@dataclass(frozen=True, slots=True)
class _Sums:
    """All that the model needs to know of the episodes; rewards are centred."""

    count_TV: Floats
    sum_T: Floats
    sum_V: Floats
    squares: float  # of all rewards


@dataclass(frozen=True, slots=True)
class _Fits:
    """The posterior of the version effects for each pair of variances. Weights add up to 1."""

    weight_G: Floats
    effect_GV: Floats
    covariance_GVV: Floats


def episodes_to_evidence(episodes: Sequence[ScoredEpisode], newest: int) -> tuple[VersionEvidence, ...]:
    """What the episodes, by versions 0 to `newest`, say of versions 1 to `newest`, in order.

    A version without episodes inherits the estimate of the one before it, with a step more of uncertainty. An episode
    without a reward counts as the worst that any earned, and as no more than 0: were it left out, a version that seldom
    comes to an end would be judged by the runs that went well.

    Nothing where no version after 0 has an episode, none has a reward, or there are too few to tell noise from effects.
    """
    known_rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if not known_rewards:
        return ()
    worst = min(0.0, *known_rewards)
    with_base = any(episode.version == 0 for episode in episodes)
    free_effects = 2 if with_base else 1  # versions 0 and 1, which begin anywhere
    if not any(episode.version > 0 for episode in episodes) or len(episodes) <= free_effects:
        return ()
    reward_E = np.array([worst if episode.reward is None else episode.reward for episode in episodes])
    is_lost_E = np.array([episode.reward is None for episode in episodes])
    centre = float(reward_E.mean())
    first = 0 if with_base else 1
    version_E = np.array([episode.version - first for episode in episodes])
    tasks = [episode.task for episode in episodes]
    sums = _episodes_to_sums(version_E, tasks, reward_E - centre, newest=newest - first)
    fits = _fit(sums, first_trained=1 - first)
    effect_GV, covariance_GVV = fits.effect_GV[:, 1 - first :], fits.covariance_GVV[:, 1 - first :, 1 - first :]
    estimate_V = fits.weight_G @ effect_GV
    variance_GV = np.einsum("gvv->gv", covariance_GVV)
    deviation_V = np.sqrt(fits.weight_G @ (variance_GV + (effect_GV - estimate_V) ** 2))
    above_V = fits.weight_G @ _above_newest(effect_GV, covariance_GVV)
    rows = []
    for version in range(1, newest + 1):
        rewards = reward_E[version_E == version - first]
        estimate, half_width = float(estimate_V[version - 1]) + centre, _Z95 * float(deviation_V[version - 1])
        rows.append(
            VersionEvidence(
                version=version,
                episodes=rewards.size,
                without_result=int(is_lost_E[version_E == version - first].sum()),
                mean=float(rewards.mean()) if rewards.size else None,
                estimate=estimate,
                low=estimate - half_width,
                high=estimate + half_width,
                above_newest=float(np.clip(above_V[version - 1], 0.0, 1.0)),
            )
        )
    return tuple(rows)


def evidence_to_best(evidence: Sequence[VersionEvidence]) -> VersionEvidence:
    """The version to name: the newest, unless earlier ones are credibly better, and then the best estimate of those."""
    newest = evidence[-1]
    better = [row for row in evidence if row.version < newest.version and row.above_newest >= CREDIBLE]
    return max(better, key=lambda row: (row.estimate, row.version)) if better else newest


def evidence_to_stop(evidence: Sequence[VersionEvidence]) -> bool:
    """Whether a further round no longer pays: the best version is far back, and almost surely better than the newest.

    A version's steps have no direction, so what is expected of going on is the newest version's reward.
    """
    if not evidence:
        return False
    best, newest = evidence_to_best(evidence), evidence[-1]
    return newest.version - best.version >= PATIENCE and best.above_newest >= STOP_PROBABILITY


def _episodes_to_sums(version_E: NDArray[Any], tasks: Sequence[str], reward_E: Floats, newest: int) -> _Sums:
    _, task_E = np.unique(np.array(tasks), return_inverse=True)
    task_count = int(task_E.max()) + 1
    count_TV, sum_T, sum_V = np.zeros((task_count, newest + 1)), np.zeros(task_count), np.zeros(newest + 1)
    np.add.at(count_TV, (task_E, version_E), 1.0)
    np.add.at(sum_T, task_E, reward_E)
    np.add.at(sum_V, version_E, reward_E)
    return _Sums(count_TV, sum_T, sum_V, squares=float(reward_E @ reward_E))


def _fit(sums: _Sums, first_trained: int) -> _Fits:
    """The version effects for every pair of variances.

    Task effects are eliminated: with n_t episodes of task t and the ratio a of the variances, the rewards of a task
    have the precision (I - a / (1 + a n_t) J) / noise. What is left are as many equations as there are versions.
    """
    step_VV = _step_precision(sums.count_TV.shape[1], first_trained)
    steps = int(np.linalg.matrix_rank(step_VV))
    freedom = float(sums.count_TV.sum()) - (step_VV.shape[0] - steps)
    ratio_S = np.array(STEP_VARIANCES)
    count_T = sums.count_TV.sum(axis=1)
    likelihoods, effects, covariances = [], [], []
    for task_variance in TASK_VARIANCES:
        shrink_T = task_variance / (1.0 + task_variance * count_T)
        weighted_TV = sums.count_TV * shrink_T[:, None]
        precision_VV = np.diag(sums.count_TV.sum(axis=0)) - weighted_TV.T @ sums.count_TV
        right_V = sums.sum_V - weighted_TV.T @ sums.sum_T
        squares = sums.squares - float(shrink_T @ sums.sum_T**2)
        posterior_SVV = precision_VV + step_VV / ratio_S[:, None, None]
        inverse_SVV = np.linalg.inv(posterior_SVV)
        effect_SV = inverse_SVV @ right_V
        residual_S = np.maximum(squares - effect_SV @ right_V, _ROUNDING * max(sums.squares, _ROUNDING))
        likelihoods.append(
            -0.5
            * (
                float(np.log1p(task_variance * count_T).sum())
                + steps * np.log(ratio_S)
                + np.linalg.slogdet(posterior_SVV)[1]
                + freedom * np.log(residual_S)
            )
        )
        effects.append(effect_SV)
        covariances.append(inverse_SVV * (residual_S / freedom)[:, None, None])
    likelihood_G = np.concatenate(likelihoods)
    weight_G = np.exp(likelihood_G - likelihood_G.max())
    return _Fits(weight_G / weight_G.sum(), np.concatenate(effects), np.concatenate(covariances))


def _step_precision(versions: int, first_trained: int) -> Floats:
    """Sum of the squared steps between neighbours as a quadratic form [V, V]; the step from version 0 is free."""
    difference = np.zeros((max(versions - 1 - first_trained, 0), versions))
    for row, version in enumerate(range(first_trained, versions - 1)):
        difference[row, version], difference[row, version + 1] = -1.0, 1.0
    return difference.T @ difference


def _above_newest(effect_GV: Floats, covariance_GVV: Floats) -> Floats:
    """P(effect of a version > effect of the newest) for each pair of variances; 0.5 where they are equal."""
    difference_GV = effect_GV - effect_GV[:, -1:]
    variance_GV = np.einsum("gvv->gv", covariance_GVV) + covariance_GVV[:, -1:, -1] - 2 * covariance_GVV[:, :, -1]
    scale_GV = np.sqrt(np.maximum(variance_GV, 1e-300))
    z_GV: Floats = np.where(difference_GV == 0.0, 0.0, difference_GV / scale_GV)
    probability_GV: Floats = ndtr(z_GV)
    return probability_GV
