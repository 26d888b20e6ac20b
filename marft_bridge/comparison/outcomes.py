"""A variant's stored episodes -> what came of each task and sample, and the pairs that two variants share.

Episodes are read one after the other and kept without their tokens. Invariants: of several attempts at one task and
sample one counts, the latest that has the deciding metric; a pair is one task, one sample and one seed on both sides;
what is absent is never 0. It knows nothing of statistics or pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from marft_bridge.rewards.facts import sampled_tokens
from trace_store.records import Trajectory
from trace_store.store import TraceStore

Key = tuple[str, int]  # task, sample
COSTS = ("tokens", "steps", "seconds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one task and sample in one variant."""

    trajectory: Trajectory  # without actions and edges
    values: Mapping[str, float]  # metric -> value: the team's rewards, and costs

    @property
    def episode_id(self) -> str:
        """Where the whole episode is to be found."""
        return self.trajectory.episode.episode_id

    @property
    def task_id(self) -> str:
        """The unit of all statistics."""
        return self.trajectory.episode.task_id


@dataclass(frozen=True, slots=True)
class Pair:
    """One task and sample in the base and in another variant."""

    base: Outcome
    other: Outcome


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Everything that one variant ran."""

    scored: Mapping[Key, Outcome]  # those that have the deciding metric, in the order (task, sample)
    reasons: Mapping[str, int]  # why the others have not

    @property
    def unscored(self) -> int:
        """How many tasks and samples have no score."""
        return sum(self.reasons.values())

    def values(self, metric: str) -> tuple[list[float], list[str]]:
        """The metric of every episode that has it, and their tasks."""
        found = [(o.values[metric], o.task_id) for o in self.scored.values() if metric in o.values]
        return [value for value, _ in found], [task for _, task in found]


def stored_outcomes(store: TraceStore, run_id: str, variant: str, metric: str, expected: Iterable[Key]) -> Outcomes:
    """What a variant's episodes of one run came to.

    Args:
        metric: decides.
        expected: the tasks and samples that it was to run.
    """
    wanted = sorted(set(expected))
    found: dict[Key, Outcome] = {}
    for trajectory in store.trajectories(run_ids=[run_id], variant=variant):
        episode = trajectory.episode
        outcome = trajectory_to_outcome(trajectory)
        known = found.get((episode.task_id, episode.sample))
        if known is None or metric in outcome.values or metric not in known.values:
            found[episode.task_id, episode.sample] = outcome
    scored = {key: found[key] for key in wanted if key in found and metric in found[key].values}
    reasons = Counter(_reason(found.get(key), metric) for key in wanted if key not in scored)
    return Outcomes(scored, dict(reasons.most_common()))


def trajectory_to_outcome(trajectory: Trajectory) -> Outcome:
    """An episode into its numbers. A declared reward that has the name of a cost takes its place."""
    names = {reward.name for reward in trajectory.rewards if reward.scope == "episode"}
    rewards = {name: value for name in names if (value := trajectory.team_reward(name)) is not None}
    return Outcome(replace(trajectory, actions=(), edges=()), {**_costs(trajectory), **rewards})


def _costs(trajectory: Trajectory) -> dict[str, float]:
    episode, counts = trajectory.episode, [sampled_tokens(action) for action in trajectory.actions]
    known = [count for count in counts if count is not None]
    costs = {"steps": float(len(counts)), "seconds": (episode.ended_ns - episode.started_ns) / 1e9}
    return costs | ({"tokens": float(sum(known))} if len(known) == len(counts) else {})


def _reason(outcome: Outcome | None, metric: str) -> str:
    if outcome is None:
        return "no complete record of the episode"
    episode = outcome.trajectory.episode
    if episode.outcome == "terminated":
        return f"ended without the reward {metric!r}"
    return f"{episode.outcome}: {episode.reason or 'no reason recorded'}"


def pairs_of(base: Outcomes, other: Outcomes) -> list[Pair]:
    """The tasks and samples that have the deciding metric on both sides."""
    return [Pair(base.scored[key], other.scored[key]) for key in base.scored.keys() & other.scored.keys()]


def in_order(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """By task and sample."""
    yield from sorted(pairs, key=lambda pair: (pair.base.task_id, pair.base.trajectory.episode.sample))


def shared_metrics(pairs: Sequence[Pair], metric: str) -> list[str]:
    """What both sides of some pair have besides the deciding metric: rewards by name, then costs."""
    names = {name for pair in pairs for name in pair.base.values.keys() & pair.other.values.keys()} - {metric}
    return [*sorted(names - set(COSTS)), *(cost for cost in COSTS if cost in names)]


def paired_values(pairs: Iterable[Pair], metric: str) -> tuple[list[float], list[float], list[str]]:
    """The metric on both sides of the pairs that have it on both, and their tasks: three parallel lists."""
    both = [p for p in pairs if metric in p.base.values and metric in p.other.values]
    return (
        [pair.base.values[metric] for pair in both],
        [pair.other.values[metric] for pair in both],
        [pair.base.task_id for pair in both],
    )
