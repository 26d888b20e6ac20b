"""Stored episodes of the teams of one `credit` run -> rewards of the agents in the store, and a table on the console.

Invariant: a reward is what one agent added to one episode of the full team, on the same task, sample and seed as the
episode without it; an episode that lacks its counterpart gets none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from marft_bridge.agent_credit.estimates import (
    AgentCredit,
    Method,
    PairCredit,
    SampleKey,
    Scores,
    contribution_weights,
    scores_to_credits,
    share_by_sample,
)
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_uncut, text_to_cell
from marft_bridge.recording.tool_schemas import Surface, store_to_surface
from marft_bridge.rewards.agent_credit import CREDIT_REWARDS
from marft_bridge.statistics.shapley import Team, shared_keys
from trace_store.records import Reward
from trace_store.store import TraceStore

DIFFERENCE, SHAPLEY = CREDIT_REWARDS
_PAIR_EXPLANATIONS: dict[str, str] = {
    "only together": "each is needed for what the other adds",
    "cover for each other": "one covers for the other, so that one at a time both look as if they added little",
    "colluding": "they harm the team together, which replacing either one alone does not show",
}


@dataclass(slots=True)
class _TeamEpisodes:
    """The scored episodes of one team."""

    scores: dict[SampleKey, float] = field(default_factory=dict)
    episode_ids: dict[SampleKey, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  # by node


@dataclass(frozen=True, slots=True)
class CreditRun:
    """One `credit` run whose episodes are stored: its teams, and where their episodes are."""

    agents: Sequence[str]
    method: Method
    metric: str
    variants: Mapping[Team, str]  # team -> variant of its episodes; the full team first
    run_id: str
    run_of: str | None  # the run that holds the full team's episodes; None: this one
    substitute: str  # its label

    def store_and_print(self, store: TraceStore, min_contribution: float, seed: int, reporter: Reporter) -> None:
        """Writes the rewards to the full team's episodes and prints what each agent contributes.

        Args:
            min_contribution: an agent that is shown to add less is called lazy.
            seed: of bootstrap and permutations.

        Raises:
            ConfigError: an agent's teams have too few scores in common, or the stored run had other tools.
        """
        self._refuse_other_tools(store)
        (full_team, full_variant), *replaced_teams = self.variants.items()
        full_run = self.run_of or self.run_id
        full_episodes = self._read_team(store, full_run, None if self.run_of else full_variant)
        scores: dict[Team, Mapping[SampleKey, float]] = {full_team: full_episodes.scores}
        for team, variant in replaced_teams:
            team_scores = self._read_team(store, self.run_id, variant).scores
            scores[team] = {key: score for key, score in team_scores.items() if key in full_episodes.scores}
        self._refuse_too_few(scores)
        calls = {agent: full_episodes.calls[agent] / len(full_episodes.scores) for agent in self.agents}
        singles, pairs = scores_to_credits(
            self.agents, scores, calls, method=self.method, min_contribution=min_contribution, seed=seed
        )
        rewards = list(self._rewards(scores, full_episodes.episode_ids))
        reward_count = store.put_rewards(rewards)
        print_uncut(reporter.console, self._table(singles))
        for line in (*self._finding_lines(singles, min_contribution), *_pair_lines(pairs)):
            reporter.say(line)
        reward_names = " and ".join(sorted({reward.name for reward in rewards}))
        reporter.say(
            f"{self.run_id}: wrote {reward_count} rewards of agents ({reward_names}) to the episodes of {full_run}"
        )
        reporter.give(
            {
                "run": self.run_id,
                "metric": self.metric,
                "method": self.method,
                "substitute": self.substitute,
                "agents": [asdict(credit) for credit in singles],
                "pairs": [asdict(credit) for credit in pairs],
                "rewards_of": full_run,
                "rewards_written": reward_count,
            }
        )

    def _read_team(self, store: TraceStore, run_id: str, variant: str | None) -> _TeamEpisodes:
        team = _TeamEpisodes()
        for trajectory in store.trajectories(run_ids=[run_id], variant=variant, split="train"):
            score = trajectory.team_reward(self.metric)
            if score is not None:
                key = (trajectory.episode.task_id, trajectory.episode.sample)
                team.scores[key], team.episode_ids[key] = score, trajectory.episode.episode_id
                team.calls.update(action.node for action in trajectory.actions)
        return team

    def _refuse_other_tools(self, store: TraceStore) -> None:
        if self.run_of is None:
            return
        stored_surface, surface = store_to_surface(store, self.run_of), store_to_surface(store, self.run_id)
        if changed := changed_tools(stored_surface, surface):
            raise ConfigError(
                f"credit --run-of: {changed[0]} has another schema than in run {self.run_of!r}, so a difference to "
                "that run is not the agent's; leave it out, and the best team runs"
            )

    def _refuse_too_few(self, scores: Scores) -> None:
        for agent in self.agents:
            shared = shared_keys({team: scores[team] for team in contribution_weights(agent, self.agents, self.method)})
            if len({task for task, _ in shared}) < 2:
                raise ConfigError(
                    f"credit: the teams that tell what {agent!r} adds have the reward {self.metric!r} together in "
                    f"{len(shared)} runs, of fewer than two tasks; check --metric and the app"
                )

    def _rewards(self, scores: Scores, episode_ids: Mapping[SampleKey, str]) -> Iterator[Reward]:
        now, source = time.time_ns(), f"credit:{self.run_id}: {self.metric}, {self.substitute} instead"
        methods: dict[str, Method] = {DIFFERENCE: "leave-one-out"}
        if self.method == "shapley":
            methods[SHAPLEY] = "shapley"
        for name, method in methods.items():
            for agent in self.agents:
                for key, value in share_by_sample(scores, contribution_weights(agent, self.agents, method)).items():
                    yield Reward(
                        episode_ids[key], name, value, source=source, created_ns=now, scope="agent", node=agent
                    )

    def _table(self, singles: Sequence[AgentCredit]) -> Table:
        table = Table(title=text_to_cell(f"what each agent adds to {self.metric}", "table.title"))
        share = "Shapley value" if self.method == "shapley" else "difference"
        for column in ("agent", "calls per run", share, "95% interval, all together", "runs up / down", "finding"):
            table.add_column(column)
        for credit in singles:
            interval = "the score never changes" if credit.interval is None else _interval_text(credit.interval)
            changed_text = f"{credit.improved_episodes} / {credit.worsened_episodes} of {credit.episodes}"
            table.add_row(
                text_to_cell(credit.agent),
                f"{credit.calls:.2f}",
                f"{credit.contribution:+.3f}",
                interval,
                changed_text,
                credit.finding,
            )
        return table

    def _finding_lines(self, singles: Sequence[AgentCredit], min_contribution: float) -> Iterator[str]:
        for credit in singles:
            if credit.finding == "lazy":
                yield (
                    f"{credit.agent} is lazy: it makes {credit.calls:.2f} calls a run, and adds less than "
                    f"{min_contribution:g} over {self.substitute} in its place"
                )
            elif credit.finding == "harmful":
                yield f"{credit.agent} is harmful: the team does better with {self.substitute} in its place"
            elif credit.finding == "not settled":
                yield (
                    f"{credit.agent}: {credit.tasks} tasks do not settle whether it adds anything; "
                    "run more with --tasks"
                )


def changed_tools(left: Surface, right: Surface) -> list[str]:
    """The tools that both sides offered under one name and never with the same schema.

    A tool that only one of them offered is no sign of a change: with an agent replaced, a graph takes other branches.
    """
    return [
        f"tool {name!r} of node {node!r}"
        for node in sorted(left.keys() & right.keys())
        for name in sorted(left[node].tools.keys() & right[node].tools.keys())
        if not left[node].tools[name] & right[node].tools[name]
    ]


def _pair_lines(pairs: Sequence[PairCredit]) -> Iterator[str]:
    for pair in pairs:
        if (explanation := _PAIR_EXPLANATIONS.get(pair.finding)) is not None:
            joint_text = f"{pair.joint:+.3f} {_interval_text(pair.joint_interval)}"
            yield f"{' and '.join(pair.agents)}, {pair.finding}: {explanation} (without both: {joint_text})"


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"
