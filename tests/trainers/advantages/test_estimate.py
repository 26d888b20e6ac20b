"""Owns: advantages with the part of each that came from each reward, and their normalisation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages.arrays import Floats
from trainers.advantages.estimate import BASELINE, Estimate, normalize_estimate
from trainers.advantages.group_baselines import standardise
from trainers.advantages.recurrences import gae_along_dependencies

ADVANTAGES = np.array([1.0, 3.0, 10.0, 30.0, 7.0])
AGENTS = ["r", "r", "a", "a", "lonely"]


def of(advantages: Floats, **by_source: Floats) -> Estimate:
    return Estimate(advantages, by_source or {"reward": advantages})


def test_normalisation_is_over_the_batch_or_over_each_agent() -> None:
    np.testing.assert_array_equal(normalize_estimate(of(ADVANTAGES), AGENTS, "none").advantage_U, ADVANTAGES)
    # r: mean 2, deviation 1; a: mean 20, deviation 10; one unit alone says nothing
    by_agent = normalize_estimate(of(ADVANTAGES), AGENTS, "agent").advantage_U
    np.testing.assert_allclose(by_agent, [-1, 1, -1, 1, 0], atol=2e-6)
    # all: mean 51 / 5 = 10.2; squares 1 + 9 + 100 + 900 + 49 = 1059, variance 1059 / 5 - 10.2^2 = 107.76
    batch = normalize_estimate(of(ADVANTAGES), AGENTS, "batch").advantage_U
    np.testing.assert_allclose(batch, np.array([-9.2, -7.2, -0.2, 19.8, -3.2]) / 107.76**0.5, rtol=1e-6)


def test_every_source_is_centred_by_its_own_mean_and_scaled_like_the_advantage() -> None:
    # advantages 0 and 4: mean 2, deviation 2. correct 1 and 5: centred -2 and 2. baseline -1 and -1: centred 0.
    estimate = of(np.array([0.0, 4.0]), correct=np.array([1.0, 5.0]), **{BASELINE: np.array([-1.0, -1.0])})
    result = normalize_estimate(estimate, ["a", "a"], "agent")
    np.testing.assert_allclose(result.advantage_U, [-1, 1], atol=1e-6)
    np.testing.assert_allclose(result.by_source["correct"], [-1, 1], atol=1e-6)
    np.testing.assert_array_equal(result.by_source[BASELINE], [0, 0])


@pytest.mark.parametrize("mode", ["batch", "agent"])
def test_equal_advantages_become_zero_and_so_do_their_parts(mode: str) -> None:
    # 0.1 + 0.2 leaves a rest of rounding that no division may blow up; the parts differ, and cancel
    advantages = np.array([0.1 + 0.2, 0.3, 0.3])
    part = np.array([5.0, -5.0, 1.0])
    result = normalize_estimate(of(advantages, x=part, y=advantages - part), ["r"] * 3, mode)  # type: ignore[arg-type]
    for values in (result.advantage_U, *result.by_source.values()):
        np.testing.assert_array_equal(values, [0, 0, 0])


def test_a_round_without_units_stays_empty() -> None:
    assert len(normalize_estimate(of(np.zeros(0)), [], "agent").advantage_U) == 0


parts = st.lists(st.tuples(*[st.floats(-5, 5)] * 3, st.integers(0, 2)), min_size=1, max_size=10)


@settings(deadline=None)  # the machine is shared
@given(parts, st.sampled_from(["none", "batch", "agent"]))
def test_the_parts_sum_to_the_advantage_and_each_group_has_mean_zero(
    case: list[tuple[float, float, float, int]], mode: str
) -> None:
    sources = dict(zip("xyz", np.array([row[:3] for row in case]).T, strict=True))
    agents = [row[3] for row in case]
    before = Estimate(sources["x"] + sources["y"] + sources["z"], sources)
    after = normalize_estimate(before, agents, mode)  # type: ignore[arg-type]
    # a group of little spread is divided by as little as the 1e-6 that is added
    np.testing.assert_allclose(sum(after.by_source.values()), after.advantage_U, atol=1e-6)
    if mode == "none":
        return
    for agent in {agents[0]} if mode == "batch" else set(agents):
        rows = [i for i, a in enumerate(agents) if mode == "batch" or a == agent]
        for values in (after.advantage_U, *after.by_source.values()):
            assert values[rows].mean() == pytest.approx(0, abs=1e-6)
        spread = np.std(before.advantage_U[rows])
        assert np.std(after.advantage_U[rows]) == pytest.approx(spread / (spread + 1e-6), abs=1e-6)


def test_gae_is_the_sum_of_what_each_reward_gives_alone_and_of_the_values() -> None:
    # chain of two, gamma 0.5, lambda 0.5, correct 2 and brief -1 at the end, V = (1, 3).
    # correct alone: A_1 = 2, A_0 = 0.25 * 2; brief: -1, -0.25; values: -3, (0.5 * 3 - 1) - 0.25 * 3 = -0.25
    def alone(values: list[float], reward: float) -> Floats:
        return gae_along_dependencies(values, [0, reward], ((1,), ()), [0, 0], gamma=0.5, lam=0.5)

    by_source = {"correct": alone([0, 0], 2), "brief": alone([0, 0], -1), BASELINE: alone([1, 3], 0)}
    np.testing.assert_allclose(by_source["correct"], [0.5, 2])
    np.testing.assert_allclose(by_source["brief"], [-0.25, -1])
    np.testing.assert_allclose(by_source[BASELINE], [-0.25, -3])
    np.testing.assert_allclose(alone([1, 3], 1), sum(by_source.values()))


def test_a_group_estimate_is_the_sum_of_what_each_reward_gives_and_of_the_baseline() -> None:
    # correct (1, 0), brief (0, -1) of two samples: returns 1 and -1, mean 0, sample deviation sqrt(2)
    correct, brief = np.array([1.0, 0.0]), np.array([0.0, -1.0])
    group = standardise(correct + brief, ["t", "t"], [0, 1], "trajectory", std=True)
    by_source = {
        "correct": group.gain_A * correct,
        "brief": group.gain_A * brief,
        BASELINE: -group.gain_A * group.baseline_A,
    }
    np.testing.assert_allclose(by_source["correct"], [0.5**0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(by_source["brief"], [0, -(0.5**0.5)], rtol=1e-6)
    np.testing.assert_allclose(group.advantages(correct + brief), sum(by_source.values()))
