"""Adapters one after another, or all at once: the order of a round's updates, and what each is given.

Sequential: an adapter's surrogate is weighted by the clipped ratio of those already updated (HAPPO, A2PO; paper,
section 4.1.1). Simultaneous: all against the policies that sampled. Alternating: one adapter a round.

Invariant: an adapter is updated once a round. It knows nothing of rewards, critics or how advantages came about.

Shapes: lists of _T tensors are parallel to the round's items; _A one entry per action of the round.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.adapter_round import AdapterRound
from trainers.advantages import BASELINE, Estimate
from trainers.batch import Round
from trainers.config import TrainerOptions
from trainers.model import Tick
from trainers.policies import Policies
from trainers.sampling import compounded_factor, items_to_ratios
from trainers.schedule import rate_factor
from trainers.scored_round import ScoredRound
from trainers.units import Units


def update_order(
    data: Round, policies: Policies, options: TrainerOptions, rounds: int, generator: torch.Generator
) -> tuple[str, ...]:
    """The adapters to update, in order. Topological: by the mean position of their actions in the episodes.

    Args:
        rounds: on-policy rounds so far, which says whose turn it is with update 'alternating'.
    """
    names = tuple(policies.learners)
    if options.update == "simultaneous":
        return names
    if options.agent_order == "random":
        ordered = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    else:
        positions: dict[str, list[int]] = {name: [] for name in names}
        for episode in data.episodes:
            for i, item in enumerate(episode.actions):
                positions[policies.adapter_of(item.agent)].append(i)
        ordered = sorted(names, key=lambda n: float(np.mean(positions[n])) if positions[n] else math.inf)
        if options.agent_order == "reverse":
            ordered.reverse()
    if options.update == "alternating":
        turn = 0 if options.agent_order == "random" else rounds % len(ordered)
        return (ordered[turn],)
    return tuple(ordered)


def sweep(
    data: Round,
    scored: ScoredRound,
    units: Units,
    normal: Estimate,
    policies: Policies,
    options: TrainerOptions,
    rounds: int,
    generator: torch.Generator,
    tick_of: Callable[[str, int], Tick],
) -> dict[str, dict[str, Any]]:
    """Updates the adapters of a scored round in its order.

    Args:
        normal: normalised advantages over the units of the round.
        rounds: on-policy rounds so far, for the schedules.

    Returns:
        Per adapter: those of `AdapterLearner.improve`, those of `AdapterLearner.measure` (None where nothing needs
        them: after the last adapter, and in updates that are not sequential, without `kl_limit`), lr, factor_mean,
        adapter_norm, adapter_moved.
    """
    factor_A = torch.ones(len(data.items))
    log_factor_E = torch.zeros(len(data.episodes), dtype=torch.float64)
    learned: dict[str, dict[str, Any]] = {}
    limit = None if options.kl_limit is None else options.kl_limit / len(scored.rows_of)
    for name, rows in scored.rows_of.items():
        learner = policies.learners[name]
        before = learner.snapshot()
        rate = learner.set_rate(rate_factor(policies.adapters[name].schedule, rounds))
        given = _to_adapter_round(name, rows, data, scored, units, normal, factor_A, policies, options)
        improved = learner.improve(given, generator, tick_of(f"update {name}", len(rows) * options.epochs))
        factor = float(factor_A[rows].mean()) if rows else None
        others_weigh = options.update == "sequential" and len(learned) + 1 < len(scored.rows_of)
        after: dict[str, float | None] = {"kl_after": None, "step_share": None}
        if rows and (others_weigh or limit is not None):
            phase = partial(tick_of, f"new log-probs {name}", len(rows))
            new_T, measured = learner.measure(given, before, limit, phase)
            after.update(measured)
            if others_weigh:
                ratios_A = items_to_ratios(new_T, given.items, options, given.old_T)
                factor_A = compounded_factor(log_factor_E, ratios_A, rows, data.episode_A, options)
        learned[name] = {**improved, **after, "lr": rate, "factor_mean": factor, **learner.movement(before)}
    return learned


def _to_adapter_round(
    name: str,
    rows: Sequence[int],
    data: Round,
    scored: ScoredRound,
    units: Units,
    normal: Estimate,
    factor_A: Tensor,
    policies: Policies,
    options: TrainerOptions,
) -> AdapterRound:
    device, reference_T = policies.learners[name].model.device, scored.reference_T
    positive = [data.episodes[data.episode_A[i]].reward >= options.nll_threshold for i in rows]
    sources = {source: part_U for source, part_U in normal.by_source.items() if source != BASELINE}
    return AdapterRound(
        items=[data.items[i] for i in rows],
        episode_A=[data.episode_A[i] for i in rows],
        old_T=[scored.old_T[i] for i in rows],
        reference_T=None if reference_T is None else [reference_T[i] for i in rows],
        advantage_U=units.split(normal.advantage_U, rows, device),
        factor_A=factor_A[list(rows)].to(device),
        positive_A=torch.tensor(positive, dtype=torch.float32, device=device),
        source_U={source: units.split(part_U, rows, device) for source, part_U in sources.items()},
    )
