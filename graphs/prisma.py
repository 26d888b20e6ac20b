"""A question of one or two hops -> searches, sentences that are kept as notes, and an answer of one word (PRISMA).

A planner writes the next search, or DONE; the search runs over the local corpus; an inspector keeps one of the
sentences that were found as a note, or says NONE, and then the planner tries again; a solver answers from the notes
alone. At most MAX_PLANS searches, the last DONE included. Search and notes are the environment's.

From the paper (PRISMA: Reinforcement Learning Guided Two-Stage Policy Optimization): plan, retrieve, inspect, solve
and memoize; an inspector whose verdict sends the planner back; stage one, in which planner and solver learn as experts
each by its own reward, and stage two, in which the outcome is shared, both by group comparison (`prisma-modules`, then
`prisma-two-stage`; `prisma-joint` is stage two from the base model on). Simplified: 160 sentences about made-up
people; the memory is the notes of one question; stage two is GRPO on the answer for all three modules instead of OARPO
for the inspector. The modules' own rewards are ours, exact because the needed sentences are known.

Invariant: the solver sees nothing but notes and question, so what was not kept cannot be answered.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import FewShotPrompt
from graphs.first_line import first_line
from graphs.last_number import numbers_in
from graphs.local_corpus import Person, people, search, text_to_words
from graphs.word_overlap import exact_match, f1

_TWO_HOPS, _ONE_HOP = "Where does the boss of Mary live?", "Which animal does Paul keep?"
_BOSS_NOTE, _BOTH_NOTES = "Mary reports to Paul.", "Mary reports to Paul. Paul lives in Athens."
PLANNER = FewShotPrompt(
    "Write words to search for next. Reply DONE once the notes answer the question.",
    (
        (f"{_TWO_HOPS}\nNotes: none\nSearch?", "Mary reports"),
        (f"{_TWO_HOPS}\nNotes: {_BOSS_NOTE}\nSearch?", "Paul lives"),
        (f"{_TWO_HOPS}\nNotes: {_BOTH_NOTES}\nSearch?", "DONE"),
        (f"{_ONE_HOP}\nNotes: none\nSearch?", "Paul keeps"),
    ),
)
INSPECTOR = FewShotPrompt(
    "Which sentence helps next? Reply with its number, or NONE.",
    (
        (f"{_TWO_HOPS}\nNotes: none\n1. Mary keeps a hen.\n2. {_BOSS_NOTE}\nWhich?", "2"),
        (f"{_TWO_HOPS}\nNotes: {_BOSS_NOTE}\n1. Paul lives in Athens.\n2. Paul keeps a hen.\nWhich?", "1"),
        (f"{_ONE_HOP}\nNotes: none\n1. Mary keeps a hen.\n2. {_BOSS_NOTE}\nWhich?", "NONE"),
        (f"{_ONE_HOP}\nNotes: none\n1. Paul lives in Athens.\n2. Mary keeps a hen.\n3. Paul keeps a hen.\nWhich?", "3"),
    ),
)
SOLVER = FewShotPrompt(
    "Answer with one word from the notes, or unknown.",
    (
        (f"Notes: {_BOTH_NOTES}\n{_TWO_HOPS}", "Athens"),
        (f"Notes: Paul keeps a hen.\n{_ONE_HOP}", "hen"),
        (f"Notes: none\n{_ONE_HOP}", "unknown"),
        ("Notes: Paul lives in Athens.\nWhere does Paul live?", "Athens"),
    ),
)

QUESTIONS = {
    "city": ("Where does {name} live?", "Where does the boss of {name} live?"),
    "pet": ("Which animal does {name} keep?", "Which animal does the boss of {name} keep?"),
    "job": ("What is the job of {name}?", "What is the job of the boss of {name}?"),
}

MAX_PLANS = 4
QUERY_CHARACTERS = 60
RIGHT_PERSON = 0.3  # of a search that names whom the next sentence is about, and does not find it
UNKNOWN = "unknown"

Verdict = tuple[Literal["kept", "none", "unclear"], str]
"""What the inspector said, and the sentence that it kept, "" for none."""


class SearchState(TypedDict, total=False):
    """The state that the nodes share. `retrieved` and `verdicts` hold all, for the reward: no agent reads them."""

    question: str
    query: str
    plans: Annotated[list[str], operator.add]
    sentences: list[str]
    retrieved: Annotated[list[list[str]], operator.add]
    verdicts: Annotated[list[Verdict], operator.add]
    notes: Annotated[list[str], operator.add]
    failed_query: str
    answer: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop, in which the three modules call `model`."""

    async def planner(state: SearchState) -> SearchState:
        failed = state.get("failed_query")
        hint = f"Nothing for: {failed}\n" if failed else ""
        notes = notes_to_line(state.get("notes", []))
        reply = await model.ainvoke(PLANNER.messages(f"{state['question']}\n{notes}\n{hint}Search?"))
        query = first_line(str(reply.text))[:QUERY_CHARACTERS]
        return {"query": query, "plans": [query]}

    def route_after_planner(state: SearchState) -> Literal["retrieval", "solver"]:
        return "solver" if is_done(state["query"], state.get("notes", [])) else "retrieval"

    async def retrieval(state: SearchState) -> SearchState:
        found_sentences = await search.ainvoke({"query": state["query"]})
        sentences = [sentence for sentence in found_sentences if sentence not in state.get("notes", [])]
        failed_query = "" if sentences else state["query"]
        return {"sentences": sentences, "retrieved": [sentences], "failed_query": failed_query}

    def route_after_retrieval(state: SearchState) -> Literal["inspector", "planner", "solver"]:
        return "inspector" if state["sentences"] else route_next_plan(state)

    async def inspector(state: SearchState) -> SearchState:
        sentences = state["sentences"]
        lines = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
        prompt = "\n".join([state["question"], notes_to_line(state.get("notes", [])), *lines, "Which?"])
        reply = await model.ainvoke(INSPECTOR.messages(prompt))
        verdict = text_to_verdict(str(reply.text), sentences)
        if verdict[0] == "kept":
            return {"verdicts": [verdict], "notes": [verdict[1]]}
        return {"verdicts": [verdict], "failed_query": state["query"]}

    def route_next_plan(state: SearchState) -> Literal["planner", "solver"]:
        return "solver" if len(state["plans"]) == MAX_PLANS else "planner"

    async def solver(state: SearchState) -> SearchState:
        prompt = f"{notes_to_line(state.get('notes', []))}\n{state['question']}"
        reply = await model.ainvoke(SOLVER.messages(prompt))
        return {"answer": str(reply.text).strip()}

    graph = StateGraph(SearchState)
    graph.add_node("planner", planner)
    graph.add_node("retrieval", retrieval)
    graph.add_node("inspector", inspector)
    graph.add_node("solver", solver)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", route_after_planner)
    graph.add_conditional_edges("retrieval", route_after_retrieval)
    graph.add_conditional_edges("inspector", route_next_plan)
    graph.add_edge("solver", END)
    return graph.compile(name="prisma")


