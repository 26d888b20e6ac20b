"""Owns: the zoo's dialogue with a simulated customer (DoctorAgent-RL): D of the turns, rewards apart, and leaks.

What a customer tells unasked is found in every run, and such a run has no reward to train on.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import service_dialogue as dialogue
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

PERSON = {"goods": "lamp", "problem": "broken", "order": "47", "manner": "plain"}
TASK = {"id": "t", "person": PERSON, "decision": "REPLACE"}
GOOD = ["ASK problem, please", "ASK order, thanks", "LOOKUP 47", "DECIDE REPLACE"]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(
    recorder: Recorder, lines: list[str], simulator: Any = dialogue.person_to_answer, **person: str
) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"agent": lines})
    graph = wrap(dialogue.build_with_simulator(policy, simulator), recorder)
    task = TASK | {"person": PERSON | person}
    return asyncio.run(graph.ainvoke(dialogue.task_to_input(task))), policy


def earned(result: dict[str, Any], calls: int | None = None, **person: str) -> dict[str, Any]:
    """The rewards of a run, whose calls are named 0, 1, ..."""
    count = len(result["moves"]) if calls is None else calls
    actions = [SimpleNamespace(node="agent", action_id=str(number)) for number in range(count)]
    record = SimpleNamespace(game=lambda: SimpleNamespace(actions=actions))
    return dialogue.reward(TASK | {"person": PERSON | person}, result, record)


def test_a_turn_depends_on_all_turns_before_it_and_sees_only_what_was_told(recorder: Recorder) -> None:
    result, policy = run(recorder, GOOD)
    assert recorded_edges(recorder) == {
        "trigger": "agent1>agent2 agent2>agent3 agent3>agent4",
        "data": "agent1>agent2 agent1>agent3 agent1>agent4 agent2>agent3 agent2>agent4 agent3>agent4",
    }
    prompts = [call.prompt.split("human: ")[-1] for call in policy.asked]
    assert prompts[-1].removesuffix("\nai: ").splitlines() == [
        "Customer: Hello, it is about my lamp.",
        "You: ASK problem, please",
        "Customer: It is broken.",
        "You: ASK order, thanks",
        "Customer: It is order 47.",
        "You: LOOKUP 47",
        "Shop: Order 47 is in time.",
        "Next?",
    ]
    assert ["broken" in prompt for prompt in prompts] == [False, True, True, True]
    assert ["47" in prompt for prompt in prompts] == [False, False, True, True]
    found = earned(result)
    assert found["fact"] == pytest.approx({"step:0": 1 / 3, "step:1": 1 / 3, "step:2": 1 / 3, "step:3": 0.0})
    assert found["rudeness"] == {"step:0": 0.0, "step:1": 0.0}
    assert found["turn"] == dict.fromkeys(found["fact"], 1.0)
    assert [found[name] for name in ("correct", "reward", "facts", "turns", "leaks")] == [1.0, 1.0, 1.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("lines", "manner", "correct", "reward", "facts", "rude"),
    [
        (["DECIDE REPLACE"], "plain", 1.0, 1.0, (), None),
        (["DECIDE DECLINE"], "plain", 0.0, 0.1, (), None),
        (["LOOKUP 48", "DECIDE DECLINE"], "plain", 0.0, 0.1, (), None),  # another order's standing
        (["ASK problem", "DECIDE refund"], "chatty", 0.0, 0.1, ("problem",), (1.0,)),
        (["ASK problem", "ASK problem, please", "DECIDE REPLACE"], "touchy", 1.0, 1.0, ("problem",), (1.0, 0.0)),
        (["You: ASK order", "ASK order", "DECIDE REPLACE"], "plain", 1.0, 1.0, ("order",), (1.0, 1.0)),  # found once
        (["zzz", "", "DECIDE", "LOOKUP it", "ASK", "I DECIDE REPLACE"], "plain", 0.0, 0.0, (), None),
        (["ASK order"] * 6, "touchy", 0.0, 0.0, (), (1.0,) * 6),
        (["LOOKUP 47"] * 6, "plain", 0.0, 0.0, ("standing",), None),
    ],
)
def test_rewards_apart_are_those_worked_out_by_hand(
    lines: list[str], manner: str, correct: float, reward: float, facts: tuple[str, ...], rude: Any, recorder: Recorder
) -> None:
    result, _ = run(recorder, lines, manner=manner)
    found = earned(result, manner=manner)
    assert (found["correct"], found["reward"], found["turns"]) == (correct, reward, len(lines))
    assert found["facts"] == pytest.approx(len(facts) / 3)
    assert sum(found["fact"].values()) == pytest.approx(len(facts) / 3)
    assert (tuple(found["rudeness"].values()) if found["rudeness"] else None) == rude
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"


def test_a_planted_leak_is_detected_and_leaves_nothing_to_train_on(recorder: Recorder) -> None:
    def leaky(person: dialogue.Person, move: dialogue.Move) -> str:
        return f"{dialogue.person_to_answer(person, move)} By the way, my order is {person['order']}."

    result, _ = run(recorder, ["ASK problem, please", "ASK order, please", "DECIDE REPLACE"], leaky)
    found = earned(result)
    assert dialogue.find_leaks(PERSON, result["opening"], result["exchanges"]) == ["order"]  # asked for the second time
    assert (found["leaks"], found["reward"], found["correct"]) == (1.0, None, None)
    assert dialogue.find_leaks(PERSON, "Hello, my lamp is broken.", []) == ["problem"]


def sly(person: dialogue.Person, move: dialogue.Move) -> str:
    """Tells both facts in other words, whatever it was asked for."""
    fate = "It fell." if person["problem"] == "broken" else "I have two."
    tens, ones = (("no", "one", "two", "three", "four")[int(digit) % 5] for digit in person["order"])
    return f"{fate} It says {tens} and {ones} on the bill."


def test_a_leak_in_other_words_is_found_by_what_another_customer_would_have_answered(recorder: Recorder) -> None:
    result, _ = run(recorder, ["ASK problem, please", "ASK order, please", "DECIDE REPLACE"], sly)
    found = earned(result)
    assert dialogue.find_leaks(PERSON, result["opening"], result["exchanges"]) == ["order"]
    assert (found["leaks"], found["reward"], found["correct"]) == (1.0, None, None)
    for line, leaked in (("ASK order", ["problem"]), ("ASK problem", ["order"])):
        move = dialogue.text_to_move(line)
        for person in (task["person"] for task in dialogue.tasks()):
            assert dialogue.leaked_facts(sly, person, move, sly(person, move)) == leaked


@pytest.mark.parametrize(
    "tells",
    [
        lambda order: "early" if order < 50 else "later",  # in which half of the books
        lambda order: order == 99,
        lambda order: order > 13 and order % 3 == 0,  # the bit that decides, of most orders
    ],
)
def test_a_leak_that_tells_few_orders_apart_is_found_of_every_customer(tells: Callable[[int], Any]) -> None:
    def coarse(person: dialogue.Person, move: dialogue.Move) -> str:
        return f"{dialogue.person_to_answer(person, move)} {tells(int(person['order']))}"

    move = dialogue.text_to_move("ASK problem, please")
    for person in (task["person"] for task in dialogue.tasks()):
        assert dialogue.leaked_facts(coarse, person, move, coarse(person, move)) == ["order"]


def test_a_fact_that_was_asked_for_before_is_no_leak_when_it_is_told_again(recorder: Recorder) -> None:
    def repeats(person: dialogue.Person, move: dialogue.Move) -> str:
        again = f" As I said, {person['problem']}." if move["subject"] == "order" else ""
        return dialogue.person_to_answer(person, move) + again

    result, _ = run(recorder, ["ASK problem, please", "ASK order, please", "DECIDE REPLACE"], repeats)
    assert (earned(result)["leaks"], earned(result)["correct"]) == (0.0, 1.0)
    result, _ = run(recorder, ["ASK order, please", "ASK problem, please", "DECIDE REPLACE"], repeats)
    assert (earned(result)["leaks"], earned(result)["correct"]) == (1.0, None)


def test_of_a_customer_that_samples_the_words_alone_are_checked(recorder: Recorder) -> None:
    chance = random.Random(0)

    def sampled(person: dialogue.Person, move: dialogue.Move) -> str:
        return f"{dialogue.person_to_answer(person, move)} {chance.random()}"

    policy = ScriptedPolicy(answers={"agent": GOOD})
    graph = dialogue.build_with_simulator(policy, sampled, is_deterministic=False)
    result = run_recorded(graph, dialogue.task_to_input(TASK), recorder)
    assert earned(result)["correct"] == 1.0
    assert [part["leaked"] for part in result["exchanges"]] == [[], [], []]


def test_the_scripted_customer_leaks_to_nobody() -> None:
    moves = [
        dialogue.text_to_move(line)
        for line in ("ASK problem", "ASK order", "ASK problem, please", "ASK order, please", "ASK order and problem")
    ]
    for task in dialogue.tasks():
        person = task["person"]
        exchanges: list[dialogue.Exchange] = [
            {
                "fact": move["subject"],
                "source": "customer",
                "answer": (answer := dialogue.person_to_answer(person, move)),
                "leaked": dialogue.leaked_facts(dialogue.person_to_answer, person, move, answer),
            }
            for move in moves
        ]
        opening = dialogue.task_to_input(task)["opening"]
        assert dialogue.find_leaks(person, opening, exchanges) == []
        for exchange in exchanges:
            assert exchange["leaked"] == []
            assert dialogue.find_leaks(person, opening, [exchange]) == []


def test_rewards_of_calls_are_absent_where_the_record_has_not_one_for_each_turn(recorder: Recorder) -> None:
    result, _ = run(recorder, GOOD)
    found = earned(result, calls=3)
    assert (found["fact"], found["turn"], found["rudeness"], found["reward"]) == (None, None, None, 1.0)


def test_the_decision_of_a_task_follows_from_its_facts_and_no_two_customers_are_alike_but_for_their_goods() -> None:
    tasks = list(dialogue.tasks())
    assert tasks == list(dialogue.tasks())
    keys = [tuple(task["person"][name] for name in ("problem", "order", "manner")) for task in tasks]
    assert len(set(keys)) == len(keys)
    assert Counter(task["decision"] for task in tasks) == {"REPLACE": 60, "REFUND": 60, "DECLINE": 60}
    assert Counter(task["person"]["manner"] for task in tasks) == {"plain": 60, "chatty": 60, "touchy": 60}
    for task in tasks:
        late = sum(map(int, task["person"]["order"])) % 3 == 0  # the digit sum
        due = {"broken": "REPLACE", "unwanted": "REFUND"}[task["person"]["problem"]]
        assert task["decision"] == ("DECLINE" if late else due)
        assert set(dialogue.task_to_input(task)) == {"opening", "person"}


def half_polite(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """An agent that takes the next step two times in three, politely half the time, and else writes nonsense."""
    transcript = messages[-1]["content"]
    if chance.random() < 0.35:
        return "zzzz zzzz"
    please = ", please" if chance.random() < 0.5 else ""
    if not (problem := re.search(r"It is (broken|unwanted)", transcript)):
        return f"ASK problem{please}"
    if not (order := re.search(r"It is order (\d+)", transcript)):
        return f"ASK order{please}"
    if "Shop: Order" not in transcript:
        return f"LOOKUP {order[1]}"
    return "DECIDE " + ("DECLINE" if "too late" in transcript else dialogue.PROBLEMS[problem[1]])


@pytest.mark.slow
def test_training_pulls_the_agent_towards_facts_and_the_right_decision(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "service_dialogue.toml", half_polite, tmp_path, rounds=2, episodes=8)
    assert trained.norms["agent"] > 0
    assert {trajectory.team_reward("leaks") for trajectory in trained.trained} == {0.0}
    assert trained.pull("agent") > 0
    assert trained.pull_to("agent", "fact") > 0.2
