"""Owns: which older episodes are drawn, to be imitated again or to be gone on from."""

from __future__ import annotations

import random

import pytest

from marft_bridge.training.success_draw import AGE_DECAY, draw_order, rewards_to_draw_weights
from marft_bridge.training.task_draw import TaskReward


def test_a_weight_is_the_excess_over_the_tasks_usual_reward_worked_by_hand() -> None:
    """All of this round's age 1. The mean of all is 3/6; two prior episodes of it join each task's own.

    easy: 1, 1, 1 -> (2 * 0.5 + 3) / 5 = 0.8. hard: 0, 0, 0 -> 1 / 5 = 0.2.
    """
    rewards = [TaskReward("easy", 0, 1.0)] * 3 + [TaskReward("hard", 0, 0.0)] * 3
    # one round later every episode counts AGE_DECAY: three of it are 2.4 episodes
    easy = (2 * 0.5 + 2.4) / 4.4
    assert rewards_to_draw_weights(rewards, 1) == pytest.approx([AGE_DECAY * (1 - easy)] * 3 + [0.0] * 3)


def test_what_others_earned_is_weighed_by_what_a_task_earns_here() -> None:
    """Of age 1. Own: t failed twice, v came out right twice; the mean is 1/2, so t usually earns (2 * 0.5) / 3.6 and a
    task that was never played here 1/2. Where nothing is known of any task here, others are all that is."""
    own = [TaskReward("t", 0, 0.0)] * 2 + [TaskReward("v", 0, 1.0)] * 2
    others = [TaskReward("t", 0, 1.0), TaskReward("new", 0, 1.0), TaskReward("new", 0, 0.0)]
    weights = rewards_to_draw_weights(own, 1, others)
    assert weights[:4] == rewards_to_draw_weights(own, 1)
    assert weights[4:] == pytest.approx([AGE_DECAY * (1 - 1 / 3.6), AGE_DECAY / 2, 0.0])
    assert rewards_to_draw_weights([], 1, others) == rewards_to_draw_weights(others, 1)


def test_the_rare_success_of_a_hard_task_is_drawn_before_that_of_an_easy_one_and_the_newer_before_the_older() -> None:
    rewards = [TaskReward("hard", 1, value) for value in (0, 0, 0, 1)]
    rewards += [TaskReward("easy", 1, value) for value in (1, 1, 1, 1)]
    weights = dict(zip([(r.task_id, r.value) for r in rewards], rewards_to_draw_weights(rewards, 2), strict=True))
    assert weights["hard", 1] > 2 * weights["easy", 1] > 0
    assert weights["hard", 0] == 0
    old_and_new = [TaskReward("t", 0, 1.0), TaskReward("t", 3, 1.0), TaskReward("u", 3, 0.0)]
    old, new, _ = rewards_to_draw_weights(old_and_new, 4)
    assert old == pytest.approx(new * AGE_DECAY**3)


def test_a_weight_follows_from_rewards_and_rounds_and_not_from_their_order() -> None:
    rewards = [TaskReward(f"t{i % 3}", i % 4, (i * 7 % 5) / 4) for i in range(20)]
    weights = dict(zip(range(20), rewards_to_draw_weights(rewards, 5), strict=True))
    order = random.Random(0).sample(range(20), 20)
    assert rewards_to_draw_weights([rewards[i] for i in order], 5) == [weights[i] for i in order]


def test_nothing_is_drawn_where_all_earned_the_same_or_nothing_is_known() -> None:
    assert rewards_to_draw_weights([], 1) == []
    assert rewards_to_draw_weights([TaskReward("t", 0, 0.5)] * 4, 1) == pytest.approx([0.0] * 4)


def test_the_first_that_is_drawn_is_each_by_its_share_of_the_weights_and_what_weighs_nothing_never() -> None:
    weights = {"a": 1.0, "b": 3.0, "c": 0.0, "d": 4.0}
    orders = [draw_order(weights, f"key {n}") for n in range(4000)]
    assert {frozenset(order) for order in orders} == {frozenset("abd")}
    shares = [sum(order[0] == name for order in orders) / len(orders) for name in "abd"]
    assert shares == pytest.approx([1 / 8, 3 / 8, 4 / 8], abs=0.03)  # four standard deviations
    assert draw_order(dict(reversed(weights.items())), "key 1") == orders[1]
