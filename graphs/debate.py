"""Three debaters who answer in parallel, read each other and answer again, and a judge who reads the last answers.

After multi-agent debate as MARTI trains it: in each round every debater answers in a branch of its own, a join ends
the round, and in the next round each sees the answers of the others; a judge decides after the last round. Tasks and
input are those of `graphs.math_duo`. Since answers can be checked, the team is rewarded for the judge's answer, and
each debater for its own answers. Simplified: two rounds, and only numbers are compared; a debater sees the end of the
others' latest answers and none of its own.
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
TAIL_CHARACTERS = 40  # the last ones of an answer that a prompt quotes


class DebaterAnswer(NamedTuple):
    """One answer of one debater; rounds count from 0."""

    round: int
    debater: str
    text: str


class DebateState(TypedDict, total=False):
    """The state that the nodes share. `round` counts from 0, `answer` is the judge's."""

    question: str
    round: int
    answers: Annotated[list[DebaterAnswer], operator.add]
    answer: str


class DebaterNode(Protocol):
    """A debater's node."""

    async def __call__(self, state: DebateState) -> DebateState:
        """Adds the debater's answer of this round."""


def build(model: BaseChatModel, rounds: int = ROUNDS) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled debate, in which debaters and judge call `model`."""

    def debater(name: str, profile: str) -> DebaterNode:
        async def speak(state: DebateState) -> DebateState:
            number = state.get("round", 0)
            previous = [a for a in state["answers"] if a.round == number - 1 and a.debater != name]
            prompt = _build_prompt(state["question"], previous)
            reply = await model.ainvoke([SystemMessage(profile), HumanMessage(prompt)])
            return {"answers": [DebaterAnswer(number, name, str(reply.text).strip())]}

        return speak

    def end_of_round(state: DebateState) -> DebateState:
        return {"round": state.get("round", 0) + 1}

    def route_after_round(state: DebateState) -> list[str]:
        return ["judge"] if state["round"] >= rounds else list(DEBATERS)

    async def judge(state: DebateState) -> DebateState:
        last_answers = [answer for answer in state["answers"] if answer.round == rounds - 1]
        prompt = _build_prompt(state["question"], last_answers)
        reply = await model.ainvoke([SystemMessage(JUDGE), HumanMessage(prompt)])
        return {"answer": str(reply.text)}

    graph = StateGraph(DebateState)
    graph.add_node("end_of_round", end_of_round)
    graph.add_node("judge", judge)
    for name, profile in DEBATERS.items():
        graph.add_node(name, debater(name, profile))
        graph.add_edge(START, name)
    graph.add_edge(list(DEBATERS), "end_of_round")
    graph.add_conditional_edges("end_of_round", route_after_round, ["judge", *DEBATERS])
    graph.add_edge("judge", END)
    return graph.compile(name="debate")


def _build_prompt(question: str, answers: list[DebaterAnswer]) -> str:
    """The question and the answers, in the order of the debaters' names."""
    lines = [f"{a.debater}: {a.text[-TAIL_CHARACTERS:]}" for a in sorted(answers, key=lambda a: a.debater)]
    return "\n".join([question, *lines])


def reward(task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Rewards of one episode, from its final state.

    Of the team: `correct`, 1 where the judge's last number is right; `reward`, which is trained on, adds 0.1 where the
    right number occurs at all; `agree`, 1 where the debaters' last numbers of the last round are one and the same. Of
    each debater: `own`, the mean over the rounds of what its answers earn, on the same scale as `reward`.
    """
    answers_by_debater = {name: [a for a in result["answers"] if a.debater == name] for name in DEBATERS}
    last_numbers = {last_number(answers[-1].text) for answers in answers_by_debater.values()}
    debater_rewards = {
        f"agent:{name}": sum(number_credit(answer.text, task["answer"]) for answer in answers) / len(answers)
        for name, answers in answers_by_debater.items()
    }
    judge_credit = number_credit(result["answer"], task["answer"])
    return {
        "correct": float(judge_credit == 1.0),
        "reward": judge_credit,
        "agree": float(len(last_numbers) == 1 and None not in last_numbers),
        "own": debater_rewards,
    }
