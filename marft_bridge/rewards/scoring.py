"""All rewards of one run, each within its time: those that `[[rewards]]` declares, and those of `graph.reward`.

Invariants: a reward that takes too long, does not apply or was not to be had is absent, with the reason, and the
others are computed all the same; one that is broken ends the run with its name; a reward is computed after those that
it reads. Where rewards are written is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from marft_bridge.errors import BridgeError, ConfigError, GraphError
from marft_bridge.rewards.contract import Absent, Earned, NeedsResult, RewardOptions, RunView
from marft_bridge.rewards.function import UserFunction, value_to_named
from marft_bridge.rewards.registry import kind_of, settle
from trace_store.records import Reward

FUNCTION = "graph.reward"
"""How the rewards of the function are called where their own names are not known."""
DOES_NOT_APPLY = "does not apply to the episode"
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Score:
    """What one run earned, and why it lacks what it lacks."""

    earned: dict[str, list[Earned]] = field(default_factory=dict)  # by name
    sources: dict[str, str] = field(default_factory=dict)  # by name
    absent: dict[str, str] = field(default_factory=dict)  # name -> reason
    needs_result: set[str] = field(default_factory=set)  # names that are absent because the final state is not stored
    of_function: frozenset[str] | None = (
        None  # the names that graph.reward gave; None: it gave nothing, or was not asked
    )

    @property
    def team(self) -> dict[str, float]:
        """The team's rewards, by name."""
        return {name: one.value for name, each in self.earned.items() for one in each if one.level == "episode"}

    def to_rewards(self, episode_id: str, created_ns: int, source: Callable[[str], str] = str) -> list[Reward]:
        """The same as records; `source` may change what they say of where they come from."""
        return [
            Reward(
                *(episode_id, name, one.value, source(self.sources[name]), created_ns),
                scope=one.level,
                action_id=one.action_id,
                node=one.node,
            )
            for name, each in self.earned.items()
            for one in each
        ]

    def add(self, name: str, earned: Sequence[Earned], source: str) -> None:
        """One reward that was computed; of an empty list it is said that it does not apply."""
        if earned:
            self.earned[name], self.sources[name] = list(earned), source
        else:
            self.absent[name] = DOES_NOT_APPLY

    def lack(self, name: str, why: Absent) -> None:
        """One reward that was not to be had."""
        self.absent[name] = str(why)
        if isinstance(why, NeedsResult):
            self.needs_result.add(name)


class Scorer:
    """Computes the rewards of runs, of many at the same time on one loop.

    Args:
        declared: the tables of `[[rewards]]`.
        function: `graph.reward`, and its name.
        timeout_s: seconds that the function may take.
        agents: nodes that may have rewards of their own whether they acted or not.

    Raises:
        ConfigError: see `registry.settle`.
        BridgeError: a kind cannot work here.
    """

    def __init__(
        self,
        declared: Sequence[RewardOptions] = (),
        function: tuple[Callable[..., Any], str] | None = None,
        timeout_s: float = 60.0,
        agents: Sequence[str] = (),
    ) -> None:
        self._layers = settle(declared, also_function=function is not None)
        self._declared = frozenset(options.name for options in declared)
        self._function = UserFunction(*function) if function is not None else None
        self._timeout_s = timeout_s
        self._agents = frozenset(agents)
        self.needs_record = bool(declared) or (self._function is not None and self._function.takes_run)
        for options in declared:
            kind_of(options).check(options)

    async def run_to_score(
        self, run: RunView, only: Callable[[str], bool] = lambda _: True, known: Mapping[str, float] | None = None
    ) -> Score:
        """Everything that a run earned.

        Args:
            only: names to compute; `graph.reward` for all that the function gives.
            known: team rewards that the episode has already, for those that are computed from them.

        Raises:
            GraphError: a reward is broken, or reads something that is not there; the message names it.
        """
        score = Score()
        if self._function is not None and only(FUNCTION):
            await self._add_function(run, score)
        for layer in self._layers:
            wanted = [options for options in layer if only(options.name)]
            before = {**(known or {}), **score.team}
            await _all(self._add_declared(options, run, before, score) for options in wanted)
        for name, each in score.earned.items():
            for one in each:
                self._refuse_stranger(name, one, run)
        return score

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a name that nothing here has."""
        known = sorted(self._declared) + ([FUNCTION] if self._function is not None else [])
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"no reward is called {unknown[0]!r}; there are: {', '.join(known)}")

    async def _add_function(self, run: RunView, score: Score) -> None:
        assert self._function is not None
        source = self._function.source
        try:
            value = await _within(self._timeout_s, self._function(run))
            named = value_to_named(value, source)
        except Absent as why:
            score.lack(FUNCTION, why)
            return
        score.of_function = frozenset(named)
        for name, earned in named.items():
            score.add(name, earned, source)

    async def _add_declared(
        self, options: RewardOptions, run: RunView, before: Mapping[str, float], score: Score
    ) -> None:
        if score.of_function is not None and options.name in score.of_function:
            raise GraphError(f"rewards.{options.name}: {FUNCTION} gives a reward of this name too; rename one of them")
        for name in options.reads():
            if score.of_function is not None and name not in score.of_function | self._declared:
                raise GraphError(f"rewards.{options.name}: it is computed from {name!r}, which {FUNCTION} did not give")
        view = replace(run, earned={name: before[name] for name in options.reads() if name in before})
        try:
            earned = await _within(options.timeout_s, kind_of(options).compute(options, view))
        except Absent as why:
            score.lack(options.name, why)
        except BridgeError as error:
            raise type(error)(f"rewards.{options.name}: {error}") from error
        except Exception as error:
            raise GraphError(f"rewards.{options.name} failed: {type(error).__name__}: {error}") from error
        else:
            given = [_for_agent(each, options) for each in earned] if options.agent is not None else earned
            score.add(options.name, given, options.source())

    def _refuse_stranger(self, name: str, earned: Earned, run: RunView) -> None:
        """A reward of nobody would be stored, and reach nobody."""
        if run.trajectory is None:
            return
        actions = run.trajectory.actions
        if earned.action_id is not None and earned.action_id not in {action.action_id for action in actions}:
            raise GraphError(f"the reward {name!r} is for action {earned.action_id!r}, which the episode does not have")
        if earned.node is not None and earned.node not in self._agents | {action.node for action in actions}:
            raise GraphError(f"the reward {name!r} is for node {earned.node!r}, which called no model in the episode")


def _for_agent(earned: Earned, options: RewardOptions) -> Earned:
    if earned.level != "episode":
        raise GraphError(f"rewards.{options.name}: agent says whose it is, but it is computed for a {earned.level}")
    return Earned(earned.value, "agent", node=options.agent)


async def _within(seconds: float, computing: Awaitable[_Value]) -> _Value:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await computing
    except TimeoutError:
        if limit.expired():
            raise Absent(f"took longer than {seconds:g} s") from None
        raise


async def _all(computing: Any) -> None:
    """Waits for all; when one fails, the others are stopped first."""
    tasks = [asyncio.ensure_future(each) for each in computing]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
