"""Owns: what may be claimed from paired outcomes.

- p-values equal hand-worked tables and scipy's own tests
- intervals equal scipy's BCa bootstrap
- a verdict in a family needs the corrected p-value and the simultaneous interval
- the result forgets the order of the pairs and of the labels, and depends on the seed only
- unusable input is refused with both lengths

How often claims are wrong is in test_statistics_rates.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from marft_bridge.statistics import (
    MCNEMAR,
    SIGN_FLIP,
    SIGNED_RANK,
    Contrast,
    compare_family,
    holm,
    mcnemar_exact,
    mean_interval,
    minimum_detectable_effect,
    paired_difference,
    tasks_to_settle,
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


def test_values_that_differ_by_rounding_do_not_differ() -> None:
    result = paired_difference("reward", [0.1 + 0.2] * 10, [0.3] * 10, seed=1)
    assert (result.diff, result.ci95, result.p_value) == (0.0, (0.0, 0.0), 1.0)


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


def test_values_without_spread_have_no_bounds_rather_than_an_interval_of_width_zero() -> None:
    assert mean_interval([0.0, 0.0, 0.0]) == (0.0, None, None)
    assert mean_interval([0.1, 0.1, 0.1], 0.9) == (pytest.approx(0.1), None, None)
    assert mean_interval([0.0, 1.0, 1.0, 0.0], clusters=["a", "a", "b", "b"]) == (0.5, None, None)


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
    # Two samples of each task differ, and always in the same way; and thirds that are equal but for their last bits.
    tasks = np.repeat(np.arange(12), 2)
    thirds = [0.1 + 0.2, 0.3] * 12
    for diffs, clusters in (
        ([1.0, 0.0] * 12, tasks),
        (thirds, np.arange(24)),
        ([0.1, 0.2, 0.3] * 2, [0] * 3 + [1] * 3),
    ):
        assert minimum_detectable_effect(diffs, clusters=clusters) is None
        assert tasks_to_settle(diffs, clusters=clusters) is None
    assert minimum_detectable_effect([1.0, 0.0] * 11 + [1.0, 1e-6], clusters=tasks) is not None


def test_tasks_to_settle_equals_the_smallest_number_that_a_t_test_needs() -> None:
    unit = np.random.default_rng(31).normal(0, 1, 30)
    unit = (unit - unit.mean()) / unit.std(ddof=1)
    plan = tasks_to_settle(unit, -0.4)
    assert plan is not None

    def power(tasks: int) -> float:
        return float(scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, tasks - 1), tasks - 1, 0.4 * math.sqrt(tasks)))

    assert power(plan.tasks) == pytest.approx(0.8, abs=0.01)  # one task more or less changes it by that
    assert power(plan.tasks - 2) < power(plan.tasks)
    assert (plan.effect, plan.additional_tasks) == (0.4, plan.tasks - 30)
    # What as many tasks can find, and one task fewer cannot.
    for tasks, found in ((plan.tasks, True), (plan.tasks - 1, False)):
        steps = np.arange(tasks) - (tasks - 1) / 2
        detectable = minimum_detectable_effect(steps / steps.std(ddof=1))
        assert detectable is not None
        assert (detectable <= 0.4) == found


def test_tasks_to_settle_takes_the_difference_that_was_seen() -> None:
    diffs = np.array([0.9, 0.2, 0.6, 0.1, 0.8, 0.4, 0.5, 0.7])
    plan = tasks_to_settle(diffs)
    assert plan is not None
    assert plan.effect == pytest.approx(diffs.mean())
    assert plan.additional_tasks == 0
    assert plan.tasks < 8
    samples = tasks_to_settle(np.repeat(diffs, 3), clusters=np.repeat(np.arange(8), 3))
    assert samples == plan


def test_what_no_number_of_tasks_settles_is_unknown() -> None:
    assert tasks_to_settle([1.0, -1.0]) is None
    assert tasks_to_settle([1.0, 0.5], 0.0) is None
    assert tasks_to_settle([0.5, 0.5], 0.1) is None
    assert tasks_to_settle([1.0, 2.0], 0.1, clusters=["t", "t"]) is None
    assert tasks_to_settle([]) is None
    assert tasks_to_settle([1.0, 0.5], 1e-9) is None
    with pytest.raises(ValueError, match=r"alpha 0\.05 and power 1\.0 must lie between 0 and 1"):
        tasks_to_settle([1.0, 0.5], power=1.0)


# -- ranks -------------------------------------------------------------------------------------------------------


def ranked(diffs: ArrayLike) -> float:
    values = np.asarray(diffs, dtype=float)
    result = paired_difference("seconds", np.zeros(values.size), values, seed=0, resamples=10, ranks=True)
    assert result.test == SIGNED_RANK
    return result.p_value


def test_signed_ranks_with_a_zero_and_a_tie_equal_a_hand_worked_table() -> None:
    # Sizes 0, 1, 1, 2, 3 have ranks 1, 2.5, 2.5, 4, 5; only -1 is negative, with 2.5. Of the 16 sign patterns of
    # 2.5, 2.5, 4, 5 three have a sum of at most 2.5: none, the first, the second. Two sides: 6 / 16.
    assert ranked([0, 1, -1, 2, 3]) == pytest.approx(6 / 16)
    # Ranks 2, 2, 2, 4: the negative one lies in the middle, since 2 + 2 is as much as 4. Eight of 16, on two sides.
    assert ranked([1, 1, 1, -2]) == 1.0


@pytest.mark.parametrize("tasks", [6, 13, 40, 300])
def test_signed_ranks_equal_scipy_exact_test(tasks: int) -> None:
    diffs = np.random.default_rng(tasks).normal(0.15, 1, tasks)
    assert ranked(diffs) == pytest.approx(scipy.stats.wilcoxon(diffs, method="exact").pvalue)


def test_signed_ranks_of_tied_scores_equal_all_sign_patterns() -> None:
    diffs = np.array([0.2, -0.2, 0.4, 0.4, 0.0, 0.6, -0.4, 0.8, 0.2, 1.0])
    method = scipy.stats.PermutationMethod(n_resamples=2**10)
    assert ranked(diffs) == pytest.approx(scipy.stats.wilcoxon(diffs, zero_method="pratt", method=method).pvalue)
    # Three tenths made of tenths are a tie with three tenths.
    assert ranked([0.1 + 0.2, -0.3, 0.5, 0.6]) == ranked([0.3, -0.3, 0.5, 0.6])


def test_signed_ranks_of_very_many_tasks_follow_the_normal_curve() -> None:
    diffs = np.random.default_rng(5).normal(0.08, 1, 600)
    expected = scipy.stats.wilcoxon(diffs, method="approx", correction=True).pvalue
    assert ranked(diffs) == pytest.approx(expected, rel=1e-6)


def test_signed_ranks_take_a_task_once_and_see_past_a_rare_huge_value() -> None:
    means = np.concatenate([np.linspace(0.1, 0.5, 14), [-60.0]])
    labels = np.repeat(np.arange(15), 2)
    diffs = np.repeat(means, 2) + np.tile([0.05, -0.05], 15)
    labels, diffs = np.append(labels, [14] * 6), np.append(diffs, [-60.0] * 6)  # the same mean from more samples
    labels, diffs = np.append(labels, [0] * 8), np.append(diffs, [0.1] * 8)
    zeros = np.zeros(44)
    by_rank = paired_difference("seconds", zeros, diffs, clusters=labels, seed=0, ranks=True)
    by_mean = paired_difference("seconds", zeros, diffs, clusters=labels, seed=0)
    assert by_rank.p_value == pytest.approx(ranked(means))
    assert by_rank.p_value < 0.05 < by_mean.p_value
    assert by_rank.ci95 == by_mean.ci95


def test_ranks_leave_zeros_and_ones_to_mcnemar() -> None:
    assert paired_difference("x", [0, 0, 1, 1], [1, 0, 1, 0], seed=0, ranks=True).test == MCNEMAR
    unmoved = paired_difference("x", [0.5, 0.7], [0.5, 0.7], seed=0, ranks=True)
    assert (unmoved.test, unmoved.p_value) == (SIGNED_RANK, 1.0)


# -- families ----------------------------------------------------------------------------------------------------


def test_a_family_has_holm_p_values_and_wider_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, 30)
    contrasts = [Contrast(f"v{i}", "reward", base, base + rng.normal(mean, 1, 30)) for i, mean in enumerate([1, 0, -1])]
    members = compare_family(contrasts, seed=3)
    alone = [paired_difference("reward", c.base, c.values, seed=3, resamples=10_000) for c in contrasts]
    assert [m.variant for m in members] == ["v0", "v1", "v2"]
    assert [m.verdict for m in members] == ["higher", "not settled", "lower"]
    assert [m.p_adjusted for m in members] == pytest.approx(holm([one.p_value for one in alone]))
    for member, contrast, one in zip(members, contrasts, alone, strict=True):
        assert member.result.ci95 == one.ci95
        wide = paired_difference("reward", contrast.base, contrast.values, seed=3, level=1 - 0.05 / 3)
        assert member.simultaneous == wide.ci95
        assert wide.ci95[0] < one.ci95[0] < one.ci95[1] < wide.ci95[1]


def test_a_member_of_a_family_may_be_tested_by_ranks() -> None:
    base, values = np.zeros(8), np.array([1.0, 2, 3, 4, 5, 6, 7, -80])
    by_rank, by_mean = compare_family([Contrast("v", "s", base, values, ranks=r) for r in (True, False)], seed=0)
    assert (by_rank.result.test, by_mean.result.test) == (SIGNED_RANK, SIGN_FLIP)
    # Only -80, of rank 8, is negative. Of 2^8 sign patterns 1, 1, 1, 2, 2, 3, 4, 5, 6 have a sum of 0 to 8: 25.
    assert by_rank.result.p_value == pytest.approx(2 * 25 / 256)


def test_a_family_of_one_is_the_comparison_itself() -> None:
    a, b = np.random.default_rng(1).random((2, 12))
    (only,) = compare_family([Contrast("v", "reward", a, b)], seed=0)
    assert only.result == paired_difference("v: reward", a, b, seed=0)
    assert (only.simultaneous, only.p_adjusted) == (only.result.ci95, only.result.p_value)
    assert compare_family([], seed=0) == ()


def test_a_verdict_needs_the_corrected_p_value() -> None:
    # Six wins of six: p = 2 / 64. Alone that is a finding, beside another question it is none.
    wins = Contrast("v", "reward", np.zeros(20), np.arange(20) < 6)
    nothing = Contrast("w", "reward", np.zeros(20), np.arange(20) % 2 == 0)
    same = Contrast("u", "reward", nothing.values, nothing.values)
    assert compare_family([wins], seed=0)[0].verdict == "higher"
    assert [m.verdict for m in compare_family([wins, same], seed=0)] == ["not settled", "not settled"]


def test_a_member_of_a_family_may_lack_pairs_and_names_itself_when_it_cannot_be_used() -> None:
    whole = Contrast("v", "reward", [0.0, 0.5, 0.2, 0.1], [0.1, 0.7, 0.1, 0.9])
    part = Contrast("w", "reward", [0.0, 0.5], [0.1, 0.7])
    assert [m.result.n for m in compare_family([whole, part], seed=0, resamples=99)] == [4, 2]
    with pytest.raises(ValueError, match="w: reward: a has 2 values, b has 1"):
        compare_family([whole, Contrast("w", "reward", [0.0, 0.5], [0.1])], seed=0)
