"""Generator -> verifier -> refiner as a search tree (MALT), on the duo's sums, with a value for each role.

A question becomes `generations` drafts, each draft `verifications` checks, each check `refinements` refined answers,
all as parallel `Send` branches; the answer is the number that most refined answers end with. Tasks and input are those
of `graphs.math_duo`; so is the worth of one answer.

From the paper (arXiv 2412.01928): the three roles, the tree in which every call is sampled several times, and value
iteration along it: a refined answer is worth what it is worth against the truth, a check the mean of its refined
answers, a draft the mean of its checks; and the vote over the leaves. Simplified: the paper thresholds these values at
1/2 and trains each role on good and bad examples (SFT, then DPO), while here the value itself is what a call earned;
the branching factor is 2, and the vote also decides while training.

How a value reaches the loss: rewards of steps are passed up along D, so a call also earns what the calls below it do.
`credit` is therefore what each call must be given so that the team's reward (the mean of all leaves) and all credit at
or below the call add up to exactly its value (with gamma 1): (1 - calls directly below it) * (its value - the mean of
all leaves).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send

from graphs.last_number import last_number, number_credit

GENERATOR = "You are the Generator. Solve the problem and reply with the number only."
VERIFIER = "You are the Verifier. Check the answer: say right or wrong, and the right number."
REFINER = "You are the Refiner. Use the check to correct the answer. Reply with the final number only."

LEAF = "refiner"
TAIL_LETTERS = 60  # of what an earlier role said, the last ones; keeps prompts short


class TreeState(TypedDict, total=False):
    """What the graph is given and gives. `leaves` holds (place in the tree, what the refiner wrote)."""

    question: str
    leaves: Annotated[list[tuple[tuple[int, ...], str]], operator.add]
    answer: str


class Branch(TypedDict):
    """What one call of the tree is sent: its place, and what was said on the way to it."""

    question: str
    place: tuple[int, ...]
    draft: str
    check: str


def build(
    model: BaseChatModel, generations: int = 2, verifications: int = 2, refinements: int = 2
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled tree, in which all three roles call `model`."""

    async def ask(profile: str, branch: Branch) -> str:
        lines = [branch["question"]]
        lines += [f"Answer: {branch['draft'][-TAIL_LETTERS:]}"] if branch["draft"] else []
        lines += [f"Check: {branch['check'][-TAIL_LETTERS:]}"] if branch["check"] else []
        reply = await model.ainvoke([SystemMessage(profile), HumanMessage("\n".join(lines))])
        return str(reply.text).strip()

    def to_generators(state: TreeState) -> list[Send]:
        root = Branch(question=state["question"], place=(), draft="", check="")
        return _branches("generator", root, generations)

    async def generator(state: Branch) -> Command[Any]:
        draft = await ask(GENERATOR, state)
        return Command(goto=_branches("verifier", {**state, "draft": draft}, verifications))

    async def verifier(state: Branch) -> Command[Any]:
        check = await ask(VERIFIER, state)
        return Command(goto=_branches(LEAF, {**state, "check": check}, refinements))

    async def refiner(state: Branch) -> TreeState:
        return {"leaves": [(state["place"], await ask(REFINER, state))]}

    def vote(state: TreeState) -> TreeState:
        return {"answer": leaves_to_answer([text for _, text in sorted(state["leaves"])])}

    graph = StateGraph(TreeState)
    graph.add_node("generator", generator, destinations=("verifier",))
    graph.add_node("verifier", verifier, destinations=(LEAF,))
    graph.add_node(LEAF, refiner)
    graph.add_node("vote", vote)
    graph.add_conditional_edges(START, to_generators, ["generator"])
    graph.add_edge(LEAF, "vote")
    graph.add_edge("vote", END)
    return graph.compile(name="verifier_refiner")


def _branches(node: str, branch: Branch, count: int) -> list[Send]:
    return [Send(node, {**branch, "place": (*branch["place"], number)}) for number in range(count)]


def leaves_to_answer(texts: Sequence[str]) -> str:
    """The number that most texts end with, the first of equals; "" where no text has a number."""
    votes = Counter(number for text in texts if (number := last_number(text)) is not None)
    return str(votes.most_common(1)[0][0]) if votes else ""


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one recorded episode; `run.game()` is its trajectory.

    Of the team: `correct`, 1 where the vote is the right number, and `reward`, which is trained on: the mean worth of
    all leaves. Of each call: `value`, MALT's, to look at, and `credit`, which carries it to the loss. Both are absent
    where what a refiner said was not recorded.
    """
    worth = [number_credit(text, task["answer"]) for _, text in result["leaves"]]
    team = {
        "correct": float(last_number(result["answer"]) == task["answer"]),
        "reward": sum(worth) / len(worth),
    }
    game = run.game()
    leaves = {a.action_id: a.completion for a in game.actions if a.node == LEAF}
    if any(text is None for text in leaves.values()):
        return {**team, "value": None, "credit": None}
    below = calls_below([a.action_id for a in game.actions], game.edges)
    values = tree_to_values(below, {call: number_credit(text, task["answer"]) for call, text in leaves.items()})
    credit = {call: (1 - len(below[call])) * (value - team["reward"]) for call, value in values.items()}
    return {
        **team,
        "value": {f"step:{call}": value for call, value in values.items()},
        "credit": {f"step:{call}": value for call, value in credit.items()},
    }


def calls_below(calls: Sequence[str], edges: Sequence[Any]) -> dict[str, list[str]]:
    """Each call -> the calls that were sent what it said."""
    below: dict[str, list[str]] = {call: [] for call in calls}
    for edge in edges:
        if edge.kind == "send":
            below[edge.src].append(edge.dst)
    return below


def tree_to_values(below: Mapping[str, Sequence[str]], leaves: Mapping[str, float]) -> dict[str, float]:
    """Value iteration: a leaf has its worth, every other call the mean of the calls below it."""
    values: dict[str, float] = {}

    def value_of(call: str) -> float:
        if call not in values:
            children = below[call]
            values[call] = leaves[call] if call in leaves else sum(map(value_of, children)) / len(children)
        return values[call]

    return {call: value_of(call) for call in below}
