"""Adapters one after another, or all at once: the order of a round's updates, and what each is given.

Sequential: an adapter's surrogate is weighted by the clipped ratio of those already updated (HAPPO, A2PO); in a game
with sides by that of its own side's, since only these pursue the same reward.
Simultaneous: all against the policies that sampled. Alternating: one adapter a round (the paper's agent-by-agent
update).

Invariant: an adapter is updated once a round. It knows nothing of rewards, critics or how advantages came about.

Shapes: lists of _T tensors are parallel to the round's items; _A one entry per action of the round.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.advantages.estimate import BASELINE, Estimate
from trainers.batch import Round
from trainers.common.spread import spread_rows
from trainers.config import TrainerOptions
from trainers.credit.units import Units
from trainers.objective.adapter_round import AdapterRound
from trainers.objective.improve import improve, measure
from trainers.objective.round_worth import RoundWorth, worth_of_round
from trainers.objective.schedule import rate_factor
from trainers.objective.scored_round import ScoredRound, without_successes
from trainers.objective.trust_region import SLACK, information, next_rate
from trainers.policies.policies import Policies
from trainers.scoring.model import Tick
from trainers.scoring.sampling import add_log_ratios, compounded_factor, items_to_ratios

_PROBES = 64  # calls that a KL is measured on where nothing else needs all of them


def update_order(
    data: Round, policies: Policies, options: TrainerOptions, rounds: int, generator: torch.Generator
) -> tuple[str, ...]:
    """The adapters to update, in order. Topological: by the mean position of their actions in the episodes.

    Args:
        rounds: on-policy rounds so far, which says whose turn it is with update 'alternating'. That order is the same
            in every round: positions differ from one to the next, and who changes places would miss its turn.
    """
    names = tuple(policies.learners)
    if options.objective.update == "simultaneous":
        return names
    is_random = options.experimental.agent_order == "random"
    if options.objective.update == "alternating" and not is_random:
        in_turn = names[::-1] if options.experimental.agent_order == "reverse" else names
        return (in_turn[rounds % len(names)],)
    if is_random:
        ordered = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    else:
        positions: dict[str, list[int]] = {name: [] for name in names}
        for episode in (data if data.forest is None else data.forest.unrolled).episodes:
            for i, item in enumerate(episode.actions):
                positions[policies.adapter_of(item.agent)].append(i)
        ordered = sorted(names, key=lambda n: float(np.mean(positions[n])) if positions[n] else math.inf)
        if options.experimental.agent_order == "reverse":
            ordered.reverse()
    return tuple(ordered[:1] if options.objective.update == "alternating" else ordered)


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What the updates of one scored round share."""

    data: Round
    scored: ScoredRound
    units: Units
    normal: Estimate  # normalised advantages over the units of the round
    policies: Policies
    options: TrainerOptions
    rounds: int  # on-policy rounds so far, for the schedules
    generator: torch.Generator
    tick_of: Callable[[str, int], Tick]
    teacher_T: Sequence[Tensor] | None = None  # by position: a teacher's log-probs, in a round that it scores

    def sampled_rows(self, name: str) -> list[int]:
        """Positions of the adapter's actions whose `old_T` is the policy at the start of the round."""
        return without_successes(self.data, self.scored.rows_of[name], self.options)

    def to_adapter_round(self, name: str, factor_A: Tensor, rows: Sequence[int]) -> AdapterRound:
        """What the adapter `name` learns from in these actions; `factor_A`: their weights by the adapters before it."""
        data, scored = self.data, self.scored
        device, reference_T = self.policies.learners[name].model.device, scored.reference_T
        threshold = self.options.experimental.nll_threshold
        positive = [data.episodes[data.episode_A[i]].reward >= threshold for i in rows]
        stands_A = None if data.forest is None else data.forest.stands_A
        sources = {source: part_U for source, part_U in self.normal.by_source.items() if source != BASELINE}
        return AdapterRound(
            items=[data.items[i] for i in rows],
            episode_A=[data.episode_A[i] for i in rows],
            old_T=[scored.old_T[i] for i in rows],
            reference_T=None if reference_T is None else [reference_T[i] for i in rows],
            advantage_U=self.units.split(self.normal.advantage_U, rows, device),
            factor_A=factor_A.to(device),
            positive_A=torch.tensor(positive, dtype=torch.float32, device=device),
            source_U={source: self.units.split(part_U, rows, device) for source, part_U in sources.items()},
            stands_A=None if stands_A is None else [stands_A[i] for i in rows],
            success_A=self._success_A(rows, device),
            teacher_T=None if self.teacher_T is None else [self.teacher_T[i] for i in rows],
        )

    def _success_A(self, rows: Sequence[int], device: torch.device) -> Tensor | None:  # noqa: N802 - shape suffix
        if self.options.replay.successes == 0:
            return None
        return torch.tensor([self.data.is_replayed(i) for i in rows], dtype=torch.bool, device=device)


