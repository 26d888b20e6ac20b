"""Owns: what a call was worth against its forks, by hand-worked numbers."""

from __future__ import annotations

import math

import pytest

from marft_bridge.statistics.fork_worth import ForkWorth, interval_to_text, rewards_to_worth


def test_the_mean_and_its_interval_are_of_the_resampled_branches_only() -> None:
    """1, 0, 1, 1: mean 3/4; s^2 = (3 * 1/16 + 9/16) / 3 = 1/4, so s / sqrt(4) = 1/4; t(3, 0.975) = 3.182446."""
    worth = rewards_to_worth(0.0, [1.0, 0.0, 1.0, 1.0], comparable=True)
    assert (worth.recorded, worth.branches, worth.resampled, worth.mean) == (0.0, 5, 4, 0.75)
    assert worth.low == pytest.approx(0.75 - 3.182446 / 4, abs=1e-6)
    assert worth.high == pytest.approx(0.75 + 3.182446 / 4, abs=1e-6)
    assert worth.recorded_over_mean == -0.75


def test_a_recorded_run_that_was_sampled_otherwise_is_no_branch() -> None:
    assert rewards_to_worth(0.0, [1.0, 0.0], comparable=False).branches == 2
    assert rewards_to_worth(None, [1.0, 0.0], comparable=True).branches == 2


def test_branches_without_a_reward_are_left_out_and_nothing_is_made_up() -> None:
    alone = rewards_to_worth(1.0, [None, math.nan, 0.5], comparable=True)
    assert alone == ForkWorth(
        1.0, branches=2, resampled=1, mean=0.5, low=None, high=None, interval=None, recorded_over_mean=0.5
    )
    nothing = rewards_to_worth(1.0, [None], comparable=True)
    assert nothing == ForkWorth(
        1.0, branches=1, resampled=0, mean=None, low=None, high=None, interval=None, recorded_over_mean=None
    )
    assert rewards_to_worth(math.inf, [1.0], comparable=True).recorded_over_mean is None


def test_equal_rewards_never_make_an_interval_of_width_zero() -> None:
    """All of n are 0: Clopper and Pearson's upper bound is 1 - 0.025^(1 / n); n = 2: 0.841886, n = 4: 0.602365."""
    nothing = rewards_to_worth(1.0, [0.0, 0.0], comparable=True)
    assert (nothing.low, nothing.high, nothing.interval) == (0.0, pytest.approx(0.841886, abs=1e-6), "exact")
    assert interval_to_text(nothing) == "exact 95% interval 0 to 0.842 if it is always 0 or 1: all forks have the same"
    always = rewards_to_worth(None, [1.0] * 4, comparable=True)
    assert (always.low, always.high) == (pytest.approx(1 - 0.602365, abs=1e-6), 1.0)
    for recorded, rewards in ((0.0, [0.1, 0.1, 0.1]), (0.5, [0.0, 0.0]), (1.0, [-1.0, -1.0]), (1.0, [1.0])):
        worth = rewards_to_worth(recorded, rewards, comparable=True)
        assert (worth.mean, worth.low, worth.high, worth.interval) == (pytest.approx(rewards[0]), None, None, None)
        reason = "one fork" if len(rewards) == 1 else "all forks have the same"
        assert interval_to_text(worth) == f"no interval: {reason}"