def notes_to_line(notes: Sequence[str]) -> str:
    """What every module is shown of the notes."""
    return f"Notes: {' '.join(notes) or 'none'}"


def is_done(query: str, notes: Sequence[str]) -> bool:
    """Whether a plan ends the search: it says DONE, and there is a note."""
    return bool(notes) and text_to_words(query)[:1] == ["done"]


def text_to_verdict(text: str, sentences: Sequence[str]) -> Verdict:
    """The sentence whose number comes first in a text, or that it wants none, or neither."""
    numbers = numbers_in(text)
    if numbers and 1 <= numbers[0] <= len(sentences):
        return "kept", sentences[numbers[0] - 1]
    return ("none", "") if re.search(r"\bnone\b", text, flags=re.IGNORECASE) else ("unclear", "")


def tasks() -> Iterator[dict[str, Any]]:
    """120 tasks in one fixed order: of each of forty people three facts, of which one is asked by way of who reports.

    Each of the 160 sentences is needed by one task alone. So a held-out question asks what no training task asks, and
    goes by a boss that none goes by: what was learned by heart does not answer it.
    """
    by_name = {person.name: person for person in people()}
    for index, person in enumerate(people()):
        boss = by_name[person.boss]  # everybody is the boss of one other, so all facts of all people come up
        for fact_index, (fact, (one_hop, two_hops)) in enumerate(QUESTIONS.items()):
            if fact_index != index % len(QUESTIONS):
                yield _fact_to_task(boss, fact, one_hop.format(name=boss.name))
                continue
            task = _fact_to_task(boss, fact, two_hops.format(name=person.name))
            yield task | {"id": f"boss-{fact}-{person.name}", "needed": [person.sentences["boss"], *task["needed"]]}


