"""Owns: what may be claimed before all tasks have run. How often it is wrong is in test_statistics_rates.py.

- The error is spent as published, and with many tasks the bounds are those of the published table
- A look never changes when later tasks arrive; small numbers of tasks are counted by hand
- Intervals leave out 0 exactly where the test stops, and follow the unit of the metric
- Betting equals a slow loop over the published formula; its p-value and its interval agree
- What was not declared beforehand is refused
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from marft_bridge.statistics import confidence_sequence, monitor, repeated_interval, spent_error

# Lan and DeMets' O'Brien-Fleming type, five equal looks, two-sided 5%.
PUBLISHED = (4.8769, 3.3569, 2.6803, 2.2898, 2.0310)


def test_the_error_is_spent_as_lan_and_demets_published() -> None:
    # The first bound is the normal quantile of all that is spent by then.
    assert scipy.stats.norm.isf(spent_error(0.2) / 2) == pytest.approx(PUBLISHED[0], abs=1e-4)
    assert spent_error(1.0) == pytest.approx(0.05)
    assert spent_error(1.0, 0.1) == pytest.approx(0.1)
    assert spent_error(0.0) == 0.0


@pytest.mark.parametrize(("look", "tolerance"), [(2, 0.1), (3, 0.05), (4, 0.04), (5, 0.04)])
def test_with_many_tasks_the_bounds_are_those_of_the_published_table(look: int, tolerance: float) -> None:
    sizes = np.abs(np.random.default_rng(1).normal(0, 1, 100 * look))

    def stops_at(z: float) -> bool:
        """The walk stays near 0 up to the last block, and then climbs to z roots of its sum of squares."""
        walk = np.zeros(sizes.size)
        total = 0.0
        for i, size in enumerate(sizes[:-100]):
            walk[i] = -size if total > 0 else size
            total += walk[i]
        target = z * math.sqrt(float((sizes**2).sum()))
        walk[-100:] = sizes[-100:]
        for i in np.argsort(-sizes[-100:]) + sizes.size - 100:
            if walk.sum() - 2 * walk[i] >= target:
                walk[i] = -walk[i]
        assert walk.sum() == pytest.approx(target, rel=0.01)
        looks = [100 * (i + 1) for i in range(look)]
        return monitor("x", np.zeros(walk.size), walk, looks=looks, max_tasks=500, seed=3, flips=19_999).stopped

    bound = PUBLISHED[look - 1]
    assert not stops_at(bound * (1 - tolerance))
    assert stops_at(bound * (1 + tolerance))


def look_at(diffs: Any, looks: Sequence[int], max_tasks: int, **more: Any) -> Any:
    return monitor("x", np.zeros(len(diffs)), diffs, looks=looks, max_tasks=max_tasks, seed=0, **more)


def test_few_equal_differences_do_not_stop_and_their_p_value_is_counted_by_hand() -> None:
    # Five times +1: a t test has no spread and would stop. Of 32 sign patterns two are as extreme.
    five = look_at(np.ones(5), [5], 5)
    assert (five.stopped, five.p_value) == (False, 2 / 32)
    eight = look_at(np.ones(8), [8], 8)
    assert (eight.stopped, eight.p_value) == (True, 2 / 256)


@pytest.mark.parametrize("seed", range(12))
def test_few_tasks_are_tested_with_all_sign_patterns_whatever_the_seed(seed: int) -> None:
    # Seven times +1: 2 of 128 patterns, below 0.05 / 3. Drawn ones would be more often than that by chance.
    arguments = {"looks": [2, 4, 6, 7], "max_tasks": 7, "alpha": 0.05 / 3, "seed": seed, "flips": 14_999}
    found = monitor("x", np.zeros(7), np.ones(7), **arguments)
    assert (found.stopped, found.p_value, found.spent) == (True, 2 / 128, 2 / 128)
    low, high = repeated_interval("x", np.zeros(7), np.ones(7), **arguments)
    assert low is not None
    assert high is not None
    assert 0 < low < 1 < high
    # One of 127 flips drawn would be too few for all patterns: they are taken where they fit, and no sooner.
    drawn = monitor("x", np.zeros(7), np.ones(7), **{**arguments, "flips": 126})
    assert drawn.spent == 2 / 127


def test_a_task_without_a_pair_leaves_the_patterns_of_the_others_all_there() -> None:
    # Seven declared, six came: each of their 64 patterns stands twice among the 128 paths.
    arguments = {"looks": [2, 4, 6], "shares": [2 / 7, 4 / 7, 1.0], "max_tasks": 7, "seed": 0}
    found = monitor("x", np.zeros(6), np.ones(6), **arguments)
    assert (found.stopped, found.p_value) == (True, 2 / 64)
    # An early look has the same paths as the last one, so what it said stays: 2 x 2^3 of 4,096 begin like it.
    early = look_at(np.ones(9), [9], 12)
    assert (early.stopped, early.p_value) == (True, 2 / 512)
    assert look_at(np.concatenate([np.ones(9), -np.ones(3)]), [9, 12], 12) == early


def test_only_a_comparison_that_ended_has_a_p_value() -> None:
    diffs = np.random.default_rng(0).normal(0, 1, 30)
    going_on = look_at(diffs, [10, 20], 30)
    assert (going_on.stopped, going_on.p_value, going_on.tasks) == (False, None, 20)
    assert going_on.diff == pytest.approx(diffs[:20].mean())
    assert look_at(diffs, [10, 20, 30], 30).p_value is not None


def test_the_only_look_at_the_end_is_the_fixed_test() -> None:
    rng = np.random.default_rng(3)
    diffs = rng.normal(0.5, 1, 9)
    exact = scipy.stats.permutation_test(
        (diffs, np.zeros(9)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue
    assert look_at(diffs, [9], 9, flips=39_999).p_value == pytest.approx(exact)  # all 512 sign patterns
    drawn = look_at(diffs, [9], 9, flips=400).p_value
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / 400))


def test_a_look_that_stopped_stays_what_it_was() -> None:
    rng = np.random.default_rng(1)
    diffs = rng.normal(0.62, 1, 40)
    first = look_at(diffs[:20], [10, 20], 40, flips=49_999)
    assert first.stopped
    assert first.p_value > 10 / 50_000  # so many flipped paths that others would be noticed
    assert first.tasks == 20
    later = look_at(np.concatenate([diffs[:20], -50 * np.ones(20)]), [10, 20, 30, 40], 40, flips=49_999)
    assert later == first


def test_samples_of_a_task_are_one_difference_whatever_lies_between_them() -> None:
    rng = np.random.default_rng(2)
    means = rng.normal(0.6, 1, 24)
    labels = [f"t{23 - i}" for i in range(24)]  # not in the order of the alphabet
    apart = rng.normal(0, 3, 24)
    diffs = np.concatenate([means + apart, means - apart])
    both = monitor(
        "x", np.zeros(48), diffs, clusters=labels + labels, looks=[8, 16, 24], max_tasks=24, seed=0, flips=999
    )
    alone = monitor("x", np.zeros(24), means, looks=[8, 16, 24], max_tasks=24, seed=0, flips=999)
    assert (both.stopped, both.tasks, both.p_value) == (alone.stopped, alone.tasks, alone.p_value)
    assert both.diff == pytest.approx(alone.diff)


def test_a_look_spends_all_that_it_may() -> None:
    # One flipped path of 20 may cross at 5%, and the path that was seen lies farthest out.
    climbing = np.random.default_rng(0).normal(3, 1, 12)
    done = look_at(climbing, [12], 12, flips=19)
    assert (done.stopped, done.p_value) == (True, pytest.approx(1 / 20))
    short = look_at(climbing, [12], 12, flips=18)  # 1 in 19 is more than 5%
    assert (short.stopped, short.p_value) == (False, pytest.approx(1 / 19))


def test_what_earlier_looks_spent_counts_in_the_p_value_at_the_end() -> None:
    # A walk that ends at 0 is the least extreme of all: every other path crossed before or lies farther out.
    ends_at_zero = np.concatenate([np.arange(1.0, 16.0), -np.arange(1.0, 16.0)])
    shuffled = np.random.default_rng(0).permutation(ends_at_zero)
    assert look_at(shuffled, [10, 20, 30], 30).p_value == 1.0


def test_no_difference_at_all_never_stops() -> None:
    done = look_at(np.zeros(30), [10, 20, 30], 30)
    assert (done.stopped, done.p_value, done.diff) == (False, 1.0, 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_the_repeated_interval_leaves_out_0_where_the_test_stops(seed: int) -> None:
    diffs = np.random.default_rng(seed).normal(0.4, 1, 40)
    looks = {"looks": [20, 40], "max_tasks": 40, "seed": seed, "flips": 999}
    found = monitor("x", np.zeros(40), diffs, **looks)
    taken = found.tasks
    looks["looks"] = [look for look in (20, 40) if look <= taken]
    low, high = repeated_interval("x", np.zeros(40), diffs, **looks)
    assert low is not None
    assert high is not None
    assert low < diffs[:taken].mean() < high
    assert (low > 0 or high < 0) == found.stopped
    tenfold = repeated_interval("x", np.zeros(40), 10 * diffs, **looks)
    assert tenfold == pytest.approx((10 * low, 10 * high), rel=1e-4)


def test_the_repeated_interval_of_many_tasks_at_the_end_is_near_the_published_one() -> None:
    diffs = np.random.default_rng(4).normal(0.3, 1, 400)
    interval = repeated_interval(
        "x", np.zeros(400), diffs, looks=[80, 160, 240, 320, 400], max_tasks=400, seed=1, flips=4_999
    )
    half = PUBLISHED[-1] * scipy.stats.sem(diffs)
    assert interval == pytest.approx((diffs.mean() - half, diffs.mean() + half), abs=0.06 * half)


def test_too_few_tasks_bound_nothing() -> None:
    assert repeated_interval("x", np.zeros(4), np.ones(4), looks=[4], max_tasks=4, seed=0) == (None, None)


@pytest.mark.parametrize(
    ("looks", "max_tasks", "message"),
    [
        ([], 10, "must be numbers of tasks that rise"),
        ([0, 5], 10, "must be numbers of tasks that rise"),
        ([5, 5], 10, "must be numbers of tasks that rise"),
        ([5, 11], 20, "a look at 11 tasks, but 10 are there"),
        ([5, 10], 9, "a look at 10 tasks, but 10 are there and 9 were declared"),
    ],
)
def test_looks_that_were_not_declared_are_refused(looks: list[int], max_tasks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        look_at(np.ones(10), looks, max_tasks)


def test_an_error_rate_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x: alpha 5\.0 must lie between 0 and 1"):
        look_at(np.ones(10), [10], 10, alpha=5.0)
    with pytest.raises(ValueError, match="flips 0 must be at least 1"):
        look_at(np.ones(10), [10], 10, flips=0)
    with pytest.raises(ValueError, match=r"x: alpha 0\.0 must lie between 0 and 1"):
        confidence_sequence("x", [0.0], [0.5], alpha=0.0)


# -- betting -----------------------------------------------------------------------------------------------------


def capital(values: Sequence[float], mean: float, alpha: float) -> float:
    """Waudby-Smith and Ramdas' hedged capital against one mean, value by value, at its highest."""
    up = down = highest = 0.5
    seen: list[float] = []
    squares = 0.0
    for t, x in enumerate(values, start=1):
        spread = (0.25 + squares) / t
        bet = math.sqrt(2 * math.log(2 / alpha) / (spread * t * math.log(t + 1)))
        up *= 1 + min(bet, 0.5 / mean) * (x - mean)
        down *= 1 - min(bet, 0.5 / (1 - mean)) * (x - mean)
        seen.append(x)
        squares += (x - (0.5 + sum(seen)) / (t + 1)) ** 2
        highest = max(highest, up, down)
    return highest


