"""Owns: which episodes and actions are trained on and why others are not; how actions become padded rectangles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_policy import AGENTS, make_action, make_trajectory

from trace_store.records import NO_LOGPROBS, OF_LIMIT, RETOKENISED, Reward, Trajectory
from trainers.batch import ActionItem, Round, Use, trajectories_to_round
from trainers.scoring.microbatch import items_to_microbatches, lengths_to_groups


def _read(*trajectories: Trajectory, use: Use = "on_policy") -> Round:
    return trajectories_to_round(trajectories, AGENTS, "reward", dict.fromkeys(AGENTS, 32), use)


def test_a_trajectory_keeps_exactly_the_recorded_tokens() -> None:
    data = _read(make_trajectory([make_action("reasoner", [1, 2], [3, 4], logprobs=(-0.1, -0.2))], 0.5, task_id="x"))
    assert data.drops == {}
    assert data.items == (ActionItem("reasoner", (1, 2), (3, 4), (-0.1, -0.2), 1.0),)
    (episode,) = data.episodes
    assert (episode.task_id, episode.reward, episode.truncated, episode.successors) == ("x", 0.5, False, ((),))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"outcome": "failed", "reward": 1.0}, "episode failed"),
        ({"reward": None}, "episode without a finite reward 'reward'"),
        ({"reward": float("nan")}, "episode without a finite reward 'reward'"),
        ({"reward": 1.0, "edges": [(1, 0)]}, "episode whose edges do not fit its actions"),
        ({"reward": 1.0, "edges": [(0, 5)]}, "episode whose edges do not fit its actions"),
    ],
)
def test_an_episode_that_cannot_be_trained_on_is_counted_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    actions = [make_action("reasoner", [1], [2]), make_action("actor", [1], [2])]
    data = _read(make_trajectory(actions, **fields))
    assert (data.items, data.drops) == ((), {reason: 1})


@pytest.mark.parametrize(
    ("rewards", "truncated"),
    [
        ([("reward", 0.5, "app:reward")], True),
        ([("reward", -1.0, OF_LIMIT)], False),
        ([("reward", -1.0, f"score:{OF_LIMIT}")], False),
        ([("reward", -1.0, OF_LIMIT), ("reward", 0.5, "a person")], True),  # the latest counts
        ([("reward", 0.5, "a person"), ("reward", -1.0, f"score:{OF_LIMIT}")], False),
        ([("reward", 0.5, "app:reward"), ("other", -1.0, OF_LIMIT)], True),
    ],
)
def test_a_run_that_was_cut_short_has_ended_where_its_reward_is_what_that_is_worth(
    rewards: list[tuple[str, float, str]], truncated: bool
) -> None:
    cut = make_trajectory([make_action("actor", [1], [2])], None, outcome="truncated")
    rows = [Reward("e", name, value, source, created_ns=at) for at, (name, value, source) in enumerate(rewards)]
    data = _read(replace(cut, rewards=tuple(rows)))
    assert [episode.truncated for episode in data.episodes] == [truncated]
    (ended,) = _read(replace(cut, episode=replace(cut.episode, outcome="terminated"), rewards=tuple(rows))).episodes
    assert not ended.truncated


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": "judge"}, "node is not trained"),
        ({"trainable": False, "untrainable_reason": "no log-probs"}, "no log-probs"),
        ({"prompt_ids": None}, "no token ids"),
        ({"sampled_ids": (), "logprobs": ()}, "no token ids"),
        ({"logprobs": (-1.0, -1.0)}, "log-probs that are not finite, one per token"),
        ({"logprobs": (float("-inf"),)}, "log-probs that are not finite, one per token"),
        ({"prompt_ids": (32,)}, "token ids outside the base model's vocabulary"),
    ],
)
@pytest.mark.parametrize("use", ["on_policy", "replay", "imitation"])
def test_an_action_that_cannot_be_trained_on_is_counted_and_its_episode_stays(
    changes: dict[str, Any], reason: str, use: Use
) -> None:
    bad = replace(make_action("actor", [1], [2]), **changes)
    chain = [make_action("reasoner", [1], [2]), bad, make_action("reasoner", [3], [4])]
    data = _read(make_trajectory(chain, 1.0), use=use)
    assert data.drops == {f"action: {reason}": 1}
    assert [item.prompt_ids for item in data.items] == [(1,), (3,)]
    assert data.episodes[0].successors == ((1,), ())


def test_an_action_without_log_probs_may_be_imitated_and_reaches_no_ratio() -> None:
    flagged = make_action("actor", [1], [2], logprobs=None, trainable=False, untrainable_reason=NO_LOGPROBS)
    trajectory = make_trajectory([flagged], 1.0)
    (item,) = _read(trajectory, use="imitation").items
    assert (item.sampled_ids, item.behaviour) == ((2,), None)
    uses: tuple[Use, ...] = ("on_policy", "replay")
    for use in uses:
        assert _read(trajectory, use=use).drops[f"action: {NO_LOGPROBS}"] == 1
    cut = make_action("actor", [1], [2], logprobs=None, trainable=False, untrainable_reason="the call failed")
    assert _read(make_trajectory([cut], 1.0), use="imitation").items == ()
    (success,) = _read(trajectory, use="success").episodes
    assert (success.replayed, success.actions[0].behaviour) == (True, None)
    text = make_action("actor", [1], [2], logprobs=None, trainable=False, untrainable_reason=RETOKENISED)
    greedy = make_action("actor", [1], [2], temperature=0.0)
    sampled = make_action("actor", [1], [2])
    read = _read(make_trajectory([text, greedy, sampled], 1.0), use="success")
    assert [item.behaviour for item in read.items] == [None, None, (-1.0,)]


def test_turns_count_an_agents_own_actions_and_versions_are_kept() -> None:
    nodes = ("reasoner", "actor", "reasoner", "reasoner")
    actions = [make_action(node, [1], [2], adapter_version=k) for k, node in enumerate(nodes)]
    items = _read(make_trajectory(actions, 1.0)).items
    assert [item.turn for item in items] == [0, 0, 1, 2]
    assert [item.version for item in items] == [0, 1, 2, 3]


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": None}, {"top_p": 0.9}, {"top_k": 50}])
def test_a_policy_whose_logprobs_are_not_comparable_may_be_imitated_but_is_not_on_policy(
    changes: dict[str, Any],
) -> None:
    trajectory = make_trajectory([make_action("actor", [1], [2], **changes)], 1.0)
    on_policy, offline = _read(trajectory), _read(trajectory, use="imitation")
    assert on_policy.items == ()
    assert sum(on_policy.drops.values()) == 2  # the action, and its episode that has no other
    assert (offline.drops, offline.items[0].temperature) == ({}, 1.0)


def test_dropped_episodes_are_counted_on_top_of_earlier_drops() -> None:
    action = make_action("actor", [1], [2])
    data = _read(make_trajectory([action], 0.0), make_trajectory([action], 1.0), make_trajectory([action], None))
    good = data.only(lambda episode: episode.reward > 0.5, "poor")
    assert (len(good.items), good.episode_A) == (1, (0,))
    assert good.drops == {"episode without a finite reward 'reward'": 1, "poor": 1}


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_groups_hold_every_row_once_within_the_budget_and_sorted(lengths: list[int], budget: int) -> None:
    groups = lengths_to_groups(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    flat = [lengths[i] for group in groups for i in group]
    assert flat == sorted(flat, reverse=True)


def test_a_microbatch_points_each_sampled_token_at_the_column_that_predicts_it() -> None:
    items = [
        ActionItem("actor", (5, 6), (7,), (-1.0,), 0.5),
        ActionItem("actor", (1,), (2, 3, 4), (-1.0, -1.0, -1.0), 2.0),
    ]
    (batch,) = items_to_microbatches(items, 100)
    assert batch.items == (1, 0)  # longest first
    assert batch.input_ids_BL.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert batch.row_T.tolist() == [0, 0, 0, 1]
    assert batch.column_T.tolist() == [0, 1, 2, 1]
    assert batch.sampled_T.tolist() == [2, 3, 4, 7]
    assert batch.temperature_T.tolist() == [2.0, 2.0, 2.0, 0.5]
    assert batch.lengths == (3, 1)


def test_chosen_items_keep_their_positions() -> None:
    items = [ActionItem("actor", (k,), (k,), (-1.0,), 1.0) for k in range(4)]
    batches = items_to_microbatches(items, 1, [3, 1])
    assert [(b.items, b.sampled_T.tolist()) for b in batches] == [((3,), [3]), ((1,), [1])]
