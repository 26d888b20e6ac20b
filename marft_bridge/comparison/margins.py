"""Pairs of the deciding metric and a margin -> what each contrast says about being worse by the margin or more.

Invariants: the p-values are one family over all candidates, as those of the differences are; the range of the metric is
0 to 1 where every score lies in it, and otherwise from the lowest score to the highest of all variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.numbers import number
from marft_bridge.comparison.outcomes import Pair, paired_values, scores_to_range
from marft_bridge.comparison.records import SIGNIFICANCE, Contrast, NonInferiority
from marft_bridge.statistics import NON_INFERIORITY, holm, non_inferiority_p_value, tasks_for_non_inferiority


def add_margin(
    rows: Sequence[Contrast], pairs: Mapping[str, Sequence[Pair]], metric: str, margin: float
) -> tuple[Contrast, ...]:
    """The deciding contrasts, in order, with the test of `margin` in each.

    Raises:
        ConfigError: the margin is as large as the metric's range, so that nothing could be worse by more.
    """
    values = {name: paired_values(candidate_pairs, metric) for name, candidate_pairs in pairs.items()}
    value_range = scores_to_range(metric, [x for base, candidate, _ in values.values() for x in (*base, *candidate)])
    if margin >= value_range:
        raise ConfigError(
            f"compare.non_inferior: the scores of {metric!r} span {number(value_range)}, so a margin of {margin:g} "
            "says nothing; take a smaller one, and --resume to use the episodes that ran"
        )
    p_values = [
        non_inferiority_p_value(
            f"{name}: {metric}", base, candidate, margin=margin, value_range=value_range, clusters=tasks
        )
        for name, (base, candidate, tasks) in values.items()
    ]
    margin_rows = []
    for row, p, p_adjusted in zip(rows, p_values, holm(p_values), strict=True):
        base, candidate, tasks = values[row.variant]
        required = tasks_for_non_inferiority(
            [b - a for a, b in zip(base, candidate, strict=True)],
            margin=margin,
            value_range=value_range,
            alpha=SIGNIFICANCE / len(rows),
            clusters=tasks,
        )
        result = NonInferiority(
            margin=margin,
            value_range=value_range,
            p_value=p,
            p_adjusted=p_adjusted,
            test=NON_INFERIORITY,
            tasks_more=None if required is None else max(0, required - row.clusters),
        )
        margin_rows.append(row.model_copy(update={"non_inferiority": result}))
    return tuple(margin_rows)
