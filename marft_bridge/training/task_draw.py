"""What is known of each task -> the order in which a round takes tasks: by how much their samples may differ.

A task that always earns the same teaches nothing, whether it is solved or hopeless: what an episode teaches goes with
the variance of its task's rewards, p(1-p) where they are 0 or 1, and with the chance that it comes to a reward at all.
Invariant: an order follows from the seed, the round and runs of rounds before it alone, never from the order of rows or
of tasks, so that a plan made again is the same.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

MEMORY = 0.9
"""What a round leaves of the weight of what was known; half of it after 6.6 rounds. Of 0.65, 0.8, 0.9, 0.95 and 1, it
came within 0.01 of the least share of groups without spread in each of six simulated trainings of 8 to 40 rounds on 40
to 100 tasks that all grew easier (0.2 to 0.6 on the logit a round). 1 was best where nothing moved (0.52 against 0.56),
and 0.02 worse over 40 rounds of learning."""
OLDEST = 120
"""Rounds after which an episode, by then worth 3e-6 of one, is no longer looked at."""
PRIOR_STRENGTH = 2.0
"""How many episodes the mean over tasks counts in a task's estimate, while nothing is known of how alike tasks are: for
rewards of 0 and 1 that is the strength of the uniform Beta(1, 1)."""
PRIOR_WEIGHT = 2.0
"""How many comparisons of a task's samples with each other that guess is worth."""
MAX_STRENGTH = 10.0
"""However alike tasks seem, ten episodes of one count as much as what is known of the others."""
FLOOR = 0.1
"""The least weight of a task, as a share of that of a task of which nothing is known."""
LIKE_WEIGHT = 0.5
"""A task of the round before waits for all tasks of at least this share of its weight."""


@dataclass(frozen=True, slots=True)
class TaskReward:
    """What one episode earned."""

    task_id: str
    round: int  # 0: before the first round
    value: float


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run that came to no result: it failed, was cut short without a reward, or has none."""

    task_id: str
    round: int  # 0: before the first round


TaskRun = TaskReward | LostRun
"""What is known of one run of a task."""


@dataclass(frozen=True, slots=True)
class DrawRule:
    """What orders are drawn by.

    Args:
        tasks_per_round: how many tasks a round plans.
        max_staleness: rounds whose episodes may be under way while a round is planned, besides the one before it.
    """

    seed: int
    tasks_per_round: int
    max_staleness: int = 0

    def last_known_round(self, number: int) -> int:
        """The newest round that was learned from before round `number` is planned, in every execution; 0: none.

        Episodes of a later one may come after that plan in one execution, and before it in one that was resumed.
        """
        return max(0, number - self.max_staleness - 1)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Weighted sums over the episodes of one task."""

    weight: float
    squared_weight: float
    value: float
    square: float


_NO_EPISODES = _Sums(weight=0.0, squared_weight=0.0, value=0.0, square=0.0)


@dataclass(frozen=True, slots=True)
class _Posterior:
    """The mixture that a task's values are expected around, which counts as `total` episodes."""

    mean: float
    square: float
    total: float

    @property
    def expected_variance(self) -> float:
        """Of the task's values."""
        return (self.square - self.mean**2) * self.total / (self.total + 1)


@dataclass(frozen=True, slots=True)
class _Posteriors:
    """What is known of every task's values: the pool of all tasks, how much it counts, and the sums of each."""

    mean: float
    square: float
    strength: float
    sums_by_task: Mapping[str, _Sums]

    def of(self, task_id: str) -> _Posterior:
        """The posterior of a task."""
        task = self.sums_by_task.get(task_id, _NO_EPISODES)
        total = self.strength + task.weight
        return _Posterior(
            (self.strength * self.mean + task.value) / total,
            (self.strength * self.square + task.square) / total,
            total,
        )

    @property
    def unknown(self) -> _Posterior:
        """That of a task of which nothing is known."""
        return _Posterior(self.mean, self.square, self.strength)


