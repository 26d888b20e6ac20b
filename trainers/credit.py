"""A round of episodes to advantages, per action or per token: who earned the rewards.

With GAE a critic predicts the team reward, and lambda touches nothing else. The step and private parts (see
`trainers.returns`) are added to it, centred by the mean over the agent's actions in other episodes of the round, and 0
where there are none: nothing says what was better.

Group estimators take the whole return, which is the discounted team return (a truncated episode is not bootstrapped)
plus both parts, and give gain * (return - baseline). At token granularity their advantages, and the parts beside GAE,
are repeated over the tokens of their action, times gamma_token for each token that follows.

Every estimate is split by reward. A mean over a group or over other episodes is taken of each reward apart, so that a
reward that is always the same contributes nothing; `BASELINE` is what no reward explains: the critic's values, or
RAE's running mean.

Invariant: arithmetic on rewards is float64; nothing learns before a returned `Fit` is called, so that a refused round
changes nothing. It knows nothing of log-probs, adapters or optimisers.

Shapes: _A one entry per action of the round, episode after episode, each in topological order; _U one per unit: an
action, or a sampled token, action after action.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trainers.advantages import BASELINE, Estimate
from trainers.batch import ActionItem, Round
from trainers.config import TrainerOptions
from trainers.gae import Floats, adaptive_lambda, vtrace_along_dependencies
from trainers.group_estimators import (
    Baseline,
    RunningBaselines,
    flat_groups,
    group_keys,
    leave_one_out,
    standardise,
)
from trainers.model import PolicyModel, Tick
from trainers.rank_consistency import contribution_weights
from trainers.returns import (
    centred_own_returns,
    episodes_of,
    laid_end_to_end,
    own_rewards_of_episodes,
    returns_by_source,
    reward_at_the_end,
    team_chain,
    team_rewards,
)
from trainers.values import Observed, TeamCritics

FLAT = "group without signal"
"""Why `Credit.informative` leaves an episode out."""

Fit = Callable[[], dict[str, Any]]
"""Fits what the estimate was made with, once the agents are updated, and says what is reported about it."""


class Credit:
    """The critics and running baselines of a team, and the estimators that use them.

    Args:
        model_of: the base model of each agent; agents may share one.
        agents: the trained agents.
        seed: of the critics.
        tick: (phase, total) to a function that is told how many sequences each pass took.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_of: Mapping[str, PolicyModel],
        agents: Sequence[str],
        seed: int,
        tick: Callable[[str, int], Tick],
    ) -> None:
        self.options = options
        self.baselines = RunningBaselines(options.rae_decay)
        self._team = TeamCritics(options, model_of, agents, seed, tick)
        self.critics = self._team.critics
        self._by_token = options.granularity == "token"

    def forget(self) -> None:
        """Frees the cached features; the next round has other observations."""
        self._team.forget()

    def note(self, item: ActionItem, features_SH: Tensor) -> None:
        """Hidden states of the base model before each sampled token of an action; `estimate` need not ask for them."""
        if self.options.estimator == "gae":
            self._team.note(item, features_SH, self._by_token)

    def warm_up(self, data: Round) -> dict[str, Any]:
        """Critic pre-training on the returns of terminated episodes, see `TeamCritics.warm_up`.

        The caller leaves truncated episodes out: the return that they would have had is not known.
        """
        seen = self._team.observe(data, self._by_token and self.options.estimator == "gae")
        return self._team.warm_up(seen, self._team_returns(data, seen, np.zeros(len(data.items))), data.episode_A)

    def returns(self, data: Round) -> Floats:
        """What each action of the round earned: discounted team return, step returns and private rewards. Shape [A]."""
        return _sum(returns_by_source(data, self.options.gamma), len(data.items))

    def replay_advantages(self, data: Round) -> Floats:
        """Discounted team return (bootstrapped where cut) minus V, plus the centred step and private parts. Shape [A].

        Of whole actions, whatever the granularity: the offline losses weigh actions.
        """
        seen = self._team.observe(data, tokens=False)
        return_A = laid_end_to_end(self._team_returns(data, seen, seen.bootstrap_A))
        own = centred_own_returns(data, self.options.gamma)
        return return_A - laid_end_to_end(seen.values) + _sum(own, len(data.items))

    def vtrace(self, data: Round, ratio_A: Floats) -> tuple[Floats, Fit]:
        """Stored actions with pi / mu to V-trace's advantages [A], and what fits the critics to its targets.

        rho-bar and c-bar are `offline.ratio_cap`. The advantages are those before their own rho, r + gamma v' - V, with
        the centred step and private parts: the loss takes rho of the policy as it is at each step, since the one at the
        start is soon out of date.
        """
        seen = self._team.observe(data, tokens=False)
        values_A, cap = laid_end_to_end(seen.values), self.options.offline.ratio_cap
        targets_A, advantage_A = np.zeros(len(data.items)), np.zeros(len(data.items))
        for episode, rows in episodes_of(data):
            targets_A[rows], advantage_A[rows] = vtrace_along_dependencies(
                values_A[rows],
                reward_at_the_end(episode, episode.rewards.total),
                episode.successors,
                seen.bootstrap_A[rows],
                ratio_A[rows],
                self.options.gamma,
                cap,
                cap,
            )
        advantage_A /= np.minimum(ratio_A, cap)
        advantage_A += _sum(centred_own_returns(data, self.options.gamma), len(data.items))
        returns = self._team_returns(data, seen, seen.bootstrap_A)
        return advantage_A, lambda: self._team.fit(seen, list(targets_A[:, None]), returns)

    def estimate(self, data: Round) -> tuple[Estimate, Fit]:
        """Advantages of a round before normalisation, and what learns from it once the agents are updated.

        The critics' targets are A + V of the team reward's chain, per unit.

        Returns:
            The estimate over units, as the granularity says; and a `Fit` to what `TeamCritics.fit` returns, with
            "flat_groups": share of the groups that cannot say what was better, None for gae and rae, and
            "contribution": each agent's factor of the team reward, None where it is 1 for all. Without a critic
            all of its figures are None.
        """
        return self._gae_estimate(data) if self.options.estimator == "gae" else self._group_estimate(data)

    def informative(self, data: Round) -> Round:
        """The round without the episodes whose groups all earned the same (DAPO's dynamic sampling).

        Counted as dropped under `FLAT`. An episode stays when one of its actions is in a group, as the
        estimator forms them, that can say what was better.
        """
        keys = self._groups(data)
        return_A = _sum(self._sources(data, self._contribution(data)), len(data.items))
        flat_A = flat_groups(return_A, keys, data.episode_A)[1]
        refused = {id(episode) for episode, rows in episodes_of(data) if flat_A[rows].all()}
        return data.only(lambda episode: id(episode) not in refused, FLAT)

    def _gae_estimate(self, data: Round) -> tuple[Estimate, Fit]:
        seen = self._team.observe(data, self._by_token)
        lambda_A = [self._token_lambda(len(values)) for values in seen.values]
        totals = [episode.rewards.total for episode in data.episodes]
        lam = self.options.gae_lambda
        team = self._chain(data, totals, seen.values, seen.bootstrap_A, lam, lambda_A)
        lengths = [len(values) for values in seen.values]
        contribution = self._contribution(data)
        weight_U = np.repeat(_of_agents(contribution, data), lengths)
        team_U = weight_U * laid_end_to_end(team)
        targets = [advantages + values for advantages, values in zip(team, seen.values, strict=True)]
        returns = self._team_returns(data, seen, seen.bootstrap_A)

        # the chain is linear in the team reward: what a reward of 1 would add to each unit, times the reward
        ones, nothing = [1.0] * len(totals), [np.zeros_like(values) for values in seen.values]
        one_U = weight_U * laid_end_to_end(self._chain(data, ones, nothing, np.zeros(len(nothing)), lam, lambda_A))
        by_source = {name: one_U * np.repeat(value_A, lengths) for name, value_A in team_rewards(data).items()}
        by_source[BASELINE] = team_U - _sum(by_source, len(team_U))
        own = centred_own_returns(data, self.options.gamma)
        own_U = {name: self._over_units(own_A, lengths) for name, own_A in own.items()}

        def fit() -> dict[str, Any]:
            return {**self._team.fit(seen, targets, returns), "flat_groups": None, "contribution": contribution}

        return Estimate(team_U + _sum(own_U, len(team_U)), by_source | own_U), fit

    def _group_estimate(self, data: Round) -> tuple[Estimate, Fit]:
        contribution = self._contribution(data)
        sources = self._sources(data, contribution)
        return_A = _sum(sources, len(data.items))
        options, agents = self.options, [item.agent for item in data.items]
        flat: float | None = None
        state = self.baselines.state
        if options.estimator == "rae":
            whole, state = self.baselines.baselines_of(return_A, agents, data.episode_A)
            shares = dict.fromkeys(sources, np.zeros(len(data.items)))
        else:
            whole = self._baseline(data, return_A)
            shares = {name: self._baseline(data, part_A).baseline_A for name, part_A in sources.items()}
            flat = flat_groups(return_A, self._groups(data), data.episode_A)[0]
        advantage_A = whole.advantages(return_A)
        by_source = {name: whole.gain_A * (part_A - shares[name]) for name, part_A in sources.items()}
        by_source[BASELINE] = advantage_A - _sum(by_source, len(data.items))
        lengths = [len(item.sampled_ids) if self._by_token else 1 for item in data.items]

        def fit() -> dict[str, Any]:
            self.baselines.commit(state)
            no_critic: dict[str, Any] = {"value_loss": None, "explained_variance": None, "critics": {}, "agents": {}}
            return {**no_critic, "flat_groups": flat, "contribution": contribution}

        units = {name: self._over_units(part_A, lengths) for name, part_A in by_source.items()}
        return Estimate(self._over_units(advantage_A, lengths), units), fit

    def _contribution(self, data: Round) -> dict[str, float] | None:
        """Each agent's factor of the team reward, by what the samples of the round's tasks say; None: 1 for all."""
        if self.options.contribution == "equal":
            return None
        team_E = np.array([episode.rewards.total for episode in data.episodes])
        tasks = [episode.task_id for episode in data.episodes]
        return contribution_weights(own_rewards_of_episodes(data), team_E, tasks)

    def _sources(self, data: Round, contribution: Mapping[str, float] | None) -> dict[str, Floats]:
        """What each action earned of each reward; of the team's with its agent's factor. [A] each."""
        weight_A, team = _of_agents(contribution, data), team_rewards(data)
        sources = returns_by_source(data, self.options.gamma)
        return {name: part_A * weight_A if name in team else part_A for name, part_A in sources.items()}

    def _baseline(self, data: Round, return_A: Floats) -> Baseline:
        """What returns are compared with; its baseline (not its gain) is linear in them."""
        options, keys = self.options, self._groups(data)
        if options.estimator == "rloo":
            return leave_one_out(return_A, keys, data.episode_A)
        return standardise(return_A, keys, data.episode_A, options.statistics_weight, options.group_std)

    def _groups(self, data: Round) -> list[Hashable]:
        estimator = self.options.estimator
        if estimator == "gae" or estimator == "rae":
            raise ValueError(f"estimator {estimator!r} compares no groups")
        tasks = [data.episodes[e].task_id for e in data.episode_A]
        return group_keys(estimator, tasks, [i.agent for i in data.items], [i.turn for i in data.items])

    def _team_returns(self, data: Round, seen: Observed, bootstrap_A: Floats) -> list[Floats]:
        """Discounted team reward after each observation: no baseline, lambda = 1."""
        nothing = [np.zeros_like(values) for values in seen.values]
        totals = [episode.rewards.total for episode in data.episodes]
        return self._chain(data, totals, nothing, bootstrap_A, 1.0, [1.0] * len(nothing))

    def _chain(
        self,
        data: Round,
        team_E: Sequence[float],
        values: Sequence[Floats],
        bootstrap_A: Floats,
        lam: float,
        token_lambda_A: Sequence[float],
    ) -> list[Floats]:
        gamma, gamma_token = self.options.gamma, self.options.gamma_token
        return team_chain(
            data, team_E, values, bootstrap_A, token_lambda_A, gamma=gamma, lam=lam, gamma_token=gamma_token
        )

    def _token_lambda(self, tokens: int) -> float:
        chosen = self.options.token_lambda
        return adaptive_lambda(tokens, self.options.adaptive_alpha) if chosen == "adaptive" else chosen

    def _over_units(self, part_A: Floats, lengths: Sequence[int]) -> Floats:
        """What is known per action to its units, times gamma_token for each token that follows. [A] to [U]."""
        following_U = laid_end_to_end([np.arange(n - 1, -1, -1, dtype=np.float64) for n in lengths])
        return np.repeat(part_A, lengths) * self.options.gamma_token**following_U


def _of_agents(contribution: Mapping[str, float] | None, data: Round) -> Floats:
    """The factor of each action's agent; 1 for an agent without one. [A]."""
    return np.array([(contribution or {}).get(item.agent, 1.0) for item in data.items], dtype=np.float64)


def _sum(parts: Mapping[str, Floats], count: int) -> Floats:
    total: Floats = np.sum([np.zeros(count), *parts.values()], axis=0)
    return total
