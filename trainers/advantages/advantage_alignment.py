"""Advantage Alignment: a side's advantages, with what its rival gains counted by how the game went for the side so far.

    A*_t = A_t + beta * gamma * (sum over k < t of gamma^(t - k) A_k) * B_t      Duque et al., arXiv 2406.14662

A_t is the advantage of a side's move at turn t, B_t that of its rivals at the same turn. Where the turns before went
better for the side than expected, a move of now that is good for the rival too becomes likelier, and one that
exploits it less likely: both sides then keep up what serves both. It is meant for games of simultaneous moves, where
turn t is the same moment for all.

Simplified, and ours: A is the side's discounted return less the mean of the other samples of the task at that turn (the
group-relative baseline of "Learning Robust Social Strategies with Large Language Models", whose formula was not at
hand), where the paper has a critic; the sum of the rivals' advantages stands for the rival where there are several; a
rival that is not trained (frozen, or scripted) has no advantage, and adds nothing. A turn is the n-th call of an agent
that is learned from.

B holds all that rivals are paid, prices of their own as well: what a rival pays for a bad reply lowers B at that turn
and before it, and so what a side that has done well learns of its own moves there.

Invariant: the first turn, and a turn at which no rival moved, have their plain advantage. `BASELINE` has the term of
the rivals: it is no reward of the side's.
"""

# ruff: noqa: N803, N806 (shape suffixes; _B: an action in one of the runs that it stands in)
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from trainers.advantages.arrays import Floats, rows_by_key
from trainers.advantages.estimate import BASELINE, Estimate
from trainers.advantages.estimator import BaselineEstimator, Estimated, EstimatorInput, sum_of
from trainers.advantages.group_baselines import Baseline, leave_one_out
from trainers.advantages.grpo import task_of_each_action
from trainers.batch import Round


class AdvantageAlignment(BaselineEstimator):
    """Returns less the mean of the task's other samples at a turn, and the rivals' part."""

    name: ClassVar[str] = "advantage_alignment"
    needs_groups: ClassVar[bool] = True
    needs_sides: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("alignment_beta",)

    def groups(self, data: Round) -> list[Hashable]:
        """Task, turn and agent."""
        turns, agents = (item.turn for item in data.items), (item.agent for item in data.items)
        return list(zip(task_of_each_action(data), turns, agents, strict=True))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """The mean of the other samples."""
        return leave_one_out(returns_A, self.groups(data), data.tree_A)

    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """As the class says, with the rivals' part added."""
        plain = super().estimate(round_input)
        data, settings = round_input.data, self.settings
        return_A = sum_of(round_input.returns_by_source(settings.gamma), len(data.items))
        own_A = self.baseline(return_A, data).advantages(return_A)
        runs, own_B = (data, own_A) if data.forest is None else (data.forest.unrolled, own_A[list(data.forest.row_B)])
        aligned_B = settings.alignment_beta * alignment(own_B, runs, round_input.side_of or {}, gamma=settings.gamma)
        aligned_A = aligned_B if data.forest is None else data.forest.fold(aligned_B)
        part_U = round_input.over_units(aligned_A, settings.gamma_token)
        estimate = plain.estimate
        by_source = {**estimate.by_source, BASELINE: estimate.by_source[BASELINE] + part_U}
        return replace(plain, estimate=Estimate(estimate.advantage_U + part_U, by_source))


def alignment(advantage_A: Floats, data: Round, side_of: Mapping[str, str], *, gamma: float) -> Floats:
    """gamma * (sum over k < t of gamma^(t - k) A_k) * B_t of each action. Shape [A].

    Args:
        side_of: agent -> its side. Where several agents of a side move at a turn, their mean is the side's.
    """
    aligned_A: Floats = np.zeros(len(data.items))
    for rows in rows_by_key(data.episode_A).values():
        moves: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            moves[data.items[row].turn][side_of[data.items[row].agent]].append(float(advantage_A[row]))
        past: dict[str, float] = defaultdict(float)  # side -> the discounted sum over the turns before
        factor_by_move: dict[tuple[int, str], float] = {}
        for turn in range(max(moves) + 1):
            mean_by_side = {side: sum(values) / len(values) for side, values in moves[turn].items()}
            for side in mean_by_side:
                rivals = sum(mean for rival, mean in mean_by_side.items() if rival != side)
                factor_by_move[turn, side] = gamma * past[side] * rivals
            for side in {*past, *mean_by_side}:
                past[side] = gamma * (past[side] + mean_by_side.get(side, 0.0))
        for row in rows:
            aligned_A[row] = factor_by_move[data.items[row].turn, side_of[data.items[row].agent]]
    return aligned_A
