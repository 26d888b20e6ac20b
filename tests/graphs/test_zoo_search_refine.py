"""Owns: the zoo's actor and refiner (Search-R2): cutting and going on from the cut in D, its limits, rewards, training.

What a cut throws away depends on nothing later, and earns as little as it holds; two searches answer every question.
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

from graphs import search_refine
from graphs.local_corpus import corpus, people, query_to_sentences
from graphs.search_refine import Step
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

OWN, BOSS = list(search_refine.tasks())[:2]
PERSON = people()[0]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, task: dict[str, Any], **answers: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers=answers)
    return asyncio.run(wrap(search_refine.build(policy), recorder).ainvoke(search_refine.task_to_input(task))), policy


def test_an_answer_without_a_search_that_is_accepted_is_two_calls(recorder: Recorder) -> None:
    result, _ = run(recorder, OWN, actor=["Delhi"], discriminator=["Yes."])
    assert (result["answer"], result["accepted"]) == ("Delhi", True)
    assert "steps" not in result
    assert recorded_edges(recorder) == {"trigger": "actor>discriminator", "data": "actor>discriminator"}
    assert search_refine.reward(OWN, result)["density"] == 0.0


def test_the_actor_goes_on_from_what_the_cut_left(recorder: Recorder) -> None:
    boss = PERSON.boss
    bad, good = "SEARCH: parrot", f"SEARCH: {boss} lives"
    result, policy = run(
        recorder,
        BOSS,
        actor=[f"SEARCH: {PERSON.name} reports", bad, "no idea", good, BOSS["answer"]],
        discriminator=["No!"],
        trimmer=["Step 2 is bad."],
    )
    assert [step.query for step in result["steps"]] == [f"{PERSON.name} reports", f"{boss} lives"]
    # actor reads the steps, which retrieval and trimmer write; the discriminator the steps and the answer; the trimmer
    # both. After the trimmer wrote the steps anew, nothing reads what came before it.
    assert recorded_edges(recorder) == {
        "trigger": "actor1>actor2 actor2>actor3 actor3>discriminator actor4>actor5"
        " discriminator>trimmer trimmer>actor4",
        "data": "actor1>actor2 actor1>actor3 actor1>discriminator actor1>trimmer"
        " actor2>actor3 actor2>discriminator actor2>trimmer"
        " actor3>discriminator actor3>trimmer"
        " actor4>actor5"
        " trimmer>actor4 trimmer>actor5",
    }
    prompts = [call.prompt for call in policy.asked if call.node == "actor"]
    assert prompts[3] == prompts[1]  # as if the bad step had never been
    (shown,) = (call.prompt for call in policy.asked if call.node == "trimmer")
    assert re.findall(r"(?m)^(\d\. \w+)", shown.split("human: ")[-1]) == ["1. Searched", "2. Searched", "3. Answer"]
    rewards = search_refine.reward(BOSS, result)
    assert rewards["correct"] == rewards["f1"] == rewards["cuts"] == 1.0
    # 2 sentences needed. Both searches bring three, and the one that leads on comes with both.
    assert rewards["density"] == pytest.approx(2 / 6)
    assert rewards["reward"] == pytest.approx((1 + 2 / 6) / 2)


def test_there_are_one_cut_and_two_searches_at_most_and_no_verdict_after_the_last_cut(recorder: Recorder) -> None:
    again = "SEARCH: parrot"
    result, policy = run(recorder, OWN, actor=[again] * 6, discriminator=["no"], trimmer=["1"])
    nodes = [call.node for call in policy.asked]
    assert nodes == [*(["actor"] * 3), "discriminator", "trimmer", *(["actor"] * 3)]
    assert (len(result["steps"]), result["answer"], result["accepted"]) == (2, again, False)
    assert search_refine.reward(OWN, result)["reward"] == 0.0


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SEARCH: Ann", "Ann"),
        ("  **search** for Ann's town", "for Ann's town"),
        ("Search:", ""),
        ("Oslo", None),
        ("I would search Ann", None),
        ("searching", None),
        ("", None),
        ("SEARCH " + "x" * 1000, "x" * 60),
        ("SEARCH: Ann\nOslo", "Ann"),
    ],
)
def test_a_line_that_begins_with_search_is_a_query(text: str, query: str | None) -> None:
    assert search_refine.text_to_query(text) == query


@pytest.mark.parametrize(
    ("text", "kept"),
    [("1", 0), ("step 2.", 1), ("3", 2), ("4", 2), ("0", 2), ("-1", 2), ("none", 2), ("", 2), ("9" * 9999 + " 1", 0)],
)
def test_a_trimmer_that_names_no_step_cuts_the_answer_only(text: str, kept: int) -> None:
    assert search_refine.text_to_prefix_length(text, 2) == kept


def test_every_question_is_answered_by_two_searches() -> None:
    bosses = {person.name: person.boss for person in people()}
    for task in search_refine.tasks():
        _, whose, name = task["id"].split("-")
        verb = "lives" if task["id"].startswith("city") else "keeps"
        queries = [f"{name} {verb}"] if whose == "own" else [f"{name} reports", f"{bosses[name]} {verb}"]
        found = [query_to_sentences(query, corpus(), 3) for query in queries]
        assert all(sentence in sentences for sentence, sentences in zip(task["sentences"], found, strict=True))
        assert task["answer"] in task["sentences"][-1]


@pytest.mark.parametrize(
    ("found", "answer", "earned"),
    [
        ([["p", "q"]], "Oslo", (1.0, 1.0, 1.0, 1.0)),
        ([["p", "x"], ["p", "q"]], "Oslo", (1.0, 1.0, 0.5, 0.75)),  # what comes twice counts once as needed
        ([["p", "x"], ["y", "z"]], "in Oslo", (0.0, 2 / 3, 0.25, 2 / 3 * 1.25 / 2)),
        ([["p", "x"]], "Rome", (0.0, 0.0, 0.5, 0.05)),
        ([[]], "Oslo", (1.0, 1.0, 0.0, 0.5)),
        ([], "", (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_the_outcome_counts_more_the_denser_what_was_found(
    found: list[list[str]], answer: str, earned: tuple[float, ...]
) -> None:
    task = {"answer": "Oslo", "sentences": ["p", "q"]}
    rewards = search_refine.reward(task, {"steps": [Step("s", each) for each in found], "answer": answer})
    names = ("correct", "f1", "density", "reward")
    assert rewards == pytest.approx(dict(zip(names, earned, strict=True)) | {"cuts": 0.0})


def by_chance(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """An actor that searches well or, mostly, not at all; a refiner that knows a searched answer, mostly."""
    question, *steps = str(messages[-1]["content"]).split("\n")
    lucky = chance.random() < 0.35
    if node == "discriminator":
        return "yes" if len(steps) > 1 or chance.random() < 0.2 else "no"
    if node == "trimmer":
        return "1" if lucky else "the first of them"
    hops = ["reports"] * ("boss" in question) + ["lives" if "live" in question else "keeps"]
    if not steps:
        (name,) = (person.name for person in people() if re.search(rf"\b{person.name}\b", question))
        return f"SEARCH: {name} {hops[0]}" if lucky else "dunno"
    name, verb, found = re.findall(r"Searched (\w+) (\w+): (.*)", steps[-1])[0]
    last = re.findall(rf"{name} {verb} .*?(\w+)\.", found)[0]
    return f"SEARCH: {last} {hops[1]}" if len(steps) < len(hops) else last


@pytest.mark.slow
def test_training_moves_all_three_and_pulls_the_actor_towards_dense_right_answers(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "search_refine.toml", by_chance, tmp_path)
    assert sorted(trained.norms) == ["actor", "discriminator", "trimmer"]
    assert min(trained.norms.values()) > 0
    assert {trajectory.team_reward("cuts") for trajectory in trained.trained} == {0.0, 1.0}
    assert max(trajectory.team_reward("correct") or 0.0 for trajectory in trained.trained) == 1.0
    assert trained.pull("actor") > 0.2
