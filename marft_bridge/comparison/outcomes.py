"""A variant's stored episodes -> the outcome of each task and sample, and the pairs that two variants share.

Episodes are read one after the other and held without their tokens. Invariants: of several attempts at one task and
sample one counts, the latest that has the deciding metric; a pair is one task, one sample and one seed on both sides;
an absent value is never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from marft_bridge.rewards.facts import sampled_tokens
from trace_store.records import Trajectory
from trace_store.store import TraceStore

SampleKey = tuple[str, int]  # task id, sample number
COST = "cost"  # in money
COSTS = ("tokens", "steps", "seconds", COST)
# Of the runs whose calls all have a price; summed in the order of the costs, so that a report says the same each time.
_MONEY = """
SELECT episode_id, sum(c.cost ORDER BY c.cost) FROM call_costs c JOIN episodes e USING (episode_id)
WHERE e.run_id = ? AND e.variant = ? GROUP BY episode_id HAVING count(c.cost) = count(*)
"""
# The same of the calls of each node.
_NODE_MONEY = """
SELECT episode_id, c.node, sum(c.cost ORDER BY c.cost) FROM call_costs c JOIN episodes e USING (episode_id)
WHERE e.run_id = ? AND e.variant = ? GROUP BY episode_id, c.node HAVING count(c.cost) = count(*)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one task and sample in one variant: its episode's rewards and costs."""

    trajectory: Trajectory  # without actions and edges
    values: Mapping[str, float]  # metric -> value: the team's rewards, and costs in tokens, steps, seconds and money

    @property
    def episode_id(self) -> str:
        """The id under which the store has the whole episode."""
        return self.trajectory.episode.episode_id

    @property
    def task_id(self) -> str:
        """The cluster of all statistics."""
        return self.trajectory.episode.task_id


