"""A round of actions to what the trainer's own policies say of them, before anything is updated.

Invariant: an adapter is given only actions that a ratio can be formed for: fresh ones that engine and trainer score
alike, and older ones whose weights are worth enough samples. Older ones that are not are taken out of the round before
anybody computes a baseline from it, and so are tokens that a grammar decided. It knows nothing of advantages.

Shapes: lists of _T tensors are parallel to the round's items, one entry per decided token; _A one entry per action.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from trainers.advantages.arrays import rows_by_key
from trainers.batch import ActionItem, Round
from trainers.checks.reality import logprob_gap
from trainers.common.spread import spread_rows
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.policies.policies import Policies
from trainers.scoring.effective_sample_size import gate_actions
from trainers.scoring.masked_tokens import force_tokens, masked_tokens, open_forced
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import Tick
from trainers.scoring.passes import scoring_passes
from trainers.scoring.sampling import Sampling, items_to_sampling, items_to_weights

_SPOT_CHECKS = 8  # actions per agent and round that are scored again when the engine's log-probs are taken
_ENGINE_GAP = 0.01  # nats per token; a float32 engine differs by 1e-5, a bfloat16 one by 3e-2
_UNCORRECTED_GAP = 0.06  # nats per token that nothing need correct for: twice what a bfloat16 engine differs by
_ONE_SIDED = 0.5  # of a gap: beyond, engine - trainer is mostly positive, as rounding never leaves it


@dataclass(frozen=True, slots=True)
class ScoredRound:
    """The adapters whose turn it is, their actions, and log pi_old of these. Tensors are on the models' devices."""

    data: Round  # what may be learned from
    rows_of: Mapping[str, list[int]]  # adapter -> positions of its actions, in the order of the updates
    old_T: Sequence[Tensor]  # by position; empty for actions of other adapters
    reference_T: Sequence[Tensor] | None  # by the base model, likewise; None without a KL penalty
    sampling: Mapping[str, Sampling]  # by agent


def score_round(
    data: Round,
    order: Sequence[str],
    policies: Policies,
    options: TrainerOptions,
    tick_of: Callable[[str, int], Tick],
    reread: Callable[[Mapping[str, str]], Round],
    note: Callable[[ActionItem, Tensor], None] = lambda _item, _features_SH: None,
    newest: int | None = None,
) -> ScoredRound:
    """log pi_old of the actions of some adapters, what may be learned from, and how engine and trainer differ.

    And what the base models say of what may be learned from, where a KL penalty asks for it.

    Args:
        reread: the round again without the replayed actions of some agents (agent -> why), which then count as part of
            the environment.
        note: told what a pass of the base model saw by the way: its hidden states before each sampled token of an
            action, which critics read too; see `PolicyModel.features_at`.
        newest: the version that the adapters are; None: the newest that fresh actions of each name.

    Raises:
        TrainError: engine and trainer score fresh actions differently.
    """
    rows_of = _rows_of(data, order, policies)
    if options.importance.proximal == "recomputed":  # then the trainer says of every call what it thinks of its tokens
        data = _open_forced(data, _current_rows(data, rows_of, newest))
    old_T, ours_T = _old_logprobs(data, rows_of, policies, options=options, tick_of=tick_of)
    if options.experimental.success_traces:
        data = _as_sampled_today(data, old_T)
    if options.importance.proximal == "recomputed":
        data, old_T, ours_T = _force_masked(data, old_T, ours_T, current=_current_rows(data, rows_of, newest))
    for agent in (agent for name in order for agent in policies.adapters[name].agents):
        _check_engine(agent, data, [i for i in ours_T if data.items[i].agent == agent], ours_T=ours_T, options=options)
    refused = _refused_agents(data, rows_of, old_T, policies=policies, options=options)
    if refused:
        read, data = data, reread(refused)
        row_of = {key: i for i, key in enumerate(_keys(read))}
        rows = [row_of[key] for key in _keys(data)]
        data = data.with_items([read.items[row] for row in rows])
        old_T = [old_T[row] for row in rows]
        ours_T = {i: ours_T[row] for i, row in enumerate(rows) if row in ours_T}
        rows_of = _rows_of(data, order, policies)
    sampling = _to_sampling(data, rows_of, ours_T, policies=policies, options=options)
    reference_T = None
    if options.experimental.kl_coef > 0:
        reference_T = _reference_logprobs(data, rows_of, policies, options=options, tick_of=tick_of, note=note)
    return ScoredRound(data, rows_of, old_T, reference_T=reference_T, sampling=sampling)


def without_successes(data: Round, rows: Sequence[int], options: TrainerOptions) -> list[int]:
    """Those of some actions that no success of before is: that one is held against the policy that sampled it, long
    ago, so it tells neither how far this round moves a policy nor how fresh calls were sampled."""
    return [i for i in rows if not (options.replay.successes and data.is_replayed(i))]


def _rows_of(data: Round, order: Sequence[str], policies: Policies) -> dict[str, list[int]]:
    return {name: data.agents_to_rows(policies.adapters[name].agents) for name in order}


