"""Owns: the zoo's deferring agent: who acts when it defers, what deferring costs, a person as the expert, and training.

Also that a run that waits for a person, and the one that goes on with the answer, are two linked episodes.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from support.edge_rig import edges_of, recorded_edges, recorded_traces
from support.zoo_rig import ZOO, train_zoo

from graphs import defer
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal

TASK = next(task for task in defer.tasks() if task["id"] == "shelf-red-lamp")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, **answers: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers=answers)
    return asyncio.run(wrap(defer.build(policy), recorder).ainvoke(defer.task_to_input(TASK))), policy


def test_an_agent_that_answers_acts_alone(recorder: Recorder) -> None:
    result, _ = run(recorder, agent=["17"])
    assert result == {"question": TASK["question"], "deferred": False, "answer": "17"}
    assert recorded_edges(recorder) == {}


def test_the_expert_acts_because_the_agent_deferred_and_alone_has_the_catalogue(recorder: Recorder) -> None:
    result, policy = run(recorder, agent=["DEFER"], expert=["17"])
    assert (result["deferred"], result["answer"]) == (True, "17")
    assert recorded_edges(recorder) == {"trigger": "agent>expert"}
    known = f"Catalogue: the red lamp is on shelf {TASK['answer']}."
    assert [known in call.prompt for call in policy.asked] == [False, True]


def test_a_run_that_waits_for_a_person_is_cut_and_goes_on_as_a_linked_episode_with_their_answer(
    recorder: Recorder,
) -> None:
    policy = ScriptedPolicy(answers={"agent": ["DEFER"]})
    graph = wrap(defer.build_with_human(policy, InMemorySaver()), recorder)
    thread: Any = {"configurable": {"thread_id": "t"}}

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        first = await graph.ainvoke(defer.task_to_input(TASK), thread)
        return first, await graph.ainvoke(Command(resume=str(TASK["answer"])), thread)

    waiting, done = asyncio.run(both())
    assert [question.value for question in waiting["__interrupt__"]] == [{"question": TASK["question"]}]
    assert defer.reward(TASK, done) == {"correct": 1.0, "deferred": 1.0, "reward": pytest.approx(0.7)}
    first, second = (spans_to_trajectory(spans) for spans in recorded_traces(recorder))
    assert (first.episode.outcome, first.episode.reason) == ("truncated", "interrupted")
    assert [action.node for action in first.actions] == ["agent"]
    assert second.episode.parent_episode == first.episode.episode_id
    assert (second.episode.outcome, second.actions, edges_of(second)) == ("terminated", (), {})  # a person is no agent


@pytest.mark.parametrize(
    ("answer", "deferred", "earned"),
    [
        ("{right}", False, 1.0),
        ("on shelf {right}.", True, 0.7),
        ("1{right}", False, 0.0),
        ("", True, -0.3),
        ("no number", False, 0.0),
        ("9" * 5000, True, -0.3),
    ],
)
def test_rewards_are_those_worked_out_by_hand(answer: str, deferred: bool, earned: float) -> None:
    result = {"answer": answer.replace("{right}", str(TASK["answer"])), "deferred": deferred}
    found = defer.reward(TASK, result)
    assert found == {
        "correct": float(earned > 0),
        "deferred": float(deferred),
        "reward": pytest.approx(earned),
    }
    assert defer.reward(TASK, {})["reward"] == 0.0  # a run that was cut short has no answer


@pytest.mark.parametrize(
    ("text", "does"),
    [("DEFER", True), ("I defer.", True), ("Ask the expert", True), ("17", False), ("Defender", False), ("", False)],
)
def test_an_agent_defers_where_it_says_so(text: str, does: bool) -> None:
    assert defer.is_deferral(text) is does


def test_the_catalogue_answers_half_of_the_tasks_and_knows_nothing_of_the_other_half() -> None:
    tasks = list(defer.tasks())
    assert tasks == list(defer.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) >= 100
    assert sum(task["known"] for task in tasks) * 2 == len(tasks)
    for task in tasks:
        line = defer.question_to_knowledge(task["question"])
        assert re.findall(r"\d+", line) == ([] if task["known"] else [str(task["answer"])])
        assert set(defer.task_to_input(task)) == {"question"}


def sometimes_defers(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """The agent defers or answers a sum by the toss of a coin; the expert is always right."""
    asked = messages[-1]["content"]
    if node != "agent":
        numbers = [int(n) for n in re.findall(r"\d+", asked)]
        return str(sum(numbers))
    if chance.random() < 0.5:
        return "DEFER"
    return str(sum(int(n) for n in re.findall(r"\d+", asked)))  # 0 where a shelf is asked for


@pytest.mark.slow
def test_training_moves_the_agent_towards_what_paid_and_leaves_the_expert_as_it_is(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "defer.toml", sometimes_defers, tmp_path, rounds=2, episodes=16)
    assert set(trained.norms) == {"agent"}
    assert trained.norms["agent"] > 0
    assert {t.team_reward("reward") for t in trained.trained} == {0.0, 1.0 - defer.DEFER_COST, 1.0}
    experts = [action for t in trained.trained for action in t.actions if action.node == "expert"]
    assert experts
    assert not any(action.trainable for action in experts)
    assert trained.pull("agent") > 0
