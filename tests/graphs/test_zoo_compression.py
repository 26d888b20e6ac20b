"""Owns: the zoo's reasoner whose chunks are weighed (SCMA): D, what becomes a chunk, the length term, own rewards."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories
from support.zoo_rig import ZOO, train_zoo

from graphs import compression
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import split_tasks
from trace_store.journal import Journal

TASK = {"id": "t", "question": "What is 3 + 4?", "answer": 7}
WORDY = "Let me think. 3 + 4 = 7. A nice sum. So it is 7."
SENTENCES = ["Let me think.", "3 + 4 = 7.", "A nice sum.", "So it is 7."]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, *answers: str) -> tuple[dict[str, Any], ScriptedPolicy]:
    """One run, with what reasoner, segmenter and scorer say."""
    nodes = ("reasoner", "segmenter", "scorer")
    policy = ScriptedPolicy(answers={node: [answer] for node, answer in zip(nodes, answers, strict=False)})
    return asyncio.run(wrap(compression.build(policy), recorder).ainvoke(compression.task_to_input(TASK))), policy


def earned(result: dict[str, Any], tokens: tuple[int | None, ...] = (11,)) -> dict[str, Any]:
    actions = [SimpleNamespace(node="reasoner", sampled_tokens=count) for count in tokens]
    return compression.reward(TASK, result, SimpleNamespace(game=lambda: SimpleNamespace(actions=actions)))


def test_the_scorer_sees_the_segmenters_chunks_and_never_the_answer(recorder: Recorder) -> None:
    result, policy = run(recorder, WORDY, "1, 2 and 3", "1 5 1")
    chain = "reasoner>segmenter segmenter>scorer"
    assert recorded_edges(recorder) == {"trigger": chain, "data": chain}
    assert result["chunks"] == ["Let me think.", "3 + 4 = 7.", "A nice sum. So it is 7."]
    prompts = [call.prompt.split("human: ")[-1] for call in policy.asked]
    assert prompts[1].startswith("1. Let me think.\n2. 3 + 4 = 7.\n3. A nice sum.\n4. So it is 7.\nNew steps?")
    assert prompts[2].startswith("1. Let me think.\n2. 3 + 4 = 7.\n3. A nice sum. So it is 7.\nScores?")


def test_nobody_acts_after_an_empty_reasoning(recorder: Recorder) -> None:
    result, policy = run(recorder, " \n")
    assert [call.node for call in policy.asked] == ["reasoner"]
    assert recorded_trajectories(recorder)[0].episode.outcome == "terminated"
    found = earned(result)
    assert (found["correct"], found["reward"], found["length_cost"], found["own"]) == (0.0, 0.0, 0.0, None)


@pytest.mark.parametrize(
    ("answers", "credit", "length_cost", "own"),
    [
        # 13 idle characters, 23 more: 36 of 120. Sentence 2 alone brings the answer: a cut before and after it.
        ((WORDY, "1 2 3", "1 5 1"), 1.0, 0.3, (1.0, 1.0)),
        # 10 of 46 characters are rightly scored.
        ((WORDY, "1 2 3", "5 5 5"), 1.0, 0.0, (1.0, 10 / 46)),
        # Without scores every chunk counts by half; 13 + 10 + 11 + 11 = 45 characters.
        ((WORDY, "no idea", "1 2 3"), 1.0, 22.5 / 120, (0.0, 0.0)),
        ((WORDY, "2 1", "5 5 5 1"), 1.0, 11 / 120, (0.0, 21 / 45)),
        # Joined: one chunk of 48 characters with spaces, of which the 10 of `3 + 4 = 7.` are freed by half. It shares
        # 13, 10 and 22 of its 45 characters with the three parts: a mean of a third.
        ((WORDY, "1", "3"), 1.0, 43 / 120, (1 / 3, 0.5)),
        ((WORDY, "1", "5"), 1.0, 38 / 120, (1 / 3, 1.0)),
        # 13 + 10 before the end: the first part shares 13 characters with the chunk of 23, the second 10.
        ((WORDY, "1 3", "5 1"), 1.0, (24 - 10 + 23) / 120, ((13 / 23 + 10 / 23 + 1) / 3, 1.0)),
        # Commas: one sentence, and one clause of it is freed; without them no more than 20 characters of 45.
        (("Let me think, 3 + 4 = 7, a nice sum, so it is 7.", "1", "5"), 1.0, 38 / 120, (1.0, 1.0)),
        (("3 plus 4 is as we can easily see the number 7", "1", "5"), 1.0, 25 / 120, (1.0, 1.0)),
        (("7", "1", "5"), 1.0, 0.0, (1.0, 1.0)),
        (("7 or 8", "1", "1"), 0.1, 6 / 120, (1.0, 0.0)),
        (("x" * 4000, "1", "1"), 0.0, 1.0, (1.0, 1.0)),
        (("8.", "1 9", "0"), 0.0, 1 / 120, (0.0, 0.0)),
    ],
)
def test_rewards_are_those_worked_out_by_hand(
    answers: tuple[str, ...], credit: float, length_cost: float, own: tuple[float, float], recorder: Recorder
) -> None:
    result, _ = run(recorder, *answers)
    found = earned(result)
    assert found["correct"] == float(credit == 1.0)
    assert found["length_cost"] == pytest.approx(length_cost)
    assert found["reward"] == pytest.approx(credit - compression.LENGTH_PRICE * length_cost)
    assert found["own"] == pytest.approx({"agent:segmenter": own[0], "agent:scorer": own[1]})
    assert recorded_trajectories(recorder)[0].episode.outcome == "terminated"


SIX = (
    "Let me think about this sum. We have to add two numbers. This is a nice sum. We start with the first one."
    " So then we add the second. So the answer is 7."
)
UNEVEN = "First let me think about this sum that we have been given here. Now. So. Well. 3 + 4 = 7. Yes."
LONG = f"{'We think about it for a long time, ' * 10}and go on. 3 + 4 = 7. {'It was a nice sum ' * 5}to do."


def joined_and_scored(text: str, starts: list[int], scores: list[int]) -> dict[str, float]:
    """What the team earns, and what segmenter and scorer do with what they earn by themselves, at weight 1.0."""
    chunks = compression.join_sentences(compression.text_to_sentences(text), starts)
    found = earned({"reasoning": text, "starts": starts, "chunks": chunks, "scores": scores})
    return {"team": found["reward"]} | {name: found["reward"] + value for name, value in found["own"].items()}


def right_scores(text: str, starts: list[int]) -> list[int]:
    chunks = compression.join_sentences(compression.text_to_sentences(text), starts)
    return [5 if is_essential else 1 for is_essential in compression.texts_to_essential(chunks, 7)]


def all_starts(text: str) -> list[list[int]]:
    later = range(2, len(compression.text_to_sentences(text)) + 1)
    return [[1, *cuts] for count in range(len(later) + 1) for cuts in itertools.combinations(later, count)]


TEXTS = [
    ("Let me think. Let me think. 3 + 4 = 7. So it is 7.", [1, 3, 4]),
    (WORDY, [1, 2, 3]),
    (SIX, [1, 6]),
    (SIX.replace(". ", ", "), [1]),
    (UNEVEN, [1, 5, 6]),
    (LONG, [1, 2, 3]),
    ("So the answer is 7.", [1]),
    ("I do not know. It is a sum. Is it 8?", [1]),
]


@pytest.mark.parametrize(("text", "right"), TEXTS)
def test_a_scorer_earns_most_by_right_scores_whatever_the_chunks_are(text: str, right: list[int]) -> None:
    """Flattery of an idle chunk, however long, loses more of the scorer's own reward than the team gains by it."""
    for starts in all_starts(text):
        honest = right_scores(text, starts)
        best = joined_and_scored(text, starts, honest)["agent:scorer"]
        for scores in itertools.product((1, 3, 5), repeat=len(starts)):
            if list(scores) != honest:
                assert joined_and_scored(text, starts, list(scores))["agent:scorer"] < best, (starts, scores)
    assert len(right_scores(text, right)) == len(right)


