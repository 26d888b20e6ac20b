"""A round of episodes to advantages, per action or per token: who earned the rewards.

The estimator that the options name (`trainers.advantages`) computes them; here it is given what it asks for, values of
the team's critics among it, and what learns from the round is put off until the agents are updated. Stored episodes are
valued by the same critics.

Invariant: arithmetic on rewards is float64; nothing learns before a returned `Fit` is called, so that a refused round
changes nothing. It knows nothing of log-probs, adapters or optimisers.

Shapes: _A one entry per action of the round, episode after episode, each in topological order; _U one per unit: an
action, or a decided token, action after action.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainers.advantages.arrays import Floats, laid_end_to_end, rows_by_key
from trainers.advantages.estimate import Estimate, normalize_estimate, without_noise
from trainers.advantages.estimator import EstimatorInput, sum_of
from trainers.advantages.group_baselines import flat_groups
from trainers.advantages.rank_consistency import contribution_weights
from trainers.advantages.recurrences import vtrace_along_dependencies
from trainers.advantages.returns import (
    action_rewards,
    centred_own_returns,
    episodes_of,
    expected_discounts,
    own_rewards_of_episodes,
    returns_by_source,
    reward_at_the_end,
    run_positions,
    team_chain,
)
from trainers.batch import ActionItem, Round
from trainers.common.workers import Workers
from trainers.config import TrainerOptions
from trainers.credit.critic_rests import CriticRests
from trainers.credit.shrinkage import explained_out_of_sample, shrink_values
from trainers.credit.spreads import Spreads
from trainers.credit.units import Units
from trainers.credit.values import Observed, TeamCritics
from trainers.scoring.model import PolicyModel, Tick

FLAT = "group without signal"
"""Why `Credit.informative` leaves an episode out."""

Fit = Callable[[], dict[str, Any]]
"""Fits what the estimate was made with, once the agents are updated, and says what is reported about it."""


class Credit:
    """The estimator of a team, and the critics that it and the offline phase ask.

    Args:
        model_of: the base model of each agent; agents may share one.
        agents: the trained agents.
        seed: of the critics.
        tick: (phase, total) to a function that is told how many sequences each pass took.
        workers: see `TeamCritics`.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_of: Mapping[str, PolicyModel],
        agents: Sequence[str],
        seed: int,
        tick: Callable[[str, int], Tick],
        workers: Workers | None = None,
    ) -> None:
        self.options = options
        self.estimator = options.advantage.estimator_class(options.estimator_settings)
        self._team = TeamCritics(options, model_of, agents, seed=seed, tick=tick, workers=workers)
        self.critics = self._team.critics
        self.rests = CriticRests(tuple(self.critics))
        self.spreads = Spreads()
        self._by_token = options.granularity == "token"

    def forget(self) -> None:
        """Frees the cached features; the next round has other observations."""
        self._team.forget()

    def note(self, item: ActionItem, features_SH: Tensor) -> None:
        """Hidden states of the base model before each decided token of an action; `estimate` need not ask for them."""
        if self.estimator.needs_critic:
            self._team.note(item, features_SH, self._by_token)

    def warm_up(self, data: Round) -> dict[str, Any]:
        """Critic pre-training on the returns of terminated episodes, see `TeamCritics.warm_up`.

        The caller leaves truncated episodes out: the return that they would have had is not known.
        """
        observed = self._team.observe(data, self._by_token and self.estimator.needs_critic)
        figures = self._team.warm_up(
            observed, self._team_returns(data, observed, np.zeros(len(data.items))), data.tree_A
        )
        if self.options.advantage.critic.shrink:
            self.rests.end_warm_up({key: part["explained_variance"] for key, part in figures["critics"].items()})
        return figures

    def returns(self, data: Round) -> Floats:
        """What each action of the round earned: discounted team return, step returns and private rewards. Shape [A]."""
        return sum_of(returns_by_source(data, self.options.advantage.gamma, self.estimator.step_gamma), len(data.items))

    def known_returns(self, data: Round) -> Floats:
        """`returns`, with NaN where a run was cut short, so that what it would have earned is not known. Shape [A].

        With a discount, less the mean of those at the action's place and with that of its agent: what is left to differ
        is what the runs earned, and how long they took, not how early in them an action stands. Where nobody else
        stood, an action has nothing to be held against but its agent's others.
        """
        known_A = np.where(self._cut(data), np.nan, self.returns(data))
        if self.options.advantage.gamma == 1:
            return known_A
        level_A = known_A.copy()
        for rows in rows_by_key([item.agent for item in data.items]).values():
            level_A[rows] -= _mean_of_known(known_A[rows])
        for rows in rows_by_key(run_positions(data)).values():
            if len({data.tree_A[i] for i in rows.tolist()}) > 1:
                known_A[rows] -= _mean_of_known(level_A[rows])
        return known_A

    def note_spreads(self, data: Round) -> None:
        """Remembers how far the returns of a round, or of collected episodes, lie apart."""
        self.spreads.note([item.agent for item in data.items], self.known_returns(data))

    def normalise(self, estimate: Estimate, data: Round, units: Units) -> Estimate:
        """An estimate of the round as the loss takes it: normalised, and 0 where the returns of what was compared
        hardly differ, by what returns of this run did so far (`trainers.credit.spreads`)."""
        mode = self.options.advantage.normalization
        return_U = units.repeat(self.known_returns(data))
        normal = normalize_estimate(estimate, units.agents, mode, return_U=return_U)
        compares = self.estimator.groups(data) is not None and not self.estimator.adds_step_rewards
        if mode == "none" and not compares:  # what all earned alike has its part in the loss
            return normal
        agents_of = {"all": set(units.agents)} if mode == "batch" else {agent: {agent} for agent in units.agents}
        key_U = ["all"] * len(units.agents) if mode == "batch" else units.agents
        return without_noise(normal, key_U, return_U, least_of=lambda key: self.spreads.least(agents_of[str(key)]))

    @staticmethod
    def _cut(data: Round) -> npt.NDArray[np.bool_]:
        """Whether one of the runs that each action stands in was cut short. Shape [A]."""
        runs = data if data.forest is None else data.forest.unrolled
        is_cut_B = np.array([runs.episodes[e].truncated for e in runs.episode_A], dtype=np.float64)
        return (is_cut_B if data.forest is None else data.forest.fold(is_cut_B)) > 0

    def replay_advantages(self, data: Round) -> Floats:
        """Discounted team return (bootstrapped where cut) minus V, plus the centred step and private parts. Shape [A].

        Of whole actions, whatever the granularity: the offline losses weigh actions. In a game with sides there is no
        team return, and no critic of it: the centred parts are all.
        """
        if self.options.side_of is not None:
            return sum_of(centred_own_returns(data, self.estimator.step_gamma), len(data.items))
        observed = self._observe_stored(data)
        return_A = laid_end_to_end(self._team_returns(data, observed, observed.bootstrap_A))
        own_by_source = centred_own_returns(data, self.estimator.step_gamma)
        return return_A - laid_end_to_end(observed.values) + sum_of(own_by_source, len(data.items))

    def _observe_stored(self, data: Round) -> Observed:
        """Stored actions to their values. With a discount these are shrunk as those of a round are: a critic that
        explains nothing says one number of calls at all places, and none of them earns that."""
        observed = self._team.observe(data, tokens=False)
        if self.options.advantage.critic.shrink and self.options.advantage.gamma < 1:
            return self._shrink(data, observed)[0]
        return observed

    def vtrace(self, data: Round, ratio_A: Floats) -> tuple[Floats, Fit]:
        """Stored actions with pi / mu to V-trace's advantages [A], and what fits the critics to its targets.

        rho-bar and c-bar are `offline.ratio_cap`. The advantages are those before their own rho, r + gamma v' - V, with
        the centred step and private parts: the loss takes rho of the policy as it is at each step, since the one at the
        start is soon out of date.
        """
        observed = self._observe_stored(data)
        values_A, cap = laid_end_to_end(observed.values), self.options.offline.ratio_cap
        targets_A, advantage_A = np.zeros(len(data.items)), np.zeros(len(data.items))
        for episode, rows in episodes_of(data):
            targets_A[rows], advantage_A[rows] = vtrace_along_dependencies(
                values_A[rows],
                reward_at_the_end(episode, episode.rewards.total),
                episode.successors,
                bootstrap_A=observed.bootstrap_A[rows],
                ratio_A=ratio_A[rows],
                gamma=self.options.advantage.gamma,
                rho_bar=cap,
                c_bar=cap,
            )
        advantage_A /= np.minimum(ratio_A, cap)
        advantage_A += sum_of(centred_own_returns(data, self.estimator.step_gamma), len(data.items))
        returns = self._team_returns(data, observed, observed.bootstrap_A)
        return advantage_A, lambda: self._team.fit(observed, list(targets_A[:, None]), returns)

    def estimate(self, data: Round) -> tuple[Estimate, Fit]:
        """Advantages of a round before normalisation, and what learns from it once the agents are updated.

        The critics' targets are A + V of the team reward's chain, per unit. A critic that has explained too little is
        not asked (`trainers.credit.critic_rests`): the baseline is what `critic.shrink` makes of one that knows
        nothing.

        Returns:
            The estimate over units, as the granularity says; and a `Fit` to what `TeamCritics.fit` returns, with
            "flat_groups": share of the groups that cannot say what was better, None for gae and rae,
            "value_weights": how far each agent's baseline is its critic's values, and "resting": how many critics were
            not asked, both None without `critic.shrink`, and
            "contribution": each agent's factor of the team reward, None where it is 1 for all. Without a critic
            all of its figures are None.
        """
        contribution = self._contribution(data)
        shrink = self.estimator.needs_critic and self.options.advantage.critic.shrink
        resting = self.rests.resting if shrink else frozenset()
        observed = self._team.observe(data, self._by_token, resting) if self.estimator.needs_critic else None
        baseline, value_weights = observed, None
        explained: dict[str, float | None] = {}
        if observed is not None and shrink:
            baseline, value_weights, explained = self._shrink(data, observed)
        estimated = self.estimator.estimate(self._to_estimator_input(data, contribution, baseline))

        def fit() -> dict[str, Any]:
            self.estimator.commit(estimated.state)
            self.note_spreads(data.fresh if self.options.replay.successes else data)  # successes are no fair sample
            figures: dict[str, Any] = {"value_loss": None, "explained_variance": None, "critics": {}, "agents": {}}
            if observed is not None and estimated.targets is not None:
                figures = self._team.fit(
                    observed, estimated.targets, self._team_returns(data, observed, observed.bootstrap_A)
                )
            if shrink:
                self.rests.end_round(explained)
            figures |= {"value_weights": value_weights, "resting": len(resting) if shrink else None}
            return {**figures, "flat_groups": estimated.flat_groups, "contribution": contribution}

        return estimated.estimate, fit

    def informative(self, data: Round) -> Round:
        """The round without the episodes whose groups all earned the same (DAPO's dynamic sampling).

        Counted as dropped under `FLAT`. An episode stays when one of its actions, or of its tree's, is in a
        group, as the estimator forms them, that can say what was better, or where the estimator needs no other for it.
        For an estimator that compares no groups all episodes are one: where they earned the same, none can be told
        from what was expected of it.
        """
        groups = self.estimator.groups(data)
        if groups is None:
            earned = {episode.rewards.figures for episode in data.episodes}
            telling = set(data.tree_E) if len(earned) > 1 else set()
        else:
            compared = self.estimator.compared_by_source(self._to_estimator_input(data, self._contribution(data), None))
            flat_A = flat_groups(sum_of(compared, len(data.items)), groups, self.estimator.samples(data))[1]
            telling = {tree for tree, is_flat in zip(data.tree_A, flat_A.tolist(), strict=True) if not is_flat}
        telling |= self._teaching_alone(data)
        kept_ids = {id(episode) for episode, tree in zip(data.episodes, data.tree_E, strict=True) if tree in telling}
        return data.only(lambda episode: id(episode) in kept_ids, FLAT)

    def _teaching_alone(self, data: Round) -> set[int]:
        """The trees with an episode from which the estimator learns whatever the others of its group earned."""
        own_A = sum_of(action_rewards(data), len(data.items))
        by_call: list[list[float]] = [[] for _ in data.episodes]
        for position, own in zip(data.episode_A, own_A.tolist(), strict=True):
            by_call[position].append(own)
        mode, trees = self.options.advantage.normalization, set()
        for episode, tree, calls in zip(data.episodes, data.tree_E, by_call, strict=True):
            private = (value for by_agent in episode.rewards.private.values() for value in by_agent.values())
            by_run = [episode.rewards.total, *private]
            if self.estimator.teaches_alone(calls, by_run, mode, penalties_teach=self.options.penalties_teach):
                trees.add(tree)
        return trees

    def _shrink(
        self, data: Round, observed: Observed
    ) -> tuple[Observed, dict[str, float | None], dict[str, float | None]]:
        """What the critics say, drawn towards the mean return, by how much (see `shrink_values`), and what each critic
        that was asked explains out of sample."""
        discounts = self._discounts(data, [len(part) for part in observed.values])
        observed = self._with_constants(data, observed, discounts)
        returns = self._team_returns(data, observed, observed.bootstrap_A)
        shrunk = shrink_values(
            observed.values,
            returns,
            agents=observed.agents,
            tasks=[data.episodes[e].task_id for e in data.episode_A],
            episode_A=data.tree_A,
            ends_A=observed.bootstrap_A,
            is_cut_A=observed.is_cut_A,
            discounts=discounts,
        )
        explained = {key: explained_out_of_sample(shrunk, returns, view.rows) for key, view in observed.views.items()}
        return replace(observed, values=shrunk.values, bootstrap_A=shrunk.ends), shrunk.weights, explained

    def _with_constants(self, data: Round, observed: Observed, discounts: Sequence[Floats] | None) -> Observed:
        """The same with the mean return of those of its runs that ended as what an agent whose critic rests is told,
        as the discount leaves it at each observation."""
        if not observed.resting:
            return observed
        values, bootstrap_A = list(observed.values), observed.bootstrap_A.copy()
        return_A = [float(part.mean()) for part in self._team_returns(data, observed, np.zeros(len(data.items)))]
        discounts = [np.ones_like(part) for part in values] if discounts is None else discounts
        for agent in observed.resting:
            rows = [i for i, actor in enumerate(observed.agents) if actor == agent]
            ended = [i for i in rows if not data.episodes[data.episode_A[i]].truncated]
            mean_return = sum(return_A[i] for i in ended) / len(ended) if ended else 0.0
            mean_discount = sum(float(discounts[i].mean()) for i in ended) / len(ended) if ended else 1.0
            for i in rows:
                values[i] = mean_return / mean_discount * discounts[i]
                bootstrap_A[i] = mean_return if observed.is_cut_A[i] else 0.0
        return replace(observed, values=values, bootstrap_A=bootstrap_A)

    def _to_estimator_input(
        self, data: Round, contribution: Mapping[str, float] | None, observed: Observed | None
    ) -> EstimatorInput:
        """The round as the estimator sees it."""
        factors = [(contribution or {}).get(item.agent, 1.0) for item in data.items]
        return EstimatorInput(
            data,
            tuple(len(item.decided) if self._by_token else 1 for item in data.items),
            np.array(factors, dtype=np.float64),
            values=None if observed is None else observed.values,
            bootstrap_A=None if observed is None else observed.bootstrap_A,
            side_of=self.options.side_of,
            least_deviation=self.spreads.least(item.agent for item in data.items),
        )

    def _contribution(self, data: Round) -> dict[str, float] | None:
        """Each agent's factor of the team reward, by what the samples of the round's tasks say; None: 1 for all."""
        if self.options.advantage.contribution == "equal":
            return None
        team_E = np.array([episode.rewards.total for episode in data.episodes])
        tasks = [episode.task_id for episode in data.episodes]
        return contribution_weights(own_rewards_of_episodes(data), team_E, tasks)

    def _discounts(self, data: Round, units_A: Sequence[int]) -> list[Floats] | None:
        """See `expected_discounts`."""
        gamma, gamma_token = self.options.advantage.gamma, self.options.experimental.gamma_token
        return expected_discounts(data, units_A, gamma=gamma, gamma_token=gamma_token)

    def _team_returns(self, data: Round, observed: Observed, bootstrap_A: Floats) -> list[Floats]:
        """Discounted team reward after each observation: no baseline, lambda = 1."""
        zero_values = [np.zeros_like(values) for values in observed.values]
        return team_chain(
            data,
            [episode.rewards.total for episode in data.episodes],
            zero_values,
            bootstrap_A=bootstrap_A,
            token_lambda_A=[1.0] * len(zero_values),
            gamma=self.options.advantage.gamma,
            lam=1.0,
            gamma_token=self.options.experimental.gamma_token,
        )


def _mean_of_known(values: Floats) -> float:
    """The mean of the entries that are known; 0 where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0
