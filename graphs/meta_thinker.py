"""ReMA's two levels: a meta-thinker that says what to work out next, and a reasoner that does it, turn by turn.

After "ReMA: Learning to Meta-think for LLMs with Multi-Agent Reinforcement Learning": a high-level agent that plans,
watches and decides when to stop, a low-level agent that carries out, several turns, and credit for each turn instead
of one for the whole run. Its agents learn in turns, one while the other rests (`update = "alternating"` in the
configuration). Simplified: sums of three numbers, which take two turns, instead of contest mathematics; a turn is worth
what its number is worth, instead of what a judge says; at most MOST_TURNS turns.

Invariant: the meta-thinker speaks first and before every turn, and cannot stop before the reasoner has spoken once.
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

MOST_TURNS = 3
MOST_SHOWN = 60
"""Letters of what somebody said that a prompt shows."""
FINISH = "FINISH"
TURN_COST = 0.05
HALF_WAY = 0.5
"""What the sum of the first two numbers is worth."""

META_THINKER = f"You are the Meta-thinker. Say what to work out next, or {FINISH} when the question is answered."
REASONER = "You are the Reasoner. Do what the Meta-thinker says and end with the number."
_ASKED = "Mia has 20 pens, gets 10 more and then 5 more. How many now?"
META_EXAMPLES = (
    (f"{_ASKED}\nNext?", "Add 10 to 20."),
    (f"{_ASKED}\nReasoner: 20 + 10 = 30\nNext?", "Add 5 to 30."),
    (f"{_ASKED}\nReasoner: 20 + 10 = 30\nReasoner: 30 + 5 = 35\nNext?", FINISH),
)
REASONER_EXAMPLES = (
    (f"{_ASKED}\nMeta-thinker: Add 10 to 20.", "20 + 10 = 30"),
    (f"{_ASKED}\nReasoner: 20 + 10 = 30\nMeta-thinker: Add 5 to 30.", "30 + 5 = 35"),
)

TEMPLATES = (
    "{name} has {a} {things}, gets {b} more and then {c} more. How many {things} does {name} have now?",
    "{name} finds {a} {things}, then {b} and then {c}. How many {things} does {name} find?",
)
NAMES = ("Ann", "Tom", "Leo", "Eva")
THINGS = ("apples", "shells", "coins", "books")


class TurnsState(TypedDict, total=False):
    """What the two agents share. `turns`: what the reasoner said, turn by turn."""

    question: str
    plan: str
    turns: Annotated[list[str], operator.add]


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop, in which both agents call `model`."""

    async def meta_thinker(state: TurnsState) -> TurnsState:
        asked = f"{_so_far(state)}\nNext?"
        reply = await model.ainvoke(profile_to_messages(META_THINKER, META_EXAMPLES, asked))
        return {"plan": _shown(str(reply.text))}

    async def reasoner(state: TurnsState) -> TurnsState:
        asked = f"{_so_far(state)}\nMeta-thinker: {state['plan']}"
        reply = await model.ainvoke(profile_to_messages(REASONER, REASONER_EXAMPLES, asked))
        return {"turns": [_shown(str(reply.text))]}

    def after_meta_thinker(state: TurnsState) -> Literal["reasoner", "__end__"]:
        return "__end__" if state["turns"] and FINISH in state["plan"].upper() else "reasoner"

    def after_reasoner(state: TurnsState) -> Literal["meta_thinker", "__end__"]:
        return "__end__" if len(state["turns"]) == MOST_TURNS else "meta_thinker"

    graph = StateGraph(TurnsState)
    graph.add_node("meta_thinker", meta_thinker)
    graph.add_node("reasoner", reasoner)
    graph.add_edge(START, "meta_thinker")
    graph.add_conditional_edges("meta_thinker", after_meta_thinker, {"reasoner": "reasoner", "__end__": END})
    graph.add_conditional_edges("reasoner", after_reasoner, {"meta_thinker": "meta_thinker", "__end__": END})
    return graph.compile(name="meta_thinker")


def _so_far(state: TurnsState) -> str:
    return "\n".join([state["question"], *(f"Reasoner: {turn}" for turn in state["turns"])])


def _shown(text: str) -> str:
    """The first line, cut: what is said in one turn must not crowd out the next."""
    return first_line(text)[:MOST_SHOWN]


def tasks() -> Iterator[dict[str, Any]]:
    """All 216 tasks: a and b from 1 to 6 and c from 1 to 3 in both templates, in one fixed order."""
    pick = random.Random(0)
    for number, template in enumerate(TEMPLATES):
        for a in range(1, 7):
            for b in range(1, 7):
                for c in range(1, 4):
                    question = template.format(name=pick.choice(NAMES), things=pick.choice(THINGS), a=a, b=b, c=c)
                    ident = f"sum-{number}-{a}-{b}-{c}"
                    yield {"id": ident, "question": question, "half_way": a + b, "answer": a + b + c}


def task_to_input(task: dict[str, Any]) -> TurnsState:
    """The graph never sees the numbers that are wanted."""
    return {"question": task["question"]}


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `correct` is 1 where the last number of the last turn is the answer, and `turns` how many there were. `reward`,
    which is trained on, is `correct`, or a fifth where some turn got half way, less TURN_COST for every turn after the
    second. `turn` is a reward of steps, one for each call of the reasoner: 1 for the answer, HALF_WAY for the sum of
    the first two numbers, each only the first time, else 0. It reaches that call and what it depended on, so also the
    plan that led to it. It is absent where the record has not one call for each turn.
    """
    numbers = [last_number(turn) for turn in result["turns"]]
    correct = numbers[-1] == task["answer"]
    worth = {task["half_way"]: HALF_WAY, task["answer"]: 1.0}
    earned = [worth.pop(number, 0.0) if number is not None else 0.0 for number in numbers]
    calls = [action.action_id for action in run.game().actions if action.node == "reasoner"]
    half_way = task["half_way"] in numbers
    return {
        "correct": float(correct),
        "turns": float(len(numbers)),
        "reward": (1.0 if correct else 0.2 * half_way) - TURN_COST * max(0, len(numbers) - 2),
        "turn": {f"step:{call}": value for call, value in zip(calls, earned, strict=True)}
        if len(calls) == len(earned)
        else None,
    }