def _current_rows(data: Round, rows_of: Mapping[str, Sequence[int]], newest: int | None) -> set[int]:
    """Positions of the fresh actions that no older version of their adapter sampled than the newest.

    What a grammar decided of the others cannot be told from a policy that has changed since.
    """
    current: set[int] = set()
    for rows in rows_of.values():
        version_of = {i: data.items[i].version for i in rows if not data.is_replayed(i)}
        known = [version for version in (newest, *version_of.values()) if version is not None]
        current |= {i for i, version in version_of.items() if version is None or version >= max(known)}
    return current


def _open_forced(data: Round, current: Collection[int]) -> Round:
    """The round in which nothing is forced of the actions that the newest policy sampled."""
    return data.with_items([open_forced(item) if i in current else item for i, item in enumerate(data.items)])


def _force_masked(
    data: Round, old_T: Sequence[Tensor], ours_T: Mapping[int, Tensor], current: Collection[int]
) -> tuple[Round, list[Tensor], dict[int, Tensor]]:
    """Round and log-probs without the tokens that a grammar decided, of the actions that the newest policy sampled."""
    items = [
        force_tokens(item, masked_tokens(item, ours_T[i].tolist())) if i in ours_T and i in current else item
        for i, item in enumerate(data.items)
    ]
    old_T = [_of_decided(logp_T, item) for logp_T, item in zip(old_T, items, strict=True)]
    return data.with_items(items), old_T, {i: _of_decided(logp_T, items[i]) for i, logp_T in ours_T.items()}


def _of_decided(logp_T: Tensor, item: ActionItem) -> Tensor:
    """Log-probs of all sampled tokens to those of the decided ones; as it is where it holds no others."""
    return logp_T[list(item.decided)] if len(logp_T) > len(item.decided) else logp_T


def _keys(data: Round) -> list[tuple[bool, str, str]]:
    """What tells each action of the round from all others, [A]; an old episode may be in a round as a fresh one too."""
    return [
        (episode.replayed, episode.episode_id, action_id)
        for episode in data.episodes
        for action_id in episode.action_ids
    ]


