"""Owns: what the leader of several learners says to the others arrives as it was sent, and rows are cut evenly."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.shared_update import UPDATES
from support.tiny_policy import make_action, make_trajectory
from support.trainer_options import trainer_options

from trace_store.records import Action, Edge, Episode, Reward
from trainers.config import TrainerOptions
from trainers.learners.calls import part_to_value, trajectories_to_values, value_to_part, values_to_trajectories
from trainers.learners.follower import _CALLS
from trainers.learners.leader import IDLE, LeadingTrainer, options_to_values
from trainers.marft import MarftTrainer
from trainers.scoring.microbatch import padded_groups, rows_to_even_groups


def test_trajectories_arrive_as_they_were_sent() -> None:
    """Floats to the bit, NaN and infinity too; tuples as tuples; what is absent as None."""
    actions = [
        make_action("reasoner", [1, 2], [3, 4, 5], logprobs=(-0.1, -1 / 3, -1e-30), temperature=0.7),
        make_action("actor", [6], [7], trainable=False, untrainable_reason="no log-probs", logprobs=None),
    ]
    sent = make_trajectory(actions, 1 / 3, task_id="ä")
    episode = replace(
        sent.episode, task={"id": "t", "parts": [1, {"x": None}]}, tags={"a": "b"}, adapters={"actor": 3}, seed=2**62
    )
    sent = replace(sent, episode=episode, rewards=(*sent.rewards, Reward("e", "cost", math.inf, "s", 2**60)))
    (arrived,) = values_to_trajectories(json.loads(json.dumps(trajectories_to_values([sent]))))
    assert arrived == sent
    nan = replace(sent, rewards=(replace(sent.rewards[0], value=math.nan),))
    (arrived,) = values_to_trajectories(json.loads(json.dumps(trajectories_to_values([nan]))))
    assert math.isnan(arrived.rewards[0].value)


@pytest.mark.parametrize("part", [None, 0, 3, Path("/models/teacher"), [], [make_trajectory([], 0.5)]])
def test_arguments_of_a_call_arrive_as_they_were_given(part: Any) -> None:
    assert value_to_part(json.loads(json.dumps(part_to_value(part)))) == part


@pytest.mark.parametrize("record", [Action, Edge, Episode, Reward])
def test_every_tuple_of_a_record_is_known_to_the_reader(record: Any) -> None:
    """JSON has lists: a new field that is a tuple must be made one again."""
    tuples = {field.name for field in fields(record) if "tuple" in str(field.type)}
    assert tuples == ({"prompt_ids", "sampled_ids", "logprobs"} if record is Action else set())


@pytest.mark.parametrize(
    "changes",
    [{}, *(changes for _, changes in UPDATES.values()), {"shaping": [{"reward": "x", "level": "step", "weight": 0.5}]}],
    ids=["defaults", *UPDATES, "shaped"],
)
def test_options_arrive_as_they_were_set(changes: dict[str, Any]) -> None:
    options = trainer_options(**{"mismatch_cap": 7.5} | changes) if changes else TrainerOptions()
    assert TrainerOptions.model_validate(json.loads(json.dumps(options_to_values(options)))) == options
    system = options.system.model_copy(update={"device": "cpu", "threads": 1})
    placed = options.model_copy(update={"system": system})
    assert TrainerOptions.model_validate(options_to_values(placed)) == placed


def test_several_processes_get_as_many_passes_of_about_one_size() -> None:
    rows = [tuple(range(length)) for length in (30, 30, 20, 20, 10, 10)]  # 120 tokens
    by_shares = {
        shares: rows_to_even_groups(rows, 1000, shares=shares, rows_to_groups=padded_groups) for shares in (1, 2, 3, 6)
    }
    assert by_shares[1] == [[0, 1, 2, 3, 4, 5]]
    assert by_shares[2] == [[0, 1], [2, 3, 4, 5]]  # 60 tokens and, with padding, 80: 90 for three of thirty is more
    assert by_shares[3] == [[0, 1], [2, 3, 4], [5]]  # 60 at most, which two of thirty take anyhow
    assert sorted(map(len, by_shares[6])) == [1, 1, 1, 1, 1, 1]
    # two passes by the budget become three for three processes, and stay two for two
    assert [len(rows_to_even_groups(rows, 90, shares=n, rows_to_groups=padded_groups)) for n in (1, 2, 3)] == [2, 2, 3]


def test_fewer_rows_than_processes_are_a_pass_each() -> None:
    assert rows_to_even_groups([(1, 2), (3,)], 100, shares=4, rows_to_groups=padded_groups) == [[0], [1]]
    assert rows_to_even_groups([], 100, shares=4, rows_to_groups=padded_groups) == []


def test_whatever_trains_is_led_and_followed() -> None:
    """Else a learner would wait for others that were never told."""
    trains = {name for name, method in vars(MarftTrainer).items() if hasattr(method, "__wrapped__")}
    assert {"warm_up", "update", "distil_on_policy"} <= trains
    assert trains | {IDLE} == set(_CALLS)
    assert trains <= set(vars(LeadingTrainer))
