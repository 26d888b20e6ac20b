"""Which kinds of rewards there are, and whether a list of `[[rewards]]` tables makes sense as a whole.

Adding a kind: a module with options, a function and `KINDS`, and a line in each of the two lists here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import Field

from marft_bridge.errors import ConfigError
from marft_bridge.rewards import code, composite, function, goals, gym, judge, match, math, signals, tools
from marft_bridge.rewards.contract import ANY_LEVEL, Kind, RewardOptions

AnyReward = Annotated[
    match.ExactOptions
    | match.RegexOptions
    | match.JsonSchemaOptions
    | match.NumericOptions
    | math.MathOptions
    | code.CodeOptions
    | judge.JudgeOptions
    | gym.GymOptions
    | tools.ToolSuccessOptions
    | tools.ToolErrorRateOptions
    | tools.ToolSelectionOptions
    | signals.TrajectoryScoreOptions
    | signals.StepEfficiencyOptions
    | signals.StepCountOptions
    | signals.HandoffLoopOptions
    | signals.TokensOptions
    | signals.LatencyOptions
    | signals.CostOptions
    | goals.TaskCompletionOptions
    | goals.GoalProgressOptions
    | function.PythonOptions
    | composite.CompositeOptions,
    Field(discriminator="kind"),
]
"""One `[[rewards]]` table."""

_MODULES = (match, math, code, judge, gym, tools, signals, goals, function, composite)
_KINDS: dict[type[RewardOptions], Kind[Any]] = {kind.options: kind for module in _MODULES for kind in module.KINDS}


def kind_of(options: RewardOptions) -> Kind[Any]:
    """What computes a reward with these options."""
    return _KINDS[type(options)]


def settle(declared: Sequence[RewardOptions], *, also_function: bool) -> list[list[RewardOptions]]:
    """The rewards in the order in which they can be computed: those of one inner list do not need each other.

    Args:
        also_function: whether `graph.reward` gives rewards besides, under names that are not known here.

    Raises:
        ConfigError: a name is used twice, nobody gives a reward that another one is computed from, or something is
            said that has no effect.
    """
    by_name: dict[str, RewardOptions] = {}
    for reward in declared:
        if by_name.setdefault(reward.name, reward) is not reward:
            raise ConfigError(f"rewards.{reward.name}: two tables have this name")
        if reward.agent is not None and "level" in reward.model_fields_set:
            raise ConfigError(f"rewards.{reward.name}: agent and level both say whose it is; leave one out")
    for reward in declared:
        for name in reward.reads():
            if name not in by_name and not also_function:
                raise ConfigError(f"rewards.{reward.name}: it is computed from {name!r}, which is not declared")
            if name in by_name and by_name[name].level_given not in ("episode", ANY_LEVEL):
                raise ConfigError(f"rewards.{reward.name}: it is computed from {name!r}, which is not the team's")
    _refuse_idle_weights(declared)
    order = TopologicalSorter({r.name: [n for n in r.reads() if n in by_name] for r in declared})
    try:
        order.prepare()
    except CycleError as error:
        raise ConfigError(f"rewards: these are computed from each other: {' <- '.join(error.args[1])}") from None
    layers = []
    while order.is_active():
        ready = order.get_ready()
        order.done(*ready)
        layers.append([_settled(by_name[name], declared) for name in ready])
    return layers


def _settled(reward: RewardOptions, declared: Sequence[RewardOptions]) -> RewardOptions:
    return composite.with_weights(reward, declared) if isinstance(reward, composite.CompositeOptions) else reward


def _refuse_idle_weights(declared: Sequence[RewardOptions]) -> None:
    used = {name for reward in declared if isinstance(reward, composite.CompositeOptions) for name in reward.of}
    for reward in declared:
        if "weight" in reward.model_fields_set and reward.name not in used:
            raise ConfigError(f"rewards.{reward.name}.weight has no effect: no composite names {reward.name!r} in `of`")


def refuse_unknown_rewards(declared: Sequence[RewardOptions], wanted: Iterable[tuple[str, str, str]]) -> None:
    """Refuses options that name a reward which no table gives.

    Args:
        wanted: key of the option, name of the reward, its level.

    Raises:
        ValueError: as pydantic expects of a validator.
    """
    given = {(reward.name, reward.level_given) for reward in declared}
    for key, name, level in sorted(wanted):
        if not given & {(name, level), (name, ANY_LEVEL)}:
            there = ", ".join(sorted(n for n, at in given if at in (level, ANY_LEVEL))) or "none"
            raise ValueError(f"{key}: no [[rewards]] table gives {name!r} with level {level!r}; there are: {there}")
