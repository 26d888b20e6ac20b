"""Rewriter -> retrieval -> selector -> generator over a local corpus (MMOA-RAG): questions about made-up people.

A question becomes up to four queries, one a line; of the sentences that they retrieve the selector picks some by
number, and the generator turns these into an answer of one word. Retrieval is a tool and not a model, so it belongs to
the environment. Where nothing is retrieved the selector is skipped.

From the paper (arXiv 2501.15228): three agents with one shared reward, the F1 of the answer; and for each agent
a penalty of its own: the rewriter for more than four queries, the selector for an answer that is no list of different
numbers of sentences, the generator for an answer that is too long. Simplified: a corpus of 160 sentences and BM25
instead of a dense index; no supervised warm-up; each agent has an adapter of its own, where the paper's share all
parameters (`[train.trainer.agents]` can have them share one). The sizes of the penalties are ours.

A question as it stands, and a name alone, retrieve the sentence that answers it where it asks for a town or an animal,
and never where it asks for a profession: there the rewriter has something to learn, and everywhere that several queries
are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.local_corpus import people, search
from graphs.word_overlap import exact_match, f1

REWRITER = FewShotPrompt(
    "You are the rewriter. Turn the question into a few words to search for.",
    (("In which town is the home of Mary?", "Mary home town"), ("Which animal does Paul own?", "Paul animal")),
)
SELECTOR = FewShotPrompt(
    "You are the selector. Which sentences help to answer the question? Reply with their numbers only.",
    (
        ("In which town is the home of Mary?\n1. Mary lives in Athens.\n2. Paul reports to Mary.", "1"),
        ("Which animal does Paul own?\n1. Paul lives in Athens.\n2. Mary reports to Paul.\n3. Paul keeps a hen.", "3"),
    ),
)
GENERATOR = FewShotPrompt(
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

MAX_QUERIES = 4
MAX_SENTENCES = 5  # that the selector is shown
MAX_WORDS = 4  # of an answer, before it counts as too long
QUERY_CHARACTERS = 80

QUERIES_PENALTY = -0.5  # more than MAX_QUERIES
SELECTION_PENALTY = -0.5  # no list of numbers
LENGTH_PENALTY = -0.25  # more than MAX_WORDS


class RagState(TypedDict, total=False):
    """The state that the nodes share. `sentences` are the retrieved ones, `selected` those for the generator."""

    question: str
    queries: list[str]
    sentences: list[str]
    selection: str
    selected: list[str]
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled pipeline, in which the three agents call `model`."""

    async def rewriter(state: RagState) -> RagState:
        reply = await model.ainvoke(REWRITER.messages(state["question"]))
        return {"queries": [line.strip() for line in str(reply.text).splitlines() if line.strip()]}

    async def retrieval(state: RagState) -> RagState:
        sentences: list[str] = []
        for query in state["queries"][:MAX_QUERIES]:
            sentences += await search.ainvoke({"query": query[:QUERY_CHARACTERS]})
        return {"sentences": list(dict.fromkeys(sentences))[:MAX_SENTENCES]}

    def route_after_retrieval(state: RagState) -> Literal["selector", "generator"]:
        return "selector" if state["sentences"] else "generator"

    async def selector(state: RagState) -> RagState:
        prompt = _number_sentences(state["question"], state["sentences"])
        reply = await model.ainvoke(SELECTOR.messages(prompt))
        selection = str(reply.text)
        numbers = selection_to_numbers(selection, len(state["sentences"]))
        # Without a usable number the generator reads everything, so that early rounds still earn rewards.
        selected = [state["sentences"][number - 1] for number in numbers] or state["sentences"]
        return {"selection": selection, "selected": selected}

    async def generator(state: RagState) -> RagState:
        prompt = "\n".join([*state.get("selected", []), state["question"]])
        reply = await model.ainvoke(GENERATOR.messages(prompt))
        return {"answer": str(reply.text).strip()}

    graph = StateGraph(RagState)
    graph.add_node("rewriter", rewriter)
    graph.add_node("retrieval", retrieval)
    graph.add_node("selector", selector)
    graph.add_node("generator", generator)
    graph.add_edge(START, "rewriter")
    graph.add_edge("rewriter", "retrieval")
    graph.add_conditional_edges("retrieval", route_after_retrieval)
    graph.add_edge("selector", "generator")
    graph.add_edge("generator", END)
    return graph.compile(name="rag")


def _number_sentences(question: str, sentences: Sequence[str]) -> str:
    lines = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([question, *lines])


def selection_to_numbers(selection: str, count: int) -> list[int]:
    """The distinct numbers from 1 to `count` in a selection, in its order."""
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", selection) if len(digits) <= 2]
    return list(dict.fromkeys(number for number in numbers if 1 <= number <= count))


def is_selection(selection: str, count: int) -> bool:
    """Whether a selection is nothing but distinct numbers from 1 to `count`, separated by commas or spaces."""
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
    """The question only: the graph sees neither the answer nor the sentence that holds it."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    Of the team: `correct`, 1 where the answer is the expected word and nothing else (articles and punctuation aside);
    `reward`, which is trained on, the F1 of its words; `found`, 1 where the sentence with the answer was retrieved. Of
    each agent that acted: `penalty`, which is 0 or less.
    """
    penalty = {
        "agent:rewriter": QUERIES_PENALTY if len(result["queries"]) > MAX_QUERIES else 0.0,
        "agent:generator": LENGTH_PENALTY if len(result["answer"].split()) > MAX_WORDS else 0.0,
    }
    if "selection" in result:
        penalty["agent:selector"] = (
            0.0 if is_selection(result["selection"], len(result["sentences"])) else SELECTION_PENALTY
        )
    return {
        "correct": exact_match(result["answer"], task["answer"]),
        "reward": f1(result["answer"], task["answer"]),
        "found": float(task["sentence"] in result["sentences"]),
        "penalty": penalty,
    }
