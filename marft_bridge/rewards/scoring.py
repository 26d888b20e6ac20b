"""One run -> all its rewards, each within its time limit: those of `[[rewards]]`, and those of `graph.reward`.

Invariants: a reward that takes too long, does not apply or cannot be computed is absent, with the reason, and the
others are computed all the same; whatever one raises carries its name and ends its episode alone; what only the user
can mend ends the run. A reward is computed after those that it is computed from, on its own copy of the task and
of the containers of the final state.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.common.errors import BridgeError, ConfigError, GraphError, RewardFailedError
from marft_bridge.rewards.contract import Absent, Earned, NeedsResult, RewardOptions, RunView
from marft_bridge.rewards.function import PythonOptions, UserFunction, declared_function, value_to_earned_by_name
from marft_bridge.rewards.registry import kind_of, rewards_to_layers
from marft_bridge.rewards.time_limit import comes_from_outside, within
from trace_store.records import Reward

FUNCTION = "graph.reward"
"""Stands for all rewards of the function where their own names are not known."""
DOES_NOT_APPLY = "does not apply to the episode"


@dataclass(slots=True)
class Score:
    """What one run earned, and the reason for each reward that is absent."""

    earned: dict[str, list[Earned]] = field(default_factory=dict)  # by name
    sources: dict[str, str] = field(default_factory=dict)  # by name
    absent: dict[str, str] = field(default_factory=dict)  # name -> reason
    needs_result: set[str] = field(default_factory=set)  # names that are absent because the final state is not stored
    function_names: frozenset[str] | None = None  # the names that graph.reward gave; None: absent, or not called

    @property
    def team(self) -> dict[str, float]:
        """The team's rewards, by name."""
        return {name: part.value for name, parts in self.earned.items() for part in parts if part.level == "episode"}

    def to_rewards(self, episode_id: str, created_ns: int, source: Callable[[str], str] = str) -> list[Reward]:
        """The same as records of the store; `source` maps each reward's source to the text that is stored."""
        return [
            Reward(
                episode_id=episode_id,
                name=name,
                value=part.value,
                source=source(self.sources[name]),
                created_ns=created_ns,
                scope=part.level,
                action_id=part.action_id,
                node=part.node,
            )
            for name, parts in self.earned.items()
            for part in parts
        ]

    def add(self, name: str, earned: Sequence[Earned], source: str) -> None:
        """Adds a reward that was computed; an empty list makes it absent, because it does not apply.

        Raises:
            RewardFailedError: it is not finite.
        """
        for part in earned:
            if not math.isfinite(part.value):
                raise RewardFailedError(f"the reward {name!r} is {part.value}, not a finite number")
        if earned:
            self.earned[name], self.sources[name] = list(earned), source
        else:
            self.absent[name] = DOES_NOT_APPLY

    def mark_absent(self, name: str, error: Absent) -> None:
        """Notes a reward that could not be computed, with its reason."""
        self.absent[name] = str(error)
        if isinstance(error, NeedsResult):
            self.needs_result.add(name)


