"""An actor that searches and answers, and a refiner that cuts its trajectory at the first bad step (Search-R2).

A question becomes steps (a search and what it found), then an answer; a discriminator accepts the whole or not; where
it does not, a trimmer names the first bad step, everything from there is thrown away, and the actor goes on from what
is left. Limits: MOST_STEPS searches in a trajectory, MOST_CUTS cuts.

From the paper (arXiv 2602.03647): the actor whose reasoning is interleaved with searches; a Meta-Refiner of two
parts, discriminator and trimmer, who keep the good prefix and have the rest written again; both trained together; a
reward that joins the outcome with the density of information in what was retrieved. Simplified: a step is one line of
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

from graphs.few_shot import FewShot
from graphs.last_number import numbers_in
from graphs.local_corpus import people, search
from graphs.word_overlap import exact_match, f1

_ASKED = "Question: Where does Mary live?"
ACTOR = FewShot(
    "Write SEARCH: and words to search for. Once you know the answer, reply with that one word.",
    (
        (_ASKED, "SEARCH: Mary"),
        (f"{_ASKED}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens. Paul reports to Mary.", "Athens"),
    ),
)
DISCRIMINATOR = FewShot(
    "Do these steps answer the question? Reply yes or no.",
    (
        (f"{_ASKED}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens.\n2. Answer: Athens", "yes"),
        (f"{_ASKED}\n1. Searched Paul: Paul keeps a fish.\n2. Answer: fish", "no"),
    ),
)
TRIMMER = FewShot(
    "The answer is wrong. Which step is the first bad one? Reply with its number only.",
    (
        (f"{_ASKED}\n1. Searched Paul: Paul keeps a fish.\n2. Answer: fish", "1"),
        (f"{_ASKED}\n1. Searched Mary: Mary keeps a hen. Mary lives in Athens.\n2. Answer: hen", "2"),
    ),
)

QUESTIONS = {
    "city": ("Where does {name} live?", "Where does the boss of {name} live?"),
    "pet": ("Which animal does {name} keep?", "Which animal does the boss of {name} keep?"),
}

MOST_STEPS = 2
MOST_CUTS = 1
QUERY_LETTERS = 60
ANSWER_LETTERS = 60  # that the refiner is shown


class Step(NamedTuple):
    """One search of the actor."""

    query: str
    found: list[str]


class SearchState(TypedDict, total=False):
    """What the nodes share. `steps` and `answer` are the trajectory as it stands; a cut takes from it."""

    question: str
    steps: list[Step]
    wanted: str | None  # what the actor wants to search for; None once it answered
    answer: str
    accepted: bool
    cuts: int


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled graph, in which actor, discriminator and trimmer call `model`."""

    async def ask(profile: FewShot, state: SearchState, answer: str | None) -> str:
        lines = [f"{number}. {_step_to_line(step)}" for number, step in enumerate(state.get("steps", []), 1)]
        lines += [f"{len(lines) + 1}. Answer: {answer[:ANSWER_LETTERS]}"] if answer is not None else []
        asked = "\n".join([f"Question: {state['question']}", *lines])
        reply = await model.ainvoke(profile.messages(asked))
        return str(reply.text).strip()

    async def actor(state: SearchState) -> SearchState:
        text = await ask(ACTOR, state, None)
        query = text_to_query(text) if len(state.get("steps", [])) < MOST_STEPS else None
        return {"wanted": query, "answer": text if query is None else ""}

    def searches(state: SearchState) -> Literal["retrieval", "discriminator"]:
        return "discriminator" if state["wanted"] is None else "retrieval"

    async def retrieval(state: SearchState) -> SearchState:
        query = state["wanted"] or ""
        found = await search.ainvoke({"query": query})
        return {"steps": [*state.get("steps", []), Step(query, found)]}

    async def discriminator(state: SearchState) -> SearchState:
        verdict = await ask(DISCRIMINATOR, state, state["answer"])
        return {"accepted": not re.match(r"\W*no\b", verdict, re.IGNORECASE)}

    def ends(state: SearchState) -> Literal["trimmer", "__end__"]:
        return "__end__" if state["accepted"] or state.get("cuts", 0) >= MOST_CUTS else "trimmer"

    async def trimmer(state: SearchState) -> SearchState:
        steps = state.get("steps", [])
        keep = text_to_kept(await ask(TRIMMER, state, state["answer"]), len(steps))
        return {"steps": steps[:keep], "cuts": state.get("cuts", 0) + 1}

    graph = StateGraph(SearchState)
    graph.add_node("actor", actor)
    graph.add_node("retrieval", retrieval)
    graph.add_node("discriminator", discriminator)
    graph.add_node("trimmer", trimmer)
    graph.add_edge(START, "actor")
    graph.add_conditional_edges("actor", searches)
    graph.add_edge("retrieval", "actor")
    graph.add_conditional_edges("discriminator", ends)
    graph.add_edge("trimmer", "actor")
    return graph.compile(name="search_refine")


def text_to_query(text: str) -> str | None:
    """What a line asks to search for; None where it is an answer."""
    found = re.match(r"\W*search\b\W*(.*)", text, re.IGNORECASE)
    return found[1][:QUERY_LETTERS] if found else None


def text_to_kept(text: str, steps: int) -> int:
    """How many searches come before the first bad step that a trimmer names.

    The answer counts as the step after the last search. Without a number of a step only the answer is cut.
    """
    named = [number for number in numbers_in(text) if 1 <= number <= steps + 1]
    return named[0] - 1 if named else steps


def _step_to_line(step: Step) -> str:
    return f"Searched {step.query}: {' '.join(step.found) or 'nothing'}"


def tasks() -> Iterator[dict[str, Any]]:
    """160 tasks in one fixed order: town and pet of forty people, and of the boss of each, which takes two searches."""
    by_name = {person.name: person for person in people()}
    for fact, (plain, about_boss) in QUESTIONS.items():
        for person in people():
            boss = by_name[person.boss]
            for word, asked, meant in (("own", plain, person), ("boss", about_boss, boss)):
                hop = [] if meant is person else [person.sentences["boss"]]
                yield {
                    "id": f"{fact}-{word}-{person.name}",
                    "question": asked.format(name=person.name),
                    "answer": getattr(meant, fact),
                    "sentences": [*hop, meant.sentences[fact]],
                }


def task_to_input(task: dict[str, Any]) -> SearchState:
    """The graph sees neither the answer nor the sentences that hold it."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """Team rewards of one episode, from its final state: only what the cuts left counts.

    `correct` is 1 where the answer is the expected word and nothing else. `density` is the share of the retrieved
    sentences, each counted as often as it came, that the question needs; 0 where nothing was retrieved. `reward`, which
    is trained on, is the answer's F1 times (1 + density) / 2, and where that is 0, a tenth of the density.
    """
    found = [sentence for step in result.get("steps", []) for sentence in step.found]
    needed = set(task["sentences"]) & set(found)
    density = len(needed) / len(found) if found else 0.0
    outcome = f1(result["answer"], task["answer"])
    return {
        "correct": exact_match(result["answer"], task["answer"]),
        "f1": outcome,
        "density": density,
        "cuts": float(result.get("cuts", 0)),
        "reward": outcome * (1 + density) / 2 if outcome else density / 10,
    }
