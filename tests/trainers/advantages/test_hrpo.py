"""Owns: HRPO: runs compared with the task's samples, rewards of single calls added as they are; worked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_policy import AGENTS, make_action, make_trajectory

from trace_store.records import Reward
from trainers.advantages.arrays import Floats
from trainers.advantages.estimate import BASELINE
from trainers.advantages.estimator import Estimated, EstimatorInput
from trainers.advantages.hrpo import Hrpo
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import Round, trajectories_to_round
from trainers.rewards import ShapingTerm

HOST, ROLE = AGENTS
IDLE = ShapingTerm(reward="idle", level="step", weight=-0.5)
OWN = ShapingTerm(reward="own", level="agent", weight=1.0)


def run(
    number: int, nodes: Sequence[str], team: float, idle: Mapping[int, float], own: Mapping[str, float] | None = None
) -> Any:
    """A chain of calls that earned `team`; `idle` by the place of a call, `own` by agent."""
    actions = [make_action(node, [3 + place], [1 + place]) for place, node in enumerate(nodes)]
    bare = make_trajectory(actions, team, task_id="t")
    steps = [Reward("e", "idle", value, "test", 1, "step", action_id=str(place)) for place, value in idle.items()]
    private = [Reward("e", "own", value, "test", 1, "agent", node=node) for node, value in (own or {}).items()]
    episode = replace(bare.episode, episode_id=f"e{number}")
    return replace(bare, episode=episode, rewards=(*bare.rewards, *steps, *private))


def to_round(*runs: Any, shaping: Sequence[ShapingTerm] = (IDLE,)) -> Round:
    return trajectories_to_round(runs, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "on_policy", shaping)


def estimated(data: Round, units: int = 1, *, std: bool = False, penalties_teach: bool = True) -> Estimated:
    count = len(data.items)
    shown = EstimatorInput(data, (units,) * count, np.ones(count))
    return Hrpo(EstimatorSettings(group_std=std, penalties_teach=penalties_teach)).estimate(shown)


def advantages(data: Round) -> Floats:
    return estimated(data).estimate.advantage_U


def three_runs() -> Round:
    """A host that called the role never, once and twice; runs that earned 0, 3 and 6."""
    return to_round(
        run(0, [HOST], 0.0, {0: 0.0}),
        run(1, [HOST, ROLE, HOST], 3.0, {0: 1.0, 2: 0.0}),
        run(2, [HOST, ROLE, HOST, ROLE, HOST], 6.0, {0: 0.0, 2: 2.0, 4: 0.0}),
    )


# The host in runs 0, 3, 6, each counted once: mean 3, deviation 3. The role in runs 3 and 6: mean 4.5, deviation
# 3 / sqrt(2). What was idle costs 0.5 each, at the call that added it.
RUNS = [-3.0, 0, -1.5, 0, 3, 1.5, 3, 1.5, 3]
IDLE_PART = [0, -0.5, 0, 0, 0, 0, -1, 0, 0]


def test_three_runs_by_hand() -> None:
    found = estimated(three_runs()).estimate
    np.testing.assert_allclose(found.advantage_U, np.add(RUNS, IDLE_PART), atol=1e-12)
    np.testing.assert_allclose(found.by_source["reward"], RUNS, atol=1e-12)
    np.testing.assert_allclose(found.by_source["idle"], IDLE_PART, atol=1e-12)
    np.testing.assert_allclose(found.by_source[BASELINE], 0, atol=1e-12)


def test_runs_are_divided_by_their_deviation_and_rewards_of_calls_are_not() -> None:
    is_role = np.array([item.agent == ROLE for item in three_runs().items])
    deviation = np.where(is_role, 3 / 2**0.5, 3.0)
    found = estimated(three_runs(), std=True).estimate.advantage_U
    np.testing.assert_allclose(found, np.array(RUNS) / deviation + IDLE_PART, atol=1e-5)


def test_a_reward_of_a_call_reaches_no_other_call() -> None:
    """Whatever led to it, followed from it, or has the same task."""
    before = advantages(three_runs())
    changed = to_round(
        run(0, [HOST], 0.0, {0: 0.0}),
        run(1, [HOST, ROLE, HOST], 3.0, {0: 1.0, 2: 0.0}),
        run(2, [HOST, ROLE, HOST, ROLE, HOST], 6.0, {0: 0.0, 2: 2.0, 4: 7.0}),
    )
    np.testing.assert_allclose(advantages(changed) - before, [0] * 8 + [-3.5], atol=1e-12)


def test_a_penalty_that_every_sample_deserves_is_one() -> None:
    same = estimated(to_round(*(run(number, [HOST], 1.0, {0: 1.0}) for number in range(3))))
    np.testing.assert_array_equal(same.estimate.advantage_U, [-0.5] * 3)
    assert same.flat_groups == 0.0


def test_a_group_is_silent_where_its_runs_earned_the_same_and_no_call_anything() -> None:
    data = to_round(run(0, [HOST, ROLE], 1.0, {0: 0.0}), run(1, [HOST, ROLE], 1.0, {0: 1.0}))
    assert estimated(data).flat_groups == 0.5  # the host's teaches by its idle line
    np.testing.assert_array_equal(advantages(data), [0, 0, -0.5, 0])


def test_a_group_with_nothing_but_penalties_is_silent_where_these_have_no_part_in_the_loss() -> None:
    data = to_round(run(0, [HOST, ROLE], 1.0, {0: 0.0}), run(1, [HOST, ROLE], 1.0, {0: 1.0, 1: -1.0}))
    assert estimated(data, penalties_teach=False).flat_groups == 0.5  # the role's teaches by its half a unit
    np.testing.assert_array_equal(advantages(data), [0, 0, -0.5, 0.5])
    for by_call, teaches in (([-0.5], False), ([-0.5, 0.5], True), ([0.0], False)):
        assert Hrpo.teaches_alone(by_call, [1.0], "none", penalties_teach=False) == teaches


def test_an_agents_own_reward_of_a_run_is_compared_like_the_teams() -> None:
    data = to_round(
        run(0, [HOST, ROLE], 0.0, {0: 0.0}, {ROLE: 1.0}),
        run(1, [HOST, ROLE], 2.0, {0: 0.0}, {ROLE: 0.0}),
        shaping=(IDLE, OWN),
    )
    # the host 0 and 2 against 1; the role 1 and 2 against 1.5
    np.testing.assert_allclose(advantages(data), [-1, -0.5, 1, 0.5], atol=1e-12)


def test_without_rewards_of_calls_it_is_dr_mas_with_every_run_counted_once() -> None:
    bare = to_round(run(0, [HOST], 0.0, {}), run(1, [HOST, ROLE, HOST], 3.0, {}), shaping=())
    np.testing.assert_allclose(advantages(bare), [-1.5, 1.5, 0, 1.5], atol=1e-12)


def test_tokens_of_a_call_share_its_advantage() -> None:
    data = three_runs()
    np.testing.assert_array_equal(estimated(data, units=3).estimate.advantage_U, np.repeat(advantages(data), 3))


team_rewards = st.lists(st.floats(-5, 5).map(lambda value: round(value, 2)), min_size=2, max_size=5)


@settings(deadline=None, max_examples=30)
@given(team_rewards, st.randoms(use_true_random=False))
def test_neither_an_amount_that_everybody_gets_nor_the_order_of_the_runs_changes_it(
    rewards: list[float], chance: Any
) -> None:
    def of(order: Sequence[int], more: float = 0.0) -> dict[int, list[float]]:
        nodes = [[HOST, ROLE][: 1 + number % 2] for number in range(len(rewards))]
        runs = [run(number, nodes[number], rewards[number] + more, {0: number % 3}) for number in order]
        data = to_round(*runs)
        found = advantages(data)
        return {
            number: [float(found[row]) for row, place in enumerate(data.episode_A) if place == at]
            for at, number in enumerate(order)
        }

    order = list(range(len(rewards)))
    plain = of(order)
    shuffled = chance.sample(order, len(order))
    for other in (of(order, more=8.0), of(shuffled)):
        assert {number: pytest.approx(values, abs=1e-9) for number, values in other.items()} == plain
