"""Pairs of the base and each candidate -> the contrast of every metric, and the power of the comparison.

Invariants: the deciding metric is one family over all candidates, the others are one family for each candidate; a
comparison with interim looks has the p-values and intervals of a group-sequential test, and no others; each contrast
holds its tasks' differences, so that a test that nobody asked for yet (a gate's margin) needs no episode again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.outcomes import Pair, paired_values, scores_to_range, shared_metrics
from marft_bridge.comparison.ratio import ratio_interval
from marft_bridge.comparison.records import SIGNIFICANCE, Contrast, Power, TaskDifferences
from marft_bridge.comparison.stopping import InterimResult
from marft_bridge.statistics import Contrast as PairedContrast
from marft_bridge.statistics import FamilyMember, compare_family, minimum_detectable_effect, tasks_to_settle
from marft_bridge.statistics.clusters import totals_by_label

SEQUENTIAL_TEST = "sign flips of whole tasks, the error spent over {} looks; repeated confidence intervals"
MIN_TASKS = 2  # with a pair: one task says nothing about the variance between tasks

Pairs = Mapping[str, Sequence[Pair]]
"""Candidate -> its pairs with the base."""


def _paired_contrast(name: str, pairs: Sequence[Pair], metric: str, ranks: Collection[str]) -> PairedContrast:
    base, values, tasks = paired_values(pairs, metric)
    return PairedContrast(name, metric, base=base, values=values, clusters=tasks, ranks=metric in ranks)


def pairs_to_deciding_contrasts(
    pairs: Pairs,
    metric: str,
    seed: int,
    ranks: Collection[str] = (),
    interim_results: Mapping[str, InterimResult] | None = None,
    looks: int = 0,
) -> tuple[Contrast, ...]:
    """The contrasts of the deciding metric: one for each candidate, in order.

    Args:
        ranks: metrics whose p-value is that of Wilcoxon's signed ranks.
        interim_results: of every candidate after the last look; None where there were no looks.
        looks: how many there were.

    Raises:
        ConfigError: too few tasks for an interval that allows for the looks.
    """
    paired_contrasts = [
        _paired_contrast(name, candidate_pairs, metric, ranks=ranks) for name, candidate_pairs in pairs.items()
    ]
    rows = paired_to_contrasts(paired_contrasts, seed)
    if interim_results is None:
        return tuple(rows)
    return tuple(_correct_for_looks(row, interim_results[row.variant], looks, candidates=len(pairs)) for row in rows)


def pairs_to_secondary_contrasts(
    name: str, pairs: Sequence[Pair], metric: str, seed: int, ranks: Collection[str] = ()
) -> list[Contrast]:
    """The contrasts of every other metric that both sides have on at least `MIN_TASKS` tasks, for one candidate."""
    metrics = shared_metrics(pairs, metric)
    paired_contrasts = [_paired_contrast(name, pairs, secondary, ranks=ranks) for secondary in metrics]
    return paired_to_contrasts(
        [paired for paired in paired_contrasts if len(set(paired.clusters or ())) >= MIN_TASKS], seed
    )


def paired_to_contrasts(paired_contrasts: Sequence[PairedContrast], seed: int) -> list[Contrast]:
    """Pairs of scores, tested together, as a report has them, in order."""
    members = compare_family(paired_contrasts, seed=seed)
    scores: dict[str, list[float]] = {}  # of all candidates: the deciding metric has one range
    for paired in paired_contrasts:
        scores.setdefault(paired.metric, []).extend([*_floats(paired.base), *_floats(paired.values)])
    ranges = {metric: scores_to_range(metric, values) for metric, values in scores.items()}
    return [
        _member_to_contrast(member, paired, value_range=ranges[paired.metric])
        for member, paired in zip(members, paired_contrasts, strict=True)
    ]


def _floats(x: ArrayLike) -> list[float]:
    return [float(value) for value in np.asarray(x, dtype=np.float64)]


def paired_to_task_differences(paired: PairedContrast, value_range: float) -> TaskDifferences:
    """The pairs of one contrast into the differences of its tasks, sorted."""
    differences = np.asarray(paired.values, dtype=np.float64) - np.asarray(paired.base, dtype=np.float64)
    sums, sizes = totals_by_label(paired.metric, differences, paired.clusters)
    counts = Counter((float(total), int(size)) for total, size in zip(sums, sizes, strict=True))
    rows = tuple((total, size, count) for (total, size), count in sorted(counts.items()))
    return TaskDifferences(value_range=value_range, rows=rows)


def _member_to_contrast(member: FamilyMember, paired: PairedContrast, value_range: float) -> Contrast:
    result = member.result
    return Contrast(
        variant=member.variant,
        metric=paired.metric,
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
        ratio_ci95=ratio_interval(paired.base, paired.values, clusters=paired.clusters),
        task_differences=paired_to_task_differences(paired, value_range),
    )


def _correct_for_looks(row: Contrast, interim_result: InterimResult, looks: int, candidates: int) -> Contrast:
    """The same means, with the p-value and the intervals that allow for the looks."""
    p = interim_result.p_value
    assert p is not None  # a plan ends where every candidate is settled or all tasks have run
    changes: dict[str, Any] = {
        "p_value": p,
        "p_adjusted": min(1.0, candidates * p),
        "ci95": _require_bounds(row, interim_result.interval),
        "simultaneous": _require_bounds(row, interim_result.simultaneous),
        "test": SEQUENTIAL_TEST.format(looks),
        "ratio_ci95": None,  # one that ignores the looks is too narrow
    }
    return Contrast.model_validate(row.model_dump(exclude_computed_fields=True) | changes)


def _require_bounds(row: Contrast, interval: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = interval
    if low is None or high is None:
        raise ConfigError(
            f"compare: {row.clusters} tasks with pairs of {row.variant!r} are too few for an interval after looks on "
            "the way; take more tasks, or leave out compare.stop_early"
        )
    return low, high


def pairs_to_power(name: str, pairs: Sequence[Pair], metric: str, candidates: int) -> Power:
    """What the comparison with one of `candidates` can detect, and the tasks that would settle it."""
    base, values, tasks = paired_values(pairs, metric)
    differences = [b - a for a, b in zip(base, values, strict=True)]
    alpha = SIGNIFICANCE / candidates
    required = tasks_to_settle(differences, alpha=alpha, clusters=tasks)
    return Power(
        variant=name,
        detectable=minimum_detectable_effect(differences, alpha, clusters=tasks),
        tasks_more=None if required is None else required.additional_tasks,
        effect=None if required is None else required.effect,
    )
