"""The stored forks of a plan -> what was measured at each call of each run.

Invariant: to a variance the recorded run counts as one more fork of every level around its calls, which holds because
it was drawn without a look at its reward; it is no part of a difference, which is of pairs of forks with one seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.fork_credit.credit_plan import CreditPlan
from marft_bridge.fork_credit.estimates import MeasuredCall, MeasuredRun
from marft_bridge.fork_credit.run_levels import CallLevels, Level, RunLevels
from marft_bridge.rollouts.episode_plan import Key, episode_to_key
from marft_bridge.statistics.decided_variance import decided_variance
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class StoredForks:
    """The forks of one command that are stored."""

    rewards: Mapping[Key, float]
    failures: Counter[str]  # reason -> forks without a reward

    @property
    def count(self) -> int:
        """All of them, with a reward and without."""
        return len(self.rewards) + sum(self.failures.values())


def read_forks(store: TraceStore, run_id: str, metric: str) -> StoredForks:
    """The forks of a run. Of several attempts at one the latest counts, and one with a reward before one without."""
    reasons: dict[Key, str | None] = {}  # of the latest
    rewards: dict[Key, float] = {}
    for each in store.trajectories(run_ids=[run_id], forks=True):  # by their start
        key = episode_to_key(each.episode)
        reasons[key] = each.episode.reason
        if (reward := each.team_reward(metric)) is not None:
            rewards[key] = reward
    failures: Counter[str] = Counter()
    for key, reason in reasons.items():
        if key not in rewards:
            failures[reason or f"it ended without the reward {metric!r}"] += 1
    return StoredForks(rewards, failures)


def read_recorded_rewards(store: TraceStore, runs: Sequence[RunLevels], metric: str) -> dict[str, float]:
    """Episode -> the reward of the recorded run."""
    ids = [levels.run.episode_id for levels in runs]
    rows = store.sql(
        "SELECT episode_id, value FROM episode_reward WHERE name = ? AND episode_id IN (SELECT unnest(?::VARCHAR[]))",
        (metric, ids),
    )
    return {str(episode_id): float(value) for episode_id, value in rows}


def measure_runs(
    plan: CreditPlan, runs: Sequence[RunLevels], forks: Mapping[Key, float], recorded: Mapping[str, float]
) -> tuple[list[MeasuredRun], float]:
    """What was measured of each run; and the largest less the smallest reward that was seen.

    Args:
        forks: the rewards of the forks.
        recorded: those of the recorded runs, by episode.
    """
    measured = [_RunForks(plan, levels, forks, recorded=recorded[levels.run.episode_id]).measure() for levels in runs]
    seen = [*forks.values(), *recorded.values()]
    return measured, max(seen) - min(seen)


@dataclass(frozen=True, slots=True)
class _RunForks:
    plan: CreditPlan
    levels: RunLevels
    rewards: Mapping[Key, float]
    recorded: float

    def measure(self) -> MeasuredRun:
        episode = self.levels.run.trajectory.episode
        whole = self._level_rewards(self.levels.beginning)
        return MeasuredRun(
            episode.episode_id,
            episode.task_id,
            decided_variance(whole, None) if len(whole) > 1 else None,
            calls=[self._measure_call(call) for call in self.levels.calls],
            whole_nodes={node for node in self.plan.nodes if self.levels.is_whole(node)},
        )

    def _measure_call(self, call: CallLevels) -> MeasuredCall:
        before = self._level_rewards(call.before)
        after = None if call.after is None else self._level_rewards(call.after)
        decided = None
        if len(before) > 1 and (after is None or len(after) > 1):
            decided = decided_variance(before, after)
        episode = self.levels.run.trajectory.episode
        pairs = zip(self.plan.level_keys(call.before, episode), self.plan.stand_in_keys(call, episode), strict=False)
        differences = [
            self.rewards[key] - self.rewards[stand_in_key]
            for key, stand_in_key in pairs
            if key in self.rewards and stand_in_key in self.rewards
        ]
        difference = sum(differences) / len(differences) if differences else None
        return MeasuredCall(call.call.node, call.call.number, decided, difference=difference)

    def _level_rewards(self, level: Level) -> list[float]:
        """Of the recorded run, and of its forks."""
        keys = self.plan.level_keys(level, self.levels.run.trajectory.episode)
        return [self.recorded, *(self.rewards[key] for key in keys if key in self.rewards)]
