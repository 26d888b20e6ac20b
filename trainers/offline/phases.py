"""Stored episodes to better adapters before the first fresh rollout, each mode by its own advantage.

Advantages are in units of the spread of the returns, the largest less the smallest, so that no option hangs on the unit
that rewards are counted in, and those of rewards of 0 and 1 are as they are.

    filtered     imitation of what reached the threshold
    awr          imitation weighted by exp((return - V) / beta)                        advantage-weighted regression
    asymre       (return - (mean return + shift)) log pi                               AsymRE, arXiv 2506.20520
    topr         (return - mean return) log pi, at min(pi / mu, 1) where negative      TOPR, arXiv 2503.14286
    importance   (return - V) log pi, at min(pi / mu, cap)                             truncated importance sampling
    vtrace       V-trace's advantage along D; the critic is fitted to its targets      Espeholt et al. 2018

Invariant: the last three are only given actions with behaviour log-probs, whose weights have an effective sample size
of at least `replay.min_ess`; what is refused for that is taken out before any baseline. It knows nothing of fresh
rollouts.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.advantages.arrays import NO_SPREAD, Floats, range_of_most, rows_by_key
from trainers.advantages.returns import run_positions
from trainers.batch import ActionItem, Round, forced_share
from trainers.config import TrainerOptions
from trainers.credit.credit import Credit
from trainers.offline.imitate import Demonstrations, imitate
from trainers.policies.policies import Policies
from trainers.scoring.effective_sample_size import effective_sample_size, gate_actions
from trainers.scoring.model import Tick

BELOW_THRESHOLD = "episode below offline.threshold"


def learn_offline(
    data: Round,
    policies: Policies,
    credit: Credit,
    options: TrainerOptions,
    generator: torch.Generator,
    tick: Callable[[str, int], Tick],
    reread: Callable[[Mapping[str, str]], Round],
) -> tuple[dict[str, dict[str, Any]], Round]:
    """One offline phase over all adapters.

    Args:
        reread: the round again without the actions of some agents (agent -> why), which then count as part of the
            environment.

    Returns:
        Per agent: adapter, actions, drops (its other calls, by reason), tokens, forced_share, retokenised_share (of
        the tokens), those of `Imitated`, effective_sample_size (of the importance weights, or of what awr weighs by;
        None for other modes), lr, adapter_norm, adapter_moved. And the round with what the modes and the gate left out.
    """
    offline, read = options.offline, data
    if offline.mode == "filtered":
        data = data.only(lambda episode: episode.reward >= offline.threshold, BELOW_THRESHOLD)
    ratio_A = _ratios(data, policies, tick) if offline.needs_behaviour and data.items else None
    if ratio_A is not None and (refused := _refused_agents(data, policies, ratio_A, options=options)):
        data = reread(refused)
        ratio_A = _ratios(data, policies, tick) if data.items else None
    advantage_A, fit = _advantages(data, credit, options, ratio_A=ratio_A)
    agents: dict[str, dict[str, Any]] = {}
    for name, learner in policies.learners.items():
        rows = data.agents_to_rows(policies.adapters[name].agents)
        weights = _weights(offline.mode, rows, ratio_A, advantage_A=advantage_A, options=options)
        start_weights = learner.snapshot()
        learner.set_rate(1.0)
        learned = imitate(
            learner,
            Demonstrations(
                items=[data.items[i] for i in rows],
                episode_A=[data.episode_A[i] for i in rows],
                task_A=[data.episodes[data.episode_A[i]].task_content for i in rows],
                advantages=advantage_A[rows].tolist(),
                own_items=_own_items(read, policies.adapters[name].agents),
                kl_budget=offline.kl_budget,
            ),
            generator,
            tick=tick(f"replay {name}", len(rows) * offline.epochs),
        )
        learner.optimizer = learner.fresh_optimizer()
        moved = learner.movement(start_weights)
        for agent in policies.adapters[name].agents:
            agent_rows = [i for i in rows if data.items[i].agent == agent]
            agents[agent] = {
                "adapter": name,
                "actions": len(agent_rows),
                "drops": dict(data.dropped_calls.get(agent, {})),
                "tokens": (tokens := sum(len(data.items[i].decided) for i in agent_rows)),
                "forced_share": forced_share([data.items[i] for i in agent_rows]),
                "retokenised_share": _retokenised(data, agent_rows) / tokens if tokens else None,
                **learned.figures,
                **learned.held_out_figures(agent),
                "effective_sample_size": effective_sample_size(weights) if weights else None,
                "lr": learner.lr,
                **moved,
            }
    fit()
    return agents, data


def _refused_agents(data: Round, policies: Policies, ratio_A: Floats, options: TrainerOptions) -> dict[str, str]:
    """Agent -> why its actions say too little about its policy of today; all agents of an adapter as one."""
    refused: dict[str, str] = {}
    for plan in policies.adapters.values():
        rows = data.agents_to_rows(plan.agents)
        weights = _weights(options.offline.mode, rows, ratio_A, advantage_A=np.zeros(0), options=options)
        if rows and (reason := gate_actions(weights, options.replay.min_ess)) is not None:
            refused |= dict.fromkeys(plan.agents, reason)
    return refused


def _own_items(data: Round, agents: Sequence[str]) -> list[ActionItem]:
    """The calls that the untrained policy of some agents sampled itself, whatever came of them."""
    own_items = (data.items[i] for i in data.agents_to_rows(agents))
    return [item for item in own_items if item.behaviour is not None and not item.version and not item.retokenised]


def _retokenised(data: Round, rows: Sequence[int]) -> int:
    """Sampled tokens of these actions that no engine sampled."""
    return sum(len(data.items[i].decided) for i in rows if data.items[i].retokenised)


def _advantages(
    data: Round, credit: Credit, options: TrainerOptions, ratio_A: Floats | None
) -> tuple[Floats, Callable[[], object]]:
    """What the mode weighs each action by, and what fits the critic afterwards."""
    offline = options.offline
    if not data.items or offline.mode in ("filtered", "off"):
        return np.zeros(len(data.items)), lambda: None
    returns_A = credit.returns(data)
    # with a discount, how far what runs earned lies apart, not early from late calls
    unit_A = _spreads(data, returns_A if options.advantage.gamma == 1 else credit.known_returns(data), options)
    if offline.mode == "vtrace":
        assert ratio_A is not None
        advantage_A, fit = credit.vtrace(data, ratio_A)
        return advantage_A / unit_A, fit
    if offline.mode in ("awr", "importance"):
        return credit.replay_advantages(data) / unit_A, lambda: None
    baseline_A = unit_A * (offline.shift if offline.mode == "asymre" else 0.0)
    # what one earns alone says nothing of another's calls, nor, with a discount, what late calls earn of early ones
    keys: Sequence[Hashable] = (
        [item.agent for item in data.items] if options.advantage.gamma == 1 else run_positions(data)
    )
    for rows in rows_by_key(keys).values():
        baseline_A[rows] += returns_A[rows].mean()
    return (returns_A - baseline_A) / unit_A, lambda: None


def _spreads(data: Round, returns_A: Floats, options: TrainerOptions) -> Floats:
    """The largest less the smallest of most returns of the agent for which they lie furthest apart, in the team, or in
    each side of a game; 1 where all agents always earn the same. Shape [A]; a return that is not known is NaN."""
    agents = [item.agent for item in data.items]
    is_known_A = ~np.isnan(returns_A)
    spread_by_agent = {
        agent: range_of_most(returns_A[rows][is_known_A[rows]]) for agent, rows in rows_by_key(agents).items()
    }
    unit_A: Floats = np.ones_like(returns_A)
    for rows in rows_by_key([(options.side_of or {}).get(agent) for agent in agents]).values():
        spread = max(spread_by_agent[agents[i]] for i in rows)
        largest = np.abs(returns_A[rows][is_known_A[rows]]).max(initial=0.0)
        if spread > NO_SPREAD * largest:  # else it is what float64 leaves of equal ones
            unit_A[rows] = spread
    return unit_A


def _ratios(data: Round, policies: Policies, tick: Callable[[str, int], Tick]) -> Floats:
    """pi now against the policy that sampled, per action: the product over its tokens, shape [A]."""
    ratio_A: Floats = np.zeros(len(data.items))
    for name, learner in policies.learners.items():
        rows = data.agents_to_rows(policies.adapters[name].agents)
        scored_T = learner.logprobs([data.items[i] for i in rows], tick=tick(f"log-probs {name}", len(rows)))
        for i, ours_T in zip(rows, scored_T, strict=True):
            ratio_A[i] = _ratio(ours_T, data.items[i].behaviour)
    return ratio_A


def _ratio(ours_T: Tensor, behaviour: Sequence[float] | None) -> float:
    assert behaviour is not None  # rounds for these modes hold no other actions
    gap = float(ours_T.double().sum()) - sum(behaviour)
    return float(np.exp(np.clip(gap, -20.0, 20.0)))


def _weights(
    mode: str, rows: Sequence[int], ratio_A: Floats | None, advantage_A: Floats, options: TrainerOptions
) -> list[float]:
    """What an effective sample size can be told of: importance weights, or AWR's."""
    offline = options.offline
    if ratio_A is not None:
        cap = 1.0 if mode == "topr" else offline.ratio_cap
        return [min(float(ratio_A[i]), cap) for i in rows]
    if mode == "awr":
        return [math.exp(min(float(advantage_A[i]) / offline.beta, math.log(offline.max_weight))) for i in rows]
    return []
