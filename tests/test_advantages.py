"""Owns: credit along the dependencies D of an episode, group baselines, normalisation; against hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages import (
    edges_to_successors,
    gae_along_dependencies,
    group_advantages,
    normalize,
    transitive_reduction,
)


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
    successors = ((1, 2), (3,), (3,), ())
    result = gae_along_dependencies([0.5, 0.4, 0.6, 0.8], [0, 0, 0, 1], successors, [0] * 4, gamma=1.0, lam=0.5)
    np.testing.assert_allclose(result, [0.2, 0.5, 0.3, 0.2], atol=1e-12)


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


graphs = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])),
        st.lists(st.floats(-2, 2), min_size=n, max_size=n),
        st.floats(-3, 3),
    )
)


@settings(deadline=None)  # the machine is shared
@given(graphs)
def test_without_discount_and_with_lambda_one_the_advantage_is_reward_minus_value(case: tuple) -> None:
    count, edges, values, reward = case
    successors = edges_to_successors(count, edges)
    rewards = [0.0 if after else reward for after in successors]
    result = gae_along_dependencies(values, rewards, successors, [0.0] * count, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(result, reward - np.array(values), atol=1e-9)


def _reach(count: int, edges: list[tuple[int, int]]) -> np.ndarray:
    """Reachability by matrix powers: independent of the bit sets."""
    step = np.zeros((count, count), dtype=bool)
    for src, dst in edges:
        step[src, dst] = True
    reach = step.copy()
    for _ in range(count):
        reach |= reach @ step
    return reach


@settings(deadline=None)  # the machine is shared
@given(graphs)
def test_the_reduction_keeps_reachability_and_no_edge_can_go(case: tuple) -> None:
    count, edges, _, _ = case
    reduced = [(i, j) for i, after in enumerate(transitive_reduction(count, edges)) for j in after]
    assert (_reach(count, reduced) == _reach(count, edges)).all()
    for edge in reduced:
        rest = [e for e in reduced if e != edge]
        assert (_reach(count, rest) != _reach(count, edges)).any()


def test_dependencies_pass_through_an_action_that_is_left_out() -> None:
    # 0 -> 1 -> 2 -> 3 without 1: 0 -> 2 -> 3, renumbered
    assert edges_to_successors(4, [(0, 1), (1, 2), (2, 3)], [True, False, True, True]) == ((1,), (2,), ())


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 1)])
def test_an_edge_that_does_not_point_forward_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not point forward"):
        edges_to_successors(2, [edge])


def test_grpo_table() -> None:
    # group a: mean 0.5, sample deviation sqrt(0.5) = 0.70711; b alone; c of equal rewards
    rewards, groups = [1.0, 0.0, 5.0, 2.0, 2.0], ["a", "a", "b", "c", "c"]
    expected = [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 0.0, 0.0, 0.0]
    np.testing.assert_allclose(group_advantages(rewards, groups, "grpo"), expected, rtol=1e-12)


def test_rloo_table() -> None:
    # 3 - mean(0, 3) = 1.5; 0 - mean(3, 3) = -3; 3 - mean(3, 0) = 1.5; singleton 0; equal 0
    rewards, groups = [3.0, 7.0, 0.0, 3.0, 1.0, 1.0], ["a", "b", "a", "a", "c", "c"]
    np.testing.assert_allclose(group_advantages(rewards, groups, "rloo"), [1.5, 0, -3, 1.5, 0, 0], atol=1e-12)


def test_normalisation_is_over_the_batch_or_over_each_agent() -> None:
    advantages = np.array([1.0, 3.0, 10.0, 30.0, 7.0])
    agents = ["r", "r", "a", "a", "lonely"]
    np.testing.assert_array_equal(normalize(advantages, agents, "none"), advantages)
    np.testing.assert_allclose(normalize(advantages, agents, "agent"), [-1, 1, -1, 1, 0], atol=2e-6)
    batch = normalize(advantages, agents, "batch")
    assert abs(batch.mean()) < 1e-9
    assert batch.std() == pytest.approx(1.0, abs=1e-6)
    assert (np.diff(batch[np.argsort(advantages)]) > 0).all()


def test_equal_advantages_normalise_to_zero() -> None:
    np.testing.assert_allclose(normalize(np.full(3, 0.1), ["r"] * 3, "agent"), 0.0, atol=1e-9)
