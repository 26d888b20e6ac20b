"""Owns: what may be claimed from paired outcomes.

- p-values equal hand-worked tables and scipy's own tests
- intervals equal scipy's BCa bootstrap and cover the truth as often as they say
- under no difference, 5% of comparisons are called different, also with several samples per task
- the result forgets the order of the pairs and of the labels, and depends on the seed only
- unusable input is refused with both lengths
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_bridge.statistics import (
    MCNEMAR,
    SIGN_FLIP,
    holm,
    mcnemar_exact,
    mean_interval,
    minimum_detectable_effect,
    paired_difference,
)


def test_mcnemar_equals_hand_worked_table() -> None:
    # One task only a solves, eight only b solves: 2 * (C(9,0) + C(9,1)) / 2^9 = 20 / 512.
    a = [1] + [0] * 8 + [1] * 5 + [0] * 6
    b = [0] + [1] * 8 + [1] * 5 + [0] * 6
    result = paired_difference("reward", a, b, seed=0, resamples=200)
    assert result.test == MCNEMAR
    assert result.p_value == pytest.approx(20 / 512)
    assert (result.n, result.clusters) == (20, 20)
    assert (result.mean_a, result.mean_b) == (pytest.approx(6 / 20), pytest.approx(13 / 20))
    assert result.diff == pytest.approx(7 / 20)


@pytest.mark.parametrize(("losses", "wins"), [(0, 1), (0, 6), (4, 4), (5, 3), (2, 17), (40, 61)])
def test_mcnemar_equals_scipy_binomial_test(losses: int, wins: int) -> None:
    assert mcnemar_exact(losses, wins) == pytest.approx(scipy.stats.binomtest(wins, losses + wins, 0.5).pvalue)


def test_two_samples_of_one_task_are_not_mcnemar_pairs() -> None:
    result = paired_difference("reward", [0, 0, 1, 0], [1, 1, 1, 0], clusters=["t", "t", "u", "u"], seed=0)
    assert (result.test, result.n, result.clusters) == (SIGN_FLIP, 4, 2)
    # One task moved by 2, the other not at all: both of its two signs are as extreme as what was seen.
    assert result.p_value == 1.0


def test_sign_flip_p_equals_scipy_permutation_test() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random(9), rng.random(9) + 0.25
    exact = scipy.stats.permutation_test(
        (b, a),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue  # all 2^9 swaps
    result = paired_difference("reward", a, b, seed=5, resamples=40_000)
    assert result.test == SIGN_FLIP
    assert result.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 40_000))


def test_sign_flip_counts_ties_of_equal_sums() -> None:
    # Three tasks of +0.1, 0.2, 0.3: of the 8 sign patterns only +++ and --- are as extreme, so p = 2 / 8.
    result = paired_difference("reward", np.zeros(3), [0.1, 0.2, 0.3], seed=1, resamples=40_000)
    assert result.p_value == pytest.approx(0.25, abs=0.01)


def test_sign_flip_p_is_never_zero() -> None:
    result = paired_difference("tokens", np.zeros(60), np.full(60, 7.5), seed=1, resamples=99)
    assert result.p_value == pytest.approx(1 / 100)


def _expanded_level(level: float, clusters: int) -> float:
    """The normal level whose z is sqrt(n / (n - 1)) times the t quantile."""
    z = math.sqrt(clusters / (clusters - 1)) * scipy.stats.t.ppf((1 + level) / 2, clusters - 1)
    return float(2 * scipy.stats.norm.cdf(z) - 1)


def test_sign_flip_counts_ties_that_rounding_pulls_apart() -> None:
    # In tenths 1, 1, 2, 3, 7 make 14; as extreme as 7 + 2 + 1 + 1 - 3 = 8 is every pattern that turns round at most 3:
    # nothing, 1, 1, 2, 3, 1 + 1, 1 + 2, 1 + 2. With their mirror images 16 of 32. Sums of tenths are not exact.
    result = paired_difference("reward", np.zeros(5), [-0.3, 0.1, 0.1, 0.2, 0.7], seed=1, resamples=40_000)
    assert result.p_value == pytest.approx(0.5, abs=0.01)


def test_interval_of_few_tasks_is_as_wide_as_t_says() -> None:
    diffs = np.random.default_rng(8).normal(0.4, 1.0, 8)
    other = scipy.stats.bootstrap(
        (diffs,), np.mean, n_resamples=40_000, method="BCa", confidence_level=_expanded_level(0.8, 8), rng=3
    )
    result = paired_difference("reward", np.zeros(8), diffs, seed=2, level=0.8, resamples=40_000)
    assert result.ci95 == pytest.approx(tuple(other.confidence_interval), abs=0.06 * other.standard_error)


@pytest.mark.parametrize("seed", range(4))
def test_unit_of_the_metric_changes_neither_interval_nor_p_value(seed: int) -> None:
    # Whole numbers add up exactly and tie often; tenths of them do neither, and must be told the same.
    diffs = np.random.default_rng(seed).integers(-3, 6, 9)
    whole = paired_difference("x", np.zeros(9), diffs, seed=seed, resamples=3000)
    tenths = paired_difference("x", np.zeros(9), diffs / 10, seed=seed, resamples=3000)
    assert np.array(tenths.ci95) * 10 == pytest.approx(np.array(whole.ci95))
    assert tenths.p_value == whole.p_value


def test_interval_at_an_extreme_level_reaches_the_extremes() -> None:
    result = paired_difference("x", np.zeros(5), [0.0, 0.0, 0.0, 0.0, 10.0], seed=0, level=0.9999)
    assert result.ci95[0] <= result.diff < result.ci95[1]
    assert result.ci95[1] >= 8.0  # four of five draws, or all, hit the one task that moved


def test_interval_equals_scipy_bca_bootstrap() -> None:
    rng = np.random.default_rng(8)
    a, b = rng.random(40), rng.random(40) + rng.exponential(0.6, 40)
    other = scipy.stats.bootstrap(
        (b - a,), np.mean, n_resamples=40_000, method="BCa", confidence_level=_expanded_level(0.95, 40), rng=11
    )
    result = paired_difference("reward", a, b, seed=2, resamples=40_000)
    spread = other.standard_error
    assert result.ci95[0] == pytest.approx(other.confidence_interval.low, abs=0.06 * spread)
    assert result.ci95[1] == pytest.approx(other.confidence_interval.high, abs=0.06 * spread)
    percentile_low, percentile_high = np.quantile(other.bootstrap_distribution, [0.025, 0.975])
    assert result.ci95[1] - percentile_high > percentile_low - result.ci95[0]  # the skew that BCa is here for


def test_interval_of_unequal_clusters_equals_scipy_bca_of_the_ratio() -> None:
    rng = np.random.default_rng(9)
    tasks = np.repeat(np.arange(25), rng.integers(1, 7, 25))
    diffs = rng.normal(0.3, 1.0, 25)[tasks] + rng.normal(0, 0.5, tasks.size)
    sums, sizes = np.bincount(tasks, weights=diffs), np.bincount(tasks).astype(float)
    other = scipy.stats.bootstrap(
        (sums, sizes),
        lambda s, n, axis: s.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=40_000,
        method="BCa",
        confidence_level=_expanded_level(0.9, 25),
        rng=12,
    )
    result = paired_difference("x", np.zeros(tasks.size), diffs, clusters=tasks, seed=4, level=0.9, resamples=40_000)
    assert result.diff == pytest.approx(diffs.mean())
    assert result.ci95[0] == pytest.approx(other.confidence_interval.low, abs=0.06 * other.standard_error)
    assert result.ci95[1] == pytest.approx(other.confidence_interval.high, abs=0.06 * other.standard_error)


def _within_binomial(hits: int, trials: int, rate: float) -> bool:
    """Whether a count is what this rate gives, up to one chance in a thousand."""
    return bool(scipy.stats.binomtest(hits, trials, rate).pvalue > 1e-3)


def test_no_difference_is_called_different_five_times_in_a_hundred() -> None:
    rng = np.random.default_rng(20)
    rejected = 0
    for seed in range(400):
        a, b = rng.normal(0, 1, (2, 15))
        rejected += paired_difference("x", a, b, seed=seed, resamples=399).p_value <= 0.05
    assert _within_binomial(rejected, 400, 0.05)


def test_binary_no_difference_is_called_different_at_most_five_times_in_a_hundred() -> None:
    rng = np.random.default_rng(21)
    rejected = 0
    for seed in range(400):
        a, b = (rng.random((2, 30)) < 0.4).astype(float)
        rejected += paired_difference("x", a, b, seed=seed, resamples=10).p_value <= 0.05
    assert scipy.stats.binomtest(rejected, 400, 0.05, alternative="greater").pvalue > 1e-3  # exact tests may be shy


def test_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(22)
    covered = {"normal": 0, "binary": 0}
    for seed in range(400):
        low, high = paired_difference("x", np.zeros(20), rng.normal(0.5, 1, 20), seed=seed, resamples=600).ci95
        covered["normal"] += low <= 0.5 <= high
        moved = rng.choice([-1, 0, 1], 40, p=[0.1, 0.6, 0.3])
        low, high = paired_difference("x", moved < 0, moved > 0, seed=seed, resamples=600).ci95
        covered["binary"] += low - 1e-9 <= 0.2 <= high + 1e-9
    assert _within_binomial(covered["normal"], 400, 0.95)
    assert _within_binomial(covered["binary"], 400, 0.95)


def test_samples_of_one_task_do_not_count_as_independent() -> None:
    """Eight samples of each of 12 tasks that differ by task: taking 96 independent pairs claims far too much."""
    rng = np.random.default_rng(23)
    tasks = np.repeat(np.arange(12), 8)
    naive = clustered = covered = 0
    for seed in range(300):
        diffs = rng.normal(0, 1, 12)[tasks] + rng.normal(0, 0.5, 96)
        zeros = np.zeros(96)
        naive += paired_difference("x", zeros, diffs, seed=seed, resamples=299).p_value <= 0.05
        ours = paired_difference("x", zeros, diffs, clusters=tasks, seed=seed, resamples=399)
        clustered += ours.p_value <= 0.05
        covered += ours.ci95[0] <= 0 <= ours.ci95[1]
    assert naive > 0.25 * 300
    assert _within_binomial(clustered, 300, 0.05)
    assert _within_binomial(covered, 300, 0.95)


def test_equal_sides_show_no_difference() -> None:
    values = [0.25, 1.0, 0.5]
    result = paired_difference("reward", values, values, seed=0)
    assert (result.diff, result.ci95, result.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert result.mean_a == result.mean_b == pytest.approx(1.75 / 3)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(4, 24))
def test_order_of_pairs_and_swap_of_sides_change_nothing_else(data: st.DataObject, n: int) -> None:
    grid = st.lists(st.integers(0, 8), min_size=n, max_size=n)
    a, b = (np.array(data.draw(grid)) / 8 for _ in range(2))
    tasks = np.arange(n) // 2
    shuffle = np.array(data.draw(st.permutations(range(n))))
    result = paired_difference("x", a, b, clusters=tasks, seed=7, resamples=200)
    again = paired_difference("x", a[shuffle], b[shuffle], clusters=tasks[shuffle], seed=7, resamples=200)
    assert (again.diff, *again.ci95) == pytest.approx((result.diff, *result.ci95))
    assert again.p_value == result.p_value
    assert result.ci95[0] - 1e-9 <= result.diff <= result.ci95[1] + 1e-9
    swapped = paired_difference("x", b, a, clusters=tasks, seed=7, resamples=200)
    assert swapped.diff == pytest.approx(-result.diff)
    assert swapped.p_value == result.p_value


def test_seed_decides_the_resamples() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 30))
    first, same, other = (paired_difference("x", a, b, seed=s, resamples=500) for s in (4, 4, 5))
    assert first == same
    assert first.ci95 != other.ci95


def test_ten_thousand_resamples_of_a_thousand_pairs_take_less_than_a_second() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 1000))
    started = time.process_time()  # CPU time: other work on the machine does not count
    paired_difference("x", a, b, seed=0)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "a has 0 values, b has 0"),
        ([1.0, 2.0], [1.0], "a has 2 values, b has 1"),
        ([1.0, math.nan], [1.0, 2.0], "1 of 2 values are NaN or infinite"),
        ([1.0, 2.0], [math.inf, math.nan], "2 of 2 values are NaN or infinite"),
        ([[1.0]], [[1.0]], "got shape"),
    ],
)
def test_unusable_pairs_are_refused(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference("reward", a, b, seed=0)


def test_labels_must_match_the_pairs() -> None:
    with pytest.raises(ValueError, match="2 values but 3 cluster labels"):
        paired_difference("reward", [0.0, 1.0], [1.0, 0.0], clusters=["t", "u", "v"], seed=0)


def test_one_task_alone_proves_nothing() -> None:
    with pytest.raises(ValueError, match="at least 2 tasks"):
        paired_difference("reward", [0.0, 0.0], [1.0, 1.0], clusters=["t", "t"], seed=0)


def test_mean_interval_equals_scipy_t_interval() -> None:
    x = [0.1, 0.9, 0.4, 0.4, 0.7]
    expected = scipy.stats.t.interval(0.9, 4, loc=np.mean(x), scale=scipy.stats.sem(x))
    assert mean_interval(x, 0.9) == pytest.approx((0.5, *expected))


def test_mean_interval_of_equal_clusters_equals_interval_of_their_means() -> None:
    x = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    by_task = mean_interval(x, clusters=["a", "a", "b", "b", "c", "c", "d", "d"])
    assert by_task == pytest.approx(mean_interval([0.5, 1.0, 0.0, 0.5]))


def test_mean_interval_of_one_task_has_no_bounds() -> None:
    assert mean_interval([0.0, 1.0], clusters=["a", "a"]) == (0.5, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


def test_holm_equals_hand_worked_example() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; the last may not fall below 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_minimum_detectable_effect_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(30)
    unit = rng.normal(0, 1, 40)
    unit = (unit - unit.mean()) / unit.std(ddof=1)  # deviation exactly 1
    effect = minimum_detectable_effect(unit)
    assert effect is not None
    # The same question to the non-central t distribution: the power of a t test at this effect.
    critical = scipy.stats.t.ppf(0.975, 39)
    power = scipy.stats.nct.sf(critical, 39, effect * math.sqrt(40))
    assert power == pytest.approx(0.8, abs=0.01)


def test_minimum_detectable_effect_counts_tasks_not_samples() -> None:
    diffs = np.array([0.0, 1.0, 0.5, -1.0, 0.25, 0.75])
    assert minimum_detectable_effect(np.repeat(diffs, 5), clusters=np.repeat(np.arange(6), 5)) == pytest.approx(
        minimum_detectable_effect(diffs)
    )


def test_minimum_detectable_effect_is_unknown_without_spread() -> None:
    assert minimum_detectable_effect([0.0, 0.0, 0.0]) is None
    assert minimum_detectable_effect([1.0]) is None
    assert minimum_detectable_effect([1.0, 2.0], clusters=["t", "t"]) is None