def round_to_task_order(runs: Collection[TaskRun], task_ids: Collection[str], number: int, rule: DrawRule) -> list[str]:
    """All tasks in the order in which a round takes them; those beyond `tasks_per_round` are for refilling it.

    They are drawn without replacement, with chances in proportion to `runs_to_weights`. Those of the round before
    rest as `order_tasks` says: those that it played where it is known, else those that it planned.

    Args:
        runs: of any rounds and tasks; what the round must not know is ignored.
        number: of the round, from 1.
    """
    last_known = rule.last_known_round(number)
    resting = {run.task_id for run in runs if run.round == last_known and last_known > 0}
    order: list[str] = []
    for planned_round in range(last_known + 1, number + 1):
        weights = runs_to_weights(runs, task_ids, planned_round, last_known=rule.last_known_round(planned_round))
        order = order_tasks(weights, f"{rule.seed}/{planned_round}", resting)
        resting = set(order[: rule.tasks_per_round])
    return order


def runs_to_weights(
    runs: Iterable[TaskRun], task_ids: Collection[str], number: int, last_known: int
) -> dict[str, float]:
    """Task -> what one run of it in round `number` can be expected to teach.

    The expected variance of its rewards, in squares of the range of all known ones, times the share of its runs that
    are expected to come to a reward. The share has the prior that the rewards have, around the share over all tasks: a
    task whose runs never ended weighs ever less, down to the floor.

    With G the rewards of all tasks pooled, a task's rewards have the prior of a Dirichlet process of strength k around
    G. Its posterior after n episodes is that process around the mixture (k G + episodes) / (k + n), and the expected
    variance of a task's rewards is Var(mixture) (k + n) / (k + n + 1). For rewards of 0 and 1 it is exactly E[p(1-p)]
    under Beta(k m + successes, k (1 - m) + failures), with m the mean of G. An episode counts MEMORY to the power of
    the rounds since. k is the variance within tasks over that between them (empirical Bayes), so that a task without
    episodes has the mean variance of the others.

    Args:
        last_known: runs of later rounds are ignored.

    Returns:
        At least FLOOR of the weight of a task without runs. While no two rewards differ, the shares alone.
    """
    ids = set(task_ids)
    known_runs = [run for run in runs if run.task_id in ids and number - OLDEST <= run.round <= last_known]
    weights, unknown_weight = _variances(known_runs, ids, number)
    shares, unknown_share = _ending_shares(known_runs, ids, number)
    floor = FLOOR * unknown_weight * unknown_share
    return {task_id: max(weights[task_id] * shares[task_id], floor) for task_id in task_ids}


def _variances(runs: Iterable[TaskRun], task_ids: Collection[str], number: int) -> tuple[dict[str, float], float]:
    """Task -> the expected variance of its rewards, and that of a task without any; 1 while no two rewards differ."""
    rewards = [run for run in runs if isinstance(run, TaskReward)]
    low = min((reward.value for reward in rewards), default=0.0)
    spread = max((reward.value for reward in rewards), default=0.0) - low
    if spread == 0:
        return dict.fromkeys(task_ids, 1.0), 1.0
    posteriors = _to_posteriors([(reward, (reward.value - low) / spread) for reward in rewards], number)
    return {
        task_id: posteriors.of(task_id).expected_variance for task_id in task_ids
    }, posteriors.unknown.expected_variance


def _ending_shares(runs: Iterable[TaskRun], task_ids: Collection[str], number: int) -> tuple[dict[str, float], float]:
    """Task -> the share of its runs that are expected to come to a reward, and that of a task without any run."""
    values = [(run, float(isinstance(run, TaskReward))) for run in runs]
    if len({value for _, value in values}) < 2:  # all tasks are alike
        return dict.fromkeys(task_ids, 1.0), 1.0
    posteriors = _to_posteriors(values, number)
    return {task_id: posteriors.of(task_id).mean for task_id in task_ids}, posteriors.unknown.mean


