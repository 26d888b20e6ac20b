"""Stored episodes of the teams of one `credit` run -> rewards of the agents, and a table for people.

Invariant: a reward is what one agent added to one episode of the full team, on the same task, sample and seed as the
episode without it; an episode that lacks its counterpart gets none. It runs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from marft_bridge.contribution import REWARDS
from marft_bridge.contribution.games import Team, complete
from marft_bridge.contribution.judged import (
    AgentCredit,
    Method,
    PairCredit,
    Run,
    Scores,
    scores_to_credits,
    share_of,
    share_per_run,
)
from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from marft_bridge.tool_surface import Surface, store_to_surface
from trace_store.records import Reward
from trace_store.store import TraceStore

DIFFERENCE, SHAPLEY = REWARDS
_PAIRS: dict[str, str] = {
    "only together": "each is needed for what the other adds",
    "cover for each other": "one covers for the other, so that one at a time both look as if they added little",
    "colluding": "they harm the team together, which replacing either one alone does not show",
}


@dataclass(slots=True)
class _Team:
    """The scored episodes of one team."""

    scores: dict[Run, float] = field(default_factory=dict)
    episode_ids: dict[Run, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  # by node


@dataclass(frozen=True, slots=True)
class Found:
    """What one run has to go by."""

    agents: Sequence[str]
    method: Method
    metric: str
    names: Mapping[Team, str]  # team -> variant of its episodes; the full team first
    run_id: str
    run_of: str | None  # the run that holds the full team's episodes; None: this one
    substitute: str

    def keep_and_show(self, store: TraceStore, worth: float, seed: int, reporter: Reporter) -> None:
        """Writes the rewards and prints what each agent contributes.

        Raises:
            ConfigError: an agent's teams have too few scores in common, or the stored run had other tools.
        """
        self._refuse_other_tools(store)
        (full_team, full_name), *others = self.names.items()
        full_run = self.run_of or self.run_id
        full = self._scored(store, full_run, None if self.run_of else full_name)
        scores: dict[Team, Mapping[Run, float]] = {full_team: full.scores}
        for on, name in others:
            found = self._scored(store, self.run_id, name).scores
            scores[on] = {run: score for run, score in found.items() if run in full.scores}
        self._refuse_too_few(scores)
        calls = {agent: full.calls[agent] / len(full.scores) for agent in self.agents}
        singles, pairs = scores_to_credits(self.agents, scores, calls, self.method, worth, seed)
        rewards = list(self._rewards(scores, full.episode_ids))
        stored = store.put_rewards(rewards)
        reporter.console.print(self._table(singles))
        for line in (*self._lines(singles, worth), *_pair_lines(pairs)):
            reporter.say(line)
        names = " and ".join(sorted({reward.name for reward in rewards}))
        reporter.say(f"{self.run_id}: wrote {stored} rewards of agents ({names}) to the episodes of {full_run}")

    def _scored(self, store: TraceStore, run_id: str, variant: str | None) -> _Team:
        team = _Team()
        for game in store.trajectories(run_ids=[run_id], variant=variant, split="train"):
            score = game.team_reward(self.metric)
            if score is not None:
                run = (game.episode.task_id, game.episode.sample)
                team.scores[run], team.episode_ids[run] = score, game.episode.episode_id
                team.calls.update(action.node for action in game.actions)
        return team

    def _refuse_other_tools(self, store: TraceStore) -> None:
        if self.run_of is None:
            return
        before, now = store_to_surface(store, self.run_of), store_to_surface(store, self.run_id)
        if changed := changed_tools(before, now):
            raise ConfigError(
                f"credit --run-of: {changed[0]} has another schema than in run {self.run_of!r}, so a difference to "
                "that run is not the agent's; leave it out, and the newest team runs"
            )

    def _refuse_too_few(self, scores: Scores) -> None:
        for agent in self.agents:
            shared = complete({team: scores[team] for team in share_of(agent, self.agents, self.method)})
            if len({task for task, _ in shared}) < 2:
                raise ConfigError(
                    f"credit: the teams that tell what {agent!r} adds have the reward {self.metric!r} together in "
                    f"{len(shared)} runs, of fewer than two tasks; check --metric and the app"
                )

    def _rewards(self, scores: Scores, episode_ids: Mapping[Run, str]) -> Iterator[Reward]:
        now, source = time.time_ns(), f"credit:{self.run_id}: {self.metric}, {self.substitute} instead"
        kinds: dict[str, Method] = {DIFFERENCE: "leave-one-out"}
        if self.method == "shapley":
            kinds[SHAPLEY] = "shapley"
        for name, kind in kinds.items():
            for agent in self.agents:
                for run, value in share_per_run(scores, share_of(agent, self.agents, kind)).items():
                    yield Reward(episode_ids[run], name, value, source, now, scope="agent", node=agent)

    def _table(self, singles: Sequence[AgentCredit]) -> Table:
        table = Table(title=f"what each agent adds to {self.metric}")
        share = "Shapley value" if self.method == "shapley" else "difference"
        for column in ("agent", "calls per run", share, "95% interval, all together", "runs up / down", "finding"):
            table.add_column(column)
        for one in singles:
            interval = "the score never changes" if one.interval is None else _bounds(one.interval)
            moved = f"{one.up} / {one.down} of {one.runs}"
            table.add_row(one.agent, f"{one.calls:.2f}", f"{one.contribution:+.3f}", interval, moved, one.finding)
        return table

    def _lines(self, singles: Sequence[AgentCredit], worth: float) -> Iterator[str]:
        for one in singles:
            if one.finding == "lazy":
                yield (
                    f"{one.agent} is lazy: it makes {one.calls:.2f} calls a run, and adds less than {worth:g} "
                    f"over {self.substitute} in its place"
                )
            elif one.finding == "harmful":
                yield f"{one.agent} is harmful: the team does better with {self.substitute} in its place"
            elif one.finding == "not settled":
                yield f"{one.agent}: {one.tasks} tasks do not settle whether it adds anything; run more with --tasks"


def changed_tools(before: Surface, now: Surface) -> list[str]:
    """Tools of one name that no episode of both offered alike.

    A tool that only one of them offered is no sign of a change: with an agent replaced, a graph takes other branches.
    """
    return [
        f"tool {name!r} of node {node!r}"
        for node in sorted(before.keys() & now.keys())
        for name in sorted(before[node].tools.keys() & now[node].tools.keys())
        if not before[node].tools[name] & now[node].tools[name]
    ]


def _pair_lines(pairs: Sequence[PairCredit]) -> Iterator[str]:
    for pair in pairs:
        if (what := _PAIRS.get(pair.finding)) is not None:
            both = f"{pair.joint:+.3f} {_bounds(pair.joint_interval)}"
            yield f"{' and '.join(pair.agents)}, {pair.finding}: {what} (without both: {both})"


def _bounds(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"
