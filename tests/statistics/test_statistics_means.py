"""Owns: what one variant scores: avg@k and pass@k with their intervals.

- pass@k equals the share of all choices of k samples that hold a right one
- Tasks weigh the same, however many samples they have
- Equal outcomes still leave an interval, that of Clopper and Pearson
- A task with too few samples is named
- The difference of two groups has Welch's interval where each value is a task of its own, and keeps tasks together
- A rank correlation is scipy's
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy.stats

from marft_bridge.statistics import avg_at_k, pass_at_k, pass_at_k_by_task
from marft_bridge.statistics.means import difference_interval
from marft_bridge.statistics.ranks import rank_correlation


def test_pass_at_k_is_the_share_of_choices_with_a_right_sample() -> None:
    rng = np.random.default_rng(0)
    tasks = {name: (rng.random(n) < 0.4).astype(int) for name, n in (("b", 7), ("a", 5), ("c", 9))}
    tasks["none"], tasks["all"] = np.zeros(6, dtype=int), np.ones(5, dtype=int)
    outcomes = np.concatenate(list(tasks.values()))
    labels = np.concatenate([[name] * len(values) for name, values in tasks.items()])
    order = rng.permutation(outcomes.size)
    for k in (1, 2, 5):
        names, estimates = pass_at_k_by_task(outcomes[order], labels[order], k)
        assert list(names) == sorted(tasks)
        counted = [np.mean([any(choice) for choice in combinations(tasks[name], k)]) for name in sorted(tasks)]
        assert estimates == pytest.approx(counted)
        assert pass_at_k(outcomes, labels, k).mean == pytest.approx(np.mean(counted))


def test_pass_at_1_is_the_mean_over_tasks_and_avg_at_k_too() -> None:
    outcomes, labels = [1, 0, 0, 0, 1, 1], ["a"] * 4 + ["b"] * 2
    assert pass_at_k(outcomes, labels, 1).mean == pytest.approx((1 / 4 + 1) / 2)
    assert avg_at_k(outcomes, labels, 2).mean == pytest.approx((1 / 4 + 1) / 2)


def test_the_intervals_are_t_intervals_over_tasks() -> None:
    scores, labels = [0.2, 0.4, 0.9, 0.7, 0.5, 0.1], ["a", "a", "b", "b", "c", "c"]
    means = [0.3, 0.8, 0.3]
    expected = scipy.stats.t.interval(0.9, 2, loc=np.mean(means), scale=scipy.stats.sem(means))
    assert avg_at_k(scores, labels, 2, 0.9) == pytest.approx((np.mean(means), *expected))
    inside = pass_at_k([1, 1, 1, 0], ["a", "b", "c", "d"], 1)
    assert (inside.mean, inside.high) == (0.75, 1.0)  # t would reach past 1


@pytest.mark.parametrize("right", [0, 1])
def test_equal_outcomes_leave_the_interval_of_clopper_and_pearson(right: int) -> None:
    interval = pass_at_k([right] * 12, list(range(12)), 1)
    exact = scipy.stats.binomtest(12 * right, 12).proportion_ci(0.95, method="exact")
    assert interval == pytest.approx((right, exact.low, exact.high))


def test_equal_outcomes_between_0_and_1_leave_room_on_both_sides() -> None:
    low_high = pass_at_k([1, 0] * 12, np.repeat(np.arange(12), 2), 1)
    unseen = 1 - 0.025 ** (1 / 12)
    assert low_high == pytest.approx((0.5, 0.5 - 0.5 * unseen, 0.5 + 0.5 * unseen))
    assert avg_at_k([0.3, 0.3], ["a", "b"], 1) == (0.3, None, None)  # a score without bounds: nothing is known
    reordered = avg_at_k([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], list("aaabbb"), 3)  # their sums differ in the last bit
    assert reordered[1:] == (None, None)


def test_a_task_with_too_few_samples_is_named() -> None:
    with pytest.raises(ValueError, match="pass@2: task b has 1 samples; it needs at least 2"):
        pass_at_k([1, 0, 1], ["a", "a", "b"], 2)
    with pytest.raises(ValueError, match="avg@3: task a has 2 samples"):
        avg_at_k([0.5, 0.5], ["a", "a"], 3)
    with pytest.raises(ValueError, match="k must be at least 1"):
        pass_at_k([1], ["a"], 0)
    with pytest.raises(ValueError, match="no values"):
        avg_at_k([], [], 1)
    with pytest.raises(ValueError, match="outcomes must be 0 or 1"):
        pass_at_k([0.5], ["a"], 1)
    with pytest.raises(ValueError, match="1 values but 2 cluster labels"):
        avg_at_k([0.5], ["a", "b"], 1)


def test_the_difference_of_two_groups_has_welchs_standard_error_where_tasks_are_single() -> None:
    rng = np.random.default_rng(1)
    first, rest = rng.normal(0.3, 1.0, 40), rng.normal(0.0, 2.0, 60)
    result = difference_interval([*first, *rest], [True] * 40 + [False] * 60)
    welch = np.sqrt(first.var() / 40 + rest.var() / 60) * np.sqrt(100 / 99)  # divisors n, and K / (K - 1)
    half = scipy.stats.t.ppf(0.975, 99) * welch
    assert result == pytest.approx((first.mean() - rest.mean(), result.mean - half, result.mean + half))


def test_a_difference_covers_what_is_true_where_runs_of_a_task_are_alike() -> None:
    rng, hits = np.random.default_rng(2), 0
    for _ in range(400):
        task_effects = np.repeat(rng.normal(0.0, 1.0, 30), 4)
        in_first = np.repeat(rng.random(30) < 0.5, 4)  # whole tasks, so that the effects do not cancel
        if in_first.all() or not in_first.any():
            continue
        values = task_effects + rng.normal(0.0, 0.1, 120)
        low, high = difference_interval(values, in_first, clusters=np.repeat(np.arange(30), 4))[1:]
        assert low is not None
        assert high is not None
        hits += low <= 0 <= high
    assert hits / 400 == pytest.approx(0.95, abs=0.035)


def test_a_difference_needs_two_groups_and_two_tasks() -> None:
    with pytest.raises(ValueError, match="each of the two groups"):
        difference_interval([1.0, 2.0], [True, True])
    assert difference_interval([1.0, 2.0], [True, False], clusters=["a", "a"]) == (-1.0, None, None)


def test_a_rank_correlation_is_scipys_ties_included() -> None:
    rng = np.random.default_rng(3)
    for size in (3, 5, 12):
        x, y = rng.integers(0, 4, size).astype(float), rng.normal(size=size)
        x[:2] = (0.0, 3.0)
        assert rank_correlation(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) is None
    with pytest.raises(ValueError, match="at least 1"):
        rank_correlation([], [])


def test_groups_without_spread_have_no_bounds_of_their_difference() -> None:
    assert difference_interval([1.0, 1.0, 0.0, 0.0], [True, True, False, False]) == (1.0, None, None)
    assert difference_interval([1.0, 0.0, 0.0], [True, True, False]).low is not None
    large = [1e6 + 0.5 * (n % 2) for n in range(1000)]  # a spread that is small beside the values is one all the same
    assert difference_interval(large, [n < 500 for n in range(1000)]).low is not None
