"""Owns: the zoo's plan, retrieve, inspect, solve, memoize (PRISMA): D, rewards of the modules, and its two stages."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import edges_of, recorded_edges, recorded_traces
from support.zoo_rig import ZOO, train_zoo

from graphs import prisma
from graphs.local_corpus import corpus, people
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import split_tasks
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal

PEOPLE = {person.name: person for person in people()}
ANN = PEOPLE["Ann"]
BOSS = PEOPLE[ANN.boss]
TASK = next(task for task in prisma.tasks() if task["id"] == "boss-city-Ann")
ANN_FOUND = [ANN.sentences[fact] for fact in ("city", "pet", "boss")]  # what the name alone finds


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(
    recorder: Recorder, planner: list[str], inspector: list[str], solver: str
) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"planner": planner, "inspector": inspector, "solver": [solver]})
    return asyncio.run(wrap(prisma.build(policy), recorder).ainvoke(prisma.task_to_input(TASK))), policy


def recorded_calls(policy: ScriptedPolicy) -> Any:
    """A record of the calls, named planner0, planner1, inspector0 and so on."""
    counts: Counter[str] = Counter()
    actions = []
    for call in policy.asked:
        actions.append(SimpleNamespace(node=call.node, action_id=f"{call.node}{counts[call.node]}"))
        counts[call.node] += 1
    return SimpleNamespace(game=lambda: SimpleNamespace(actions=actions))


def test_each_module_depends_on_what_was_kept_and_the_solver_on_nothing_else(recorder: Recorder) -> None:
    result, policy = run(recorder, ["Ann", f"{BOSS.name} lives", "DONE"], ["3", "1"], BOSS.city)
    assert result["notes"] == TASK["needed"] == [f"Ann reports to {BOSS.name}.", f"{BOSS.name} lives in {BOSS.city}."]
    assert result["retrieved"][0] == ANN_FOUND
    (spans,) = recorded_traces(recorder)
    assert [span.name for span in spans if span.operation == "execute_tool"] == ["execute_tool search"] * 2
    assert edges_of(spans_to_trajectory(spans)) == {
        "trigger": "inspector1>planner2 inspector2>planner3 planner1>inspector1 planner2>inspector2 planner3>solver",
        # A plan reaches the inspector by what it found; what was kept reaches everybody after it. The second search
        # leaves out what is a note, and so depends on the first verdict as well.
        "data": "inspector1>inspector2 inspector1>planner2 inspector1>planner3 inspector1>solver"
        " inspector2>planner3 inspector2>solver planner1>inspector1 planner1>planner2"
        " planner2>inspector2 planner2>planner3",
    }
    solver = policy.asked[-1].prompt.split("human: ")[-1]
    assert solver.startswith(f"Notes: {' '.join(TASK['needed'])}\n{TASK['question']}")
    rewards = prisma.reward(TASK, result, recorded_calls(policy))
    calls = ("planner0", "planner1", "planner2", "solver0")
    assert rewards == {
        "correct": 1.0,
        "reward": 1.0,
        "hops": 1.0,
        "searches": 2.0,
        "stage_one": 0.0,
        "verdicts": 1.0,
    } | {"own": {f"step:{call}": 1.0 for call in calls}}
    policy.asked.pop()
    assert prisma.reward(TASK, result, recorded_calls(policy))["own"] is None


def test_a_verdict_of_none_sends_the_planner_back_with_a_hint(recorder: Recorder) -> None:
    _, policy = run(recorder, ["zzz", "Ann keeps", "Ann", "DONE"], ["NONE", "3"], "unknown")
    asked = [(call.node, "Nothing for: " in call.prompt) for call in policy.asked]
    planned = [(node, is_hinted) for node, is_hinted in asked if node == "planner"]
    assert planned == [("planner", False), ("planner", True), ("planner", True), ("planner", False)]  # a kept one
    assert [node for node, _ in asked] == [
        "planner",
        "planner",
        "inspector",
        "planner",
        "inspector",
        "planner",
        "solver",
    ]


@pytest.mark.parametrize(
    ("planner", "inspector", "solver", "own", "verdicts", "team"),
    [
        # Nothing is found four times; the name in the third would have found it with no other word. `unknown` is right.
        (["", "x", "Annx", "DONE"], [], "unknown", ([0, 0, 0, 0], [1]), None, (0.0, 0.0, 0.0)),
        # `Ann works` is about the right person and does not find the boss, so NONE is right. The same of the boss then,
        # where the inspector is unclear.
        (
            ["Ann works", "Ann", f"{BOSS.name} works keeps reports", "DONE"],
            ["NONE", "3", "nonsense"],
            BOSS.city,
            ([0.3, 1, 0.3, 0], [0]),
            (1 + 1 + 0) / 3,
            (1.0, 1.0, 0.5),
        ),
        # A wrong note is a note: the search ends where the planner says so, too early.
        (["Ann", "done"], ["1"], ANN.city, ([1, 0], [0]), 0.0, (0.0, 0.0, 0.0)),
        # Once all is kept, another search is worth nothing, and a verdict of NONE is right.
        (
            ["Ann", f"{BOSS.name} lives", "Nick lives", "DONE"],
            ["3", "1", "NONE"],
            f"in {BOSS.city}",
            ([1, 1, 0, 1], [2 / 3]),
            1.0,
            (0.0, 2 / 3, 1.0),
        ),
    ],
)
def test_rewards_of_modules_and_team_are_those_worked_out_by_hand(
    planner: list[str],
    inspector: list[str],
    solver: str,
    own: tuple[list[float], list[float]],
    verdicts: float | None,
    team: tuple[float, float, float],
    recorder: Recorder,
) -> None:
    result, policy = run(recorder, planner, inspector, solver)
    rewards = prisma.reward(TASK, result, recorded_calls(policy))
    expected = {
        f"step:{node}{number}": value
        for node, values in zip(("planner", "solver"), own, strict=True)
        for number, value in enumerate(values)
    }
    assert rewards["own"] == pytest.approx(expected)
    assert rewards["verdicts"] == pytest.approx(verdicts)
    assert (rewards["correct"], rewards["reward"], rewards["hops"]) == pytest.approx(team)


def test_without_anything_found_the_inspector_does_not_act_and_four_plans_are_the_end(recorder: Recorder) -> None:
    _, policy = run(recorder, ["DONE", "", "zzz", "zzz", "Ann"], [], "unknown")
    assert [call.node for call in policy.asked] == [*["planner"] * prisma.MAX_PLANS, "solver"]
    chain = "planner1>planner2 planner2>planner3 planner3>planner4 planner4>solver"
    assert recorded_edges(recorder)["trigger"] == chain


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("2", ("kept", "b")),
        ("Sentence 1, I think", ("kept", "a")),
        ("NONE", ("none", "")),
        ("None of them", ("none", "")),
        ("3", ("unclear", "")),
        ("0", ("unclear", "")),
        ("", ("unclear", "")),
        ("9" * 5000, ("unclear", "")),
    ],
)
def test_a_verdict_is_a_sentence_none_or_unclear(text: str, verdict: prisma.Verdict) -> None:
    assert prisma.text_to_verdict(text, ["a", "b"]) == verdict


def test_the_needed_sentences_of_a_task_lead_to_its_answer() -> None:
    tasks = list(prisma.tasks())
    assert len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) == len(tasks) == 120
    for task in tasks:
        assert set(task["needed"]) <= set(corpus())
        (name,) = {word for word in re.findall(r"\w+", task["question"]) if word in PEOPLE}
        assert task["needed"][0].startswith(f"{name} ")
        assert re.search(rf"\b{task['answer']}\.$", task["needed"][-1])
        assert (len(task["needed"]) == 2) == ("boss" in task["question"])
        if len(task["needed"]) == 2:
            assert task["needed"][1].split()[0] == PEOPLE[name].boss
        assert set(prisma.task_to_input(task)) == {"question"}


def test_no_held_out_question_needs_a_sentence_that_a_training_question_needs() -> None:
    """Three facts of each of forty people and forty bosses: 160 sentences, in 80 questions of one hop and 40 of two."""
    tasks = list(prisma.tasks())
    assert Counter(sentence for task in tasks for sentence in task["needed"]) == Counter(corpus())
    assert Counter(len(task["needed"]) for task in tasks) == {1: 80, 2: 40}
    config = toml_to_config(ZOO / "prisma-modules.toml")
    sides = split_tasks(tasks, config.graph.heldout)
    trained, held_out = ({sentence for task in side for sentence in task["needed"]} for side in sides)
    assert not trained & held_out
    assert len(sides[1]) == config.compare.tasks
    assert sum(len(task["needed"]) == 2 for task in sides[1]) == 15


VERBS = {"live": "lives", "keep": "keeps", "job": "works"}


def searches(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Each module does what is right two times in three, and else writes nonsense; it is known by its profile."""
    text = messages[-1]["content"]
    if chance.random() < 0.35:
        return "zzzz zzzz"
    question = next(line for line in text.splitlines() if line.endswith("?"))
    notes = next(line for line in text.splitlines() if line.startswith("Notes: "))
    name = next(word for word in re.findall(r"\w+", question) if word in PEOPLE)
    verb = next(verb for word, verb in VERBS.items() if word in question)
    is_two_hops = "boss" in question
    boss = re.search(rf"{name} reports to (\w+)", notes)
    about = boss[1] if boss else name
    wanted = "reports" if is_two_hops and not boss else verb
    final = re.search(rf"{about} {verb} (?:in|a|as a) (\w+)", notes)
    if messages[0]["content"] == prisma.PLANNER.profile:
        return "DONE" if final else f"{about} {wanted}"
    if messages[0]["content"] == prisma.INSPECTOR.profile:
        return next((line[0] for line in text.splitlines() if f". {about} {wanted}" in line), "NONE")
    return final[1] if final else "unknown"


@pytest.mark.slow
def test_stage_one_pulls_planner_and_solver_by_their_own_rewards_and_leaves_the_inspector(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "prisma-modules.toml", searches, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == ["planner", "solver"]
    assert min(trained.norms.values()) > 0
    inspections = [action for t in trained.trained for action in t.actions if action.node == "inspector"]
    assert inspections
    assert not any(action.trainable for action in inspections)
    for node, agent in trained.rounds[-1]["agents"].items():
        assert agent["gradient_share"].get("own", 0.0) > 0, node
    assert min(trained.pull_to(node, "own") for node in ("planner", "solver")) > 0


@pytest.mark.slow
def test_joint_training_moves_all_three_modules_by_the_answer(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "prisma-joint.toml", searches, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == ["inspector", "planner", "solver"]
    assert min(trained.norms.values()) > 0
    assert trained.pull("solver") > 0
