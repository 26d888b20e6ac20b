"""Successes of earlier rounds -> advantages beside those of the fresh episodes, in a group with them or in none.

What was drawn for having done well is no fair sample, so as a rule it has no part in a baseline, a deviation, a group
or a critic: those are of the fresh episodes alone, whose advantages it does not change. A success is worth what its
action earned beyond their mean, and nothing where the policy does as well by now; in units of their deviation wherever
the fresh advantages are. With `experimental.success_groups` one whose task the round plays is a sample of that task
like the others (LUFFY, arXiv 2504.14945), so that a group of failures beside it says what was better.

Invariant: without groups the entries of fresh units come out as they went in; a success is never pushed down; parts by
source sum to the advantage. Older episodes come after the fresh ones, as `MarftTrainer` joins them.

Shapes: _A one entry per action of the whole round, _U one per unit of it, _E one per episode of it.
"""

# ruff: noqa: N802, N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from trainers.advantages.arrays import NO_SPREAD, Floats, Rows, rows_by_key
from trainers.advantages.estimate import BASELINE, Estimate
from trainers.advantages.settings import Normalization
from trainers.batch import Round, episodes_to_round
from trainers.config import TrainerOptions
from trainers.credit.units import Units


def compared_round(data: Round, options: TrainerOptions) -> Round:
    """The episodes of a round that its estimator compares with each other: all, but those successes of before that are
    in no group."""
    if not options.replay.successes:
        return data
    compared_E = is_compared_E(data, options.experimental.success_groups)
    episodes = [episode for episode, is_compared in zip(data.episodes, compared_E, strict=True) if is_compared]
    return episodes_to_round(episodes, data.drops)


def is_compared_E(data: Round, groups: bool) -> npt.NDArray[np.bool_]:
    """Whether each episode is compared with others where older ones are successes: the fresh ones, and with `groups`
    the successes of their tasks."""
    fresh_tasks = {episode.task_id for episode in data.episodes if not episode.replayed} if groups else set()
    compared = [not episode.replayed or (groups and episode.task_id in fresh_tasks) for episode in data.episodes]
    return np.array(compared, dtype=np.bool_)


def unpunished(estimate: Estimate, data: Round, units: Units) -> Estimate:
    """The same in which no success of before is worse than expected: what the policy does better by now is not
    imitated, and nothing pushes down what another policy said."""
    is_replayed_U = units.repeat(np.array([data.is_replayed(i) for i in range(len(data.items))], dtype=np.float64)) > 0
    kept_U: Floats = np.where(is_replayed_U & (estimate.advantage_U <= 0), 0.0, 1.0)
    return Estimate(kept_U * estimate.advantage_U, {name: kept_U * part for name, part in estimate.by_source.items()})


def append_successes(
    compared: Estimate,
    normal: Estimate,
    data: Round,
    units: Units,
    *,
    return_A: Floats,
    place_A: Sequence[Hashable] | None,
    reward: str,
    mode: Normalization,
    least_of: Callable[[Collection[str]], float],
    in_deviations: bool = False,
    groups: bool = False,
) -> tuple[Estimate, Estimate]:
    """The estimates of a round's compared units, as they came and normalised, to those of all of its units.

    Args:
        units: of the whole round.
        return_A: what each action of the whole round earned.
        place_A: where in its run each stands (`trainers.advantages.returns.run_positions`), with a discount: it is then
            compared with the fresh actions there. None: with all of its agent, or of the batch.
        reward: the source that a success is put down to.
        least_of: of some agents, the smallest deviation of returns that counts (`trainers.credit.spreads`).
        in_deviations: whether the estimator itself divided by a deviation (`Estimator.in_deviations`).
        groups: as of `is_compared_E`.
    """
    replayed_A = np.array([data.episodes[e].replayed for e in data.episode_A], dtype=np.bool_)
    appended_A = ~is_compared_E(data, groups)[list(data.episode_A)]
    agent_A = np.array([item.agent for item in data.items])
    mean_A, scale_A, least_A = np.zeros_like(return_A), np.ones_like(return_A), np.zeros_like(return_A)
    for agent in dict.fromkeys(agent_A[appended_A].tolist()):
        rows = agent_A == agent
        fresh_rows = np.flatnonzero(~replayed_A & (rows if mode != "batch" else True))
        fresh_returns = return_A[fresh_rows]
        if place_A is None:
            mean_A[rows] = fresh_returns.mean() if len(fresh_returns) else 0.0
        else:
            mean_of = {key: return_A[at].mean() for key, at in _rows_by_place(place_A, fresh_rows).items()}
            agent_mean = fresh_returns.mean() if len(fresh_returns) else 0.0  # where no fresh action stands
            mean_A[rows] = [mean_of.get(place_A[i], agent_mean) for i in np.flatnonzero(rows)]
            fresh_returns = fresh_returns - [mean_of[place_A[i]] for i in fresh_rows]
        least = least_of(set(agent_A[fresh_rows].tolist()))
        least_A[rows] = np.maximum(least, NO_SPREAD * np.abs(return_A[rows]))
        if in_deviations or mode != "none":
            spread = float(fresh_returns.std()) if len(fresh_returns) else 0.0
            least = max(NO_SPREAD * np.abs(return_A[fresh_rows]).max(initial=0.0), least)
            deviation = spread if spread > least else 0.0
            excess = return_A[rows & appended_A] - mean_A[rows & appended_A]
            # where all fresh runs earned the same, the best success is worth 1
            scale_A[rows] = deviation or max(float(excess.max()), float(np.finfo(np.float64).tiny))
    is_better_A = appended_A & (return_A - mean_A > least_A)
    earned_A, baseline_A = np.where(is_better_A, return_A, 0.0), np.where(is_better_A, -mean_A, 0.0)
    is_appended_U = units.repeat(appended_A.astype(np.float64)).astype(np.bool_)

    def whole(estimate: Estimate, scale_A: Floats) -> Estimate:
        parts = {reward: units.repeat(earned_A / scale_A), BASELINE: units.repeat(baseline_A / scale_A)}
        by_source: dict[str, Floats] = {}
        for name in {**estimate.by_source, **parts}:
            part_U = parts.get(name, np.zeros(len(is_appended_U))).copy()
            part_U[~is_appended_U] = estimate.by_source.get(name, 0.0)
            by_source[name] = part_U
        advantage_U = parts[reward] + parts[BASELINE]
        advantage_U[~is_appended_U] = estimate.advantage_U
        return Estimate(advantage_U, by_source)

    return whole(compared, scale_A if in_deviations else np.ones_like(scale_A)), whole(normal, scale_A)


def _rows_by_place(place_A: Sequence[Hashable], rows: Rows) -> dict[Hashable, Rows]:
    """Some actions by where they stand."""
    return {place: rows[at] for place, at in rows_by_key([place_A[i] for i in rows]).items()}
