"""Owns: baselines over the samples of a task (GRPO, Dr. MAS, AT-GRPO, RLOO), RAE's running ones, the centring of step
and private rewards, and which groups say nothing. Against tables worked by hand, and exact enumeration.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.estimator_tables import RunningBaselines, group_keys

from trainers.advantages.arrays import Floats
from trainers.advantages.group_baselines import flat_groups, leave_one_out, standardise
from trainers.advantages.recurrences import gae_along_dependencies
from trainers.advantages.returns import leave_one_out_mean

# Three samples of one task: run 0 earned 6 and never called its solver, run 1 earned 0 and called it once, run 2
# earned 3 and called it three times. The planner acted once in each.
RETURNS = np.array([6.0, 0, 0, 3, 3, 3, 3])
AGENTS = ["planner", "planner", "solver", "planner", "solver", "solver", "solver"]
TURNS = [0, 0, 0, 0, 0, 1, 2]
RUNS = [0, 1, 1, 2, 2, 2, 2]
TASKS = ["t"] * 7

# grpo, trajectory: mean (6 + 0 + 3) / 3 = 3, variance (9 + 9 + 0) / 2 = 9
GRPO_TRAJECTORY = [1.0, -1, -1, 0, 0, 0, 0]
# grpo, step: mean 18 / 7; squares 36 + 4 * 9 = 72, less 7 * (18 / 7)^2 = 324 / 7, leaves 180 / 7; variance 180 / 7 / 6
_D = (30 / 7) ** 0.5
GRPO_STEP = [24 / 7 / _D, -18 / 7 / _D, -18 / 7 / _D, *[3 / 7 / _D] * 4]
# dr_mas, planner: 6, 0, 3 with mean 3 and deviation 3, however weighted.
# step, solver: 0, 3, 3, 3: mean 9 / 4, squares (81 + 3 * 9) / 16 = 27 / 4, variance 27 / 4 / 3, deviation 3 / 2
DR_MAS_STEP = [1.0, -1, -1.5, 0, 0.5, 0.5, 0.5]
# trajectory, solver: 0 and 3: mean 3 / 2, variance (9 / 4 + 9 / 4) / 1, deviation 3 / sqrt(2)
DR_MAS_TRAJECTORY = [1.0, -1, -(0.5**0.5), 0, *[0.5**0.5] * 3]
# at_grpo: the solver's turn 0 is 0 against 3; its turns 1 and 2 were taken by one run only
AT_GRPO = [1.0, -1, -(0.5**0.5), 0, 0.5**0.5, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "weight", "expected"),
    [
        ("grpo", "trajectory", GRPO_TRAJECTORY),
        ("grpo", "step", GRPO_STEP),
        ("dr_mas", "trajectory", DR_MAS_TRAJECTORY),
        ("dr_mas", "step", DR_MAS_STEP),
        ("at_grpo", "trajectory", AT_GRPO),
        ("at_grpo", "step", AT_GRPO),
    ],
)
def test_agents_that_act_zero_one_and_three_times(estimator: str, weight: str, expected: list[float]) -> None:
    keys = group_keys(estimator, TASKS, AGENTS, TURNS)  # type: ignore[arg-type]
    found = standardise(RETURNS, keys, RUNS, weight, std=True).advantages(RETURNS)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-12)


def test_without_the_deviation_returns_are_only_centred() -> None:
    keys = group_keys("dr_mas", TASKS, AGENTS, TURNS)
    found = standardise(RETURNS, keys, RUNS, "step", std=False).advantages(RETURNS)
    np.testing.assert_allclose(found, [3, -3, -2.25, 0, 0.75, 0.75, 0.75], atol=1e-12)


def test_the_deviation_of_trajectories_weighs_their_actions() -> None:
    # one run with returns 2 and 4 (weights 1/2), one with 0: mean (3 + 0) / 2 = 1.5,
    # variance (1/2 * 0.25 + 1/2 * 6.25 + 2.25) / (2 - 1) = 5.5
    returns = np.array([2.0, 4.0, 0.0])
    found = standardise(returns, ["t"] * 3, [0, 0, 1], "trajectory", std=True).advantages(returns)
    np.testing.assert_allclose(found, np.array([0.5, 2.5, -1.5]) / 5.5**0.5, rtol=2e-6)


def test_groups_of_one_and_of_equal_returns_have_no_gain() -> None:
    # a: mean 0.5, sample deviation sqrt(0.5); b alone; c of equal rewards
    returns, groups = np.array([1.0, 0.0, 5.0, 2.0, 2.0]), ["a", "a", "b", "c", "c"]
    grpo = standardise(returns, groups, range(5), "trajectory", std=True)
    gain = 1 / (0.5**0.5 + 1e-6)
    np.testing.assert_allclose(grpo.gain_A, [gain, gain, 0, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(grpo.advantages(returns), [0.5 * gain, -0.5 * gain, 0, 0, 0], rtol=1e-12)
    np.testing.assert_array_equal(standardise(returns, groups, range(5), "step", std=False).gain_A, [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(leave_one_out(returns, groups, range(5)).gain_A, [1, 1, 0, 0, 0])


def test_one_run_that_acts_often_is_no_group() -> None:
    # however different its returns are: a baseline made of its own actions says nothing about other samples
    returns = np.array([1.0, 2.0, 4.0])
    for baseline in (
        standardise(returns, ["t"] * 3, [0, 0, 0], "step", std=True),
        standardise(returns, ["t"] * 3, [0, 0, 0], "trajectory", std=True),
        leave_one_out(returns, ["t"] * 3, [0, 0, 0]),
    ):
        np.testing.assert_array_equal(baseline.advantages(returns), [0, 0, 0])


def test_equal_samples_are_not_told_apart_by_the_place_of_their_actions() -> None:
    # two runs of a chain of two, both earned 1, gamma 0.9: returns 0.9 and 1, and no merit of the second agent
    returns = np.array([0.9, 1.0, 0.9, 1.0])
    for weight in ("trajectory", "step"):
        found = standardise(returns, ["t"] * 4, [0, 0, 1, 1], weight, std=True).advantages(returns)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found, [0, 0, 0, 0])


def test_a_rest_of_rounding_is_no_spread() -> None:
    returns = np.array([0.1 + 0.2, 0.3, 0.3])  # 0.30000000000000004
    assert len(set(returns)) == 2
    np.testing.assert_array_equal(standardise(returns, ["t"] * 3, range(3), "step", std=True).gain_A, [0, 0, 0])
    np.testing.assert_array_equal(leave_one_out(returns, ["t"] * 3, range(3)).gain_A, [0, 0, 0])
    assert flat_groups(returns, ["t"] * 3)[0] == 1.0
    # runs (0.3, -0.1, -0.2) and (0): means of about 1e-17 and 0
    returns = np.array([0.3, -0.1, -0.2, 0.0])
    assert returns[:3].mean() != 0
    np.testing.assert_array_equal(standardise(returns, ["t"] * 4, [0, 0, 0, 1], "step", std=True).gain_A, [0, 0, 0, 0])


def test_rloo_table() -> None:
    # 3 - mean(0, 3) = 1.5; 0 - mean(3, 3) = -3; 3 - mean(3, 0) = 1.5; singleton 0; equal 0
    returns, groups = np.array([3.0, 7.0, 0.0, 3.0, 1.0, 1.0]), ["a", "b", "a", "a", "c", "c"]
    found = leave_one_out(returns, groups, range(6)).advantages(returns)
    np.testing.assert_allclose(found, [1.5, 0, -3, 1.5, 0, 0], atol=1e-12)


def test_rloo_takes_the_mean_of_the_other_runs_however_often_they_acted() -> None:
    # runs 6, 0 and 3: baselines (0 + 3) / 2, (6 + 3) / 2 and (6 + 0) / 2
    found = leave_one_out(RETURNS, TASKS, RUNS).advantages(RETURNS)
    np.testing.assert_allclose(found, [4.5, -4.5, -4.5, 0, 0, 0, 0], atol=1e-12)
    # runs with returns (2, 4), (0) and (6): baselines (0 + 6) / 2, (3 + 6) / 2 and (3 + 0) / 2
    uneven = np.array([2.0, 4.0, 0.0, 6.0])
    found = leave_one_out(uneven, ["t"] * 4, [0, 0, 1, 2]).advantages(uneven)
    np.testing.assert_allclose(found, [-1, 1, -4.5, 4.5], atol=1e-12)


def test_groups_of_a_graph_with_branches_a_loop_and_an_end_cut_short() -> None:
    # gamma 0.5, the team reward of a run arrives at its ends:
    # run 0: 0 -> {1, 2} -> 3 earned 8: returns 2, 4, 4, 8
    # run 1: a loop of planner and solver of four actions, earned 16: 2, 4, 8, 16
    # run 2: a chain of two, cut short, earned 0 so far: nothing is added for what might have come: 0, 0
    runs = [([8.0], ((1, 2), (3,), (3,), ())), ([16.0], ((1,), (2,), (3,), ())), ([0.0], ((1,), ()))]
    returns = np.concatenate(
        [
            gae_along_dependencies(
                [0] * len(after), [0.0 if a else r for a in after], after, [0] * len(after), gamma=0.5, lam=1.0
            )
            for (r,), after in runs
        ]
    )
    np.testing.assert_allclose(returns, [2, 4, 4, 8, 2, 4, 8, 16, 0, 0])
    agents = ["planner", "solver", "solver", "joiner", "planner", "solver", "planner", "solver", "planner", "solver"]
    turns = [0, 0, 1, 0, 0, 0, 1, 1, 0, 0]
    trajectory = [0] * 4 + [1] * 4 + [2] * 2
    # at_grpo: planner at turn 0: 2, 2, 0 with mean 4/3 and deviation sqrt((2 * 4/9 + 16/9) / 2) = sqrt(4/3);
    # solver at turn 0: 4, 4, 0: twice that; at turn 1: 4 and 16, mean 10, deviation sqrt(72);
    # the joiner and the planner at turn 1 acted in one run only
    d = (4 / 3) ** 0.5
    expected = [2 / 3 / d, 2 / 3 / d, -6 / 72**0.5, 0, 2 / 3 / d, 2 / 3 / d, 0, 6 / 72**0.5, -4 / 3 / d, -4 / 3 / d]
    keys = group_keys("at_grpo", ["t"] * 10, agents, turns)
    found = standardise(returns, keys, trajectory, "trajectory", std=True).advantages(returns)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    # rloo: mean returns of the runs 4.5, 7.5 and 0: baselines 3.75, 2.25 and 6
    found = leave_one_out(returns, ["t"] * 10, trajectory).advantages(returns)
    np.testing.assert_allclose(found, [-1.75, 0.25, 0.25, 4.25, -0.25, 1.75, 5.75, 13.75, -6, -6])


def test_keys_say_who_is_compared_with_whom() -> None:
    tasks, agents, turns = ["t", "t", "u"], ["a", "b", "a"], [0, 0, 1]
    assert group_keys("grpo", tasks, agents, turns) == ["t", "t", "u"]
    assert group_keys("rloo", tasks, agents, turns) == ["t", "t", "u"]
    assert group_keys("dr_mas", tasks, agents, turns) == [("t", "a"), ("t", "b"), ("u", "a")]
    assert group_keys("at_grpo", tasks, agents, turns) == [("t", 0, "a"), ("t", 0, "b"), ("u", 1, "a")]


# -- step and private rewards -----------------------------------------------------------------------------------------


def test_own_rewards_are_centred_on_the_agents_other_episodes() -> None:
    # planner: 6, 0 and 3 in runs 0 to 2. 6 - (0 + 3) / 2 = 4.5; 0 - (6 + 3) / 2 = -4.5; 3 - (6 + 0) / 2 = 0
    # solver: 0 in run 1, three times 3 in run 2: 0 - 3, and 3 - 0 each
    found = leave_one_out_mean(RETURNS, AGENTS, RUNS)
    np.testing.assert_allclose(found, [4.5, -4.5, -3, 0, 3, 3, 3], atol=1e-12)


def test_every_action_of_the_other_episodes_counts_once() -> None:
    # one agent: 1 in episode 0, (2, 5) in 1, 4 in 2: 1 - (2 + 5 + 4) / 3; 2 and 5 - (1 + 4) / 2; 4 - (1 + 2 + 5) / 3
    found = leave_one_out_mean([1, 2, 5, 4], ["a"] * 4, [0, 1, 1, 2])
    np.testing.assert_allclose(found, [1 - 11 / 3, -0.5, 2.5, 4 - 8 / 3], atol=1e-12)


def test_an_agent_without_other_episodes_gets_nothing() -> None:
    np.testing.assert_array_equal(leave_one_out_mean([7, 9, 1], ["a", "a", "b"], [0, 0, 1]), [0, 0, 0])


# -- running baselines ------------------------------------------------------------------------------------------------


def test_rae_table() -> None:
    # decay 1/2. planner: 4 - 0, b = 2; 8 - 2, b = 5.
    # solver: 2 and 6 in run 0, both against 0, b = (2 + 6) / 2 / 2 = 2; 10 - 2, b = 6
    rae = RunningBaselines(0.5)
    returns = np.array([4.0, 2.0, 6.0, 8.0, 10.0])
    agents, runs = ["planner", "solver", "solver", "planner", "solver"], [0, 0, 0, 1, 1]
    baseline, state = rae.baselines_of(returns, agents, runs)
    np.testing.assert_allclose(baseline.advantages(returns), [4, 2, 6, 6, 8])
    assert state == {"planner": 5.0, "solver": 6.0}
    rae.commit(state)
    # the next round goes on from there
    baseline, _ = rae.baselines_of([5.0, 5.0], ["solver", "planner"], [0, 0])
    np.testing.assert_allclose(baseline.baseline_A, [6, 5])


def test_rae_forgets_a_round_that_is_not_committed() -> None:
    rae = RunningBaselines(0.95, {"planner": 1.0})
    rae.baselines_of([9.0], ["planner"], [0])
    assert rae.state == {"planner": 1.0}
    _, state = rae.baselines_of([3.0], ["planner"], [0])
    assert state["planner"] == pytest.approx(0.95 * 1 + 0.05 * 3)
    rae.commit(state)
    state["planner"] = 7.0
    assert rae.state["planner"] == pytest.approx(1.1)


# -- dynamic sampling -------------------------------------------------------------------------------------------------


def test_flat_groups_are_those_whose_samples_earned_the_same() -> None:
    # a differs, b is equal, c has one sample
    share, mask = flat_groups([1.0, 0.0, 2.0, 2.0, 5.0], ["a", "a", "b", "b", "c"])
    assert share == pytest.approx(2 / 3)
    np.testing.assert_array_equal(mask, [False, False, True, True, True])
    # entries of one trajectory are one sample: (0.5, 1) and (0.5, 1) earned the same, (1, 2) alone is none
    share, mask = flat_groups([0.5, 1, 0.5, 1, 1, 2], ["a"] * 4 + ["b"] * 2, [0, 0, 1, 1, 2, 2])
    assert share == 1.0
    assert mask.all()
    assert flat_groups([], [])[0] is None


# -- on any round -----------------------------------------------------------------------------------------------------

rounds = st.lists(  # (return, task, trajectory within the task)
    st.tuples(st.floats(-5, 5).map(lambda x: round(x, 2)), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


def _columns(case: list[tuple[float, int, int]]) -> tuple[Floats, list[int], list[tuple[int, int]]]:
    return np.array([r for r, _, _ in case]), [t for _, t, _ in case], [(t, k) for _, t, k in case]


def _naive(returns: Floats, weights: Floats, runs: int, by_steps: bool) -> Floats:
    """Standardised returns of one group, from a table in which every trajectory is repeated equally often."""
    if by_steps:
        return (returns - np.mean(returns)) / (np.std(returns, ddof=1) + 1e-6)
    # 27720 is divided by 1..12: each run has the same number of rows in the repeated table
    table = np.repeat(returns, np.rint(27720 * weights).astype(int))
    return (returns - np.mean(table)) / (np.sqrt(np.var(table) * runs / (runs - 1)) + 1e-6)


@settings(deadline=None, max_examples=60)  # the machine is shared
@given(rounds, st.booleans())
def test_standardising_agrees_with_a_table_of_repeated_rows(case: list[tuple[float, int, int]], by_steps: bool) -> None:
    returns, tasks, runs = _columns(case)
    weight = "step" if by_steps else "trajectory"
    found = standardise(returns, tasks, runs, weight, std=True).advantages(returns)
    for task in set(tasks):
        rows = [i for i, t in enumerate(tasks) if t == task]
        own = [runs[i] for i in rows]
        means = {round(float(np.mean([returns[i] for i in rows if runs[i] == run])), 9) for run in set(own)}
        if len(means) < 2:
            np.testing.assert_array_equal(found[rows], 0)
            continue
        weights = np.array([1 / own.count(run) for run in own])
        np.testing.assert_allclose(
            found[rows], _naive(returns[rows], weights, len(set(own)), by_steps), rtol=1e-6, atol=1e-9
        )


@settings(deadline=None)
@given(rounds)
def test_no_estimate_moves_with_an_amount_that_everybody_gets(case: list[tuple[float, int, int]]) -> None:
    returns, tasks, runs = _columns(case)
    for estimate in (
        lambda r: standardise(r, tasks, runs, "trajectory", std=False).advantages(r),
        lambda r: standardise(r, tasks, runs, "step", std=False).advantages(r),
        lambda r: leave_one_out(r, tasks, runs).advantages(r),
        lambda r: leave_one_out_mean(r, ["a"] * len(r), [hash(run) for run in runs]),
    ):
        np.testing.assert_allclose(estimate(returns + 8), estimate(returns), atol=1e-9)


# -- unbiasedness, by enumeration -------------------------------------------------------------------------------------

# One agent with a policy over three actions, softmax of THETA. Action 0 ends the run with reward 3. Actions 1 and 2 ask
# it again, and the second action a ends the run with reward SECOND[first][a]: runs of one or of two actions.
THETA = np.array([0.3, -0.2, 0.5])
SECOND = {1: (1.0, -2.0, 4.0), 2: (0.0, 5.0, 2.0)}


def _policy(theta: Floats) -> Floats:
    return np.asarray(np.exp(theta) / np.exp(theta).sum())


def _runs() -> list[tuple[tuple[int, ...], float]]:
    return [((0,), 3.0), *(((first, a), r) for first in (1, 2) for a, r in enumerate(SECOND[first]))]


def _objective(theta: Floats) -> float:
    p = _policy(theta)
    return float(sum(np.prod(p[list(actions)]) * reward for actions, reward in _runs()))


def _expected_gradient(credit: object, samples: int) -> Floats:
    """E[sum of advantage * grad log pi] per sample, over every way to draw `samples` runs."""
    p = _policy(THETA)
    total = np.zeros(3)
    for drawn in product(_runs(), repeat=samples):
        probability = np.prod([np.prod(p[list(actions)]) for actions, _ in drawn])
        returns = np.array([reward for actions, reward in drawn for _ in actions])
        runs = [k for k, (actions, _) in enumerate(drawn) for _ in actions]
        scores = np.array([np.eye(3)[a] - p for actions, _ in drawn for a in actions])
        total += probability * (credit(returns, runs)[:, None] * scores).sum(axis=0) / samples  # type: ignore[operator]
    return total


def _exact_gradient() -> Floats:
    h = 1e-6
    return np.array([(_objective(THETA + h * e) - _objective(THETA - h * e)) / (2 * h) for e in np.eye(3)])


@pytest.mark.parametrize("samples", [2, 3])
def test_rloo_leaves_the_policy_gradient_unbiased(samples: int) -> None:
    def rloo(returns: Floats, runs: list[int]) -> Floats:
        return leave_one_out(returns, ["t"] * len(returns), runs).advantages(returns)

    np.testing.assert_allclose(_expected_gradient(rloo, samples), _exact_gradient(), atol=1e-8)


def test_rae_leaves_the_policy_gradient_unbiased_and_an_update_per_action_would_not() -> None:
    def rae(returns: Floats, runs: list[int]) -> Floats:
        return (
            RunningBaselines(0.5, {"a": 1.0}).baselines_of(returns, ["a"] * len(returns), runs)[0].advantages(returns)
        )

    def per_action(returns: Floats, runs: list[int]) -> Floats:
        return rae(returns, list(range(len(returns))))

    np.testing.assert_allclose(_expected_gradient(rae, 2), _exact_gradient(), atol=1e-8)
    assert np.abs(_expected_gradient(per_action, 2) - _exact_gradient()).max() > 0.01