def order_tasks(weights: Mapping[str, float], key: str, resting: Collection[str] = ()) -> list[str]:
    """All tasks, drawn one after another without replacement with chances in proportion to their weights.

    A resting task comes no sooner than every other of at least LIKE_WEIGHT of its weight.

    Args:
        key: seeds the draw; every task has a draw of its own, so that others may come and go.
    """
    # The least of independent exponential times with rates w is that of task i with probability w_i / sum of w, and
    # so is the least of those that are left (Efraimidis and Spirakis, 2006).
    times = {task_id: -math.log(uniform_of(f"{key}/{task_id}")) / weight for task_id, weight in weights.items()}
    drawn = sorted(times, key=lambda task_id: (times[task_id], task_id))
    rested = [task_id for task_id in drawn if task_id not in resting]
    heaviest_left = [0.0]  # of those behind each position of `rested`; made from its end
    for task_id in reversed(rested):
        heaviest_left.append(max(heaviest_left[-1], weights[task_id]))
    rested_times = [times[task_id] for task_id in rested]
    positions: dict[int, list[str]] = defaultdict(list)
    for task_id in drawn:
        if task_id in resting:
            no_like_left = len(rested) + 1 - bisect_left(heaviest_left, LIKE_WEIGHT * weights[task_id])
            positions[max(no_like_left, bisect_left(rested_times, times[task_id]))].append(task_id)
    order: list[str] = []
    for position, task_id in enumerate(rested):
        order += [*positions[position], task_id]
    return order + positions[len(rested)]


def groups_to_add(planned: int, played: int, informative: int, left: int) -> int:
    """How many groups a round is refilled with next, so that as many as were planned are expected to be informative.

    Args:
        planned: groups of the round without any refill.
        played: groups so far.
        informative: those of them whose samples earned differently.
        left: groups that may still be added.
    """
    missing = planned - informative
    if missing <= 0:
        return 0
    return min(math.ceil(missing * played / informative), left) if informative else left


def _to_posteriors(values: Iterable[tuple[TaskRun, float]], number: int) -> _Posteriors:
    """Runs with a value of each, two of which differ, to what round `number` knows of the tasks."""
    values_by_task = defaultdict[str, list[tuple[float, float]]](list)
    for run, value in values:
        values_by_task[run.task_id].append((MEMORY ** (number - run.round), value))
    sums = {task_id: _to_sums(weighted) for task_id, weighted in values_by_task.items()}
    mean, square = _pool(sums.values())
    return _Posteriors(mean, square, strength=_prior_strength(sums.values(), square - mean**2), sums_by_task=sums)


def _to_sums(values: Sequence[tuple[float, float]]) -> _Sums:
    """(weight, value) of a task's episodes to sums that do not depend on their order."""
    return _Sums(
        weight=math.fsum(weight for weight, _ in values),
        squared_weight=math.fsum(weight**2 for weight, _ in values),
        value=math.fsum(weight * value for weight, value in values),
        square=math.fsum(weight * value**2 for weight, value in values),
    )


def _pool(sums: Collection[_Sums]) -> tuple[float, float]:
    """Mean and mean square over tasks. Each counts once, however often it was drawn, or less where little is left of
    what was known of it."""
    shares = [min(1.0, task.weight) for task in sums]
    total = math.fsum(shares)
    mean = math.fsum(share * task.value / task.weight for share, task in zip(shares, sums, strict=True)) / total
    square = math.fsum(share * task.square / task.weight for share, task in zip(shares, sums, strict=True)) / total
    return mean, square


def _prior_strength(sums: Iterable[_Sums], variance: float) -> float:
    """k = within / between, from the share of the variance that lies within tasks, which is k / (k + 1).

    The share is an analysis of variance with `PRIOR_WEIGHT` degrees of freedom that say what `PRIOR_STRENGTH` does.
    """
    squares, freedom = [], []
    for task in sums:
        squares.append(task.square - task.value**2 / task.weight)
        freedom.append(task.weight - task.squared_weight / task.weight)
    expected = PRIOR_WEIGHT * PRIOR_STRENGTH / (PRIOR_STRENGTH + 1)
    share = (math.fsum(squares) / variance + expected) / (math.fsum(freedom) + PRIOR_WEIGHT)
    return share / (1 - share) if share < MAX_STRENGTH / (MAX_STRENGTH + 1) else MAX_STRENGTH


def uniform_of(key: str) -> float:
    """A number above 0 and below 1 that follows from the text."""
    return (int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") + 0.5) / 2**48