def _old_logprobs(
    data: Round,
    rows_of: Mapping[str, Sequence[int]],
    policies: Policies,
    options: TrainerOptions,
    tick_of: Callable[[str, int], Tick],
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """log pi_old of every action, each shape [T of the action]; and those that the trainer computed, by position."""
    from_engine = options.importance.proximal == "engine"
    old_T: list[Tensor] = [torch.empty(0)] * len(data.items)
    computed_T: dict[int, Tensor] = {}
    for name, rows in rows_of.items():
        learner = policies.learners[name]
        # a success of before is made likelier than when it was sampled, whatever the policy has become since
        scored = without_successes(data, rows, options)
        successes = sorted({*rows} - {*scored})
        # where nobody said how likely that was, than it is today
        unknown = [i for i in successes if data.items[i].behaviour is None]
        if from_engine:
            scored = _spot_checks(data, scored)
        for i in rows if from_engine else successes:
            if data.items[i].behaviour is not None:
                old_T[i] = torch.tensor(data.items[i].behaviour, device=learner.model.device)
        scored = [*scored, *unknown]
        tick = tick_of(f"old log-probs {name}", len(scored))
        ours_T = dict(zip(scored, learner.logprobs([data.items[i] for i in scored], tick=tick), strict=True))
        computed_T.update(ours_T)
        for i in unknown if from_engine else scored:
            old_T[i] = ours_T[i]
    return old_T, computed_T


def _as_sampled_today(data: Round, old_T: Sequence[Tensor]) -> Round:
    """The round with successes of which nobody said how likely they were as if today's policies had sampled them."""
    items = [
        replace(item, behaviour=tuple(old_T[i].tolist()))
        if item.behaviour is None and data.is_replayed(i) and len(old_T[i])
        else item
        for i, item in enumerate(data.items)
    ]
    return data.with_items(items)


def _spot_checks(data: Round, rows: Sequence[int]) -> list[int]:
    """Some of an adapter's actions, of each agent by itself, as `_check_engine` judges them; spread over its turns."""
    chosen: list[int] = []
    for positions in rows_by_key([data.items[i].agent for i in rows]).values():
        agent_rows = [rows[position] for position in positions]
        chosen += [agent_rows[k] for k in spread_rows([data.items[i].turn for i in agent_rows], _SPOT_CHECKS)]
    return sorted(chosen)


def _to_sampling(
    data: Round,
    rows_of: Mapping[str, Sequence[int]],
    ours_T: Mapping[int, Tensor],
    policies: Policies,
    options: TrainerOptions,
) -> dict[str, Sampling]:
    """How engine and trainer differ on what is learned from, successes of before left out, by agent."""
    sampling = {}
    for name, rows in rows_of.items():
        for agent in policies.adapters[name].agents:
            agent_rows = [i for i in without_successes(data, rows, options) if data.items[i].agent == agent]
            checked = [i for i in agent_rows if i in ours_T]
            sampling[agent] = items_to_sampling(
                [data.items[i] for i in agent_rows],
                [data.items[i] for i in checked],
                [ours_T[i] for i in checked],
                options=options,
            )
    return sampling


@torch.no_grad()
def _reference_logprobs(
    data: Round,
    rows_of: Mapping[str, Sequence[int]],
    policies: Policies,
    options: TrainerOptions,
    tick_of: Callable[[str, int], Tick],
    note: Callable[[ActionItem, Tensor], None],
) -> list[Tensor]:
    """The log-probs of actions by their base models, each shape [T of the action].

    With adapters off the agents of a base are one model, so their actions go through it together. Where rows cannot be
    packed each adapter's go by themselves: such passes share only what all of their rows begin with.
    """
    reference_T: list[Tensor] = [torch.empty(0)] * len(data.items)
    for model in policies.models.values():
        parts = [list(rows) for name, rows in rows_of.items() if policies.learners[name].model is model]
        tick = tick_of("reference", sum(map(len, parts)))
        for rows in [list(chain.from_iterable(parts))] if model.packs else parts:
            items = [data.items[i] for i in rows]
            budget, workers = options.system.tokens_per_microbatch, policies.workers
            scored: list[tuple[int, Tensor]] = []
            batches = items_to_microbatches(items, budget, rows_to_groups=model.rows_to_groups, shares=workers.count)
            for batch in scoring_passes(model, workers, batches):
                logp_T, features_TH = model.logprobs_and_features(batch)
                lengths = list(batch.lengths)
                scored += zip(batch.items, torch.split(logp_T, lengths), strict=True)
                if workers.count == 1:  # else each process would know others than the rest do
                    for i, features_SH in zip(batch.items, torch.split(features_TH, lengths), strict=True):
                        note(items[i], features_SH)
                tick(len(batch.items))
            gathered = workers.gather(scored, [len(item.decided) for item in items], model.device)
            for i, logp_T in zip(rows, gathered, strict=True):
                reference_T[i] = logp_T
    return reference_T


def _check_engine(
    agent: str, data: Round, rows: Sequence[int], ours_T: Mapping[int, Tensor], options: TrainerOptions
) -> None:
    """Refuses to train on fresh actions that engine and trainer score differently.

    A base in 4 bits differs from the plain one that the engine serves, by what quantisation moves. With a mismatch
    weight, which corrects for it, the tolerance is that of any base; without one it is that of rounding.
    """
    fresh = [i for i in rows if not data.is_replayed(i)]
    engine = [data.items[i].behaviour or () for i in fresh]
    gap = logprob_gap(engine, [ours_T[i].tolist() for i in fresh], f"fresh actions of {agent!r}")
    tolerance, advice = options.importance.engine_tolerance, "check which model, adapter and template the server serves"
    from_engine = options.importance.proximal == "engine"
    if from_engine and tolerance > _ENGINE_GAP:
        tolerance, advice = _ENGINE_GAP, "serve in float32, or set train.trainer.importance.proximal to 'recomputed'"
    elif options.system.load_in_4bit and not options.needs_behaviour and tolerance > _UNCORRECTED_GAP:
        tolerance, advice = _UNCORRECTED_GAP, "set train.trainer.importance.mismatch to 'truncate'"
    if options.system.load_in_4bit:
        advice += ", or have the engine serve the 4-bit base that the trainer computes (docs/gpus.md)"
    if gap is not None and gap > tolerance:
        trainer = chain.from_iterable(ours_T[i].tolist() for i in fresh)
        excess = [e - t for e, t in zip(chain.from_iterable(engine), trainer, strict=True)]
        mean_excess = math.fsum(excess) / len(excess)
        if mean_excess > _ONE_SIDED * gap:
            advice += (
                f"; the engine's are higher by {mean_excess:.3f} on average, as where an output is constrained to "
                "several tokens (response_format, structured_outputs, tool_choice): "
                + (
                    "set train.trainer.importance.proximal to 'recomputed', "
                    if from_engine
                    else "do not constrain these calls, "
                )
                + "or do not train their node"
            )
        raise TrainError(
            f"the engine's log-probs of {agent!r} differ from the trainer's by {gap:.3f} nats a token, more than "
            f"{tolerance:g}: {advice}"
        )


def _refused_agents(
    data: Round,
    rows_of: Mapping[str, Sequence[int]],
    old_T: Sequence[Tensor],
    policies: Policies,
    options: TrainerOptions,
) -> dict[str, str]:
    """Agent -> why its replayed actions say too little; all agents of an adapter, whose actions are weighed as one."""
    refused: dict[str, str] = {}
    for name, rows in rows_of.items():
        replayed_rows = [i for i in rows if data.is_replayed(i)]
        if not replayed_rows or options.replay.successes:
            continue
        items = [data.items[i] for i in replayed_rows]
        weight_U = items_to_weights([old_T[i] for i in replayed_rows], items, options)
        reason = gate_actions(weight_U.tolist(), options.replay.min_ess)
        if reason is not None:
            refused |= dict.fromkeys(policies.adapters[name].agents, reason)
    return refused