def test_betting_equals_a_slow_loop_over_the_published_formula() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random(80).round(), (rng.random(80) + 0.1).round(1)
    sequence = confidence_sequence("x", a, b, alpha=0.1, bounds=(-1.2, 1.2), grid=50)
    unit = (b - a + 1.2) / 2.4
    for t in (1, 7, 30, 80):
        assert sequence.p_values[t - 1] == pytest.approx(min(1.0, 1 / capital(unit[:t], 0.5, 0.1)))
        kept = [m for m in np.arange(1, 50) / 50 if capital(unit[:t], m, 0.1) < 10]
        inside = [
            m for m in np.arange(1, 50) / 50 if sequence.low[t - 1] + 1e-9 < 2.4 * m - 1.2 < sequence.high[t - 1] - 1e-9
        ]
        assert inside == kept
        assert sequence.diffs[t - 1] == pytest.approx((b - a)[:t].mean())


def test_the_interval_and_the_p_value_of_betting_agree_and_only_narrow() -> None:
    rng = np.random.default_rng(1)
    for mean, bounds in ((0.3, (-1.0, 1.0)), (-0.2, (-0.7, 1.3)), (0.0, (-1.0, 1.0))):
        diffs = np.clip(rng.normal(mean, 0.3, 120), *bounds)
        sequence = confidence_sequence("x", np.zeros(120), diffs, bounds=bounds, grid=300)
        out = (sequence.low >= 0) | (sequence.high <= 0)
        assert np.array_equal(out, sequence.p_values <= 0.05)
        assert sequence.settled_after == (int(out.argmax()) + 1 if out.any() else None)
        assert (np.diff(sequence.low) >= 0).all()
        assert (np.diff(sequence.high) <= 0).all()
        assert (np.diff(sequence.p_values) <= 0).all()
        assert sequence.low[0] >= bounds[0]
        assert sequence.high[0] <= bounds[1]