class Scorer:
    """Computes the rewards of runs, of many at the same time on one loop.

    Args:
        declared_rewards: the tables of `[[rewards]]`.
        function: `graph.reward`, and its name.
        timeout_s: seconds that the function may take.
        agents: nodes that may have rewards of their own whether they acted or not.

    Raises:
        ConfigError: see `registry.rewards_to_layers`.
        BridgeError: a kind cannot work on this machine.
    """

    def __init__(
        self,
        declared_rewards: Sequence[RewardOptions] = (),
        function: tuple[Callable[..., Any], str] | None = None,
        timeout_s: float = 60.0,
        agents: Sequence[str] = (),
    ) -> None:
        self._layers = rewards_to_layers(declared_rewards, has_function=function is not None)
        self._declared_names = frozenset(options.name for options in declared_rewards)
        self._function = UserFunction(*function) if function is not None else None
        self._timeout_s = timeout_s
        self._agents = frozenset(agents)
        self.needs_record = bool(declared_rewards) or (self._function is not None and self._function.takes_run)
        for options in declared_rewards:
            kind_of(options).check(options)
        self._user_functions = [declared_function(each) for each in declared_rewards if isinstance(each, PythonOptions)]
        if self._function is not None:
            self._user_functions.append(self._function)

    def take_thread_lines(self) -> list[str]:
        """What calls of functions left running since this was last asked, and what cannot be ended: lines."""
        return [line for function in dict.fromkeys(self._user_functions) for line in function.leftovers.take_lines()]

    async def run_to_score(
        self,
        run: RunView,
        is_selected: Callable[[str], bool] = lambda _: True,
        stored: Mapping[str, float] | None = None,
    ) -> Score:
        """Everything that a run earned.

        Args:
            is_selected: whether to compute the reward of a name; `graph.reward` stands for all of the function.
            stored: team rewards that the episode has already, for rewards that are computed from them.

        Raises:
            RewardFailedError: a reward raised something, or gave what is no reward; the message names it.
            GraphError: a reward reads something that does not exist; the message names it.
        """
        score = Score()
        if self._function is not None and is_selected(FUNCTION):
            await self._add_function(run, score)
        for layer in self._layers:
            selected = [options for options in layer if is_selected(options.name)]
            team = {**(stored or {}), **score.team}
            await _gather(self._add_declared(options, run, team, score=score) for options in selected)
        for name, parts in score.earned.items():
            for part in parts:
                self._refuse_unknown_owner(name, part, run)
        return score

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a name that is neither declared nor `graph.reward`."""
        known_names = sorted(self._declared_names) + ([FUNCTION] if self._function is not None else [])
        if unknown := [name for name in names if name not in known_names]:
            raise ConfigError(f"no reward is called {unknown[0]!r}; there are: {', '.join(known_names)}")

    async def _add_function(self, run: RunView, score: Score) -> None:
        assert self._function is not None
        source = self._function.source
        try:
            value = await within(self._timeout_s, self._function(_own_view(run)))
            earned_by_name = value_to_earned_by_name(value, source)
        except Absent as error:
            score.mark_absent(FUNCTION, error)
            return
        score.function_names = frozenset(earned_by_name)
        for name, earned in earned_by_name.items():
            score.add(name, earned, source)

    async def _add_declared(
        self, options: RewardOptions, run: RunView, team: Mapping[str, float], score: Score
    ) -> None:
        if score.function_names is not None and options.name in score.function_names:
            raise GraphError(f"rewards.{options.name}: {FUNCTION} gives a reward of this name too; rename one of them")
        for name in options.required_rewards():
            if score.function_names is not None and name not in score.function_names | self._declared_names:
                raise GraphError(f"rewards.{options.name}: it is computed from {name!r}, which {FUNCTION} did not give")
        view = replace(_own_view(run), earned={name: team[name] for name in options.required_rewards() if name in team})
        try:
            earned = await within(options.timeout_s, kind_of(options).compute(options, view))
        except Absent as error:
            score.mark_absent(options.name, error)
        except BridgeError as error:
            raise type(error)(f"rewards.{options.name}: {error}") from error
        except BaseException as error:
            if comes_from_outside(error):
                raise
            raise RewardFailedError(f"rewards.{options.name} failed: {type(error).__name__}: {error}") from error
        else:
            if options.agent is not None:
                earned = [_team_to_agent(part, options) for part in earned]
            score.add(options.name, earned, options.source())

    def _refuse_unknown_owner(self, name: str, earned: Earned, run: RunView) -> None:
        """A reward for an action or node that the episode does not have would be stored and train nothing."""
        if run.trajectory is None:
            return
        actions = run.trajectory.actions
        if earned.action_id is not None and earned.action_id not in {action.action_id for action in actions}:
            raise RewardFailedError(
                f"the reward {name!r} is for action {earned.action_id!r}, which the episode does not have"
            )
        if earned.node is not None and earned.node not in self._agents | {action.node for action in actions}:
            raise RewardFailedError(
                f"the reward {name!r} is for node {earned.node!r}, which called no model in the episode"
            )


def _own_view(run: RunView) -> RunView:
    """The run with a task and a final state that its reader may change: other rewards and samples keep theirs."""
    return replace(run, task=copy.deepcopy(dict(run.task)), result=_copy_containers(run.result, {}))


def _copy_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Dicts, lists and sets anew, at any depth; objects are shared, since copying a client or a model may do anything.

    Args:
        copies: what was copied so far, by the id of the original: a state may hold itself.
    """
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is dict:
        copied: dict[Any, Any] = {}
        copies[id(value)] = copied
        copied.update((key, _copy_containers(inner, copies)) for key, inner in value.items())
        return copied
    if type(value) is list:
        items: list[Any] = []
        copies[id(value)] = items
        items.extend(_copy_containers(inner, copies) for inner in value)
        return items
    if type(value) is tuple:
        return tuple(_copy_containers(inner, copies) for inner in value)
    return set(value) if type(value) is set else value


def _team_to_agent(earned: Earned, options: RewardOptions) -> Earned:
    if earned.level != "episode":
        raise GraphError(f"rewards.{options.name}: agent says whose it is, but it is computed for a {earned.level}")
    return Earned(earned.value, "agent", node=options.agent)


async def _gather(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; when one fails, the others are cancelled and awaited before its error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
