"""Pairs of the base and each candidate -> what may be claimed of every metric, and what could have been found.

Invariants: the deciding metric is one family over all candidates, the others are one family for each candidate; what
was looked at on the way has the p-value and the intervals of such a comparison, and no others. It knows neither stores
nor pages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from marft_bridge.comparison.outcomes import Pair, paired_values, shared_metrics
from marft_bridge.comparison.ratio import ratio_interval
from marft_bridge.comparison.records import SIGNIFICANCE, Contrast, Power
from marft_bridge.comparison.stopping import Standing
from marft_bridge.errors import ConfigError
from marft_bridge.statistics import Contrast as Family
from marft_bridge.statistics import FamilyMember, compare_family, minimum_detectable_effect, tasks_to_settle

SEQUENTIAL = "sign flips of whole tasks, the error spent over {} looks; repeated confidence intervals"
FEWEST_TASKS = 2  # with a pair: one task says nothing about others

Pairs = Mapping[str, Sequence[Pair]]
"""Candidate -> its pairs with the base."""


def _family(name: str, pairs: Sequence[Pair], metric: str, ranks: Collection[str]) -> Family:
    base, values, tasks = paired_values(pairs, metric)
    return Family(name, metric, base, values, tasks, metric in ranks)


def deciding_contrasts(
    pairs: Pairs,
    metric: str,
    seed: int,
    ranks: Collection[str] = (),
    standings: Mapping[str, Standing] | None = None,
    looks: int = 0,
) -> tuple[Contrast, ...]:
    """The metric that decides, for every candidate.

    Args:
        ranks: metrics whose p-value is of ranks and not of means.
        standings: of every candidate, where it was looked at while it ran.
        looks: how often.

    Raises:
        ConfigError: after looks on the way too few tasks are left for an interval.
    """
    rows = _contrasts([_family(name, those, metric, ranks) for name, those in pairs.items()], seed)
    if standings is None:
        return tuple(rows)
    return tuple(_looked_at(row, standings[row.variant], looks, len(pairs)) for row in rows)


def secondary_contrasts(
    name: str, pairs: Sequence[Pair], metric: str, seed: int, ranks: Collection[str] = ()
) -> list[Contrast]:
    """Every other metric that both sides of enough pairs have, for one candidate."""
    families = [_family(name, pairs, other, ranks) for other in shared_metrics(pairs, metric)]
    return _contrasts([each for each in families if len(set(each.clusters or ())) >= FEWEST_TASKS], seed)


def _contrasts(families: Sequence[Family], seed: int) -> list[Contrast]:
    members = compare_family(families, seed=seed)
    return [_contrast(member, family) for member, family in zip(members, families, strict=True)]


def _contrast(member: FamilyMember, family: Family) -> Contrast:
    result = member.result
    return Contrast(
        variant=member.variant,
        metric=family.metric,
        n=result.n,
        clusters=result.clusters,
        mean_a=result.mean_a,
        mean_b=result.mean_b,
        diff=result.diff,
        ci95=result.ci95,
        p_value=result.p_value,
        test=result.test,
        p_adjusted=member.p_adjusted,
        simultaneous=member.simultaneous,
        ratio_ci95=ratio_interval(family.base, family.values, clusters=family.clusters),
    )


def _looked_at(row: Contrast, standing: Standing, looks: int, candidates: int) -> Contrast:
    """The same means, with the p-value and the intervals that hold in spite of the looks."""
    p = standing.p_value
    assert p is not None  # a plan ends where every candidate is settled or all tasks have run
    changes: dict[str, Any] = {
        "p_value": p,
        "p_adjusted": min(1.0, candidates * p),
        "ci95": _closed(row, standing.interval),
        "simultaneous": _closed(row, standing.simultaneous),
        "test": SEQUENTIAL.format(looks),
        "ratio_ci95": None,  # an ordinary one is too hopeful after a look
    }
    return Contrast.model_validate(row.model_dump(exclude={"outcome"}) | changes)


def _closed(row: Contrast, interval: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = interval
    if low is None or high is None:
        raise ConfigError(
            f"compare: {row.clusters} tasks with pairs of {row.variant!r} are too few for an interval after looks on "
            "the way; take more tasks, or leave out compare.stop_early"
        )
    return low, high


def pairs_to_power(name: str, pairs: Sequence[Pair], metric: str, candidates: int) -> Power:
    """What the comparison with one of several candidates could find, and what would settle it."""
    base, values, tasks = paired_values(pairs, metric)
    differences = [b - a for a, b in zip(base, values, strict=True)]
    alpha = SIGNIFICANCE / candidates
    settle = tasks_to_settle(differences, alpha=alpha, clusters=tasks)
    return Power(
        variant=name,
        detectable=minimum_detectable_effect(differences, alpha, clusters=tasks),
        tasks_more=None if settle is None else settle.more,
        effect=None if settle is None else settle.effect,
    )
