"""Owns: the zoo's generator-verifier-refiner tree (MALT): its branches in D, the value of each role, and its training.

- D is the tree, whatever its widths, and nothing else.
- A call's value is the mean of the leaves below it; team reward and credit at or below a call add up to that value.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.fake_vllm import Answer
from support.zoo_rig import ZOO, train_zoo

from graphs import math_duo, verifier_refiner
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rewards.contract import RunView
from trace_store.journal import Journal
from trace_store.records import Trajectory
from trainers.advantages.returns import returns_by_source
from trainers.batch import trajectories_to_round
from trainers.rewards import ShapingTerm

TASK = {"id": "sum", "question": "What is 3 + 4?", "answer": 7}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, policy: ScriptedPolicy, *widths: int) -> dict[str, Any]:
    graph = wrap(verifier_refiner.build(policy, *widths), recorder)
    result: dict[str, Any] = asyncio.run(graph.ainvoke(math_duo.task_to_input(TASK)))
    return result


def always(**says: str) -> ScriptedPolicy:
    return ScriptedPolicy(script=lambda node, prompt, chance: says[node])


def test_every_draft_is_checked_and_every_check_refined_in_branches_of_their_own(recorder: Recorder) -> None:
    policy = always(generator="7", verifier="right", refiner="It is 7.")
    result = run(recorder, policy)
    assert result["answer"] == "7"
    assert recorded_edges(recorder) == {
        "send": "generator1>verifier1 generator1>verifier2 generator2>verifier3 generator2>verifier4"
        " verifier1>refiner1 verifier1>refiner2 verifier2>refiner3 verifier2>refiner4"
        " verifier3>refiner5 verifier3>refiner6 verifier4>refiner7 verifier4>refiner8"
    }
    prompts = {call.node: call.prompt for call in policy.asked}
    assert "Answer: 7\nCheck: right" in prompts["refiner"]
    assert "Answer: 7" in prompts["verifier"]
    assert "Check:" not in prompts["verifier"]


@pytest.mark.parametrize(
    ("widths", "edges"),
    [
        ((1, 1, 1), "generator>verifier verifier>refiner"),
        ((1, 2, 1), "generator>verifier1 generator>verifier2 verifier1>refiner1 verifier2>refiner2"),
    ],
)
def test_the_widths_of_the_tree_are_free(recorder: Recorder, widths: tuple[int, ...], edges: str) -> None:
    run(recorder, always(generator="1", verifier="2", refiner="3"), *widths)
    assert recorded_edges(recorder) == {"send": edges}


# Draft and check -> what their two refined answers say.
LEAVES = {
    "draft 0, check 0": ("so 7", "7 or 8"),
    "draft 0, check 1": ("none", ""),
    "draft 1, check 0": ("7", "3 + 4 = 7"),
    "draft 1, check 1": ("9", "7"),
}


def in_turn() -> ScriptedPolicy:
    """Drafts and the checks of each are numbered in turn, whichever call comes first; refined answers are of LEAVES."""
    turns = {told: itertools.count() for told in ("", "draft 0", "draft 1", *LEAVES)}

    def script(node: str, prompt: str, chance: random.Random) -> str:
        *_, told = ["", *re.findall("draft .*", prompt)]  # the latest that was said on the way here
        number = next(turns[told])
        if told in LEAVES:
            return LEAVES[told][number]
        return f"{told}, check {number}" if told else f"draft {number}"

    return ScriptedPolicy(script=script)


def test_values_are_means_of_the_leaves_below_and_credit_carries_them(recorder: Recorder) -> None:
    result = run(recorder, in_turn())
    assert result["answer"] == "7"  # 7 four times, 8 and 9 once
    (trajectory,) = recorded_trajectories(recorder)
    rewards = verifier_refiner.reward(TASK, result, RunView(TASK, result, trajectory))
    assert (rewards["correct"], rewards["reward"]) == (1.0, pytest.approx(4.1 / 8))
    told = {f"step:{action.action_id}": action.completion for action in trajectory.actions}
    values = {told[call]: value for call, value in rewards["value"].items()}
    assert {text: value for text, value in values.items() if "draft" in str(text)} == {
        "draft 0, check 0": pytest.approx(0.55),  # 1 and 0.1
        "draft 0, check 1": 0.0,
        "draft 1, check 0": 1.0,
        "draft 1, check 1": 0.5,
        "draft 0": pytest.approx(0.275),
        "draft 1": 0.75,
    }
    assert (values["so 7"], values["7 or 8"], values["none"], values["9"]) == (1.0, 0.1, 0.0, 0.0)
    credit = {told[call]: value for call, value in rewards["credit"].items()}
    assert credit["7 or 8"] == pytest.approx(0.1 - 0.5125)  # nothing below: its distance from the mean of all leaves
    assert credit["draft 1, check 0"] == pytest.approx(-(1.0 - 0.5125))  # two below, so once less
    assert credit["draft 0"] == pytest.approx(-(0.275 - 0.5125))


@pytest.mark.parametrize(
    ("leaves", "answer"),
    [
        ([], ""),
        (["no number", ""], ""),
        (["1 then 2", "3", "2"], "2"),
        (["5", "4"], "5"),
        (["9" * 5000, "4"], "4"),
    ],
)
def test_the_vote_takes_the_first_of_the_most_frequent_last_numbers(leaves: list[str], answer: str) -> None:
    assert verifier_refiner.leaves_to_answer(leaves) == answer


def test_credit_is_absent_where_what_a_refiner_said_was_not_recorded() -> None:
    class Unsaid:
        completion, node, action_id = None, "refiner", "a"

    class Game:
        actions, edges = (Unsaid(),), ()

    class Run:
        def game(self) -> Game:
            return Game()

    result = {"leaves": [((0, 0, 0), "7")], "answer": "7"}
    expected = {"correct": 1.0, "reward": 1.0, "value": None, "credit": None}
    assert verifier_refiner.reward(TASK, result, Run()) == expected


def lucky(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """A draft is right or no number by chance; the others say that it is, or that it is not."""
    question, *rest = str(messages[1]["content"]).split("\n")
    right = str(sum(int(number) for number in re.findall(r"\d+", question)[:2]))
    if node == "generator":
        return right if chance.random() < 0.5 else "many"
    bad = "many" in rest[0]
    return ("hmm" if bad else "yes") if node == "verifier" else ("no idea" if bad else right)


def returns_of(trajectory: Trajectory, agents: list[str]) -> list[float]:
    """What each call earned, in the order of the actions, as the trainer reckons it."""
    shaping = [ShapingTerm(reward="credit", level="step", weight=1.0)]
    data = trajectories_to_round([trajectory], agents, "reward", dict.fromkeys(agents, 257), "on_policy", shaping)
    earned = returns_by_source(data, gamma=1.0)
    return [sum(float(values[row]) for values in earned.values()) for row in range(len(trajectory.actions))]


@pytest.mark.slow
def test_training_pulls_every_role_towards_the_value_of_what_it_said(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "verifier_refiner.toml", lucky, tmp_path, episodes=4)
    agents = ["generator", "verifier", "refiner"]
    assert sorted(trained.norms) == sorted(agents)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        values = {reward.action_id: reward.value for reward in trajectory.rewards if reward.name == "value"}
        assert returns_of(trajectory, agents) == pytest.approx([values[a.action_id] for a in trajectory.actions])
    shares = {node: agent["gradient_share"] for node, agent in trained.rounds[-1]["agents"].items()}
    assert min(share["credit"] for share in shares.values()) > 0
    assert min(trained.pull_to(node, "value") for node in agents) > 0.2