def test_betting_on_the_other_side_mirrors_the_interval() -> None:
    a, b = np.random.default_rng(2).random((2, 60))
    one, other = confidence_sequence("x", a, b**0.3), confidence_sequence("x", b**0.3, a)
    assert other.low == pytest.approx(-one.high)
    assert other.high == pytest.approx(-one.low)
    assert other.p_values == pytest.approx(one.p_values)


def test_betting_takes_a_task_as_one_value_in_the_order_of_arrival() -> None:
    means = np.random.default_rng(3).random(30) * 0.6
    labels = np.repeat([f"t{29 - i}" for i in range(30)], 2)
    diffs = np.repeat(means, 2) + np.tile([0.2, -0.2], 30)
    both = confidence_sequence("x", np.zeros(60), diffs, clusters=labels, grid=100)
    alone = confidence_sequence("x", np.zeros(30), means, grid=100)
    assert both.p_values == pytest.approx(alone.p_values)
    assert both.low == pytest.approx(alone.low)


def test_betting_refuses_what_leaves_the_bounds() -> None:
    with pytest.raises(ValueError, match=r"tokens: differences reach from -3 to 5, outside \(-1.0, 1.0\)"):
        confidence_sequence("tokens", [3.0, 0.0], [0.0, 5.0])
    with pytest.raises(ValueError, match="must have 0 between them"):
        confidence_sequence("x", [0.0], [0.5], bounds=(0.0, 1.0))
