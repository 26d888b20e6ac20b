"""The kinds of rewards, and checks of a list of `[[rewards]]` tables as a whole: names, levels, order, weights.

To add a kind, write a module with options, a function and `KINDS`, and name it in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from marft_bridge.common.errors import ConfigError
from marft_bridge.rewards import code, composite, function, goals, judge, match, math, signals, tools
from marft_bridge.rewards import reasoning_gym as gym
from marft_bridge.rewards.contract import ANY_LEVEL, Kind, RewardOptions

_MODULES = (match, math, code, judge, gym, tools, signals, goals, function, composite)
_KINDS: dict[type[RewardOptions], Kind[Any]] = {kind.options: kind for module in _MODULES for kind in module.KINDS}

if TYPE_CHECKING:
    AnyReward = RewardOptions
else:
    AnyReward = Annotated[Union[tuple(_KINDS)], Field(discriminator="kind")]  # noqa: UP007 - of as many as there are
"""One `[[rewards]]` table."""


def kind_of(options: RewardOptions) -> Kind[Any]:
    """The kind that computes a reward with these options."""
    return _KINDS[type(options)]


def rewards_to_layers(declared_rewards: Sequence[RewardOptions], *, has_function: bool) -> list[list[RewardOptions]]:
    """The rewards in the order in which they can be computed: those of one inner list do not need each other.

    Args:
        has_function: whether `graph.reward` gives more rewards, whose names are known only when it is called.

    Raises:
        ConfigError: a name is used twice, a reward is computed from one that is not declared or not the team's,
            rewards are computed from each other, or an option has no effect.
    """
    by_name: dict[str, RewardOptions] = {}
    for reward in declared_rewards:
        if by_name.setdefault(reward.name, reward) is not reward:
            raise ConfigError(f"rewards.{reward.name}: two tables have this name")
        if reward.agent is not None and "level" in reward.model_fields_set:
            raise ConfigError(f"rewards.{reward.name}: agent and level both say whose it is; leave one out")
    for reward in declared_rewards:
        for name in reward.required_rewards():
            if name not in by_name and not has_function:
                raise ConfigError(f"rewards.{reward.name}: it is computed from {name!r}, which is not declared")
            if name in by_name and by_name[name].declared_level not in ("episode", ANY_LEVEL):
                raise ConfigError(f"rewards.{reward.name}: it is computed from {name!r}, which is not the team's")
    _refuse_idle_weights(declared_rewards)
    order = TopologicalSorter({r.name: [n for n in r.required_rewards() if n in by_name] for r in declared_rewards})
    try:
        order.prepare()
    except CycleError as error:
        raise ConfigError(f"rewards: these are computed from each other: {' <- '.join(error.args[1])}") from None
    layers = []
    while order.is_active():
        ready = order.get_ready()
        order.done(*ready)
        layers.append([_expand_composite(by_name[name], declared_rewards) for name in ready])
    return layers


def _expand_composite(reward: RewardOptions, declared_rewards: Sequence[RewardOptions]) -> RewardOptions:
    return (
        composite.with_weights(reward, declared_rewards) if isinstance(reward, composite.CompositeOptions) else reward
    )


def _refuse_idle_weights(declared_rewards: Sequence[RewardOptions]) -> None:
    weighted_names = {
        name for reward in declared_rewards if isinstance(reward, composite.CompositeOptions) for name in reward.of
    }
    for reward in declared_rewards:
        if "weight" in reward.model_fields_set and reward.name not in weighted_names:
            raise ConfigError(f"rewards.{reward.name}.weight has no effect: no composite names {reward.name!r} in `of`")


def refuse_unknown_rewards(
    declared_rewards: Sequence[RewardOptions], references: Iterable[tuple[str, str, str]]
) -> None:
    """Refuses options that name a reward which no table gives.

    Args:
        references: key of the option, name of the reward, its level.

    Raises:
        ValueError: as pydantic expects of a validator.
    """
    levels = {(reward.name, reward.declared_level) for reward in declared_rewards}
    for key, name, level in sorted(references):
        if not levels & {(name, level), (name, ANY_LEVEL)}:
            candidates = ", ".join(sorted(n for n, n_level in levels if n_level in (level, ANY_LEVEL))) or "none"
            raise ValueError(
                f"{key}: no [[rewards]] table gives {name!r} with level {level!r}; there are: {candidates}"
            )