@pytest.mark.parametrize(("text", "right"), TEXTS)
def test_a_segmenter_earns_most_by_the_right_chunks(text: str, right: list[int]) -> None:
    best = joined_and_scored(text, right, right_scores(text, right))["agent:segmenter"]
    for starts in all_starts(text):
        found = joined_and_scored(text, starts, right_scores(text, starts))
        assert starts == right or found["agent:segmenter"] < best, starts


def test_idle_sentences_cost_the_team_as_much_when_they_are_joined_or_written_with_commas() -> None:
    """Six sentences, of which five, or 132 characters with their spaces, are idle: more than FULL_LENGTH."""
    assert joined_and_scored(SIX, [1, 6], [1, 5])["team"] == pytest.approx(1 - compression.LENGTH_PRICE)
    for text in (SIX, SIX.replace(". ", ", "), SIX.replace(".", "")):
        assert joined_and_scored(text, [1], [5])["team"] == pytest.approx(1 - compression.LENGTH_PRICE)


def test_tokens_of_the_reasoner_are_absent_where_nobody_counted_them(recorder: Recorder) -> None:
    result, _ = run(recorder, "7", "1", "5")
    assert earned(result)["reasoner_tokens"] == 11.0
    assert [earned(result, tokens)["reasoner_tokens"] for tokens in ((), (None,))] == [None, None]


