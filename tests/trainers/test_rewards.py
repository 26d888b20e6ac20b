"""Owns: recorded rewards to an episode's team, step and private rewards, and which shaping terms were absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_store.records import Action, Edge, Episode, Reward, Trajectory
from trainers.advantages.recurrences import gae_along_dependencies
from trainers.advantages.returns import step_returns
from trainers.dependencies import edges_to_successors
from trainers.rewards import EpisodeRewards, ShapingTerm, StepReward, trajectory_to_rewards

Edges = list[tuple[int, int]]


def trajectory(count: int, edges: Edges, *rewards: Reward) -> Trajectory:
    """Actions "0", "1", ... of nodes n0, n1, ..."""
    episode = Episode("e", "run", "t", "train", 0, None, None, None, {}, "terminated", None, 0, 1, 1)
    unknown = dict.fromkeys(
        ("step", "model", "adapter", "adapter_version", "top_p", "top_k", "max_tokens", "seed", "finish_reason")
    )
    actions = tuple(
        Action(
            action_id=str(i),
            episode_id="e",
            node=f"n{i}",
            index=i,
            prompt_ids=(1,),
            sampled_ids=(2,),
            logprobs=(-1.0,),
            temperature=1.0,
            completion=None,
            started_ns=i,
            ended_ns=i + 1,
            trainable=True,
            **unknown,  # type: ignore[arg-type]
        )
        for i in range(count)
    )
    return Trajectory(episode, actions, tuple(Edge("e", str(i), str(j), "data") for i, j in edges), rewards)


def team(name: str, value: float, at: int = 1) -> Reward:
    return Reward("e", name, value, "judge", at)


def step(name: str, value: float, action: str, at: int = 1) -> Reward:
    return Reward("e", name, value, "judge", at, "step", action_id=action)


def private(name: str, value: float, node: str, at: int = 1) -> Reward:
    return Reward("e", name, value, "judge", at, "agent", node=node)


def term(name: str, level: str, weight: float = 1.0) -> ShapingTerm:
    return ShapingTerm(reward=name, level=level, weight=weight)  # type: ignore[arg-type]


CHAIN: Edges = [(0, 1), (1, 2)]
ALL = [True] * 3


def rewards_of(
    record: Trajectory, *shaping: ShapingTerm, edges: Edges = CHAIN, kept: list[bool] = ALL
) -> tuple[EpisodeRewards, list[str]]:
    found, absent = trajectory_to_rewards(record, ("correct", 1.0), shaping, edges, kept)
    return found, [each.reward for each in absent]


def test_shaping_of_the_episode_is_added_to_the_team_reward_with_its_weight() -> None:
    record = trajectory(3, CHAIN, team("correct", 1.0), team("short", 4.0), team("polite", 9.0))
    found, absent = rewards_of(record, term("short", "episode", -0.25))
    assert found == EpisodeRewards({"correct": 1.0, "short": -1.0})  # "polite" was not asked for
    assert found.total == 0.0
    assert absent == []


def test_a_step_reward_knows_how_far_it_is_from_what_led_to_it() -> None:
    record = trajectory(3, CHAIN, step("format", 3.0, "1"), step("format", 5.0, "2"))
    found, _ = rewards_of(record, term("format", "step", 2.0))
    assert found.step == {"format": (StepReward(6.0, {1: 0, 0: 1}), StepReward(10.0, {2: 0, 1: 1, 0: 2}))}
    assert found.total == 1.0  # no part of the team reward
    # without action 1 the one of action 2 is one link from action 0, and that of action 1 itself 0 links
    found, _ = rewards_of(record, term("format", "step"), kept=[True, False, True])
    assert found.step == {"format": (StepReward(3.0, {0: 0}), StepReward(5.0, {1: 0, 0: 1}))}


def test_a_private_reward_belongs_to_its_node() -> None:
    record = trajectory(3, CHAIN, private("brief", 2.0, "n0"), private("brief", -1.0, "n2"))
    found, _ = rewards_of(record, term("brief", "agent", 0.5))
    assert found.private == {"brief": {"n0": 1.0, "n2": -0.5}}


def test_the_level_is_part_of_the_name() -> None:
    record = trajectory(3, CHAIN, team("style", 1.0), step("style", 2.0, "0"), private("style", 3.0, "n0"))
    assert rewards_of(record, term("style", "episode"))[0].team == {"correct": 1.0, "style": 1.0}
    assert rewards_of(record, term("style", "step"))[0].step == {"style": (StepReward(2.0, {0: 0}),)}
    assert rewards_of(record, term("style", "agent"))[0].private == {"style": {"n0": 3.0}}


@pytest.mark.parametrize(("order", "level"), [((5, 7), "episode"), ((7, 5), "step"), ((7, 5), "agent")])
def test_of_one_name_and_target_the_latest_counts(order: tuple[int, int], level: str) -> None:
    made = {
        "episode": team,
        "step": lambda n, v, at: step(n, v, "1", at),
        "agent": lambda n, v, at: private(n, v, "n1", at),
    }
    record = trajectory(3, CHAIN, *(made[level]("style", float(at), at) for at in order))
    found, _ = rewards_of(record, term("style", level))
    values = {
        "episode": [found.team.get("style")],
        "step": [each.value for each in found.step.get("style", ())],
        "agent": list(found.private.get("style", {}).values()),
    }
    assert values[level] == [7.0]


@pytest.mark.parametrize("level", ["episode", "step", "agent"])
def test_an_absent_reward_adds_nothing_and_is_named(level: str) -> None:
    # recorded at another level, under another name, or not as a number
    others = [team("style", 1.0), step("style", 1.0, "0"), private("style", 1.0, "n0")]
    broken = [team("style", float("nan")), step("style", float("inf"), "0"), private("style", float("nan"), "n0")]
    index = ["episode", "step", "agent"].index(level)
    elsewhere = [each for i, each in enumerate(others) if i != index]
    record = trajectory(3, CHAIN, team("other", 1.0), broken[index], *elsewhere)
    found, absent = rewards_of(record, term("style", level))
    assert found == EpisodeRewards({"correct": 1.0})
    assert absent == ["style"]


def test_a_step_reward_of_an_action_that_is_not_there_is_not_given_to_another() -> None:
    record = trajectory(3, CHAIN, step("format", 3.0, "gone"), step("format", 5.0, "0"))
    assert rewards_of(record, term("format", "step"))[0].step == {"format": (StepReward(5.0, {0: 0}),)}


@settings(deadline=None)  # the machine is shared
@given(st.integers(1, 6), st.floats(0, 1), st.floats(-3, 3))
def test_on_a_chain_a_step_reward_of_the_last_action_is_worth_what_a_team_reward_is(
    count: int, gamma: float, value: float
) -> None:
    edges = [(i, i + 1) for i in range(count - 1)]
    record = trajectory(count, edges, step("format", value, str(count - 1)))
    found, _ = rewards_of(record, term("format", "step"), edges=edges, kept=[True] * count)
    zeros = [0.0] * count
    as_team = gae_along_dependencies(zeros, [*zeros[1:], value], edges_to_successors(count, edges), zeros, gamma, 1.0)
    np.testing.assert_allclose(step_returns(found.step["format"], count, gamma), as_team, atol=1e-12)