def _fact_to_task(person: Person, fact: str, question: str) -> dict[str, Any]:
    """`needed` are the sentences that lead to the answer, in order."""
    answer = getattr(person, fact)
    needed = [person.sentences[fact]]
    return {"id": f"{fact}-{person.name}", "question": question, "answer": answer, "needed": needed}


def task_to_input(task: dict[str, Any]) -> SearchState:
    """The question only: the graph sees neither the answer nor the sentences that hold it."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    Of the team: `correct`, 1 where the answer is the expected word and nothing else; `reward`, the F1 of its words,
    which stage two is trained on; `hops`, the share of the needed sentences that were kept; `searches`, a count; and
    `stage_one`, always 0, for training by the modules' own rewards alone. Of each call of planner and solver `own`, a
    step reward from 0 to 1: of a plan see `result_to_credits`; of an answer its F1, against UNKNOWN where a needed
    sentence is missing. It is absent where the record has not one call for each plan and answer. As a mean over a
    module's calls it would praise each of them for the best one. `verdicts` is the mean over those of the inspector,
    which stage one leaves alone: a measure, since what a frozen module earns would go to the plans before it.
    """
    notes = result.get("notes", [])
    plan_credits, verdict_credits = result_to_credits(task["needed"], result)
    is_answerable = set(task["needed"]) <= set(notes)
    answer_credit = f1(result["answer"], task["answer"] if is_answerable else UNKNOWN)
    credits_of = {"planner": plan_credits, "solver": [answer_credit]}
    calls_of = {node: [a.action_id for a in run.game().actions if a.node == node] for node in credits_of}
    is_recorded = all(len(calls_of[node]) == len(values) for node, values in credits_of.items())
    own = {
        f"step:{call}": value
        for node, values in credits_of.items()
        for call, value in zip(calls_of[node], values, strict=is_recorded)
    }
    return {
        "correct": exact_match(result["answer"], task["answer"]),
        "reward": f1(result["answer"], task["answer"]),
        "hops": sum(sentence in notes for sentence in task["needed"]) / len(task["needed"]),
        "searches": float(len(result.get("retrieved", []))),
        "stage_one": 0.0,
        "verdicts": sum(verdict_credits) / len(verdict_credits) if verdict_credits else None,
        "own": own if is_recorded else None,
    }


def result_to_credits(needed: Sequence[str], result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """What each plan and each verdict was worth where it was given, by the first needed sentence without a note.

    A plan: 1 where the search found that sentence, RIGHT_PERSON where it only names whom the sentence is about; once
    all are noted, 1 for DONE; else 0. A verdict: 1 for keeping that sentence, or for NONE where it was not among those
    found; else 0.
    """
    notes: list[str] = []
    verdicts = iter(result.get("verdicts", []))
    plan_credits, verdict_credits = [], []
    for index, plan in enumerate(result["plans"]):
        next_sentence = next((sentence for sentence in needed if sentence not in notes), None)
        if is_done(plan, notes):
            plan_credits.append(float(next_sentence is None))
            break
        sentences = result["retrieved"][index]
        is_right_person = next_sentence is not None and text_to_words(next_sentence)[0] in text_to_words(plan)
        plan_credits.append(1.0 if next_sentence in sentences else RIGHT_PERSON * is_right_person)
        if sentences:
            verdict, sentence = next(verdicts)
            is_right = sentence == next_sentence if next_sentence in sentences else verdict == "none"
            verdict_credits.append(float(is_right))
            notes += [sentence] if verdict == "kept" else []
    return plan_credits, verdict_credits
