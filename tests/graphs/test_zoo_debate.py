"""Owns: the zoo's debate: its branches and joins in D, what debaters and judge earn, and its training.

Debaters of one round never depend on each other, those of the next on all of it; each is paid for its own answers,
and the judge is not.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges
from support.fake_vllm import Answer
from support.zoo_rig import ZOO, train_zoo

from graphs import debate
from graphs.debate import DebaterAnswer
from graphs.math_duo import task_to_input
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {"id": "sum", "question": "What is 3 + 4?", "answer": 7}
NAMES = ("debater_1", "debater_2", "debater_3")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, rounds: int) -> ScriptedPolicy:
    answers = {name: [f"{name} says {number}" for number in range(rounds)] for name in NAMES}
    policy = ScriptedPolicy(answers={**answers, "judge": ["7"]})
    result = asyncio.run(wrap(debate.build(policy, rounds), recorder).ainvoke(task_to_input(TASK)))
    assert result["answer"] == "7"
    return policy


def all_pairs(sources: list[str], targets: list[str]) -> list[str]:
    return [f"{source}>{target}" for source in sources for target in targets]


def test_one_round_is_three_branches_and_a_join(recorder: Recorder) -> None:
    run(recorder, 1)
    join = " ".join(all_pairs(list(NAMES), ["judge"]))
    assert recorded_edges(recorder) == {"trigger": join, "data": join}


def test_a_second_round_depends_on_all_of_the_first_and_the_judge_on_what_both_said(recorder: Recorder) -> None:
    policy = run(recorder, 2)
    first, second = ([f"{name}{number}" for name in NAMES] for number in (1, 2))
    between = all_pairs(first, second)
    assert recorded_edges(recorder) == {
        "trigger": " ".join(sorted([*between, *all_pairs(second, ["judge"])])),
        # The judge reads the list of all answers, although it shows only the last ones to its model.
        "data": " ".join(sorted([*between, *all_pairs([*first, *second], ["judge"])])),
    }
    prompts = [call.prompt for call in policy.asked if call.node == "debater_2"]
    assert "says" not in prompts[0]
    assert re.findall(r"(debater_\d) says (\d)", prompts[1]) == [("debater_1", "0"), ("debater_3", "0")]
    (judged,) = (call.prompt for call in policy.asked if call.node == "judge")
    assert re.findall(r"(debater_\d) says (\d)", judged) == [(name, "1") for name in NAMES]


def said(*rounds: tuple[str, str, str]) -> list[DebaterAnswer]:
    return [
        DebaterAnswer(n, name, text) for n, texts in enumerate(rounds) for name, text in zip(NAMES, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("answers", "verdict", "earned", "own"),
    [
        (said(("7", "7", "6"), ("7", "it is 7", "7")), "So 7.", (1.0, 1.0, 1.0), (1.0, 1.0, 0.5)),
        (said(("7", "8", "?"), ("8", "8", "8")), "7 or 8", (0.0, 0.1, 1.0), (0.5, 0.0, 0.0)),
        (said(("", "none", "7, 9"), ("", "-7", "seven")), "", (0.0, 0.0, 0.0), (0.0, 0.0, 0.05)),
        (
            said(
                ("7" * 5000, "07", "٧"),
            ),
            "7\n",
            (1.0, 1.0, 0.0),
            (0.0, 1.0, 0.0),
        ),
        (said(("", "x", "y")), "7", (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)),  # agreeing on no number is not agreeing
    ],
)
def test_the_judge_earns_for_the_team_and_each_debater_for_its_own_answers(
    answers: list[DebaterAnswer], verdict: str, earned: tuple[float, ...], own: tuple[float, ...]
) -> None:
    rewards = debate.reward(TASK, {"answers": answers, "answer": verdict})
    assert (rewards["correct"], rewards["reward"], rewards["agree"]) == pytest.approx(earned)
    assert rewards["own"] == pytest.approx({f"agent:{name}": value for name, value in zip(NAMES, own, strict=True)})


def lucky(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """Debaters are right half the time; the judge is where two of them are."""
    text = str(messages[1]["content"])
    right = str(sum(int(number) for number in re.findall(r"\d+", text.split("\n")[0])[:2]))
    if node == "judge":
        return right if text.count("many") < 2 else "who knows"
    return right if chance.random() < 0.5 else "many"


@pytest.mark.slow
def test_training_pulls_debaters_towards_their_own_answers_and_the_judge_towards_the_teams(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "debate.toml", lucky, tmp_path, episodes=24)
    assert sorted(trained.norms) == sorted([*NAMES, "judge"])
    assert min(trained.norms.values()) > 0
    shares = {node: agent["gradient_share"] for node, agent in trained.rounds[-1]["agents"].items()}
    assert min(shares[name]["own"] for name in NAMES) > 0
    assert shares["judge"]["own"] == 0
    assert trained.pull("judge") > 0.2
    for name in NAMES:
        own = {
            reward.episode_id: reward.value
            for trajectory in trained.trained
            for reward in trajectory.rewards
            if reward.name == "own" and reward.node == name
        }
        assert trained.pull(name, lambda trajectory, own=own: own[trajectory.episode.episode_id]) > 0.2
