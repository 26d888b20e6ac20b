"""Owns: what one variant scores: avg@k and pass@k with their intervals.

- pass@k equals the share of all choices of k samples that hold a right one
- Tasks weigh the same, however many samples they have
- Equal outcomes still leave an interval, that of Clopper and Pearson
- A task with too few samples is named
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy.stats

from marft_bridge.statistics import avg_at_k, pass_at_k, pass_at_k_by_task


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