def test_chunks_are_all_sentences_in_order_whatever_the_segmenter_says() -> None:
    chance = random.Random(0)
    for _ in range(300):
        words = ["one", "7", ".", "!", " ", "\n", "? ", "x. "]
        sentences = compression.text_to_sentences(
            "one" + "".join(chance.choices(words, k=chance.randint(0, 40))).rstrip()
        )
        assert len(sentences) <= compression.MAX_SENTENCES
        text = " ".join(chance.choices(["1", "2", "3", "x", "-1", "99"], k=chance.randint(0, 4)))
        starts = compression.text_to_starts(text, len(sentences))
        assert " ".join(compression.join_sentences(sentences, starts)) == " ".join(sentences)


def test_tasks_are_distinct_and_say_their_sum() -> None:
    tasks = list(compression.tasks())
    assert len({task["id"] for task in tasks}) == len(tasks) == 105
    for task in tasks:
        assert sum(map(int, re.findall(r"\d+", task["question"]))) == task["answer"]
        assert set(compression.task_to_input(task)) == {"question"}


def test_no_held_out_sum_is_a_training_sum_in_the_other_order() -> None:
    config = toml_to_config(ZOO / "compression.toml")
    sides = split_tasks(list(compression.tasks()), config.graph.heldout)
    trained, held_out = ([frozenset(re.findall(r"\d+", task["question"])) for task in side] for side in sides)
    assert not set(trained) & set(held_out)
    assert len(held_out) == config.compare.tasks
    # The larger number comes first in some, last in others.
    assert {a > b for a, b in (map(int, re.findall(r"\d+", task["question"])) for task in compression.tasks())} == {
        True,
        False,
    }


def weighs(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A reasoner that is short or wordy, and right two times in three; the others are right or useless by chance."""
    text = messages[-1]["content"]
    if node == "reasoner":
        total = sum(map(int, re.findall(r"\d+", text)))
        total += chance.random() < 0.3
        return f"= {total}." if chance.random() < 0.5 else f"Well, let me think about all of this. So. = {total}."
    lines = text.splitlines()[:-1]
    if chance.random() < 0.5:
        return "zzzz zzzz"
    if node == "segmenter":
        return " ".join(str(number) for number in range(1, len(lines) + 1))
    return " ".join("5" if "=" in line else "1" for line in lines)


@pytest.mark.slow
def test_training_pulls_the_reasoner_towards_right_and_short_and_the_others_towards_their_own(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "compression.toml", weighs, tmp_path, rounds=2, episodes=12)
    assert sorted(trained.norms) == ["reasoner", "scorer", "segmenter"]
    assert min(trained.norms.values()) > 0
    assert trained.pull("reasoner") > 0
    for node in ("segmenter", "scorer"):

        def own(trajectory: Any, node: str = node) -> float | None:
            return next((paid.value for paid in trajectory.rewards if (paid.name, paid.node) == ("own", node)), None)

        assert trained.pull(node, own) > 0.2
