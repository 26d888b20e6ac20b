"""A question -> reasoning that is no longer than it must be: a reasoner, and two agents that weigh what it wrote.

The reasoner answers in sentences; a segmenter joins them to chunks; a scorer gives each chunk 1 to 5. The team earns
correctness less a length term in which a chunk counts the more the less it was worth, so that what is dropped first is
what the scorer finds idle. Only the reasoner is needed to answer: the other two act in training.

After SCMA (Self-Compression of Chain-of-Thought via Multi-Agent Reinforcement Learning, arXiv 2601.21919): reasoning,
segmentation and scoring agents, chunks that together are the reasoning, scores from 1 to 5, and one reward of all three
in which the scores weigh the length. Simplified: sums of two small numbers; the segmenter says which sentences begin a
chunk instead of writing the text again with marks; each agent has an adapter of its own, where the paper's share all
parameters. Ours are how a score discounts length (`chunks_to_length_cost`), the size of the term, and the own rewards
of segmenter and scorer by the numbers of the task: with the shared reward alone, the best scorer calls everything
essential.

Invariant: the chunks of a reasoning are all its sentences in order, whatever the segmenter wrote; what it or the scorer
cannot say costs that agent its own reward. The team's length term then counts every chunk as scored in the middle,
which may be more or less than a scorer would have found. Segmenter and scorer earn most, with what the team earns, by
what is right of the reasoning at hand.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.last_number import number_credit, numbers_in

REASONER = FewShotPrompt(
    "Work out the sum and end with the number.",
    (
        ("What is 10 + 2?", "Let me think about this. 10 + 2 = 12. That was a nice sum. So the answer is 12."),
        ("What is 5 + 10?", "We have to add two numbers. 5 + 10 = 15. The answer is 15."),
    ),
)
SEGMENTER = FewShotPrompt(
    "Each line is a sentence. Reply with the numbers of the sentences that begin a new step.",
    (
        ("1. Let me think.\n2. This is a sum.\n3. 10 + 2 = 12.\n4. A nice sum.\nNew steps?", "1 3 4"),
        ("1. 5 + 10 = 15.\n2. The answer is 15.\nNew steps?", "1 2"),
    ),
)
SCORER = FewShotPrompt(
    "How much does each step help? Reply with a score from 1 to 5 for each step.",
    (
        ("1. Let me think. This is a sum.\n2. 10 + 2 = 12.\n3. A nice sum.\nScores?", "1 5 1"),
        ("1. 5 + 10 = 15.\n2. The answer is 15.\nScores?", "5 1"),
    ),
)

MAX_SENTENCES = 6  # what follows belongs to the last of them
SHOWN_CHARACTERS = 60  # of a chunk or a sentence, to segmenter and scorer
HIGHEST_SCORE = 5
NEUTRAL_SCORE = 3  # of every chunk where the scorer gave no scores
FULL_LENGTH = 120  # characters of idle reasoning that cost LENGTH_PRICE
LENGTH_PRICE = 0.4
NEEDED_CHARACTERS = 20  # what "So the answer is 12." takes

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_CLAUSE_END = re.compile(r"(?<=[,;:.!?])\s+|\n+")


class ReasoningState(TypedDict, total=False):
    """The state that the nodes share. `starts` and `scores` are None where an agent gave nothing usable."""

    question: str
    reasoning: str
    starts: list[int] | None
    chunks: list[str]
    scores: list[int] | None


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled line of three, in which all agents call `model`. Nothing acts after an empty reasoning."""

    async def reasoner(state: ReasoningState) -> ReasoningState:
        reply = await model.ainvoke(REASONER.messages(state["question"]))
        return {"reasoning": str(reply.text).strip()}

    async def segmenter(state: ReasoningState) -> ReasoningState:
        sentences = text_to_sentences(state["reasoning"])
        reply = await model.ainvoke(SEGMENTER.messages(f"{_number_lines(sentences)}\nNew steps?"))
        starts = text_to_starts(str(reply.text), len(sentences))
        return {"starts": starts, "chunks": join_sentences(sentences, starts)}

    async def scorer(state: ReasoningState) -> ReasoningState:
        reply = await model.ainvoke(SCORER.messages(f"{_number_lines(state['chunks'])}\nScores?"))
        return {"scores": text_to_scores(str(reply.text), len(state["chunks"]))}

    def route_after_reasoner(state: ReasoningState) -> Literal["segmenter", "__end__"]:
        return "segmenter" if state["reasoning"] else "__end__"

    graph = StateGraph(ReasoningState)
    graph.add_node("reasoner", reasoner)
    graph.add_node("segmenter", segmenter)
    graph.add_node("scorer", scorer)
    graph.add_edge(START, "reasoner")
    graph.add_conditional_edges("reasoner", route_after_reasoner, {"segmenter": "segmenter", "__end__": END})
    graph.add_edge("segmenter", "scorer")
    graph.add_edge("scorer", END)
    return graph.compile(name="compression")


