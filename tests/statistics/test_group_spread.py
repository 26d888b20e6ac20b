"""Owns: how likely fresh groups of runs are to hold two that differ, from outcomes by task.

- Where all of n runs were alike, the pooled share of others is Beta(1/2, n + 1/2), worked by hand.
- With two outcomes it is the Beta-binomial model, integrated here by other means.
- Where runs are lost, the size of a task's group is binomial.
- The expected number of groups is that of a simulation over random rates of success, within its error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import betaln

from marft_bridge.statistics.group_spread import outcomes_to_spread

Outcomes = dict[str, list[float]]


def once(right: int, runs: int) -> Outcomes:
    """One run of each task, some of them right."""
    return {f"t{n}": [float(n < right)] for n in range(runs)}


@pytest.mark.parametrize("runs", [1, 9, 128])
def test_where_all_runs_were_alike_two_more_differ_by_the_rule_of_jeffreys(runs: int) -> None:
    # E[2 s (1 - s)] of Beta(a, b) is 2 a b / ((a + b) (a + b + 1)): for 9 runs 2 * 0.5 * 9.5 / (10 * 11) = 0.0864.
    by_hand = (runs + 0.5) / ((runs + 1) * (runs + 2))
    assert outcomes_to_spread(once(0, runs), 2, same_task=False).expected(1) == pytest.approx(by_hand, rel=0.02)


def test_with_half_of_many_runs_right_half_of_the_pairs_differ() -> None:
    spread = outcomes_to_spread(once(500, 1000), 2, same_task=False)
    assert spread.expected(32) == pytest.approx(16, rel=0.01)
    # Two or more of four pairs: 1 - 1/16 - 4/16.
    assert spread.chance_of(2, 4) == pytest.approx(11 / 16, abs=0.01)
    assert spread.chance_of(2, 1) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_with_two_outcomes_it_is_the_beta_binomial_model(size: int) -> None:
    seen = [(2, 3), (0, 3), (1, 2), (0, 1)]  # right, runs
    outcomes = {str(i): [1.0] * right + [0.0] * (runs - right) for i, (right, runs) in enumerate(seen)}
    angles = np.pi / 2 * (np.arange(400) + 0.5) / 400
    share = np.sin(angles)[:, None] ** 2  # Beta(1/2, 1/2)
    concentration = 1 / ((np.arange(80) + 0.5) / 80) - 1
    a, b = share * concentration, (1 - share) * concentration

    def moment(right: int, wrong: int) -> Any:
        """E[p^right (1 - p)^wrong] of Beta(a, b)."""
        return np.exp(betaln(a + right, b + wrong) - betaln(a, b))

    likelihood = np.prod([moment(right, runs - right) for right, runs in seen], axis=0)
    alike = [
        (moment(right + size, runs - right) + moment(right, runs - right + size)) / moment(right, runs - right)
        for right, runs in seen
    ]
    by_hand = float((likelihood * (1 - np.mean(alike, axis=0))).sum() / likelihood.sum())
    assert outcomes_to_spread(outcomes, size, same_task=True).expected(1) == pytest.approx(by_hand, rel=0.02)


def test_where_some_runs_do_not_count_a_group_s_size_is_binomial() -> None:
    outcomes = {f"t{n}": [float(n % 3 == 0), float(n % 2), 1.0] for n in range(20)}
    of_size = {size: outcomes_to_spread(outcomes, size, same_task=True).expected(1) for size in (2, 3)}
    # of three runs that count with 1/4 each, three do in 1/64 of cases, two in 9/64
    by_hand = (of_size[3] + 9 * of_size[2]) / 64
    assert outcomes_to_spread(outcomes, 3, same_task=True, kept_share=0.25).expected(1) == pytest.approx(by_hand)
    assert outcomes_to_spread(outcomes, 1, same_task=True).expected(16) == 0.0
    # of runs of a task each there are a quarter as many pairs
    pairs = [outcomes_to_spread(outcomes, 2, same_task=False, kept_share=share).expected(8) for share in (1.0, 0.25)]
    assert pairs[1] == pytest.approx(pairs[0] / 4)


def test_tasks_that_always_end_alike_have_no_spread_and_tasks_that_do_not_have() -> None:
    always = {f"t{n}": [float(n % 2)] * 4 for n in range(100)}
    never = {f"t{n}": [0.0, 1.0, 0.0, 1.0] for n in range(100)}
    graded = {f"t{n}": [n + k / 10 for k in range(4)] for n in range(100)}  # no reward comes twice
    assert outcomes_to_spread(always, 4, same_task=True).expected(1) < 0.02
    assert outcomes_to_spread(never, 4, same_task=True).expected(1) > 0.85  # 7/8 at a rate of 1/2
    assert outcomes_to_spread(graded, 4, same_task=True).expected(1) > 0.99
    assert outcomes_to_spread(always, 2, same_task=False).expected(1) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("a", "b", "runs"), [(1.0, 1.0, 4), (0.5, 1.5, 4), (0.4, 3.6, 8), (4.0, 4.0, 8)])
def test_the_expected_groups_are_those_of_a_simulation_over_random_rates(a: float, b: float, runs: int) -> None:
    chance = np.random.default_rng(0)
    gaps = []
    for _ in range(24):
        rates = chance.beta(a, b, 100)
        outcomes = {str(n): list(chance.random(runs) < rate) for n, rate in enumerate(rates)}
        played = chance.choice(rates, size=(400, 16))  # 400 rounds of 16 groups of 4
        right = chance.binomial(4, played)
        simulated = ((right > 0) & (right < 4)).sum(axis=1).mean()
        gaps.append(outcomes_to_spread(outcomes, 4, same_task=True).expected(16) - simulated)
    assert abs(np.mean(gaps)) < 3 * np.std(gaps, ddof=1) / np.sqrt(len(gaps)) + 0.16  # and 0.01 a group


def test_with_one_run_a_task_it_is_right_on_average_over_how_alike_runs_of_a_task_are() -> None:
    chance = np.random.default_rng(1)
    gaps = []
    for _ in range(60):
        concentration = 1 / chance.random() - 1
        mean = chance.beta(0.5, 0.5)
        rates = chance.beta(concentration * mean, concentration * (1 - mean), 128)
        outcomes = {str(n): [float(chance.random() < rate)] for n, rate in enumerate(rates)}
        true = 16 * np.mean(1 - rates**4 - (1 - rates) ** 4)
        gaps.append(outcomes_to_spread(outcomes, 4, same_task=True).expected(16) - true)
    assert abs(np.mean(gaps)) < 3 * np.std(gaps, ddof=1) / np.sqrt(len(gaps))