@dataclass(frozen=True, slots=True)
class Pair:
    """One task and sample in the base and in a candidate."""

    base: Outcome
    candidate: Outcome


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of everything that one variant ran."""

    scored: Mapping[SampleKey, Outcome]  # those that have the deciding metric, in the order (task, sample)
    reasons: Mapping[str, int]  # why a task and sample has no score -> how many, the most frequent first
    ended: Mapping[SampleKey, Outcome]  # those that have it, and those whose run came to its end without it

    @property
    def unscored(self) -> int:
        """How many tasks and samples have no score."""
        return sum(self.reasons.values())

    def measured(self) -> dict[str, int]:
        """Each metric, by name, and how many scored episodes have it."""
        return dict(sorted(Counter(metric for outcome in self.scored.values() for metric in outcome.values).items()))

    def values(self, metric: str) -> tuple[list[float], list[str]]:
        """The metric of every scored episode that has it, and the task of each: two parallel lists."""
        rows = [(o.values[metric], o.task_id) for o in self.scored.values() if metric in o.values]
        return [value for value, _ in rows], [task for _, task in rows]


def read_outcomes(store: TraceStore, run_id: str, variant: str, metric: str, expected: Iterable[SampleKey]) -> Outcomes:
    """Reads a variant's episodes of one run into the outcomes of the expected tasks and samples.

    Args:
        metric: the one that decides.
        expected: the tasks and samples that the variant was to run; others are left out.
    """
    expected_keys = sorted(set(expected))
    money = read_money(store, run_id, variant)
    latest: dict[SampleKey, Outcome] = {}
    for trajectory in store.trajectories(run_ids=[run_id], variant=variant):
        episode = trajectory.episode
        outcome = trajectory_to_outcome(trajectory, money.get(episode.episode_id))
        earlier = latest.get((episode.task_id, episode.sample))
        if earlier is None or metric in outcome.values or metric not in earlier.values:
            latest[episode.task_id, episode.sample] = outcome
    scored = {key: latest[key] for key in expected_keys if key in latest and metric in latest[key].values}
    reasons = Counter(_missing_reason(latest.get(key), metric) for key in expected_keys if key not in scored)
    ended = {
        key: latest[key]
        for key in expected_keys
        if key in scored or (key in latest and latest[key].trajectory.episode.outcome == "terminated")
    }
    return Outcomes(scored, dict(reasons.most_common()), ended)


def read_currency(store: TraceStore) -> str | None:
    """The currency of all prices of a store; None where there are none, or several currencies."""
    currencies = [currency for (currency,) in store.sql("SELECT DISTINCT currency FROM prices")]
    return str(currencies[0]) if len(currencies) == 1 else None


def read_money(store: TraceStore, run_id: str, variant: str) -> dict[str, float]:
    """Episode -> what its calls cost, where that is known of all; empty where prices are in several currencies."""
    if read_currency(store) is None:
        return {}
    return {str(episode): float(cost) for episode, cost in store.sql(_MONEY, (run_id, variant))}


def read_node_money(store: TraceStore, run_id: str, variant: str) -> dict[tuple[str, str], float]:
    """(episode, node) -> what its calls cost, where that is known of all; empty as `read_money` is."""
    if read_currency(store) is None:
        return {}
    rows = store.sql(_NODE_MONEY, (run_id, variant))
    return {(str(episode), str(node)): float(cost) for episode, node, cost in rows}


def trajectory_to_outcome(trajectory: Trajectory, money: float | None = None) -> Outcome:
    """An episode into its rewards and costs. A declared reward that has the name of a cost replaces it."""
    names = {reward.name for reward in trajectory.rewards if reward.scope == "episode"}
    rewards = {name: value for name in names if (value := trajectory.team_reward(name)) is not None}
    costs = _costs(trajectory) | ({COST: money} if money is not None else {})
    return Outcome(replace(trajectory, actions=(), edges=()), {**costs, **rewards})


def _costs(trajectory: Trajectory) -> dict[str, float]:
    """Steps and seconds of an episode, and its sampled tokens where every action has a count."""
    episode, actions = trajectory.episode, trajectory.actions
    token_counts = [count for count in map(sampled_tokens, actions) if count is not None]
    costs = {"steps": float(len(actions)), "seconds": (episode.ended_ns - episode.started_ns) / 1e9}
    return costs | ({"tokens": float(sum(token_counts))} if len(token_counts) == len(actions) else {})


def _missing_reason(outcome: Outcome | None, metric: str) -> str:
    if outcome is None:
        return "no complete record of the episode"
    episode = outcome.trajectory.episode
    if episode.outcome == "terminated":
        return f"ended without the reward {metric!r}"
    return f"{episode.outcome}: {episode.reason or 'no reason recorded'}"


def pair_outcomes(base: Outcomes, candidate: Outcomes) -> list[Pair]:
    """The tasks and samples that have the deciding metric on both sides."""
    return [Pair(base.scored[key], candidate.scored[key]) for key in base.scored.keys() & candidate.scored.keys()]


def sort_pairs(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """By task and sample."""
    yield from sorted(pairs, key=lambda pair: (pair.base.task_id, pair.base.trajectory.episode.sample))


def shared_metrics(pairs: Sequence[Pair], metric: str) -> list[str]:
    """The metrics that both sides of some pair have besides the deciding one: rewards by name, then costs."""
    names = {name for pair in pairs for name in pair.base.values.keys() & pair.candidate.values.keys()} - {metric}
    return [*sorted(names - set(COSTS)), *(cost for cost in COSTS if cost in names)]


def paired_values(pairs: Iterable[Pair], metric: str) -> tuple[list[float], list[float], list[str]]:
    """The metric on both sides of the pairs that have it on both, and their tasks: three parallel lists."""
    complete_pairs = [p for p in pairs if metric in p.base.values and metric in p.candidate.values]
    return (
        [pair.base.values[metric] for pair in complete_pairs],
        [pair.candidate.values[metric] for pair in complete_pairs],
        [pair.base.task_id for pair in complete_pairs],
    )


def scores_to_range(metric: str, scores: Collection[float]) -> float:
    """How far two scores of a metric may lie apart: 1 where all lie in 0 to 1, else from the lowest to the highest.

    A cost begins at 0, and its unit is anything: its range ends at the highest that was seen, however small.
    """
    low, high = min(scores), max(scores)
    if metric in COSTS:
        return high - min(low, 0.0)
    return 1.0 if low >= 0 and high <= 1 else high - low
