"""GAE along D with a critic: MARFT's own estimator (paper, section 4.1.1), per action and per token.

The critic predicts the team reward, and lambda touches nothing else. Step and private rewards are added to it, centred
by the mean over the agent's actions in other episodes of the round, and 0 where there are none: nothing says what was
better. `BASELINE` is what no reward explains: the critic's values.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from trainers.advantages.arrays import Floats, laid_end_to_end
from trainers.advantages.estimate import BASELINE, Estimate
from trainers.advantages.estimator import Estimated, Estimator, EstimatorInput, sum_of
from trainers.advantages.recurrences import adaptive_lambda
from trainers.advantages.returns import centred_own_returns, team_chain, team_rewards
from trainers.advantages.settings import Normalization
from trainers.batch import Round


class Gae(Estimator):
    """Generalised advantage estimation along the dependencies; recurrences in `recurrences`."""

    name: ClassVar[str] = "gae"
    needs_critic: ClassVar[bool] = True
    normalization: ClassVar[Normalization] = "agent"
    reads: ClassVar[tuple[str, ...]] = ("gae_lambda", "gamma_token", "token_lambda", "adaptive_alpha")

    def estimate(self, round_input: EstimatorInput) -> Estimated:
        """Advantages, and targets A + V of the team reward's chain for the critics."""
        assert round_input.values is not None
        assert round_input.bootstrap_A is not None
        data, values, lengths = round_input.data, round_input.values, round_input.units_A
        totals = [episode.rewards.total for episode in data.episodes]
        team = self._chain(data, totals, values, bootstrap_A=round_input.bootstrap_A)
        factor_U = np.repeat(round_input.factor_A, lengths)
        team_U = factor_U * laid_end_to_end(team)

        # the chain is linear in the team reward: what a reward of 1 would add to each unit, times the reward
        ones, zero_values = [1.0] * len(totals), [np.zeros_like(action_values) for action_values in values]
        one_U = factor_U * laid_end_to_end(self._chain(data, ones, zero_values, bootstrap_A=np.zeros(len(zero_values))))
        by_source = {name: one_U * np.repeat(value_A, lengths) for name, value_A in team_rewards(data).items()}
        if data.forest is not None:  # a call then stands in runs that earned differently
            by_source = {
                name: factor_U
                * laid_end_to_end(
                    self._chain(
                        data,
                        [episode.rewards.team.get(name, 0.0) for episode in data.episodes],
                        zero_values,
                        bootstrap_A=np.zeros(len(zero_values)),
                    )
                )
                for name in by_source
            }
        by_source[BASELINE] = team_U - sum_of(by_source, len(team_U))
        own_by_source = centred_own_returns(data, self.settings.gamma)
        own_U = {
            name: round_input.over_units(own_A, self.settings.gamma_token) for name, own_A in own_by_source.items()
        }
        targets = [advantages + action_values for advantages, action_values in zip(team, values, strict=True)]
        return Estimated(Estimate(team_U + sum_of(own_U, len(team_U)), by_source | own_U), targets=targets)

    def _chain(
        self, data: Round, team_E: Sequence[float], values: Sequence[Floats], bootstrap_A: Floats
    ) -> list[Floats]:
        settings = self.settings
        return team_chain(
            data,
            team_E,
            values,
            bootstrap_A=bootstrap_A,
            token_lambda_A=[self._token_lambda(len(action_values)) for action_values in values],
            gamma=settings.gamma,
            lam=settings.gae_lambda,
            gamma_token=settings.gamma_token,
        )

    def _token_lambda(self, tokens: int) -> float:
        chosen = self.settings.token_lambda
        return adaptive_lambda(tokens, self.settings.adaptive_alpha) if chosen == "adaptive" else chosen
