"""Rewriter -> retrieval -> selector -> generator over a local corpus (MMOA-RAG): questions about made-up people.

A question becomes up to four searches, one a line; the sentences that they find become those that the selector names by
number, and these an answer of one word. Retrieval is a tool and not a model, so it belongs to the environment. Where
nothing is found the selector has nothing to do and is not asked.

From the paper (arXiv 2501.15228): three agents that one reward binds together, the F1 of the answer; and for each agent
a penalty of its own: the rewriter for more than four searches, the selector for an answer that is no list of different
numbers of sentences, the generator for an answer that is too long. Simplified: a corpus of 160 sentences and BM25
instead of a dense index; no supervised warm-up; each agent has an adapter of its own, where the paper's share all
parameters (`[train.trainer.agents]` can have them share one). How large a penalty is, is ours.

Neither the questions nor the examples use the words of the corpus, and a name alone finds more about a person than is
shown: so the rewriter has something to learn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShot
from graphs.local_corpus import people, search
from graphs.word_overlap import exact_match, f1

REWRITER = FewShot(
    "You are the rewriter. Turn the question into a few words to search for.",
    (("In which town is the home of Mary?", "Mary home town"), ("Which animal does Paul own?", "Paul animal")),
)
SELECTOR = FewShot(
    "You are the selector. Which sentences help to answer the question? Reply with their numbers only.",
    (
        ("In which town is the home of Mary?\n1. Mary lives in Athens.\n2. Paul reports to Mary.", "1"),
        ("Which animal does Paul own?\n1. Paul lives in Athens.\n2. Mary reports to Paul.\n3. Paul keeps a hen.", "3"),
    ),
)
GENERATOR = FewShot(
    "You are the generator. Answer the question from the sentences with one word.",
    (
        ("Mary lives in Athens.\nIn which town is the home of Mary?", "Athens"),
        ("Paul lives in Athens.\nPaul keeps a hen.\nWhich animal does Paul own?", "hen"),
    ),
)

QUESTIONS = {
    "city": "In which town is the home of {name}?",
    "pet": "Which animal does {name} own?",
    "job": "What is the profession of {name}?",
}

MOST_QUERIES = 4
MOST_SENTENCES = 5  # that the selector is shown
MOST_WORDS = 4  # of an answer, before it counts as too long
QUERY_LETTERS = 80

TOO_MANY_QUERIES = -0.5
NO_SELECTION = -0.5
TOO_LONG = -0.25


class RagState(TypedDict, total=False):
    """What the nodes share."""

    question: str
    queries: list[str]
    found: list[str]
    selection: str
    selected: list[str]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled pipeline, in which the three agents call `model`."""

    async def rewriter(state: RagState) -> RagState:
        reply = await model.ainvoke(REWRITER.messages(state["question"]))
        return {"queries": [line.strip() for line in str(reply.text).splitlines() if line.strip()]}

    async def retrieval(state: RagState) -> RagState:
        found: list[str] = []
        for query in state["queries"][:MOST_QUERIES]:
            found += await search.ainvoke({"query": query[:QUERY_LETTERS]})
        return {"found": list(dict.fromkeys(found))[:MOST_SENTENCES]}

    def anything_found(state: RagState) -> Literal["selector", "generator"]:
        return "selector" if state["found"] else "generator"

    async def selector(state: RagState) -> RagState:
        asked = _numbered(state["question"], state["found"])
        reply = await model.ainvoke(SELECTOR.messages(asked))
        selection = str(reply.text)
        numbers = selection_to_numbers(selection, len(state["found"]))
        # Without a usable number the generator reads everything, so that a first round is not silent.
        selected = [state["found"][number - 1] for number in numbers] or state["found"]
        return {"selection": selection, "selected": selected}

    async def generator(state: RagState) -> RagState:
        asked = "\n".join([*state.get("selected", []), state["question"]])
        reply = await model.ainvoke(GENERATOR.messages(asked))
        return {"answer": str(reply.text).strip()}

    graph = StateGraph(RagState)
    graph.add_node("rewriter", rewriter)
    graph.add_node("retrieval", retrieval)
    graph.add_node("selector", selector)
    graph.add_node("generator", generator)
    graph.add_edge(START, "rewriter")
    graph.add_edge("rewriter", "retrieval")
    graph.add_conditional_edges("retrieval", anything_found)
    graph.add_edge("selector", "generator")
    graph.add_edge("generator", END)
    return graph.compile(name="rag")


def _numbered(question: str, sentences: Sequence[str]) -> str:
    lines = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([question, *lines])


def selection_to_numbers(selection: str, count: int) -> list[int]:
    """The different numbers from 1 to `count` that a selection names, in its order."""
    numbers = [int(found) for found in re.findall(r"[0-9]+", selection) if len(found) <= 2]
    return list(dict.fromkeys(number for number in numbers if 1 <= number <= count))


def is_selection(selection: str, count: int) -> bool:
    """Whether it is nothing but different numbers from 1 to `count`, with commas or spaces between them."""
    words = re.findall(r"[^\s,]+", selection.strip().removesuffix("."))
    return bool(words) and [str(number) for number in selection_to_numbers(selection, count)] == words


def tasks() -> Iterator[dict[str, Any]]:
    """120 tasks: town, pet and profession of each of forty people, in one fixed order."""
    for fact, question in QUESTIONS.items():
        for person in people():
            yield {
                "id": f"{fact}-{person.name}",
                "question": question.format(name=person.name),
                "answer": getattr(person, fact),
                "sentence": person.sentences[fact],
            }


def task_to_input(task: dict[str, Any]) -> RagState:
    """The graph sees neither the answer nor the sentence that holds it."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    Of the team: `correct`, 1 where the answer is the expected word and nothing else (articles and punctuation aside);
    `reward`, which is trained on, the F1 of its words; `found`, 1 where retrieval brought the sentence that says it. Of
    each agent that acted: `penalty`, which is 0 or less.
    """
    penalty = {
        "agent:rewriter": TOO_MANY_QUERIES if len(result["queries"]) > MOST_QUERIES else 0.0,
        "agent:generator": TOO_LONG if len(result["answer"].split()) > MOST_WORDS else 0.0,
    }
    if "selection" in result:
        penalty["agent:selector"] = 0.0 if is_selection(result["selection"], len(result["found"])) else NO_SELECTION
    return {
        "correct": exact_match(result["answer"], task["answer"]),
        "reward": f1(result["answer"], task["answer"]),
        "found": float(task["sentence"] in result["found"]),
        "penalty": penalty,
    }
