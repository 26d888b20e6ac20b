"""An actor that searches and answers, and a refiner that cuts its trajectory at the first bad step (Search-R2).

A question becomes steps (a query and the retrieved sentences), then an answer; a discriminator accepts the whole or
not; where it does not, a trimmer names the first bad step, that step and all later ones are removed, and the actor goes
on from the rest. Limits: MAX_STEPS searches in a trajectory, MAX_CUTS cuts; what is written after the last cut stands,
and no discriminator is asked.

From the paper (arXiv 2602.03647): the actor whose reasoning is interleaved with searches; a Meta-Refiner of two
parts, discriminator and trimmer, which keep the good prefix and have the rest written again; both trained together; a
reward that combines the outcome with the information density of the retrieved text. Simplified: a step is one line of
plain text (`SEARCH: words` or an answer) over 160 sentences; the outcome is an F1, not only 0 or 1; each of the three
agents has an adapter of its own; at most one cut. The weights of the reward are ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.last_number import numbers_in
from graphs.local_corpus import people, search
from graphs.word_overlap import exact_match, f1

_EXAMPLE_QUESTION = "Question: Where does Mary live?"
ACTOR = FewShotPrompt(
    "Write SEARCH: and words to search for. Once you know the answer, reply with that one word.",
    (
        (_EXAMPLE_QUESTION, "SEARCH: Mary"),
        (
            f"{_EXAMPLE_QUESTION}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens. Paul reports to Mary.",
            "Athens",
        ),
    ),
)
DISCRIMINATOR = FewShotPrompt(
    "Do these steps answer the question? Reply yes or no.",
    (
        (f"{_EXAMPLE_QUESTION}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens.\n2. Answer: Athens", "yes"),
        (f"{_EXAMPLE_QUESTION}\n1. Searched Paul: Paul keeps a fish.\n2. Answer: fish", "no"),
    ),
)
TRIMMER = FewShotPrompt(
    "The answer is wrong. Which step is the first bad one? Reply with its number only.",
    (
        (f"{_EXAMPLE_QUESTION}\n1. Searched Paul: Paul keeps a fish.\n2. Answer: fish", "1"),
        (f"{_EXAMPLE_QUESTION}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens.\n2. Answer: hen", "2"),
    ),
)

QUESTIONS = {
    "city": ("Where does {name} live?", "Where does the boss of {name} live?"),
    "pet": ("Which animal does {name} keep?", "Which animal does the boss of {name} keep?"),
}

MAX_STEPS = 2
MAX_CUTS = 1
QUERY_CHARACTERS = 60
ANSWER_CHARACTERS = 60  # of an answer that the refiner is shown


class Step(NamedTuple):
    """One search of the actor: its query and the retrieved sentences."""

    query: str
    sentences: list[str]


class SearchState(TypedDict, total=False):
    """The state that the nodes share. `steps` and `answer` are the current trajectory; a cut removes its end."""

    question: str
    steps: list[Step]
    query: str | None  # the next search of the actor; None once it answered
    answer: str
    accepted: bool  # the newest verdict; none is given after the last cut
    cuts: int


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which actor, discriminator and trimmer call `model`."""

    async def call_model(few_shot: FewShotPrompt, question: str, steps: list[Step], answer: str | None) -> str:
        lines = [f"{number}. {_step_to_line(step)}" for number, step in enumerate(steps, 1)]
        lines += [f"{len(lines) + 1}. Answer: {answer[:ANSWER_CHARACTERS]}"] if answer is not None else []
        prompt = "\n".join([f"Question: {question}", *lines])
        reply = await model.ainvoke(few_shot.messages(prompt))
        return str(reply.text).strip()

    async def actor(state: SearchState) -> SearchState:
        steps = state.get("steps", [])
        text = await call_model(ACTOR, state["question"], steps, answer=None)
        query = text_to_query(text) if len(steps) < MAX_STEPS else None
        return {"query": query, "answer": text if query is None else ""}

    def route_after_actor(state: SearchState) -> Literal["retrieval", "discriminator", "__end__"]:
        if state["query"] is not None:
            return "retrieval"
        return "__end__" if state.get("cuts", 0) >= MAX_CUTS else "discriminator"

    async def retrieval(state: SearchState) -> SearchState:
        query = state["query"] or ""
        sentences = await search.ainvoke({"query": query})
        return {"steps": [*state.get("steps", []), Step(query, sentences)]}

    async def discriminator(state: SearchState) -> SearchState:
        verdict = await call_model(DISCRIMINATOR, state["question"], state.get("steps", []), answer=state["answer"])
        return {"accepted": not re.match(r"\W*no\b", verdict, re.IGNORECASE)}

    def route_after_discriminator(state: SearchState) -> Literal["trimmer", "__end__"]:
        return "__end__" if state["accepted"] else "trimmer"

    async def trimmer(state: SearchState) -> SearchState:
        steps = state.get("steps", [])
        verdict = await call_model(TRIMMER, state["question"], steps, answer=state["answer"])
        prefix_length = text_to_prefix_length(verdict, len(steps))
        return {"steps": steps[:prefix_length], "cuts": state.get("cuts", 0) + 1}

    graph = StateGraph(SearchState)
    graph.add_node("actor", actor)
    graph.add_node("retrieval", retrieval)
    graph.add_node("discriminator", discriminator)
    graph.add_node("trimmer", trimmer)
    graph.add_edge(START, "actor")
    graph.add_conditional_edges("actor", route_after_actor)
    graph.add_edge("retrieval", "actor")
    graph.add_conditional_edges("discriminator", route_after_discriminator)
    graph.add_edge("trimmer", "actor")
    return graph.compile(name="search_refine")


