"""Owns: MARS2's estimator: a call is paid by itself, and compared with all calls of its task's trees.

By hand on a tree of six calls; what changes no advantage; and that a lone tree is no flat group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fork_toys import fork, run
from support.trainer_options import trainer_options

from trace_store.records import Reward, Trajectory
from trainers.advantages.estimate import BASELINE
from trainers.advantages.estimator import Estimated, EstimatorInput
from trainers.advantages.mars2 import Mars2
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import trajectories_to_round
from trainers.rewards import ShapingTerm

CODERS = ("coder_a", "coder_b")
PATH = ShapingTerm(reward="path", level="step", weight=1.0)
# What the six programs of a tree earned, shaped; of 3 in all, so the mean is 1/2.
EARNED = (-0.5, 0.5, 0.0, 1.5, 0.5, 1.0)


def tree(name: str, earned: Sequence[float], team: float = 0.0) -> Trajectory:
    """A run whose calls depend on each other in a chain, as in a search that looks at all scores."""
    calls = [(CODERS[k % 2], 1 + k) for k in range(len(earned))]
    plain = run(name, calls, team)
    paid = [Reward(name, "path", value, "test", 1, "step", action_id=f"{name}.{k}") for k, value in enumerate(earned)]
    return replace(plain, rewards=(*plain.rewards, *paid))


def estimate(*trees: Trajectory, **settings: Any) -> Estimated:
    vocabulary = dict.fromkeys(CODERS, 32)
    data = trajectories_to_round(trees, CODERS, "reward", vocabulary, "on_policy", [PATH])
    count = len(data.items)
    return Mars2(EstimatorSettings(**settings)).estimate(EstimatorInput(data, (1,) * count, np.ones(count)))


def advantages(*trees: Trajectory, **settings: Any) -> np.ndarray:
    return estimate(*trees, **settings).estimate.advantage_U


def test_a_tree_of_six_calls_by_hand() -> None:
    # Less the mean of 1/2: -1, 0, -1/2, 1, 0, 1/2. Squares 1 + 1/4 + 1 + 1/4 = 5/2, over five: deviation sqrt(1/2).
    expected = np.array([-1, 0, -0.5, 1, 0, 0.5])
    np.testing.assert_allclose(advantages(tree("e", EARNED)), expected * 2**0.5, rtol=1e-5)
    found = estimate(tree("e", EARNED), group_std=False)
    np.testing.assert_allclose(found.estimate.advantage_U, expected)
    np.testing.assert_allclose(found.estimate.by_source["path"], expected)
    np.testing.assert_allclose(found.estimate.by_source[BASELINE], 0, atol=1e-12)


def test_what_a_branch_ends_with_pays_no_other_call() -> None:
    """Only the mean that all are compared with moves."""
    before = advantages(tree("e", EARNED), group_std=False)
    after = advantages(tree("e", (*EARNED[:5], EARNED[5] + 6)), group_std=False)
    np.testing.assert_allclose(after - before, [-1, -1, -1, -1, -1, 5])


def test_two_trees_of_a_task_are_one_group_and_the_team_reward_tells_them_apart() -> None:
    # Returns 1 + 1, 1 + 0, 0 + 2, 0 + 0: mean 5/4.
    trees = (tree("e", (1, 0), team=1.0), tree("f", (2, 0)))
    np.testing.assert_allclose(advantages(*trees, group_std=False), [0.75, -0.25, 0.75, -1.25])
    other_task = replace(trees[1], episode=replace(trees[1].episode, task_id="other"))
    np.testing.assert_allclose(advantages(trees[0], other_task, group_std=False), [0.5, -0.5, 1, -1])


def test_within_one_tree_neither_the_team_reward_nor_the_unit_of_reward_changes_anything() -> None:
    plain = advantages(tree("e", EARNED))
    np.testing.assert_allclose(advantages(tree("e", EARNED, team=7.0)), plain, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(advantages(tree("e", [3 * r - 2 for r in EARNED])), plain, rtol=1e-5, atol=1e-9)


def test_a_call_that_forks_share_is_paid_once_and_those_beneath_by_themselves() -> None:
    parent = tree("e", (1.0, 0.0))
    branch = fork("f", run("e", [(CODERS[0], 1), (CODERS[1], 2)], 0.0), 1, [(CODERS[1], 9)], 0.0)
    paid = Reward("f", "path", 2.0, "test", 1, "step", action_id="f.1")
    # Calls e.0, e.1, f.1 with 1, 0 and 2; e.0 has its own in one of its two runs only: 1/2. Mean 5/6.
    found = advantages(parent, replace(branch, rewards=(*branch.rewards, paid)), group_std=False)
    np.testing.assert_allclose(found, [1 / 2 - 5 / 6, -5 / 6, 2 - 5 / 6])


def test_a_lone_tree_is_flat_only_where_all_its_calls_earned_the_same() -> None:
    assert estimate(tree("e", EARNED)).flat_groups == 0
    flat = estimate(tree("e", (0.1, 0.1, 0.1)))
    assert flat.flat_groups == 1
    assert flat.estimate.advantage_U.tolist() == [0, 0, 0]


def test_what_it_needs_is_said_in_one_line() -> None:
    terms = [{"reward": "path", "level": "step", "weight": 1.0}]
    assert trainer_options(estimator="mars2", shaping=terms).advantage.estimator == "mars2"
    with pytest.raises(ValueError, match="add a reward of single calls to shaping, of level 'step'"):
        trainer_options(estimator="mars2", shaping=[{"reward": "own", "level": "episode", "weight": 1.0}])
    with pytest.raises(ValueError, match=r"shaping of level 'agent' does not go with advantage.estimator 'mars2'"):
        trainer_options(estimator="mars2", shaping=[*terms, {"reward": "own", "level": "agent", "weight": 1.0}])
    with pytest.raises(ValueError, match=r"gamma below 1 does not go with advantage.estimator 'mars2'"):
        trainer_options(estimator="mars2", shaping=terms, gamma=0.9)
