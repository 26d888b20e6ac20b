"""Owns: the zoo's two levels, meta-thinker over reasoner: D of the turns, credit of each turn, and who learns when."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import meta_thinker
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {"id": "t", "question": "Ann has 2 pens, gets 3 more and then 1 more. How many?", "half_way": 5, "answer": 6}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, plans: list[str], turns: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"meta_thinker": plans, "reasoner": turns})
    graph = wrap(meta_thinker.build(policy), recorder)
    return asyncio.run(graph.ainvoke(meta_thinker.task_to_input(TASK))), policy


def earned(turns: list[str]) -> dict[str, Any]:
    """The rewards of a run with these turns, whose calls are named r0, r1, ..., and plans between them."""
    names = [(node, f"{node[0]}{turn}") for turn in range(len(turns)) for node in ("meta_thinker", "reasoner")]
    actions = [SimpleNamespace(node=node, action_id=name) for node, name in names]
    run = SimpleNamespace(game=lambda: SimpleNamespace(actions=actions))
    return meta_thinker.reward(TASK, {"turns": turns}, run)


def test_a_turn_depends_on_its_plan_and_on_all_turns_before(recorder: Recorder) -> None:
    result, policy = run(recorder, ["Add 3 to 2.", "Add 1 to 5.", "FINISH"], ["2 + 3 = 5", "5 + 1 = 6\nSo what?"])
    assert result["turns"] == ["2 + 3 = 5", "5 + 1 = 6"]
    assert recorded_edges(recorder) == {
        "trigger": "meta_thinker1>reasoner1 meta_thinker2>reasoner2 reasoner1>meta_thinker2 reasoner2>meta_thinker3",
        # The plan is the last one; of turns there are all so far.
        "data": "meta_thinker1>reasoner1 meta_thinker2>reasoner2"
        " reasoner1>meta_thinker2 reasoner1>meta_thinker3 reasoner1>reasoner2 reasoner2>meta_thinker3",
    }
    said = f"{TASK['question']}\nReasoner: 2 + 3 = 5\n"
    assert policy.asked[-2].prompt.endswith(f"{said}Meta-thinker: Add 1 to 5.\nai: ")
    assert policy.asked[-1].prompt.endswith(f"{said}Reasoner: 5 + 1 = 6\nNext?\nai: ")


def test_the_meta_thinker_cannot_stop_before_the_first_turn_and_is_not_asked_after_the_last(recorder: Recorder) -> None:
    result, policy = run(recorder, ["FINISH", "Again.", "Again."], ["5", "x" * 999, "7"])
    assert [asked.node for asked in policy.asked] == ["meta_thinker", "reasoner"] * meta_thinker.MAX_TURNS
    assert [len(turn) for turn in result["turns"]] == [1, meta_thinker.MAX_SHOWN_CHARACTERS, 1]
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"


@pytest.mark.parametrize(
    ("turns", "correct", "reward", "by_turn"),
    [
        (["2 + 3 = 5", "5 + 1 = 6"], 1.0, 1.0, (0.5, 1.0)),
        (["6"], 1.0, 1.0, (1.0,)),
        (["5", "5", "6"], 1.0, 0.95, (0.5, 0.0, 1.0)),  # one turn more than two
        (["6", "6"], 1.0, 1.0, (1.0, 0.0)),  # the answer is paid once
        (["6", "5"], 0.0, 0.2, (1.0, 0.5)),  # what stands last counts
        (["5", "7", "8"], 0.0, 0.15, (0.5, 0.0, 0.0)),
        (["none", "", "9" * 5000], 0.0, -0.05, (0.0, 0.0, 0.0)),
    ],
)
def test_rewards_of_team_and_turns_are_those_worked_out_by_hand(
    turns: list[str], correct: float, reward: float, by_turn: tuple[float, ...]
) -> None:
    found = earned(turns)
    assert (found["correct"], found["turns"]) == (correct, float(len(turns)))
    assert found["reward"] == pytest.approx(reward)
    assert found["turn"] == {f"step:r{turn}": value for turn, value in enumerate(by_turn)}


def test_the_turns_reward_is_absent_where_the_record_has_not_one_call_for_each() -> None:
    run = SimpleNamespace(game=lambda: SimpleNamespace(actions=()))
    assert meta_thinker.reward(TASK, {"turns": ["6"]}, run)["turn"] is None


def test_tasks_are_distinct_and_lead_to_their_answers() -> None:
    tasks = list(meta_thinker.tasks())
    assert tasks == list(meta_thinker.tasks())
    assert len({task["id"] for task in tasks}) == len(tasks) == 216
    for task in tasks:
        numbers = [int(number) for number in re.findall(r"\d+", task["question"])]
        assert (sum(numbers), sum(numbers[:2])) == (task["answer"], task["half_way"])
        assert set(meta_thinker.task_to_input(task)) == {"question"}


def thinks(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A plan is good half the time, and the reasoner gets the next number right after a good one only."""
    asked = messages[-1]["content"]
    numbers = [int(number) for number in re.findall(r"\d+", asked.splitlines()[0])]
    done = len(re.findall(r"^Reasoner: \d", asked, re.MULTILINE))
    if node == "meta_thinker":
        return "FINISH" if done == 2 else "Go on." if chance.random() < 0.6 else "zzzz zzzz"
    return str(sum(numbers[: 2 + done])) if "Meta-thinker: Go on." in asked else "zzzz zzzz"


@pytest.mark.slow
def test_each_turn_is_credited_and_the_agents_learn_in_turns(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "meta_thinker.toml", thinks, tmp_path, rounds=2, episodes=8)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        turns = [reward for reward in trajectory.rewards if reward.name == "turn"]
        assert len(turns) == sum(action.node == "reasoner" for action in trajectory.actions)
        assert {reward.scope for reward in turns} == {"step"}
    learned = [
        [(node, set(agent["gradient_share"])) for node, agent in row["agents"].items() if "adapter_norm" in agent]
        for row in trained.rounds[1:]
    ]
    assert learned == [[("meta_thinker", {"reward", "turn"})], [("reasoner", {"reward", "turn"})]]
    assert trained.pull("meta_thinker") > 0.2
    assert trained.pull_to("reasoner", "turn") > 0.2