def text_to_query(text: str) -> str | None:
    """The query of a line that begins with SEARCH; None where the line is an answer."""
    match = re.match(r"\W*search\b\W*(.*)", text, re.IGNORECASE)
    return match[1][:QUERY_CHARACTERS] if match else None


def text_to_prefix_length(text: str, step_count: int) -> int:
    """How many searches come before the first bad step that a trimmer names.

    The answer counts as the step after the last search. Without a number of a step only the answer is cut.
    """
    numbers = [number for number in numbers_in(text) if 1 <= number <= step_count + 1]
    return numbers[0] - 1 if numbers else step_count


def _step_to_line(step: Step) -> str:
    return f"Searched {step.query}: {' '.join(step.sentences) or 'nothing'}"


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks in one fixed order: town and pet of forty people, and of the boss of each, which takes two searches."""
    by_name = {person.name: person for person in people()}
    for fact, (own_template, boss_template) in QUESTIONS.items():
        for person in people():
            boss = by_name[person.boss]
            for kind, template, subject in (("own", own_template, person), ("boss", boss_template, boss)):
                first_hop = [] if subject is person else [person.sentences["boss"]]
                yield {
                    "id": f"{fact}-{kind}-{person.name}",
                    "question": template.format(name=person.name),
                    "answer": getattr(subject, fact),
                    "sentences": [*first_hop, subject.sentences[fact]],
                }


def task_to_input(task: dict[str, Any]) -> SearchState:
    """The question only: the graph sees neither the answer nor the sentences that hold it."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state: only the steps that no cut removed count.

    `correct` is 1 where the answer is the expected word and nothing else. `density` is the share of the retrieved
    sentences, each counted as often as it came, that the question needs; 0 where nothing was retrieved. `reward`, which
    is trained on, is the answer's F1 times (1 + density) / 2, and where that is 0, a tenth of the density.
    """
    retrieved = [sentence for step in result.get("steps", []) for sentence in step.sentences]
    relevant = set(task["sentences"]) & set(retrieved)
    density = len(relevant) / len(retrieved) if retrieved else 0.0
    outcome = f1(result["answer"], task["answer"])
    return {
        "correct": exact_match(result["answer"], task["answer"]),
        "f1": outcome,
        "density": density,
        "cuts": float(result.get("cuts", 0)),
        "reward": outcome * (1 + density) / 2 if outcome else density / 10,
    }
