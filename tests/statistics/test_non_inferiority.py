"""Owns: when outcomes show that b is not worse than a by a margin.

- the p-value is Tango's score test, worked by hand and solved anew by scipy
- samples of a task count once, and the order of the pairs does not matter
- outcomes that never changed are no proof until there are enough of them, and the planned tasks are those
- margins outside the metric's range are refused

How often the claim is wrong is in test_statistics_rates.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from marft_bridge.statistics import non_inferiority_p_value, tasks_for_non_inferiority

ONE_SIDED = 0.025


def outcomes(n: int, won: int, lost: int) -> tuple[Any, Any]:
    """Outcomes of 0 and 1 of n tasks on both sides."""
    counts = [won, lost, n - won - lost]
    return np.repeat([0.0, 1.0, 1.0], counts), np.repeat([1.0, 0.0, 1.0], counts)


def p_value(n: int, won: int, lost: int, margin: float) -> float:
    return non_inferiority_p_value("x", *outcomes(n, won, lost), margin=margin, value_range=1.0)


def tango_p_value(n: int, won: int, lost: int, margin: float) -> float:
    """Tango (1998) from its likelihood: the share of lost tasks that is most likely where won is lost - margin."""

    def slope(share_lost: float) -> float:
        won_part = won / (share_lost - margin) if won else 0.0
        return won_part + lost / share_lost - 2 * (n - won - lost) / (1 - 2 * share_lost + margin)

    lowest, highest = margin + 1e-12, (1 + margin) / 2 - 1e-12
    share = lowest if slope(lowest) <= 0 else scipy.optimize.brentq(slope, lowest, highest, xtol=1e-15)
    deviation = math.sqrt(n * (2 * share - margin - margin**2))
    return float(scipy.stats.norm.sf((won - lost + n * margin) / deviation))


@pytest.mark.parametrize(
    ("n", "won", "lost", "margin"),
    [(100, 5, 3, 0.05), (125, 0, 0, 0.03), (60, 4, 0, 0.1), (200, 10, 20, 0.03), (50, 3, 9, 0.05), (40, 0, 2, 0.1)],
)
def test_outcomes_of_0_and_1_have_the_p_value_of_tangos_test(n: int, won: int, lost: int, margin: float) -> None:
    assert p_value(n, won, lost, margin) == pytest.approx(tango_p_value(n, won, lost, margin), rel=1e-6)


def test_without_a_change_it_takes_125_tasks_to_show_a_margin_of_3_in_100() -> None:
    # z^2 = n 0.03 / 0.97, and 1.96^2 x 0.97 / 0.03 = 124.2. Of 125 tasks with a true loss of 3 in 100, none is lost in
    # 0.97^125 = 2.2% of all comparisons.
    assert p_value(124, 0, 0, 0.03) > ONE_SIDED > p_value(125, 0, 0, 0.03)
    assert p_value(125, 0, 0, 0.03) == pytest.approx(scipy.stats.norm.sf(math.sqrt(125 * 0.03 / 0.97)))
    assert ONE_SIDED > 0.97**125
    assert tasks_for_non_inferiority(np.zeros(9), margin=0.03, value_range=1.0) == 125


def test_a_range_twice_as_wide_and_a_margin_twice_as_wide_change_nothing() -> None:
    a, b = outcomes(100, 5, 3)
    assert non_inferiority_p_value("x", 2 * a, 2 * b, margin=0.1, value_range=2.0) == pytest.approx(
        p_value(100, 5, 3, 0.05)
    )
    assert tasks_for_non_inferiority(2 * (b - a), margin=0.1, value_range=2.0) == tasks_for_non_inferiority(
        b - a, margin=0.05, value_range=1.0
    )


def test_many_scores_have_the_p_value_of_a_t_test_against_the_margin() -> None:
    diffs = np.random.default_rng(5).normal(-0.02, 0.2, 2_000)
    expected = scipy.stats.ttest_1samp(diffs, -0.03, alternative="greater").pvalue
    p = non_inferiority_p_value("x", np.zeros(2_000), diffs, margin=0.03, value_range=1.0)
    assert p == pytest.approx(expected, abs=2e-3)


def test_a_sure_loss_has_a_p_value_near_1_and_a_loss_of_the_margin_itself_one_half() -> None:
    assert p_value(100, 0, 60, 0.1) > 1 - 1e-9
    assert p_value(100, 2, 12, 0.1) == pytest.approx(0.5)
    assert non_inferiority_p_value("x", np.full(50, 0.7), np.full(50, 0.67), margin=0.03, value_range=1.0) == 0.5


def test_samples_of_one_task_are_one_task_in_any_order() -> None:
    a, b = outcomes(60, 4, 3)
    labels = np.repeat(np.arange(60), 3)
    repeated = non_inferiority_p_value(
        "x", np.repeat(a, 3), np.repeat(b, 3), margin=0.1, value_range=1.0, clusters=labels
    )
    assert repeated == pytest.approx(p_value(60, 4, 3, 0.1))
    order = np.random.default_rng(1).permutation(180)
    shuffled = non_inferiority_p_value(
        "x", np.repeat(a, 3)[order], np.repeat(b, 3)[order], margin=0.1, value_range=1.0, clusters=labels[order]
    )
    assert shuffled == pytest.approx(repeated)


def test_tasks_of_unequal_size_weigh_by_their_samples() -> None:
    # Nine samples of task 0 were lost, one of each of nine tasks was not: as many samples, and not as many tasks.
    diffs, labels = np.repeat([-1.0, 0.0], 9), [0] * 9 + [*range(1, 10)]
    p = non_inferiority_p_value("x", np.zeros(18), diffs, margin=0.5, value_range=1.0, clusters=labels)
    assert p == pytest.approx(0.5)


def test_planned_tasks_are_those_of_both_spreads() -> None:
    # 5 in 100 won and lost. As seen, a task's deviation is sqrt(0.1). Worse by 0.1, it is that of the most likely
    # shares; scipy finds them here from the likelihood itself.
    diffs = np.repeat([1.0, -1.0, 0.0], [5, 5, 90])

    def minus_log_likelihood(won: float) -> float:
        return -(5 * math.log(won) + 5 * math.log(won + 0.1) + 90 * math.log(0.9 - 2 * won))

    won = scipy.optimize.minimize_scalar(minus_log_likelihood, bounds=(1e-9, 0.449), method="bounded").x
    null_deviation = math.sqrt(2 * won + 0.1 - 0.01)
    z, z_power = scipy.stats.norm.ppf([0.975, 0.8])
    expected = ((z * null_deviation + z_power * math.sqrt(0.1)) / 0.1) ** 2
    # The spread is taken around no difference, which these outcomes have.
    assert tasks_for_non_inferiority(diffs, margin=0.1, value_range=1.0) == math.floor(expected) + 1


def test_a_margin_that_no_number_of_tasks_shows_has_none() -> None:
    assert tasks_for_non_inferiority([1.0, -1.0], margin=1e-4, value_range=1.0) is None


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.0, 2.0, math.nan])
def test_a_margin_lies_between_0_and_the_range(margin: float) -> None:
    with pytest.raises(ValueError, match=r"must lie between 0 and the metric's range, 1\.0"):
        p_value(20, 1, 1, margin)
    with pytest.raises(ValueError, match=r"must lie between 0 and the metric's range, 1\.0"):
        tasks_for_non_inferiority([0.0, 1.0], margin=margin, value_range=1.0)


def test_differences_beyond_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a difference of 3 is larger than the range 1\.0"):
        non_inferiority_p_value("x", [0.0, 0.0], [0.0, 3.0], margin=0.1, value_range=1.0)
    with pytest.raises(ValueError, match="diffs: none"):
        tasks_for_non_inferiority([], margin=0.1, value_range=1.0)
