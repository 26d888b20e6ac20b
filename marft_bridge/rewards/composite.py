"""Several team rewards -> one: their weighted sum.

Invariant: the sum is absent where one of its terms is, unless `leave_out` says that this one may be; an absent term
never counts as 0 by accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from marft_bridge.common.distinct_names import DistinctNames
from marft_bridge.common.errors import ConfigError
from marft_bridge.rewards.contract import Earned, Kind, RewardOptions, RunView

# FutureAGI's "MARFT reward design playbook": anchored on outcome, shaped by the quality of steps, penalised by cost.
PRESETS: Mapping[str, Mapping[str, float]] = {
    "futureagi": {
        "task_completion": 1.0,
        "trajectory_score": 0.5,
        "step_count": -0.1,
        "tool_error_rate": -0.2,
        "goal_progress": 0.3,
    }
}


class CompositeOptions(RewardOptions):
    """Weighted sum of other team rewards, which are named in one of three ways."""

    kind: Literal["composite"] = "composite"
    of: DistinctNames = ()
    """Names of rewards that are declared here, each with its own `weight`."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Names and weights; the names may be those that graph.reward gives."""
    preset: Literal["futureagi"] | None = None
    """Names and weights from an article; rewards of these names must be there, of whatever kind."""
    leave_out: tuple[str, ...] = ()
    """Terms that an episode may lack: the sum is then over the others."""

    @model_validator(mode="after")
    def _require_one_source_of_terms(self) -> CompositeOptions:
        if sum(map(bool, (self.of, self.weights, self.preset))) != 1:
            raise ValueError("give one of of, weights and preset")
        if unknown := sorted(set(self.leave_out) - set(self.required_rewards())):
            raise ValueError(f"leave_out: {unknown[0]!r} is none of its terms: {', '.join(self.required_rewards())}")
        return self

    def required_rewards(self) -> tuple[str, ...]:
        """The names of its terms."""
        return self.of or tuple(self.weights or PRESETS[self.preset or ""])


def with_weights(options: CompositeOptions, declared_rewards: Sequence[RewardOptions]) -> CompositeOptions:
    """The same composite with the weight of each term written out.

    Raises:
        ConfigError: a term of `of` is not declared.
    """
    if not options.of:
        weights = options.weights or dict(PRESETS[options.preset or ""])
    else:
        declared_weights = {reward.name: reward.weight for reward in declared_rewards}
        if unknown := [name for name in options.of if name not in declared_weights]:
            raise ConfigError(f"rewards.{options.name}.of: no [[rewards]] table is named {unknown[0]!r}; use weights")
        weights = {name: declared_weights[name] for name in options.of}
    return options.model_copy(update={"of": (), "preset": None, "weights": weights})


async def composite(options: CompositeOptions, run: RunView) -> list[Earned]:
    """See `CompositeOptions`, after `with_weights`. An empty list where every term is left out."""
    # A term that is absent and not in leave_out stays, so that `team_reward` raises Absent for the whole sum.
    terms = {name: w for name, w in options.weights.items() if name in run.earned or name not in options.leave_out}
    return [Earned(sum(weight * run.team_reward(name) for name, weight in terms.items()))] if terms else []


KINDS = (Kind(CompositeOptions, composite),)
