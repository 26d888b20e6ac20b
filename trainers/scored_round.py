"""A round of actions to what the trainer's own policies say of them, before anything is updated.

Invariant: an adapter is given only actions that a ratio can be formed for: fresh ones that engine and trainer score
alike, and older ones whose weights are worth enough samples. It knows nothing of rewards or advantages.

Shapes: lists of _T tensors are parallel to the round's items, one entry per sampled token; _A one entry per action.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.batch import Round
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.model import Tick
from trainers.policies import Policies
from trainers.reality import logprob_gap
from trainers.replay_gate import gate_actions
from trainers.sampling import Sampling, items_to_ratios, items_to_sampling

_SPOT_CHECKS = 8  # actions per adapter and round that are scored again when the engine's log-probs are taken
_ENGINE_GAP = 0.01  # nats per token; a float32 engine differs by 1e-5, a bfloat16 one by 3e-2


@dataclass(frozen=True, slots=True)
class ScoredRound:
    """The adapters whose turn it is, their actions, and log pi_old of these. Tensors are on the models' devices."""

    rows_of: Mapping[str, list[int]]  # adapter -> positions of its actions, in the order of the updates
    old_T: Sequence[Tensor]  # by position; empty for actions of other adapters
    sampling: Mapping[str, Sampling]  # by agent
    refused: Mapping[str, int]  # replayed actions that were left out, by reason


def score_round(
    data: Round,
    order: Sequence[str],
    policies: Policies,
    options: TrainerOptions,
    tick_of: Callable[[str, int], Tick],
) -> ScoredRound:
    """log pi_old of the actions of some adapters, what may be learned from, and how engine and trainer differ.

    Raises:
        TrainError: engine and trainer score fresh actions differently.
    """
    rows_of = {name: data.of(policies.adapters[name].agents) for name in order}
    old_T, sampling = _old_logprobs(data, rows_of, policies, options, tick_of)
    kept, refused = _gate_rows(data, rows_of, old_T, options)
    return ScoredRound(kept, old_T, sampling, refused)


def _old_logprobs(
    data: Round,
    rows_of: Mapping[str, Sequence[int]],
    policies: Policies,
    options: TrainerOptions,
    tick_of: Callable[[str, int], Tick],
) -> tuple[list[Tensor], dict[str, Sampling]]:
    """log pi_old of every action, each shape [T of the action], and how engine and trainer differ, by agent."""
    from_engine = options.proximal == "engine"
    old_T: list[Tensor] = [torch.empty(0)] * len(data.items)
    sampling: dict[str, Sampling] = {}
    for name, rows in rows_of.items():
        learner = policies.learners[name]
        scored = list(rows)
        if from_engine:
            scored = scored[:: max(1, len(rows) // _SPOT_CHECKS)][:_SPOT_CHECKS]
            for i in rows:
                old_T[i] = torch.tensor(data.items[i].behaviour, device=learner.model.device)
        tick = tick_of(f"old log-probs {name}", len(scored))
        ours_T = dict(zip(scored, learner.logprobs([data.items[i] for i in scored], tick=tick), strict=True))
        for agent in policies.adapters[name].agents:
            own = [i for i in rows if data.items[i].agent == agent]
            checked = [i for i in own if i in ours_T]
            sampling[agent] = items_to_sampling(
                [data.items[i] for i in own],
                [data.items[i] for i in checked],
                [ours_T[i] for i in checked],
                options,
            )
            _check_engine(agent, data, checked, ours_T, options)
        if not from_engine:
            for i, logp_T in ours_T.items():
                old_T[i] = logp_T
    return old_T, sampling


def _check_engine(
    agent: str, data: Round, rows: Sequence[int], ours_T: Mapping[int, Tensor], options: TrainerOptions
) -> None:
    """Refuses to train on fresh actions that engine and trainer score differently."""
    fresh = [i for i in rows if not data.episodes[data.episode_A[i]].replayed]
    engine = [data.items[i].behaviour or () for i in fresh]
    gap = logprob_gap(engine, [ours_T[i].tolist() for i in fresh], f"fresh actions of {agent!r}")
    tolerance, advice = options.engine_tolerance, "check which model, adapter and template the server serves"
    if options.proximal == "engine" and tolerance > _ENGINE_GAP:
        tolerance, advice = _ENGINE_GAP, "serve in float32, or set trainer.proximal to 'recomputed'"
    if gap is not None and gap > tolerance:
        raise TrainError(
            f"the engine's log-probs of {agent!r} differ from the trainer's by {gap:.3f} nats a token, more than "
            f"{tolerance:g}: {advice}"
        )


def _gate_rows(
    data: Round, rows_of: Mapping[str, Sequence[int]], old_T: Sequence[Tensor], options: TrainerOptions
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The actions of each adapter without replayed ones whose weights have too small an effective sample size."""
    kept, refused = {}, {}
    for name, rows in rows_of.items():
        old = [i for i in rows if data.episodes[data.episode_A[i]].replayed]
        kept[name] = list(rows)
        if not old:
            continue
        items = [data.items[i] for i in old]
        ratios_A = items_to_ratios([old_T[i] for i in old], items, options)
        weights = ratios_A.clamp(max=options.mismatch_cap).tolist()
        reason = gate_actions(weights, options.replay.min_ess)
        if reason is not None:
            refused[f"replayed action of {name}: {reason}"] = len(old)
            kept[name] = [i for i in rows if i not in set(old)]
    return kept, refused
