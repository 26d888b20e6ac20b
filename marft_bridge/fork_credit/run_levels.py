"""A recorded run -> for each of its calls, what forks before it and after it give again.

A level is a set of calls that are given again; the recorded run and the forks of one level are samples of one and the
same distribution. Before a call stands what `forks` gives again when that call is made anew; after it, the same and the
call. Invariant: two levels of a run with one name give the same calls again, so that forks are run once and used twice:
in a chain the level after a call is the level before the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.forks.recorded_prefix import PrefixParts, RecordedPrefix, given_to_prefix, run_to_prefix
from marft_bridge.replay.recorded_run import RecordedCall, RecordedRun
from marft_bridge.rollouts.episode_plan import ForkPoint

BEGINNING = "from the beginning"


@dataclass(frozen=True, slots=True)
class Level:
    """What forks of one level give again. (point, variant) names it within all runs."""

    episode_id: str
    prefix: RecordedPrefix
    variant: str | None  # None: all that an ordinary fork at that point gives again

    @property
    def point(self) -> ForkPoint:
        """Where its forks leave the run."""
        return ForkPoint(self.episode_id, self.prefix.forked.action_id)

    @property
    def name(self) -> tuple[ForkPoint, str | None]:
        """Which level it is."""
        return self.point, self.variant


@dataclass(frozen=True, slots=True)
class CallLevels:
    """One call, with the levels around it."""

    call: RecordedCall
    before: Level
    after: Level | None  # None: every other call is given again before it, so nothing is sampled after it


@dataclass(frozen=True, slots=True)
class RunLevels:
    """One run, with the levels that its chosen calls need."""

    run: RecordedRun
    beginning: Level  # nothing is given again
    calls: Sequence[CallLevels]  # by their start

    @property
    def levels(self) -> list[Level]:
        """Every level that is needed, once."""
        levels = [self.beginning]
        for each in self.calls:
            levels += [each.before] if each.after is None else [each.before, each.after]
        return list({level.name: level for level in levels}.values())

    def is_whole(self, node: str) -> bool:
        """Whether this node's calls follow each other from the beginning to the end, with nothing sampled between."""
        calls = [around for around in self.calls if around.call.node == node]
        names_before = [around.before.name for around in calls]
        names_after = [None if around.after is None else around.after.name for around in calls]
        return bool(calls) and [*names_before, None] == [self.beginning.name, *names_after]


def run_to_levels(run: RecordedRun, nodes: Collection[str], tools: ToolChoice = "recorded") -> RunLevels:
    """The levels around the calls of these nodes; `tools` as in `run_to_prefix`.

    Raises:
        GraphError: the run made no call, or an answer that would be given again is not recorded as it was.
    """
    prefixes = _Prefixes(run, tools)
    beginning = prefixes.level_of(frozenset(), BEGINNING)
    if beginning is None:
        raise GraphError(f"credit: episode {run.episode_id} made no call")
    calls = []
    for call in run.calls:
        if call.node in nodes:
            before = Level(run.episode_id, prefixes.at(call), None)
            given_ids = _given_ids(before.prefix) | {call.action_id}
            after = prefixes.level_of(given_ids, f"after {call.node}:{call.number}")
            calls.append(CallLevels(call, before, after))
    return RunLevels(run, beginning, calls)


class _Prefixes:
    """The prefixes of one run. An ordinary one is made once: in a chain it is after one call and before the next."""

    def __init__(self, run: RecordedRun, tools: ToolChoice) -> None:
        self._run, self._tools, self._parts = run, tools, PrefixParts(run)
        self._ordinary: dict[str, RecordedPrefix] = {}  # by the forked call

    def at(self, call: RecordedCall) -> RecordedPrefix:
        """What an ordinary fork at a call gives again."""
        if call.action_id not in self._ordinary:
            self._ordinary[call.action_id] = run_to_prefix(self._run, call, tools=self._tools, parts=self._parts)
        return self._ordinary[call.action_id]

    def level_of(self, given_ids: frozenset[str], name: str) -> Level | None:
        """The level at which these actions are given again; None where there are no others."""
        forked = next((call for call in self._run.calls if call.action_id not in given_ids), None)
        if forked is None:
            return None
        if _given_ids(self.at(forked)) == given_ids:
            return Level(self._run.episode_id, self.at(forked), None)
        prefix = given_to_prefix(self._parts, forked, given_ids, tools=self._tools)
        return Level(self._run.episode_id, prefix, name)


def _given_ids(prefix: RecordedPrefix) -> frozenset[str]:
    return frozenset(each.call.action_id for each in prefix.given)
