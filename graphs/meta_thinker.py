"""ReMA's two levels: a meta-thinker that says what to work out next, and a reasoner that does it, turn by turn.

After "ReMA: Learning to Meta-think for LLMs with Multi-Agent Reinforcement Learning": a high-level agent that plans,
watches and decides when to stop, a low-level agent that executes, several turns, and credit for each turn instead
of one for the whole run. The agents are updated alternately (`update = "alternating"` in the configuration).
Simplified: sums of three numbers, which take two turns, instead of contest mathematics; the credit of a turn depends on
its number instead of on a judge; at most MAX_TURNS turns.

Invariant: the meta-thinker acts first and before every turn, and cannot stop before the reasoner's first turn.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line
from graphs.last_number import last_number

MAX_TURNS = 3
MAX_SHOWN_CHARACTERS = 60
"""Characters of a plan or a turn that a prompt shows."""
FINISH = "FINISH"
TURN_COST = 0.05
HALF_WAY_CREDIT = 0.5
"""For the sum of the first two numbers."""

META_THINKER = f"You are the Meta-thinker. Say what to work out next, or {FINISH} when the question is answered."
REASONER = "You are the Reasoner. Do what the Meta-thinker says and end with the number."
_EXAMPLE_QUESTION = "Mia has 20 pens, gets 10 more and then 5 more. How many now?"
META_EXAMPLES = (
    (f"{_EXAMPLE_QUESTION}\nNext?", "Add 10 to 20."),
    (f"{_EXAMPLE_QUESTION}\nReasoner: 20 + 10 = 30\nNext?", "Add 5 to 30."),
    (f"{_EXAMPLE_QUESTION}\nReasoner: 20 + 10 = 30\nReasoner: 30 + 5 = 35\nNext?", FINISH),
)
REASONER_EXAMPLES = (
    (f"{_EXAMPLE_QUESTION}\nMeta-thinker: Add 10 to 20.", "20 + 10 = 30"),
    (f"{_EXAMPLE_QUESTION}\nReasoner: 20 + 10 = 30\nMeta-thinker: Add 5 to 30.", "30 + 5 = 35"),
)

TEMPLATES = (
    "{name} has {a} {things}, gets {b} more and then {c} more. How many {things} does {name} have now?",
    "{name} finds {a} {things}, then {b} and then {c}. How many {things} does {name} find?",
)
NAMES = ("Ann", "Tom", "Leo", "Eva")
OBJECTS = ("apples", "shells", "coins", "books")


class TurnsState(TypedDict, total=False):
    """The state that the two agents share. `turns` holds what the reasoner said, turn by turn."""

    question: str
    plan: str
    turns: Annotated[list[str], operator.add]


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop, in which both agents call `model`."""

    async def meta_thinker(state: TurnsState) -> TurnsState:
        prompt = f"{_state_to_transcript(state)}\nNext?"
        reply = await model.ainvoke(profile_to_messages(META_THINKER, META_EXAMPLES, prompt))
        return {"plan": _shorten(str(reply.text))}

    async def reasoner(state: TurnsState) -> TurnsState:
        prompt = f"{_state_to_transcript(state)}\nMeta-thinker: {state['plan']}"
        reply = await model.ainvoke(profile_to_messages(REASONER, REASONER_EXAMPLES, prompt))
        return {"turns": [_shorten(str(reply.text))]}

    def route_after_meta_thinker(state: TurnsState) -> Literal["reasoner", "__end__"]:
        return "__end__" if state["turns"] and FINISH in state["plan"].upper() else "reasoner"

    def route_after_reasoner(state: TurnsState) -> Literal["meta_thinker", "__end__"]:
        return "__end__" if len(state["turns"]) == MAX_TURNS else "meta_thinker"

    graph = StateGraph(TurnsState)
    graph.add_node("meta_thinker", meta_thinker)
    graph.add_node("reasoner", reasoner)
    graph.add_edge(START, "meta_thinker")
    graph.add_conditional_edges("meta_thinker", route_after_meta_thinker, {"reasoner": "reasoner", "__end__": END})
    graph.add_conditional_edges("reasoner", route_after_reasoner, {"meta_thinker": "meta_thinker", "__end__": END})
    return graph.compile(name="meta_thinker")


def _state_to_transcript(state: TurnsState) -> str:
    return "\n".join([state["question"], *(f"Reasoner: {turn}" for turn in state["turns"])])


def _shorten(text: str) -> str:
    """The first line, cut: one long turn must not crowd the others out of the prompt."""
    return first_line(text)[:MAX_SHOWN_CHARACTERS]


def tasks() -> Iterator[dict[str, Any]]:
    """All 216 tasks: a and b from 1 to 6 and c from 1 to 3 in both templates, in one fixed order."""
    rng = random.Random(0)
    for template_number, template in enumerate(TEMPLATES):
        for a in range(1, 7):
            for b in range(1, 7):
                for c in range(1, 4):
                    question = template.format(name=rng.choice(NAMES), things=rng.choice(OBJECTS), a=a, b=b, c=c)
                    task_id = f"sum-{template_number}-{a}-{b}-{c}"
                    yield {"id": task_id, "question": question, "half_way": a + b, "answer": a + b + c}


def task_to_input(task: dict[str, Any]) -> TurnsState:
    """The question only: the graph never sees the expected numbers."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `correct` is 1 where the last number of the last turn is the answer, and `turns` how many there were. `reward`,
    which is trained on, is `correct`, or a fifth where some turn got half way, less TURN_COST for every turn after the
    second. `turn` is a step reward, one for each call of the reasoner: 1 for the answer, HALF_WAY_CREDIT for the sum of
    the first two numbers, each only the first time, else 0. It reaches that call and the calls that it depended on, so
    also the plan that led to it. It is absent where the record does not have exactly one call for each turn.
    """
    numbers = [last_number(turn) for turn in result["turns"]]
    correct = numbers[-1] == task["answer"]
    # `pop`: a number that is repeated in a later turn earns nothing.
    number_to_credit = {task["half_way"]: HALF_WAY_CREDIT, task["answer"]: 1.0}
    turn_credits = [number_to_credit.pop(number, 0.0) if number is not None else 0.0 for number in numbers]
    calls = [action.action_id for action in run.game().actions if action.node == "reasoner"]
    half_way = task["half_way"] in numbers
    return {
        "correct": float(correct),
        "turns": float(len(numbers)),
        "reward": (1.0 if correct else 0.2 * half_way) - TURN_COST * max(0, len(numbers) - 2),
        "turn": {f"step:{call}": credit for call, credit in zip(calls, turn_credits, strict=True)}
        if len(calls) == len(turn_credits)
        else None,
    }