def update_in_order(context: UpdateContext) -> dict[str, dict[str, Any]]:
    """Updates the adapters of a scored round in its order.

    Returns:
        Per adapter: those of `improve`, kl_after (k3, mean per token), kl_of_call (k2 of a call) and step_share (None
        where nothing needs them: after the last adapter, and in updates that are not sequential, without `kl_target`),
        kl_target (nats a call; None without `kl_target`), lr, factor_mean, adapter_norm, adapter_moved.
    """
    data, options, rows_of = context.data, context.options, context.scored.rows_of
    factors = _SideFactors(data, options)
    learned: dict[str, dict[str, Any]] = {}
    acting = sum(1 for rows in rows_of.values() if rows)  # who has nothing to learn from leaves its part to the others
    for name, rows in rows_of.items():
        learner = context.policies.learners[name]
        snapshot = learner.snapshot()
        adapter_round = context.to_adapter_round(name, factors.of(rows), rows=rows)
        target = _kl_target(adapter_round, acting, options, absent=_runs_without(data, rows, options))
        if target == 0:  # nothing says how far, so there is no step, and none to look at
            adapter_round = context.to_adapter_round(name, factors.of([]), rows=[])
        schedule = rate_factor(options.experimental.schedule, context.rounds)
        extent = _extent_of_round(adapter_round.advantage_U, learner.kl_rate, options)
        learner.set_rate(extent.rate * schedule)
        tick = context.tick_of(f"update {name}", math.ceil(extent.steps * len(rows) * options.optimizer.epochs))
        improved = improve(
            learner, adapter_round, context.generator, tick=tick, options=options, step_share=extent.steps
        )
        weighs_others = options.objective.update == "sequential" and len(learned) + 1 < len(rows_of)
        measured: dict[str, float | None] = {"kl_after": None, "kl_of_call": None, "step_share": None}
        sampled_rows = context.sampled_rows(name)
        factor_mean = float(factors.of(sampled_rows).mean()) if sampled_rows else None
        if not weighs_others:  # nothing but the KL is asked, and some of the calls tell it
            kinds = [(data.items[i].agent, data.items[i].turn) for i in sampled_rows]
            sampled_rows = [sampled_rows[k] for k in spread_rows(kinds, _PROBES)]
        if sampled_rows and target != 0 and (weighs_others or target is not None):
            phase = partial(context.tick_of, f"new log-probs {name}", len(sampled_rows))
            sampled_round = context.to_adapter_round(name, factors.of(sampled_rows), rows=sampled_rows)
            limit = None if target is None else SLACK * target
            new_T, result, kl_after = measure(learner, sampled_round, snapshot, limit=limit, phase=phase)
            measured = {"kl_after": kl_after, "kl_of_call": result.kl, "step_share": result.share}
            if target is not None:
                learner.kl_rate = next_rate(learner.kl_rate, result.whole_kl, target)
            if weighs_others:
                ratios_A = items_to_ratios(new_T, sampled_round.items, options, old_T=sampled_round.old_T)
                factors.compound(ratios_A, sampled_rows)
        movement = learner.movement(snapshot)
        learned[name] = {**improved, **measured, "kl_target": target, "factor_mean": factor_mean, **movement}
    return learned


