"""Owns: the zoo's rewriter, selector and generator over a local corpus (MMOA-RAG): D, rewards, penalties, training.

Retrieval is the environment's: it is recorded as tool calls and is no action. Without anything found the selector does
not act, and earns nothing of its own, which is not 0.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import edges_of, recorded_edges, recorded_traces
from support.fake_vllm import Answer
from support.zoo_rig import ZOO, train_zoo

from graphs import rag
from graphs.local_corpus import corpus, people, query_to_sentences
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import Trajectory

TASK = next(rag.tasks())
PERSON = people()[0]
VERBS = {"town": "lives", "animal": "keeps", "profession": "works"}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, **answers: str) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={node: [answer] for node, answer in answers.items()})
    return asyncio.run(wrap(rag.build(policy), recorder).ainvoke(rag.task_to_input(TASK))), policy


def question_to_query(question: str) -> str:
    """The words of the corpus for a question."""
    (verb,) = (verb for word, verb in VERBS.items() if word in question)
    (name,) = (person.name for person in people() if re.search(rf"\b{person.name}\b", question))
    return f"{name} {verb}"


def test_each_agent_depends_on_the_one_before_it_through_the_tool(recorder: Recorder) -> None:
    query = f"{PERSON.name} lives"
    result, policy = run(recorder, rewriter=f"{query}\n\n{PERSON.name} keeps", selector="2, 1.", generator="Nowhere")
    found = [PERSON.sentences[fact] for fact in ("city", "pet", "boss")]
    assert (result["queries"], result["sentences"]) == ([query, f"{PERSON.name} keeps"], found)
    assert result["selected"] == [found[1], found[0]]
    assert f"human: {found[1]}\n{found[0]}\n{TASK['question']}" in policy.asked[2].prompt
    (spans,) = recorded_traces(recorder)
    assert [span.name for span in spans if span.operation == "execute_tool"] == ["execute_tool search"] * 2
    chain = "rewriter>selector selector>generator"
    assert edges_of(spans_to_trajectory(spans)) == {"trigger": chain, "data": chain}


def test_without_anything_found_the_selector_does_not_act(recorder: Recorder) -> None:
    result, policy = run(recorder, rewriter="xyzzy", generator="I do not know")
    assert "selected" not in result
    assert [call.node for call in policy.asked] == ["rewriter", "generator"]
    assert recorded_edges(recorder) == {"trigger": "rewriter>generator"}
    rewards = rag.reward(TASK, result)
    assert rewards["penalty"] == {"agent:rewriter": 0.0, "agent:generator": 0.0}
    assert (rewards["correct"], rewards["reward"], rewards["found"]) == (0.0, 0.0, 0.0)


def test_no_more_than_four_searches_run_however_many_are_written(recorder: Recorder) -> None:
    lines = "\n".join(f"{person.name} lives" for person in people()[:6])
    result, _ = run(recorder, rewriter=lines, selector="1", generator="Nowhere")
    (spans,) = recorded_traces(recorder)
    assert sum(span.operation == "execute_tool" for span in spans) == 4
    assert (len(result["queries"]), len(result["sentences"])) == (6, 5)


def test_every_answer_can_be_found_but_not_by_the_question_as_it_stands() -> None:
    first = [query_to_sentences(question_to_query(task["question"]), corpus(), 1) for task in rag.tasks()]
    assert first == [[task["sentence"]] for task in rag.tasks()]
    unaided = [task["sentence"] in query_to_sentences(task["question"], corpus(), 3) for task in rag.tasks()]
    assert 0.3 < sum(unaided) / len(unaided) < 0.8


@pytest.mark.parametrize(
    ("selection", "numbers", "well_formed"),
    [
        ("1, 3", [1, 3], True),
        (" 2 1.", [2, 1], True),
        ("3", [3], True),
        ("1, 1", [1], False),
        ("1, 4", [1], False),  # there are three
        ("0", [], False),
        ("Sentences 1 and 2", [1, 2], False),
        ("", [], False),
        ("none", [], False),
        ("1" * 10_000, [], False),
        ("-1", [1], False),
    ],
)
def test_a_selection_is_a_list_of_different_numbers_of_sentences(
    selection: str, numbers: list[int], well_formed: bool
) -> None:
    assert rag.selection_to_numbers(selection, 3) == numbers
    assert rag.is_selection(selection, 3) == well_formed


@pytest.mark.parametrize(
    ("changes", "team", "penalties"),
    [
        ({}, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
        ({"answer": "She lives in Oslo"}, (0.0, 0.4, 1.0), (0.0, 0.0, 0.0)),
        ({"answer": "She lives in Oslo, I think"}, (0.0, 2 / 7, 1.0), (0.0, 0.0, -0.25)),
        ({"answer": ""}, (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)),
        ({"queries": ["a"] * 5, "sentences": ["x"]}, (1.0, 1.0, 0.0), (-0.5, 0.0, 0.0)),
        ({"queries": []}, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
        ({"selection": "the first"}, (1.0, 1.0, 1.0), (0.0, -0.5, 0.0)),
    ],
)
def test_the_team_earns_f1_and_each_agent_pays_for_its_own_excess(
    changes: dict[str, Any], team: tuple[float, ...], penalties: tuple[float, ...]
) -> None:
    task = {"answer": "Oslo", "sentence": "Ann lives in Oslo."}
    result = {"queries": ["Ann"], "sentences": ["Ann lives in Oslo."], "selection": "1", "answer": "Oslo"} | changes
    rewards = rag.reward(task, result)
    assert (rewards["correct"], rewards["reward"], rewards["found"]) == pytest.approx(team)
    agents = ("agent:rewriter", "agent:selector", "agent:generator")
    assert rewards["penalty"] == dict(zip(agents, penalties, strict=True))


def by_chance(node: str, messages: list[dict[str, Any]], chance: random.Random) -> Answer:
    """A good query or five bad ones; a selection that is none, half the time; the answer of the first sentence."""
    text = str(messages[-1]["content"])
    lucky = chance.random() < 0.5
    if node == "rewriter":
        return question_to_query(text) if lucky else "Udo\nlet\nme\nsee\nnow"
    if node == "selector":
        return "1" if lucky else "all of them, please"
    first, *rest = text.split("\n")
    return first.rstrip(".").split()[-1] if rest else "?"


def penalty_of(node: str, trajectory: Trajectory) -> float | None:
    return next((r.value for r in trajectory.rewards if r.name == "penalty" and r.node == node), None)


AGENTS = ["rewriter", "selector", "generator"]


@pytest.mark.slow
def test_training_pulls_agents_towards_f1_and_away_from_their_penalties(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "rag.toml", by_chance, tmp_path)
    assert sorted(trained.norms) == sorted(AGENTS)
    assert min(trained.norms.values()) > 0
    assert trained.pull("rewriter") > 0.2
    assert trained.pull("selector", lambda trajectory: penalty_of("selector", trajectory)) > 0.2
    shares = [row["agents"] for row in trained.rounds if "agents" in row]
    for node in ("rewriter", "selector"):
        assert max((agents[node]["gradient_share"] or {"penalty": 0.0})["penalty"] for agents in shares) > 0


@pytest.mark.slow
def test_the_agents_may_share_all_parameters_as_the_papers_do(tmp_path: Path) -> None:
    one_adapter = {"train.trainer.agents": {agent: {"adapter": "rag"} for agent in AGENTS}}
    trained = train_zoo(ZOO / "rag.toml", by_chance, tmp_path, changes=one_adapter, rounds=2, episodes=4)
    assert len(set(trained.norms.values())) == 1
    assert min(trained.norms.values()) > 0
