"""Owns: that a round's baseline is worth no less than a constant, whatever the critic says."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.credit.shrinkage import explained_out_of_sample, shrink_values

EPISODES = 20
TASKS = [f"t{e}" for e in range(EPISODES)]
RNG = np.random.default_rng(0)
RETURNS = RNG.normal(size=EPISODES)


def shrunk(values: np.ndarray, returns: np.ndarray = RETURNS, tasks: list[str] = TASKS) -> tuple[np.ndarray, float]:
    """One agent, one action an episode: its baseline and its weight."""
    result = shrink_values(
        [np.array([v]) for v in values],
        [np.array([r]) for r in returns],
        agents=["a"] * len(values),
        tasks=tasks,
        episode_A=range(len(values)),
        ends_A=np.zeros(len(values)),
        is_cut_A=[False] * len(values),
    )
    weight = result.weights["a"]
    assert weight is not None
    return np.concatenate(result.values), weight


def test_a_critic_that_says_the_same_of_all_becomes_the_mean_return_of_other_tasks() -> None:
    baseline, weight = shrunk(np.full(EPISODES, 7.0))
    assert weight == 0.0
    for e in range(EPISODES):  # five parts: every fifth episode is left out
        others = [RETURNS[o] for o in range(EPISODES) if o % 5 != e % 5]
        assert baseline[e] == pytest.approx(np.mean(others))


def test_a_critic_that_is_right_keeps_its_values() -> None:
    baseline, weight = shrunk(RETURNS.copy())
    assert weight == pytest.approx(1.0)
    np.testing.assert_allclose(baseline, RETURNS)


def test_a_critic_that_is_right_but_for_a_constant_loses_the_constant() -> None:
    baseline, _ = shrunk(RETURNS + 3.0)
    np.testing.assert_allclose(baseline, RETURNS)


def test_a_critic_that_says_the_opposite_is_not_believed() -> None:
    baseline, weight = shrunk(-RETURNS)
    assert weight == 0.0
    assert np.std(baseline) < 0.5 * np.std(RETURNS)


def test_half_a_slope_by_hand() -> None:
    # values 0, 2, 0, 2, ... and returns 0, 1, 0, 1, ...: slope 1/2 whichever part is left out
    values, returns = np.tile([0.0, 2.0], 10), np.tile([0.0, 1.0], 10)
    baseline, weight = shrunk(values, returns)
    assert weight == pytest.approx(0.5)
    np.testing.assert_allclose(baseline, returns)


def test_what_an_action_earned_has_no_part_in_its_own_baseline() -> None:
    values = RNG.normal(size=EPISODES)
    other_returns = RETURNS.copy()
    other_returns[3] += 100.0
    assert shrunk(values)[0][3] == shrunk(values, other_returns)[0][3]
    assert shrunk(values)[0][4] != shrunk(values, other_returns)[0][4]


def test_the_samples_of_a_task_have_no_part_in_each_others_baseline() -> None:
    tasks = [f"t{e // 2}" for e in range(EPISODES)]
    values = RNG.normal(size=EPISODES)
    other_returns = RETURNS.copy()
    other_returns[3] += 100.0
    assert shrunk(values, tasks=tasks)[0][2] == shrunk(values, other_returns, tasks)[0][2]


def test_noise_costs_less_than_it_would_at_its_word() -> None:
    """On returns that the critic knows nothing of: the squared error of the baseline, against that of a constant."""
    noisy = shrunken = constant = 0.0
    for _ in range(200):
        returns, values = RNG.normal(size=60), RNG.normal(size=60)
        baseline, _ = shrunk(values, returns, [str(i) for i in range(60)])
        noisy += float(np.mean((returns - values) ** 2))
        shrunken += float(np.mean((returns - baseline) ** 2))
        constant += float(np.var(returns))
    assert noisy > 1.9 * constant
    assert shrunken < 1.06 * constant


def test_a_round_of_one_episode_keeps_the_critics_values_and_says_that_nothing_told_a_weight() -> None:
    result = shrink_values(
        [np.array([0.5])],
        [np.array([1.0])],
        agents=["a"],
        tasks=["t"],
        episode_A=[0],
        ends_A=np.array([0.25]),
        is_cut_A=[True],
    )
    assert (result.values[0][0], result.ends[0], result.weights) == (0.5, 0.25, {"a": None})
    assert explained_out_of_sample(result, [np.array([1.0])], [0]) is None


def test_what_follows_a_cut_is_drawn_towards_the_mean_also_where_the_critic_says_0_of_it() -> None:
    cut = [e == 3 for e in range(EPISODES)]
    result = shrink_values(
        [np.array([0.0]) for _ in RETURNS],
        [np.array([r]) for r in RETURNS],
        agents=["a"] * EPISODES,
        tasks=TASKS,
        episode_A=range(EPISODES),
        ends_A=np.zeros(EPISODES),
        is_cut_A=cut,
    )
    assert result.ends[3] == pytest.approx(np.mean([RETURNS[o] for o in range(EPISODES) if o % 5 != 3]))
    assert all(result.ends[e] == 0 for e in range(EPISODES) if e != 3)


@pytest.mark.parametrize(("noise", "share"), [(0.0, 1.0), (1.0, 0.5), (1000.0, 0.0)])
def test_what_is_explained_out_of_sample_is_what_a_line_through_other_tasks_explains(
    noise: float, share: float
) -> None:
    rng = np.random.default_rng(1)
    count = 4000
    returns = rng.normal(size=count)
    values = returns + noise * rng.normal(size=count)  # explains 1 / (1 + noise^2)
    parts = [np.array([r]) for r in returns]
    result = shrink_values(
        [np.array([v]) for v in values],
        parts,
        agents=["a"] * count,
        tasks=range(count),
        episode_A=range(count),
        ends_A=np.zeros(count),
        is_cut_A=[False] * count,
    )
    assert explained_out_of_sample(result, parts, range(count)) == pytest.approx(share, abs=0.03)
