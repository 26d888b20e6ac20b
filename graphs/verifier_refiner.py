"""Generator -> verifier -> refiner as a search tree (MALT), on the duo's sums, with a value for each role.

A question becomes `generations` drafts, each draft `verifications` checks, each check `refinements` refined answers,
all as parallel `Send` branches; the answer is the number that most refined answers end with. Tasks, input and the
reward of one answer are those of `graphs.math_duo`.

From the paper (arXiv 2412.01928): the three roles, the tree in which every call is sampled several times, and value
iteration along it: the value of a refined answer is its reward, that of a check the mean of its refined answers, that
of a draft the mean of its checks; and the vote over the leaves. Simplified: the paper thresholds these values at
1/2 and trains each role on good and bad examples (SFT, then DPO), while here a call's return is the value itself;
the branching factor is 2, and the vote also decides while training.

How a value reaches the loss: step rewards are passed up along D, so a call also earns those of its descendants.
`credit` is therefore chosen so that the team reward (the mean over all leaves) plus the credit of a call and all its
descendants is exactly the value of the call (with gamma 1): credit = (1 - number of children) * (value - team reward).
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
TAIL_CHARACTERS = 60  # the last ones of an earlier role's text that a prompt quotes


class TreeState(TypedDict, total=False):
    """The state of the graph. `leaves` holds (path in the tree, what the refiner wrote)."""

    question: str
    leaves: Annotated[list[tuple[tuple[int, ...], str]], operator.add]
    answer: str


class Branch(TypedDict):
    """The input of one call of the tree: its path (a branch number a level), and the texts of the calls above it."""

    question: str
    path: tuple[int, ...]
    draft: str
    check: str


def build(
    model: BaseChatModel, generations: int = 2, verifications: int = 2, refinements: int = 2
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled tree, in which all three roles call `model`."""

    async def call_model(profile: str, branch: Branch) -> str:
        lines = [branch["question"]]
        lines += [f"Answer: {branch['draft'][-TAIL_CHARACTERS:]}"] if branch["draft"] else []
        lines += [f"Check: {branch['check'][-TAIL_CHARACTERS:]}"] if branch["check"] else []
        reply = await model.ainvoke([SystemMessage(profile), HumanMessage("\n".join(lines))])
        return str(reply.text).strip()

    def route_to_generators(state: TreeState) -> list[Send]:
        root = Branch(question=state["question"], path=(), draft="", check="")
        return _branches("generator", root, generations)

    async def generator(state: Branch) -> Command[Any]:
        draft = await call_model(GENERATOR, state)
        return Command(goto=_branches("verifier", {**state, "draft": draft}, verifications))

    async def verifier(state: Branch) -> Command[Any]:
        check = await call_model(VERIFIER, state)
        return Command(goto=_branches(LEAF, {**state, "check": check}, refinements))

    async def refiner(state: Branch) -> TreeState:
        return {"leaves": [(state["path"], await call_model(REFINER, state))]}

    def vote(state: TreeState) -> TreeState:
        return {"answer": leaves_to_answer([text for _, text in sorted(state["leaves"])])}

    graph = StateGraph(TreeState)
    graph.add_node("generator", generator, destinations=("verifier",))
    graph.add_node("verifier", verifier, destinations=(LEAF,))
    graph.add_node(LEAF, refiner)
    graph.add_node("vote", vote)
    graph.add_conditional_edges(START, route_to_generators, ["generator"])
    graph.add_edge(LEAF, "vote")
    graph.add_edge("vote", END)
    return graph.compile(name="verifier_refiner")


def _branches(node: str, branch: Branch, count: int) -> list[Send]:
    return [Send(node, {**branch, "path": (*branch["path"], number)}) for number in range(count)]


def leaves_to_answer(texts: Sequence[str]) -> str:
    """The number that most texts end with, the first of equals; "" where no text has a number."""
    votes = Counter(number for text in texts if (number := last_number(text)) is not None)
    return str(votes.most_common(1)[0][0]) if votes else ""


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one recorded episode; `run.game()` is its trajectory.

    Of the team: `correct`, 1 where the vote is the right number, and `reward`, which is trained on: the mean credit of
    all leaves. Of each call: `value`, MALT's, as a metric, and `credit`, which carries it to the loss. Both are absent
    where a refiner's text was not recorded.
    """
    leaf_credits = [number_credit(text, task["answer"]) for _, text in result["leaves"]]
    team = {
        "correct": float(last_number(result["answer"]) == task["answer"]),
        "reward": sum(leaf_credits) / len(leaf_credits),
    }
    game = run.game()
    leaf_texts = {action.action_id: action.completion for action in game.actions if action.node == LEAF}
    if any(text is None for text in leaf_texts.values()):
        return {**team, "value": None, "credit": None}
    children = calls_to_children([action.action_id for action in game.actions], game.edges)
    values = tree_to_values(children, {call: number_credit(text, task["answer"]) for call, text in leaf_texts.items()})
    credit = {call: (1 - len(children[call])) * (value - team["reward"]) for call, value in values.items()}
    return {
        **team,
        "value": {f"step:{call}": value for call, value in values.items()},
        "credit": {f"step:{call}": value for call, value in credit.items()},
    }


def calls_to_children(calls: Sequence[str], edges: Sequence[Any]) -> dict[str, list[str]]:
    """Call -> the calls that received its text by `Send`."""
    children: dict[str, list[str]] = {call: [] for call in calls}
    for edge in edges:
        if edge.kind == "send":
            children[edge.src].append(edge.dst)
    return children


def tree_to_values(children: Mapping[str, Sequence[str]], leaf_credits: Mapping[str, float]) -> dict[str, float]:
    """Value iteration: the value of a leaf is its credit, that of every other call the mean over its children."""
    values: dict[str, float] = {}

    def compute_value(call: str) -> float:
        if call not in values:
            below = children[call]
            values[call] = leaf_credits[call] if call in leaf_credits else sum(map(compute_value, below)) / len(below)
        return values[call]

    return {call: compute_value(call) for call in children}
