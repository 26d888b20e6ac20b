"""Owns: the zoo's single agent and its chains of three to twelve: who depends on whom, and that training reaches all.

- Every agent depends on all before it, and was made to run by the one before it alone.
- What a prompt holds of the others is bounded, whatever they said and however many they are.
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
from support.zoo_rig import ZOO, train_zoo

from graphs import chain, math_duo, solo
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {"id": "t", "question": "What is 3 + 4?", "answer": 7}
CHAINS = {
    "trio": (chain.build_trio, chain.TRIO),
    "quartet": (chain.build_quartet, chain.QUARTET),
    "octet": (chain.build_octet, chain.OCTET),
    "twelve": (chain.build_twelve, chain.TWELVE),
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(build: Any, recorder: Recorder, policy: ScriptedPolicy) -> dict[str, Any]:
    return asyncio.run(wrap(build(policy), recorder).ainvoke(math_duo.task_to_input(TASK)))  # type: ignore[no-any-return]


def test_one_agent_alone_depends_on_nobody_and_its_text_is_the_answer(recorder: Recorder) -> None:
    result = run(solo.build, recorder, ScriptedPolicy(answers={"actor": ["It is 7."]}))
    assert result["answer"] == "It is 7."
    assert math_duo.reward(TASK, result) == {"correct": 1.0, "reward": 1.0}
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["actor"]
    assert trajectory.edges == ()


def test_three_agents_read_all_before_them_and_the_last_one_answers(recorder: Recorder) -> None:
    answers = {"reasoner": ["Add 4 to 3."], "actor": ["3 + 4 = 8"], "verifier": ["It is 7"]}
    policy = ScriptedPolicy(answers=answers)
    result = run(chain.build_trio, recorder, policy)
    assert math_duo.reward(TASK, result)["correct"] == 1.0
    assert recorded_edges(recorder) == {
        "trigger": "actor>verifier reasoner>actor",
        "data": "actor>verifier reasoner>actor reasoner>verifier",
    }
    asked = policy.asked[-1].prompt
    assert asked.endswith("What is 3 + 4?\nReasoner: Add 4 to 3.\nActor: 3 + 4 = 8\nVerifier?\nai: ")


@pytest.mark.parametrize(("name", "size"), [("trio", 3), ("quartet", 4), ("octet", 8), ("twelve", 12)])
def test_in_a_chain_of_n_the_next_is_triggered_and_all_later_ones_read(
    name: str, size: int, recorder: Recorder
) -> None:
    build, profiles = CHAINS[name]
    result = run(build, recorder, ScriptedPolicy(script=lambda node, prompt, chance: node))
    roles = [profile.role for profile in profiles]
    assert len(set(roles)) == size
    assert [contribution.role for contribution in result["contributions"]] == roles
    assert result["answer"] == roles[-1]
    assert recorded_edges(recorder) == {
        "trigger": " ".join(sorted(f"{a}>{b}" for a, b in itertools.pairwise(roles))),
        "data": " ".join(sorted(f"{a}>{b}" for a, b in itertools.combinations(roles, 2))),
    }
    assert toml_to_config(ZOO / f"{name}.toml").graph.nodes == tuple(roles)


@pytest.mark.parametrize("said", ["1 " * 400, "1" * 400, "\U0001f600" * 400, "many words " * 100, "\n\n", ""])
def test_what_prompts_hold_of_the_others_fits_into_one_room_however_many_they_are(
    said: str, recorder: Recorder
) -> None:
    policy = ScriptedPolicy(script=lambda node, prompt, chance: said)
    run(chain.build_twelve, recorder, policy)
    for place, call in enumerate(policy.asked):
        question, *lines, turn = call.prompt.rpartition("human: ")[2].removesuffix("\nai: ").split("\n")
        assert (question, turn) == (TASK["question"], f"{call.node.capitalize()}?")
        assert len(lines) == place
        assert sum(len(line.partition(": ")[2].encode()) for line in lines) <= chain.QUOTED_BYTES
        # What is always there: profile, examples, question and names. With the room it is less than 512 tokens.
        assert len(call.prompt.encode()) < 1700


def test_a_tail_keeps_the_last_words_that_fit_and_the_end_of_a_word_that_does_not() -> None:
    assert chain.text_to_tail("one two three", 9) == "two three"
    assert chain.text_to_tail("one two three", 8) == "three"
    assert chain.text_to_tail("one two three", 3) == "ree"
    assert chain.text_to_tail("  3 +\n 4 = 7 ", 20) == "3 + 4 = 7"
    assert chain.text_to_tail("\u00e9\u00e9\u00e9", 3) == "\u00e9"  # two bytes each: no half letter
    assert chain.text_to_tail("", 5) == ""


def half_right(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """All speak at random. The last agent's number is right where the first one said "add"; what is wrong looks so."""
    roles = re.findall(r"^(\w+)(?=[:?])", messages[-1]["content"], re.MULTILINE)
    good = chance.random() < 0.5 if len(roles) < 3 else "Reasoner: add" in messages[-1]["content"]
    if node == "verifier" or len(roles) == 1 == len(messages):
        numbers = [int(number) for number in re.findall(r"\d+", messages[-1]["content"].split("\n")[0])]
        return str(sum(numbers[:2])) if good else "zzzz"
    return "add" if good else "zzzz"


@pytest.mark.slow
def test_training_a_chain_pulls_its_first_and_its_last_agent_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "trio.toml", half_right, tmp_path, episodes=6)
    assert set(trained.norms) == {"reasoner", "actor", "verifier"}
    assert min(trained.norms.values()) > 0
    assert {trajectory.team_reward("reward") for trajectory in trained.trained} == {0.0, 1.0}
    assert trained.pull("reasoner") > 0.2
    assert trained.pull("verifier") > 0.2


def coin(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Everybody says the sum or something else, by the toss of a coin."""
    numbers = [int(number) for number in re.findall(r"\d+", messages[-1]["content"].split("\n")[0])]
    return str(sum(numbers[:2])) if chance.random() < 0.5 else "zzzz"


@pytest.mark.slow
def test_training_one_agent_alone_pulls_it_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "solo.toml", coin, tmp_path)
    assert trained.norms["actor"] > 0
    assert trained.pull("actor") > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quartet", "octet", "twelve"])
def test_training_moves_every_agent_of_a_long_chain(name: str, tmp_path: Path) -> None:
    one_step = {"train.trainer.optimizer.minibatch_actions": 1000, "train.trainer.offline.minibatch_actions": 1000}
    trained = train_zoo(ZOO / f"{name}.toml", coin, tmp_path, rounds=2, episodes=2, changes=one_step)
    roles = [profile.role for profile in CHAINS[name][1]]
    assert list(trained.norms) == roles
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        assert [action.node for action in trajectory.actions] == roles
        assert trajectory.team_reward("reward") is not None
