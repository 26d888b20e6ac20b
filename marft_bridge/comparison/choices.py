"""The outcomes of all teams of a comparison -> what each is worth and costs, with the efficient ones marked.

Invariants: a run's cost is known only where that of each of its calls is, in the one currency of all; a team without
known costs is no choice. Efficient says what the means say: no other choice scores at least as high for less, or higher
for as much; whether two differ is for their intervals and contrasts to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marft_bridge.comparison.outcomes import COST, Outcomes
from marft_bridge.comparison.records import Choice, Estimate, interval_to_estimate
from marft_bridge.statistics import mean_interval


def outcomes_to_choices(outcomes: Mapping[str, Outcomes], metric: str) -> tuple[Choice, ...]:
    """Every team whose cost is known, in order; none where fewer than two are."""
    figures = {}
    for name, team in outcomes.items():
        costs, tasks = team.values(COST)
        if costs:
            figures[name] = (_estimate(team, metric), _mean(costs, tasks), len(team.scored) - len(costs))
    if len(figures) < 2:
        return ()
    points = [(cost.mean, score.mean) for score, cost, _ in figures.values()]
    return tuple(
        Choice(
            team=name,
            score=score,
            cost=cost,
            seconds=_estimate(outcomes[name], "seconds"),
            uncosted=uncosted,
            efficient=is_efficient(point, points),
        )
        for (name, (score, cost, uncosted)), point in zip(figures.items(), points, strict=True)
    )


def is_efficient(point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
    """Whether no point (cost, score) is at least as good in both and better in one."""
    cost, score = point
    return not any(c <= cost and s >= score and (c, s) != point for c, s in points)


def _estimate(team: Outcomes, metric: str) -> Estimate:
    values, tasks = team.values(metric)
    return _mean(values, tasks)


def _mean(values: Sequence[float], tasks: Sequence[str]) -> Estimate:
    return interval_to_estimate(mean_interval(values, clusters=tasks))
