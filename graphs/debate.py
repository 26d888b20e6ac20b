"""Three debaters who answer side by side, read each other and answer again, and a judge who reads them all.

After multi-agent debate as MARTI trains it: in each round every debater answers in a branch of its own, a join ends
the round, and in the next round each sees what the others said; a judge decides after the last. Tasks and input are
those of `graphs.math_duo`. Rewards are those of a debate with answers that can be checked: the team's for the judge's
answer, and each debater's own for what it said itself. Simplified: two rounds, and only numbers are compared; a debater
sees the last words of the others' latest answers and none of its own.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.last_number import last_number, number_credit

DEBATERS = {
    "debater_1": "You are one of three debaters. You calculate quickly. Reply with the number only.",
    "debater_2": "You are one of three debaters. You count step by step. Reply with the number only.",
    "debater_3": "You are one of three debaters. You check what others say. Reply with the number only.",
}
JUDGE = "You are the judge. Three debaters answered the question. Reply with the right number only."

ROUNDS = 2
TAIL_LETTERS = 40  # of what somebody said, the last ones; keeps prompts short


class Said(NamedTuple):
    """One answer of one debater."""

    round: int
    debater: str
    text: str


class DebateState(TypedDict, total=False):
    """What the nodes share. `round` counts from 0."""

    question: str
    round: int
    said: Annotated[list[Said], operator.add]
    answer: str


class Speaker(Protocol):
    """A debater's node."""

    async def __call__(self, state: DebateState) -> DebateState:
        """What one debater says in this round."""


def build(model: BaseChatModel, rounds: int = ROUNDS) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled debate, in which debaters and judge call `model`."""

    def debater(name: str, profile: str) -> Speaker:
        async def speak(state: DebateState) -> DebateState:
            number = state.get("round", 0)
            others = [s for s in state["said"] if s.round == number - 1 and s.debater != name]
            reply = await model.ainvoke([SystemMessage(profile), HumanMessage(_heard(state["question"], others))])
            return {"said": [Said(number, name, str(reply.text).strip())]}

        return speak

    def end_of_round(state: DebateState) -> DebateState:
        return {"round": state.get("round", 0) + 1}

    def who_is_next(state: DebateState) -> list[str]:
        return ["judge"] if state["round"] >= rounds else list(DEBATERS)

    async def judge(state: DebateState) -> DebateState:
        last = [said for said in state["said"] if said.round == rounds - 1]
        reply = await model.ainvoke([SystemMessage(JUDGE), HumanMessage(_heard(state["question"], last))])
        return {"answer": str(reply.text)}

    graph = StateGraph(DebateState)
    graph.add_node("end_of_round", end_of_round)
    graph.add_node("judge", judge)
    for name, profile in DEBATERS.items():
        graph.add_node(name, debater(name, profile))
        graph.add_edge(START, name)
    graph.add_edge(list(DEBATERS), "end_of_round")
    graph.add_conditional_edges("end_of_round", who_is_next, ["judge", *DEBATERS])
    graph.add_edge("judge", END)
    return graph.compile(name="debate")


def _heard(question: str, said: list[Said]) -> str:
    """The question and what was said, in the order of the debaters."""
    lines = [f"{s.debater}: {s.text[-TAIL_LETTERS:]}" for s in sorted(said, key=lambda s: s.debater)]
    return "\n".join([question, *lines])


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    Of the team: `correct`, 1 where the judge's last number is right; `reward`, which is trained on, adds 0.1 where the
    right number occurs at all; `agree`, 1 where the debaters' last numbers of the last round are one and the same. Of
    each debater: `own`, the mean worth of its answers over the rounds, on the same scale as `reward`.
    """
    by_debater = {name: [s for s in result["said"] if s.debater == name] for name in DEBATERS}
    last = {last_number(said[-1].text) for said in by_debater.values()}
    own = {
        f"agent:{name}": sum(number_credit(s.text, task["answer"]) for s in said) / len(said)
        for name, said in by_debater.items()
    }
    worth = number_credit(result["answer"], task["answer"])
    return {
        "correct": float(worth == 1.0),
        "reward": worth,
        "agree": float(len(last) == 1 and None not in last),
        "own": own,
    }
