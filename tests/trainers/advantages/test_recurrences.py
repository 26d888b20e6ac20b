"""Owns: credit along the dependencies D of an episode per action and per token, V-trace along D, returns of step
rewards. Against tables worked by hand, exact values of a small game, and the same recurrences as linear systems.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages.arrays import Floats
from trainers.advantages.recurrences import (
    adaptive_lambda,
    gae_along_dependencies,
    token_gae_along_dependencies,
    vtrace_along_dependencies,
)
from trainers.advantages.returns import step_returns
from trainers.dependencies import Successors, edges_to_successors
from trainers.rewards import StepReward

DIAMOND = ((1, 2), (3,), (3,), ())
NONE = [0.0] * 8


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_chain_of_two_follows_the_paper_by_hand() -> None:
    # A_2 = 1 - 0.6 = 0.4;  delta_1 = 0.9 * 0.6 - 0.5 = 0.04;  A_1 = 0.04 + 0.9 * 0.5 * 0.4 = 0.22
    result = gae_along_dependencies([0.5, 0.6], [0, 1], ((1,), ()), [0, 0], gamma=0.9, lam=0.5)
    np.testing.assert_allclose(result, [0.22, 0.4], atol=1e-12)


def test_a_chain_of_three_follows_the_paper_by_hand() -> None:
    # A_3 = 2 - 1 = 1; A_2 = (1 - 0.5) + 0.5 * 1 = 1; A_1 = (0.5 - 0.25) + 0.5 * 1 = 0.75
    result = gae_along_dependencies([0.25, 0.5, 1.0], [0, 0, 2], ((1,), (2,), ()), [0] * 3, gamma=1.0, lam=0.5)
    np.testing.assert_allclose(result, [0.75, 1.0, 1.0], atol=1e-12)


def test_parallel_branches_share_their_mean_and_not_their_sum() -> None:
    # 0 -> {1, 2} -> 3. A_3 = 1 - 0.8 = 0.2; A_1 = (0.8 - 0.4) + 0.5 * 0.2 = 0.5; A_2 = (0.8 - 0.6) + 0.1 = 0.3
    # A_0 = ((0.4 + 0.6) / 2 - 0.5) + 0.5 * (0.5 + 0.3) / 2 = 0.2
    result = gae_along_dependencies([0.5, 0.4, 0.6, 0.8], [0, 0, 0, 1], DIAMOND, [0] * 4, gamma=1.0, lam=0.5)
    np.testing.assert_allclose(result, [0.2, 0.5, 0.3, 0.2], atol=1e-12)


def test_returns_of_branches_of_different_length_are_averaged() -> None:
    # 0 -> {1 -> 3, 2}; the team reward 8 arrives at both ends, gamma 0.5.
    # G_3 = G_2 = 8; G_1 = 0.5 * 8 = 4; G_0 = 0.5 * (4 + 8) / 2 = 3
    result = gae_along_dependencies(NONE[:4], [0, 0, 8, 8], ((1, 2), (3,), (), ()), NONE, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(result, [3.0, 4.0, 8.0, 8.0], atol=1e-12)


def test_a_loop_of_two_steps_passes_credit_through_its_first_step() -> None:
    # reasoner, actor, reasoner, actor. A masked link at the start of the second step would give A_1 = -V_1 = -0.3.
    # A_3 = 1 - 0.7 = 0.3; A_2 = (0.7 - 0.5) + 0.3 = 0.5; A_1 = (0.5 - 0.3) + 0.5 = 0.7; A_0 = (0.3 - 0.1) + 0.7 = 0.9
    successors = edges_to_successors(4, [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)])
    result = gae_along_dependencies([0.1, 0.3, 0.5, 0.7], [0, 0, 0, 1], successors, [0] * 4, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(result, [0.9, 0.7, 0.5, 0.3], atol=1e-12)


def test_only_a_truncated_end_is_bootstrapped() -> None:
    # truncated: A_1 = 0 + 0.5 * 0.8 - 0.2 = 0.2; A_0 = (0.5 * 0.2 - 0.3) + 0.5 * 0.2 = -0.1
    truncated = gae_along_dependencies([0.3, 0.2], [0, 0], ((1,), ()), [9.0, 0.8], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(truncated, [-0.1, 0.2], atol=1e-12)
    # terminated: A_1 = -0.2; A_0 = -0.2 + 0.5 * -0.2 = -0.3
    terminated = gae_along_dependencies([0.3, 0.2], [0, 0], ((1,), ()), [0.0, 0.0], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(terminated, [-0.3, -0.2], atol=1e-12)


def test_two_actions_of_two_tokens_are_chained_token_by_token_by_hand() -> None:
    # gamma 0.5 and lambda 0.5 per link, gamma 0.8 and lambda 0.5 per token, reward 2 at the last token.
    # second action: A_1 = 2 - 1 = 1; A_0 = (0.8 * 1 - 0.4) + 0.8 * 0.5 * 1 = 0.8
    # first action: its last token sees V_{1,0} = 0.4 and A_{1,0} = 0.8: (0.5 * 0.4 - 0.3) + 0.25 * 0.8 = 0.1;
    #               its first: (0.8 * 0.3 - 0.2) + 0.4 * 0.1 = 0.08
    values = [np.array([0.2, 0.3]), np.array([0.4, 1.0])]
    first, second = token_gae_along_dependencies(values, [0, 2], ((1,), ()), [0, 0], 0.5, 0.5, 0.8, [0.5, 0.5])
    np.testing.assert_allclose(first, [0.08, 0.1], atol=1e-12)
    np.testing.assert_allclose(second, [0.8, 1.0], atol=1e-12)


def test_tokens_of_parallel_branches_and_of_a_truncated_end_by_hand() -> None:
    # 0 -> {1, 2}, all lambdas and discounts 1, no reward, bootstraps 3 and 5 after the branches, V = 0 before every
    # token but the first of action 2, which is 1: its tokens have 5 - 1 and 5, those of action 1 have 3, and
    # action 0 has the mean of what follows, (3 + 5) / 2.
    values = [np.zeros(1), np.zeros(3), np.array([1.0, 0.0])]
    result = token_gae_along_dependencies(values, [0, 0, 0], ((1, 2), (), ()), [9, 3, 5], 1.0, 1.0, 1.0, [1.0] * 3)
    np.testing.assert_allclose(np.concatenate(result), [4, 3, 3, 3, 4, 5], atol=1e-12)


def test_a_lambda_of_one_per_token_takes_the_reward_to_the_first_token_and_that_of_the_chain_does_not() -> None:
    # What follows an action of 100 tokens: 1 with lambda 1 per token, 0.95^99 = 0.0062 with 0.95.
    zeros = [np.zeros(100)]
    whole = token_gae_along_dependencies(zeros, [1], ((),), [0], 1.0, 0.95, 1.0, [1.0])
    starved = token_gae_along_dependencies(zeros, [1], ((),), [0], 1.0, 0.95, 1.0, [0.95])
    assert whole[0][0] == 1.0
    assert starved[0][0] == pytest.approx(0.0062, abs=5e-5)


def test_an_action_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without sampled tokens"):
        token_gae_along_dependencies([np.zeros(0)], [1], ((),), [0], 1.0, 1.0, 1.0, [1.0])


def test_vtrace_follows_the_paper_by_hand() -> None:
    # 0 -> 1, reward 1 at the end, V = (0.5, 0.6), ratios (0.5, 4), caps rho 2 and c 1, gamma 1.
    # v_1 = 0.6 + 2 * (1 - 0.6) = 1.4; A_1 = 2 * (1 - 0.6) = 0.8
    # delta_0 = 0.5 * (0.6 - 0.5) = 0.05; v_0 = 0.5 + 0.05 + 0.5 * (1.4 - 0.6) = 0.95; A_0 = 0.5 * (1.4 - 0.5) = 0.45
    targets, advantages = vtrace_along_dependencies(
        [0.5, 0.6], [0, 1], ((1,), ()), [0, 0], [0.5, 4.0], gamma=1.0, rho_bar=2.0, c_bar=1.0
    )
    np.testing.assert_allclose(targets, [0.95, 1.4], atol=1e-12)
    np.testing.assert_allclose(advantages, [0.45, 0.8], atol=1e-12)


def test_vtrace_cuts_the_trace_where_c_is_small_and_takes_branches_by_their_mean() -> None:
    # 0 -> {1, 2}, V = 0, gamma 0.5, both ends truncated with bootstraps 2 and 6, ratios (1, 1, 0.5), caps 1.
    # v_1 = 0.5 * 2 = 1; v_2 = 0.5 * (0.5 * 6) = 1.5; v_0 = 0 + 0 + 0.5 * 1 * (1 + 1.5) / 2 = 0.625 = A_0
    # With ratio 0.2 for action 0: v_0 = 0.5 * 0.2 * 1.25 = 0.125 and A_0 = 0.2 * 0.5 * 1.25 = 0.125.
    for ratio, expected in ((1.0, 0.625), (0.2, 0.125)):
        targets, advantages = vtrace_along_dependencies(
            [0, 0, 0], [0, 0, 0], ((1, 2), (), ()), [9, 2, 6], [ratio, 1.0, 0.5], 0.5, 1.0, 1.0
        )
        np.testing.assert_allclose(targets, [expected, 1.0, 1.5], atol=1e-12)
        np.testing.assert_allclose(advantages, [expected, 1.0, 1.5], atol=1e-12)


def test_vtrace_refuses_a_smaller_cap_for_rho_than_for_c() -> None:
    with pytest.raises(ValueError, match="rho_bar >= c_bar"):
        vtrace_along_dependencies([0], [1], ((),), [0], [1.0], 1.0, rho_bar=0.5, c_bar=1.0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 0.0), (20, 0.0), (40, 0.5), (200, 0.9), (2000, 0.99)],  # 1 - 1 / (0.05 * 40) = 1 - 1/2; 1 - 1/10; 1 - 1/100
)
def test_lambda_grows_with_the_length_of_the_action(tokens: int, expected: float) -> None:
    assert adaptive_lambda(tokens, alpha=0.05) == pytest.approx(expected)


def test_step_rewards_reach_what_they_depended_on_once_and_discounted() -> None:
    # 0 -> {1, 2} -> 3: 8 arrives with action 3, -1 with action 1; gamma 0.5.
    # G_3 = 8; G_1 = 0.5 * 8 - 1 = 3; G_2 = 4; G_0 = 0.25 * 8 - 0.5 = 1.5: the 8 once, though two branches lead to it
    rewards = [StepReward(8.0, {3: 0, 1: 1, 2: 1, 0: 2}), StepReward(-1.0, {1: 0, 0: 1})]
    np.testing.assert_allclose(step_returns(rewards, 4, 0.5), [1.5, 3.0, 4.0, 8.0], atol=1e-12)
    np.testing.assert_array_equal(step_returns([], 2, 0.5), [0.0, 0.0])


# -- the multi-agent advantage decomposition (paper, 2.3.2) -----------------------------------------------------------

# Two agents of two actions each. pi_1 = (1/4, 3/4); pi_2 = (1/2, 1/2) after 0 and (1/5, 4/5) after 1.
# r(0, 0) = 4, r(1, 0) = 5, else 0. V(after 0) = 2, V(after 1) = 1, V = 1/4 * 2 + 3/4 * 1 = 5/4.
PI_1 = (0.25, 0.75)
PI_2 = ((0.5, 0.5), (0.2, 0.8))
REWARD = ((4.0, 0.0), (5.0, 0.0))
V_2, V_1 = (2.0, 1.0), 1.25


def _credit(first: int, second: int, lam: float) -> Floats:
    return gae_along_dependencies([V_1, V_2[first]], [0, REWARD[first][second]], ((1,), ()), [0, 0], gamma=1.0, lam=lam)


def test_the_agents_advantages_sum_to_the_joint_one() -> None:
    # A^1(0) = 2 - 5/4 = 3/4, A^1(1) = 1 - 5/4 = -1/4
    # A^2(0, 0) = 4 - 2, A^2(0, 1) = 0 - 2, A^2(1, 0) = 5 - 1, A^2(1, 1) = 0 - 1
    by_hand = {(0, 0): (0.75, 2.0), (0, 1): (0.75, -2.0), (1, 0): (-0.25, 4.0), (1, 1): (-0.25, -1.0)}
    for (first, second), expected in by_hand.items():
        credit = _credit(first, second, lam=0.0)
        np.testing.assert_allclose(credit, expected, atol=1e-12)
        assert credit.sum() == pytest.approx(REWARD[first][second] - V_1)  # the joint advantage


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_whatever_lambda_each_agent_is_credited_its_own_advantage_on_average(lam: float) -> None:
    for first in (0, 1):
        mean = sum(PI_2[first][second] * _credit(first, second, lam)[0] for second in (0, 1))
        assert mean == pytest.approx(V_2[first] - V_1)
    # and under the policies nobody has an advantage on average
    mean_2 = [
        PI_1[first] * PI_2[first][second] * _credit(first, second, lam) for first, second in product((0, 1), repeat=2)
    ]
    np.testing.assert_allclose(np.sum(mean_2, axis=0), [0.0, 0.0], atol=1e-12)


# -- on any graph -----------------------------------------------------------------------------------------------------

floats = st.floats(-2, 2)
shares = st.floats(0, 1)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Successors, Floats, Floats, Floats, list[Floats]]:
    """Successors, values, rewards, bootstraps, and values of one to three tokens for each action."""
    count = draw(st.integers(1, 7))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda e: e[0] < e[1])
    successors = edges_to_successors(count, draw(st.lists(pairs)))

    def some() -> Floats:
        return np.array(draw(st.lists(floats, min_size=count, max_size=count)))

    tokens = [np.array(draw(st.lists(floats, min_size=1, max_size=3))) for _ in range(count)]
    return successors, some(), some(), some(), tokens


def _steps(successors: Successors) -> tuple[Floats, Floats]:
    """D as a matrix of steps to a uniformly drawn dependent, and who has none."""
    matrix = np.zeros((len(successors), len(successors)))
    for i, after in enumerate(successors):
        matrix[i, list(after)] = 1 / max(len(after), 1)
    return matrix, 1 - np.sign(matrix.sum(axis=1))


def _walks(successors: Successors, start: int) -> list[tuple[float, list[int]]]:
    """Every walk from `start` to an end of D, with its probability when each next step is drawn uniformly."""
    if not successors[start]:
        return [(1.0, [start])]
    share = 1 / len(successors[start])
    return [(share * p, [start, *walk]) for j in successors[start] for p, walk in _walks(successors, j)]


def _returns_by_walks(successors: Successors, rewards: Floats, bootstrap: Floats, gamma: float) -> Floats:
    def of(walk: list[int]) -> float:
        earned = sum(gamma**k * rewards[i] for k, i in enumerate(walk))
        return float(earned + gamma ** len(walk) * bootstrap[walk[-1]])

    return np.array([sum(p * of(walk) for p, walk in _walks(successors, i)) for i in range(len(successors))])


@settings(deadline=None)  # the machine is shared
@given(episodes(), shares, shares)
def test_gae_solves_its_recurrence_as_a_linear_system(case: tuple, gamma: float, lam: float) -> None:
    successors, values, rewards, bootstrap, _ = case
    step, ends = _steps(successors)
    delta = rewards + gamma * (step @ values + ends * bootstrap) - values
    expected = np.linalg.solve(np.eye(len(values)) - gamma * lam * step, delta)
    result = gae_along_dependencies(values, rewards, successors, bootstrap, gamma, lam)
    np.testing.assert_allclose(result, expected, atol=1e-9)


@settings(deadline=None)
@given(episodes(), shares)
def test_with_lambda_one_the_advantage_is_return_minus_value(case: tuple, gamma: float) -> None:
    successors, values, rewards, bootstrap, _ = case
    result = gae_along_dependencies(values, rewards, successors, bootstrap, gamma, lam=1.0)
    expected = _returns_by_walks(successors, rewards, bootstrap, gamma) - values
    np.testing.assert_allclose(result, expected, atol=1e-9)


@settings(deadline=None)
@given(episodes(), floats)
def test_every_action_of_any_graph_sees_the_team_reward_once(case: tuple, reward: float) -> None:
    successors, values, _, _, _ = case
    rewards = [0.0 if after else reward for after in successors]
    result = gae_along_dependencies(values, rewards, successors, NONE, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(result, reward - values, atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=8), floats)
def test_along_a_chain_the_advantages_sum_to_the_joint_one(steps: list[tuple[float, float]], bootstrap: float) -> None:
    values, rewards = np.array(steps).T
    chain = tuple((i + 1,) if i + 1 < len(steps) else () for i in range(len(steps)))
    ends = [9.0] * (len(steps) - 1) + [bootstrap]
    result = gae_along_dependencies(values, rewards, chain, ends, gamma=1.0, lam=0.0)
    assert result.sum() == pytest.approx(rewards.sum() + bootstrap - values[0], abs=1e-9)


@settings(deadline=None)
@given(episodes(), shares, shares, shares, shares)
def test_with_one_token_per_action_the_token_level_is_the_action_level(
    case: tuple, gamma: float, lam: float, gamma_token: float, token_lambda: float
) -> None:
    successors, values, rewards, bootstrap, _ = case
    result = token_gae_along_dependencies(
        [np.array([v]) for v in values],
        rewards,
        successors,
        bootstrap,
        gamma,
        lam,
        gamma_token,
        [token_lambda] * len(values),
    )
    expected = gae_along_dependencies(values, rewards, successors, bootstrap, gamma, lam)
    np.testing.assert_allclose(np.concatenate(result), expected, atol=1e-9)


@settings(deadline=None)
@given(episodes(), shares, shares, shares, st.data())
def test_token_gae_solves_its_recurrence_as_a_linear_system(
    case: tuple, gamma: float, lam: float, gamma_token: float, data: st.DataObject
) -> None:
    successors, _, rewards, bootstrap, tokens = case
    lambdas = data.draw(st.lists(shares, min_size=len(tokens), max_size=len(tokens)))
    first = np.cumsum([0, *(len(each) for each in tokens)])
    total = first[-1]
    # discount, and discount times lambda, from every token of the episode to those that follow it
    discount, trace, arriving = np.zeros((total, total)), np.zeros((total, total)), np.zeros(total)
    for i, after in enumerate(successors):
        for t in range(first[i], first[i + 1] - 1):
            discount[t, t + 1], trace[t, t + 1] = gamma_token, gamma_token * lambdas[i]
        last = first[i + 1] - 1
        arriving[last] = rewards[i] + (0.0 if after else gamma * bootstrap[i])
        for j in after:
            discount[last, first[j]], trace[last, first[j]] = gamma / len(after), gamma * lam / len(after)
    values = np.concatenate(tokens)
    expected = np.linalg.solve(np.eye(total) - trace, arriving + discount @ values - values)
    result = token_gae_along_dependencies(tokens, rewards, successors, bootstrap, gamma, lam, gamma_token, lambdas)
    assert [len(each) for each in result] == [len(each) for each in tokens]
    np.testing.assert_allclose(np.concatenate(result), expected, atol=1e-9)


@settings(deadline=None)
@given(episodes(), shares, st.lists(st.floats(0, 3), min_size=7, max_size=7), shares, st.floats(1, 2))
def test_vtrace_solves_its_recurrence_as_a_linear_system(
    case: tuple, gamma: float, ratios: list[float], c_bar: float, rho_bar: float
) -> None:
    successors, values, rewards, bootstrap, _ = case
    step, ends = _steps(successors)
    ratio = np.array(ratios[: len(values)])
    rho, c = np.clip(ratio, 0, rho_bar), np.clip(ratio, 0, c_bar)
    delta = rho * (rewards + gamma * (step @ values + ends * bootstrap) - values)
    expected = values + np.linalg.solve(np.eye(len(values)) - gamma * c[:, None] * step, delta)
    targets, advantages = vtrace_along_dependencies(
        values, rewards, successors, bootstrap, ratio, gamma, rho_bar, c_bar
    )
    np.testing.assert_allclose(targets, expected, atol=1e-9)
    after = step @ expected + ends * bootstrap
    np.testing.assert_allclose(advantages, rho * (rewards + gamma * after - values), atol=1e-9)


@settings(deadline=None)
@given(episodes(), shares, st.floats(1, 3))
def test_vtrace_with_unit_weights_is_td_of_lambda_one(case: tuple, gamma: float, cap: float) -> None:
    successors, values, rewards, bootstrap, _ = case
    ones = np.ones(len(values))
    targets, advantages = vtrace_along_dependencies(values, rewards, successors, bootstrap, ones, gamma, cap, 1.0)
    returns = _returns_by_walks(successors, rewards, bootstrap, gamma)
    np.testing.assert_allclose(targets, returns, atol=1e-9)
    np.testing.assert_allclose(advantages, returns - values, atol=1e-9)
    np.testing.assert_allclose(
        advantages, gae_along_dependencies(values, rewards, successors, bootstrap, gamma, 1.0), atol=1e-9
    )