def _extent_of_round(advantage_U: Sequence[Tensor], kl_rate: float, options: TrainerOptions) -> RoundWorth:
    """What a round is worth to an adapter; with `kl_target`, which looks at the same, all steps at its own rate.

    Without `kl_target` what that once made of the rate, in a run that was resumed, has no say.
    """
    if options.objective.kl_target is not None:
        return RoundWorth(rate=kl_rate)
    if not advantage_U:
        return RoundWorth()
    advantages = torch.cat(list(advantage_U)).tolist()
    return worth_of_round(advantages, options.objective.negative_weight, options.optimizer.epochs)


class _SideFactors:
    """The compounded ratios of each side's adapters already updated; without sides all agents are of one.

    What an adapter is weighted by is computed at its turn, of its own actions: all together are looked at once.
    """

    def __init__(self, data: Round, options: TrainerOptions) -> None:
        self._options, self._stands_A = options, _stands(data)
        side_of = options.side_of or {}
        self._side_A = [side_of.get(item.agent, "") for item in data.items]
        self._log_factor_E = {
            side: torch.zeros(len(data.episodes), dtype=torch.float64) for side in dict.fromkeys(self._side_A)
        }

    def of(self, rows: Sequence[int]) -> Tensor:
        """What these actions are weighted by so far, in their order."""
        factor_A = torch.ones(len(rows))
        for side, positions in self._sides_to_positions(rows):
            factor_A[positions] = compounded_factor(
                self._log_factor_E[side], [self._stands_A[rows[k]] for k in positions], self._options
            )
        return factor_A

    def compound(self, ratios_A: Tensor, rows: Sequence[int]) -> None:
        """Takes in that an adapter was updated, whose ratios at `rows` these are."""
        for side, positions in self._sides_to_positions(rows):
            stands_A = [self._stands_A[rows[k]] for k in positions]
            add_log_ratios(self._log_factor_E[side], ratios_A[positions], stands_A)

    def _sides_to_positions(self, rows: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The sides that acted at `rows`, with where in them."""
        positions: dict[str, list[int]] = {}
        for k, i in enumerate(rows):
            positions.setdefault(self._side_A[i], []).append(k)
        return list(positions.items())


def _stands(data: Round) -> list[list[tuple[int, float]]]:
    """The runs that each action stands in, with their weights."""
    return [[(e, 1.0)] for e in data.episode_A] if data.forest is None else data.forest.stands_A


def _runs_without(data: Round, rows: Sequence[int], options: TrainerOptions) -> int:
    """How many of the runs that the policies sampled have none of these actions; a run with its forks counts once."""
    sampled_runs = {
        tree
        for tree, episode in zip(data.tree_E, data.episodes, strict=True)
        if not (options.replay.successes and episode.replayed)
    }
    return len(sampled_runs - {data.tree_A[i] for i in rows})


def _kl_target(data: AdapterRound, acting: int, options: TrainerOptions, *, absent: int) -> float | None:
    """How far an adapter should move in a round, in nats a call: its part of what the round says; None: wherever.

    The policy sampled no success of before, so these are not among all that it sampled. Where none of its own actions
    was better than another, a run in which it did not act is one more that went on without: an agent that acts in runs
    that did well, and in no others, was better than those.

    Args:
        acting: adapters that act in the round: a team moves by about the sum of its agents.
        absent: runs in which it did not.
    """
    if options.objective.kl_target is None:
        return None
    mean_A = [float(part_U.mean()) for part_U in data.advantage_U]
    is_own_A = [True] * len(mean_A) if data.success_A is None else (~data.success_A).tolist()
    own_means = [mean for mean, is_own in zip(mean_A, is_own_A, strict=True) if is_own]
    nats = information(own_means) or information([*own_means, *[0.0] * absent]) or information(mean_A)
    return options.objective.kl_target * nats / max(1, acting)