def _number_lines(texts: Sequence[str]) -> str:
    return "\n".join(f"{number}. {text[:SHOWN_CHARACTERS]}" for number, text in enumerate(texts, 1))


def text_to_sentences(text: str) -> list[str]:
    """At most MAX_SENTENCES, the last with all that follows."""
    sentences = [part for part in _SENTENCE_END.split(text) if part]
    rest = sentences[MAX_SENTENCES - 1 :]
    return [*sentences[: MAX_SENTENCES - 1], *([" ".join(rest)] if rest else [])]


def text_to_starts(text: str, count: int) -> list[int] | None:
    """The sentences, from 1, that begin a chunk; the first always does. None where a text is no rising list of them."""
    numbers = numbers_in(text)
    if not numbers or numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= count:
        return None
    return sorted({1, *numbers})


def join_sentences(sentences: Sequence[str], starts: Sequence[int] | None) -> list[str]:
    """The chunks; without `starts` each sentence is one."""
    all_starts = starts or range(1, len(sentences) + 1)
    return [" ".join(sentences[low:high]) for low, high in _starts_to_spans(all_starts, len(sentences))]


def _starts_to_spans(starts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """By chunk, the indices of its first sentence and of the one after its last."""
    bounds = [start - 1 for start in starts]
    return list(zip(bounds, [*bounds[1:], count], strict=True))


def text_to_scores(text: str, count: int) -> list[int] | None:
    """A score from 1 to HIGHEST_SCORE for each of `count` chunks; None where a text is not exactly that."""
    numbers = numbers_in(text)
    is_complete = len(numbers) == count and all(1 <= number <= HIGHEST_SCORE for number in numbers)
    return numbers if is_complete else None


def score_to_weight(score: int) -> float:
    """0 for the lowest score, 1 for the highest: the share of a chunk's length that costs nothing."""
    return (score - 1) / (HIGHEST_SCORE - 1)


def chunks_to_length_cost(chunks: Sequence[str], scores: Sequence[int] | None, answer: int) -> float:
    """Idle characters over FULL_LENGTH, at most 1. Without scores every chunk counts as scored NEUTRAL_SCORE.

    A score frees its weight of a chunk: of the one that brings the answer at most `needed_characters`, so that nothing
    is gained by joining idle sentences to it, or by writing commas in the place of full stops.
    """
    all_scores = scores or [NEUTRAL_SCORE] * len(chunks)
    idle = 0.0
    for chunk, score, is_essential in zip(chunks, all_scores, texts_to_essential(chunks, answer), strict=True):
        freed = needed_characters(chunk, answer) if is_essential else len(chunk)
        idle += len(chunk) - score_to_weight(score) * freed
    return min(idle / FULL_LENGTH, 1.0)


def needed_characters(chunk: str, answer: int) -> int:
    """What it takes to bring the answer: the shortest clause of a chunk that has it, at most NEEDED_CHARACTERS."""
    clauses = [clause for clause in _CLAUSE_END.split(chunk) if answer in numbers_in(clause)]
    return min([NEEDED_CHARACTERS, *map(len, clauses)])


def texts_to_essential(texts: Sequence[str], answer: int) -> list[bool]:
    """By text, whether it is the first that has the answer in it."""
    has_answer = [answer in numbers_in(text) for text in texts]
    return [known and not any(has_answer[:index]) for index, known in enumerate(has_answer)]


def starts_to_credit(sentences: Sequence[str], starts: Sequence[int] | None, answer: int) -> float:
    """How well chunks meet the parts of a reasoning, from 0 to 1; 0 where nothing was usable.

    The parts are the sentence that brings the answer, what is before it, and what is after it. Of a part counts the
    chunk that meets it best, by the characters that the two share over all characters of both; the credit is the mean
    over parts. So a reasoning that is joined to one chunk has 1 over its number of parts, however long it is.
    """
    if starts is None:
        return 0.0
    essential = enumerate(texts_to_essential(sentences, answer))
    parts = [{index for index, _ in group} for _, group in itertools.groupby(essential, key=lambda pair: pair[1])]
    chunks = [set(range(low, high)) for low, high in _starts_to_spans(starts, len(sentences))]

    def characters(indices: set[int]) -> int:
        return sum(len(sentences[index]) for index in indices)

    best = [max(characters(part & chunk) / characters(part | chunk) for chunk in chunks) for part in parts]
    return sum(best) / len(best)


def scores_to_credit(chunks: Sequence[str], scores: Sequence[int] | None, answer: int) -> float:
    """The mean over characters of 1 - |weight - essential| of their chunk; 0 where nothing was usable.

    By characters, as the length term counts: a long idle chunk that is called essential costs more here than it gains.
    """
    if scores is None:
        return 0.0
    weighed = zip(chunks, scores, texts_to_essential(chunks, answer), strict=True)
    right = sum(len(chunk) * (1 - abs(score_to_weight(score) - is_essential)) for chunk, score, is_essential in weighed)
    return right / sum(map(len, chunks))


def tasks() -> Iterator[dict[str, Any]]:
    """105 sums of two numbers from 1 to 15, in one fixed order; those with a 10 are left to the examples.

    Each is asked in one order of its numbers only, so that none is held out whose other order is trained on.
    """
    rng = random.Random(0)
    terms = [number for number in range(1, 16) if number != 10]
    for pair in itertools.combinations_with_replacement(terms, 2):
        a, b = rng.sample(pair, 2)
        yield {"id": f"sum-{a}-{b}", "question": f"What is {a} + {b}?", "answer": a + b}


def task_to_input(task: dict[str, Any]) -> ReasoningState:
    """The question only: the graph never sees the expected number."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    Of the team: `correct`, 1 where the last number of the reasoning is the answer; `length_cost`, see
    `chunks_to_length_cost`; `reward`, which is trained on: 1 where it is correct, 0.1 where the answer occurs at all,
    less LENGTH_PRICE * length_cost; `reasoner_tokens`, absent where the engine counted none. Of segmenter and scorer,
    where they acted: `own`, see `starts_to_credit` and `scores_to_credit`.
    """
    reasoning, answer = result["reasoning"], task["answer"]
    credit = number_credit(reasoning, answer)
    own, length_cost = None, 0.0
    if reasoning:
        chunks, scores = result["chunks"], result["scores"]
        length_cost = chunks_to_length_cost(chunks, scores, answer)
        own = {
            "agent:segmenter": starts_to_credit(text_to_sentences(reasoning), result["starts"], answer),
            "agent:scorer": scores_to_credit(chunks, scores, answer),
        }
    token_counts = [action.sampled_tokens for action in run.game().actions if action.node == "reasoner"]
    return {
        "correct": float(credit == 1.0),
        "reward": credit - LENGTH_PRICE * length_cost,
        "length_cost": length_cost,
        "reasoner_tokens": None if token_counts in ([], [None]) else float(token_counts[0]),
        "own": own,
    }
