"""Owns: the zoo's swarm: handoffs make D as they were made, loops cost, a limit holds, training reaches each desk."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import swarm
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {"id": "t", "question": "What does the rake cost?", "day": 3, "first": "kitchen", "desk": "garden", "answer": 12}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, **answers: list[str]) -> dict[str, Any]:
    graph = wrap(swarm.build(ScriptedPolicy(answers=answers)), recorder)
    return asyncio.run(graph.ainvoke(swarm.task_to_input(TASK)))


def test_a_desk_that_answers_is_the_only_one_that_acts(recorder: Recorder) -> None:
    result = run(recorder, kitchen=["12"])
    assert (result["path"], result["answer"]) == (["kitchen"], "12")
    assert recorded_edges(recorder) == {}


def test_a_handoff_makes_the_next_desk_depend_on_it(recorder: Recorder) -> None:
    result = run(recorder, kitchen=["HANDOFF office"], office=["HANDOFF garden"], garden=["12"])
    assert result["path"] == ["kitchen", "office", "garden"]
    # Every desk reads who sent the customer: all before it.
    assert recorded_edges(recorder) == {
        "trigger": "kitchen>office office>garden",
        "data": "kitchen>garden kitchen>office office>garden",
    }


def test_desks_that_send_each_other_the_customer_are_stopped_and_pay_for_every_return(recorder: Recorder) -> None:
    result = run(recorder, kitchen=["HANDOFF office"] * 2, office=["HANDOFF kitchen"] * 2)
    assert result["path"] == ["kitchen", "office", "kitchen", "office"]
    assert result["answer"] == "HANDOFF kitchen"  # the last one has nobody left to hand over to
    (trajectory,) = recorded_trajectories(recorder)
    assert (len(trajectory.actions), trajectory.episode.outcome) == (1 + swarm.MAX_HANDOFFS, "terminated")
    found = swarm.reward(TASK, result)
    assert found == {"correct": 0.0, "loops": 2.0, "handoffs": 3.0, "reward": pytest.approx(-0.4)}


@pytest.mark.parametrize(
    ("path", "answer", "earned"),
    [
        (["garden"], "12", 1.0),
        (["kitchen", "garden"], "It costs 12.", 1.0),
        (["kitchen", "garden", "kitchen", "garden"], "12", 0.6),
        (["kitchen", "garden"], "11", 0.2),
        (["kitchen", "garden"], "", 0.2),
        (["kitchen"], "9", 0.0),
        (["kitchen"], "12" * 5000, 0.0),
        ([], "", 0.0),
    ],
)
def test_rewards_are_those_worked_out_by_hand(path: list[str], answer: str, earned: float) -> None:
    found = swarm.reward(TASK, {"path": path, "answer": answer})
    assert found["reward"] == pytest.approx(earned)
    assert found["correct"] == float(earned in (1.0, 0.6))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("HANDOFF garden", "garden"),
        ("handoff: Office or kitchen", "office"),
        ("ask the garden desk", "garden"),
        ("12", None),
        ("12, as in the garden", None),
        ("HANDOFF garden 12", "garden"),
        ("HANDOFF kitchen", None),
        ("HANDOFF", None),
        ("gardens", None),
        ("", None),
    ],
)
def test_a_reply_of_the_kitchen_hands_over_to_another_desk_that_it_names(text: str, other: str | None) -> None:
    assert swarm.reply_to_handoff(text, "kitchen") == other


def test_only_the_right_desk_knows_the_price_and_no_example_tells_it() -> None:
    tasks = list(swarm.tasks())
    assert tasks == list(swarm.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) >= 100
    for task in tasks:
        thing = next(word for word in task["question"].split() if word in swarm.PRODUCTS[task["desk"]])
        assert swarm.desk_to_prices(task["desk"], task["day"])[thing] == task["answer"]
        for desk in swarm.DESKS:
            profile, examples = swarm.desk_to_profile(desk, task["day"])
            assert (f"{thing} {task['answer']}" in profile) == (desk == task["desk"])
            assert not any(thing in asked for asked, _ in examples)
            assert {other for _, said in examples if (other := swarm.reply_to_handoff(said, desk))} == {
                *swarm.DESKS
            } - {desk}
        assert set(swarm.task_to_input(task)) == {"question", "day", "active"}


def sends_on(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Whoever has the thing says its price or nonsense by the toss of a coin, the others send on or say nonsense."""
    asked = messages[-1]["content"]
    (desk,) = (desk for desk, things in swarm.PRODUCTS.items() if any(f" {thing} " in asked for thing in things))
    if chance.random() < 0.4:
        return "zzzz"
    if node != desk:
        return f"HANDOFF {desk}"
    thing = next(thing for thing in swarm.PRODUCTS[desk] if f" {thing} " in asked)
    listed = messages[0]["content"].split(f"{thing} ")[1]
    return listed.split(",")[0].split(".")[0]


@pytest.mark.slow
def test_training_moves_every_desk_and_pulls_the_swarm_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "swarm.toml", sends_on, tmp_path, rounds=2, episodes=16)
    assert set(trained.norms) == set(swarm.DESKS)
    assert all(norm > 0 for norm in trained.norms.values())
    assert {0.0, 1.0} <= {t.team_reward("reward") for t in trained.trained}
    assert {len(t.actions) for t in trained.trained} == {1, 2}
    assert sum(trained.pull(desk) for desk in swarm.DESKS) > 0.3
