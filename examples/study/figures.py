"""Results of a study's runs -> its figures: curves with intervals, areas, rollouts to reach a level, differences.

Invariant: a seed is one observation. Intervals are t intervals over seeds, and differences are taken seed by seed, as
the runs of a seed share their collected episodes, tasks and sampling seeds. What too few seeds leave unknown is None.
It does not know how figures are written down or drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from examples.study.results import Result
from marft_bridge.statistics import MeanInterval, mean_interval

ByCondition = Mapping[str, Mapping[int, Result]]
"""Condition -> seed -> its run."""


def results_by_condition(results: Iterable[Result]) -> ByCondition:
    """Results in the order of their seeds.

    Raises:
        ValueError: a run occurs twice, or two runs of a study differ in their number of fresh episodes.
    """
    found: dict[str, dict[int, Result]] = {}
    sizes: dict[tuple[int, ...], str] = {}
    for result in sorted(results, key=lambda each: (each.condition, each.seed)):
        name = f"{result.condition} seed {result.seed}"
        if result.seed in found.setdefault(result.condition, {}):
            raise ValueError(f"{name} is there twice")
        found[result.condition][result.seed] = result
        sizes[tuple(each.number for each in result.rounds)] = name
    if len(sizes) > 1:
        raise ValueError(f"these have different rounds and cannot be compared: {', '.join(sizes.values())}")
    return found


def fresh_before(result: Result) -> list[int]:
    """Of each on-policy round: how many fresh episodes its adapters had been trained on when it was sampled."""
    before, total = [], 0
    for each in result.rounds[1:]:
        before.append(total)
        total += each.episodes
    return before


def rewards(result: Result) -> list[float]:
    """Mean reward of each on-policy round.

    Raises:
        ValueError: a round has no reward.
    """
    found = [each.reward for each in result.rounds[1:] if each.reward is not None]
    if len(found) < len(result.rounds) - 1 or not found:
        raise ValueError(f"{result.condition} seed {result.seed}: a round has no reward")
    return found


def area(result: Result) -> float:
    """Area under the learning curve by the trapezoid rule, over its length: a mean reward. One point is itself."""
    x, y = fresh_before(result), rewards(result)
    if len(y) == 1:
        return y[0]
    pieces = [(x[i + 1] - x[i]) * (y[i] + y[i + 1]) / 2 for i in range(len(y) - 1)]
    return sum(pieces) / (x[-1] - x[0])


def reached(result: Result, level: float) -> int | None:
    """Fresh episodes behind the adapters that first earned `level` in a round; None: in no round."""
    pairs = zip(fresh_before(result), rewards(result), strict=True)
    return next((fresh for fresh, reward in pairs if reward >= level), None)


def curve(runs: Mapping[int, Result]) -> list[tuple[float, MeanInterval]]:
    """Of each on-policy round, over seeds: fresh episodes before it (their mean), and the mean reward."""
    x = zip(*map(fresh_before, runs.values()), strict=True)
    y = zip(*map(rewards, runs.values()), strict=True)
    return [(sum(fresh) / len(fresh), mean_interval(values)) for fresh, values in zip(x, y, strict=True)]


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> MeanInterval | None:
    """b - a over the seeds that both have; None where there is none."""
    shared = sorted(a.keys() & b.keys())
    return mean_interval([b[seed] - a[seed] for seed in shared]) if shared else None


def seconds_a_round(runs: Iterable[Result]) -> tuple[float | None, float | None]:
    """Mean seconds of rollouts and of updates over all on-policy rounds in which they were measured."""
    rounds = [each for result in runs for each in result.rounds[1:]]
    return _mean([each.rollout_s for each in rounds]), _mean([each.update_s for each in rounds])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
