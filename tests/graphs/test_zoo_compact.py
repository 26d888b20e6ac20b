"""Owns: the zoo's compact messages (PACT): each agent sees one record only, what length costs, and its training.

D is the chain of records, as long as there are events; a record is paid for what it keeps, the team for brevity.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.fake_vllm import Answer
from support.zoo_rig import ZOO, train_zoo

from graphs import compact
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rewards.contract import RunView
from trace_store.journal import Journal

TASK = {"start": "have: 5", "events": ["pens put in: 2", "pens taken out: 1", "pens put in: 3"], "states": [7, 6, 9]}
TASK |= {"id": "box", "answer": 9}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, task: dict[str, Any], **answers: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers=answers)
    return asyncio.run(wrap(compact.build(policy), recorder).ainvoke(compact.task_to_input(task))), policy


def test_each_agent_depends_on_the_record_before_it_and_on_no_other(recorder: Recorder) -> None:
    long = "did: +3, have: 9" + " and so on" * 20
    result, policy = run(recorder, TASK, clerk=["did: +2, have: 7", "6", long], reporter=["9"])
    chain = "clerk1>clerk2 clerk2>clerk3 clerk3>reporter"
    assert recorded_edges(recorder) == {"trigger": chain, "data": chain}
    shown = [re.findall(r"human: Record: (.*)", asked.prompt)[-1] for asked in policy.asked]
    assert shown == ["have: 5", "did: +2, have: 7", "6", long[: compact.RECORD_CHARACTERS]]
    assert [event in asked.prompt for event, asked in zip(TASK["events"], policy.asked, strict=False)] == [True] * 3
    assert result["records"] == ["did: +2, have: 7", "6", long]


def test_without_events_the_reporter_acts_alone(recorder: Recorder) -> None:
    run(recorder, {"start": "have: 5", "events": []}, reporter=["5"])
    assert recorded_edges(recorder) == {}
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["reporter"]


@pytest.mark.parametrize(
    ("records", "answer", "team", "kept"),
    [
        # 16 + 1 + 7 letters of 80, a third each: 0.1
        (["did: +2, have: 7", "6", "have: 9"], "9", (1.0, 0.1, 0.98), (1.0, 1.0, 1.0)),
        (["", "", ""], "9 or 8", (0.0, 0.0, 0.1), (0.0, 0.0, 0.0)),
        (["x" * 80, "x" * 4000, "7" * 400], "so 9", (1.0, 1.0, 0.8), (0.0, 0.0, 0.0)),
        (["have: 7, did: +2", "6.", "have 9"], "", (0.0, 24 / 240, -0.02), (0.0, 1.0, 1.0)),
        (["word " * 30 + "have: 7", "6", "9"], "9", (1.0, 82 / 240, 1 - 0.2 * 82 / 240), (0.0, 1.0, 1.0)),  # not shown
    ],
)
def test_a_right_answer_counts_less_the_longer_the_records(
    records: list[str], answer: str, team: tuple[float, ...], kept: tuple[float, ...], recorder: Recorder
) -> None:
    result, _ = run(recorder, TASK, clerk=records, reporter=[answer])
    (trajectory,) = recorded_trajectories(recorder)
    rewards = compact.reward(TASK, result, RunView(TASK, result, trajectory))
    assert (rewards["correct"], rewards["length_cost"], rewards["reward"]) == pytest.approx(team)
    calls = [action.action_id for action in trajectory.actions if action.node == "clerk"]
    assert rewards["kept"] == {f"step:{call}": value for call, value in zip(calls, kept, strict=True)}


def test_what_a_record_keeps_is_absent_where_a_call_was_not_recorded() -> None:
    class Game:
        actions = ()

    class Run:
        def game(self) -> Game:
            return Game()

    rewards = compact.reward(TASK, {"records": ["7", "6", "9"], "answer": "9"}, Run())
    assert rewards["kept"] is None
    assert rewards["correct"] == 1.0


def test_the_states_of_a_task_follow_from_its_events() -> None:
    for task in compact.tasks():
        (have,) = (int(number) for number in re.findall(r"\d+", task["start"]))
        states = []
        for event in task["events"]:
            (number,) = (int(found) for found in re.findall(r"\d+", event))
            have += number if "put in" in event else -number
            states.append(have)
        assert (states, states[-1]) == (task["states"], task["answer"])
        assert min(states) >= 1


def test_no_two_tasks_begin_alike_and_see_the_same_events() -> None:
    boxes = [(task["start"], *task["events"]) for task in compact.tasks()]
    assert len(set(boxes)) == len(boxes) == compact.TASKS


def by_chance(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """A clerk that is short and right or long and wrong; a reporter that reads the last record, or none."""
    record, *event = str(messages[-1]["content"]).split("\n")
    numbers = [int(number) for number in re.findall(r"have: (\d)", record)]
    if node == "reporter":
        return str(numbers[-1]) if numbers else "who knows"
    change = int(event[0].split()[-1]) * (1 if "put in" in event[0] else -1)
    if numbers and chance.random() < 0.6:
        return f"have: {numbers[-1] + change}"
    return "well, let me think about everything that has happened to this box so far"


@pytest.mark.slow
def test_training_pulls_the_clerk_towards_records_that_keep_and_are_short(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "compact.toml", by_chance, tmp_path)
    assert sorted(trained.norms) == ["clerk", "reporter"]
    assert min(trained.norms.values()) > 0
    shares = {node: agent["gradient_share"] for node, agent in trained.rounds[-1]["agents"].items()}
    assert shares["clerk"]["kept"] > 0
    assert trained.pull_to("clerk", "kept") > 0.2
    assert trained.pull("clerk", lambda trajectory: -(trajectory.team_reward("length_cost") or 0.0)) > 0.2
    assert trained.pull("reporter") > 0.2
