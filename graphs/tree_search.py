"""Two coders grow one tree of programs: each call refines one of them or begins anew; the best is handed in.

After "MARS2: Scaling Multi-Agent Tree Search via Reinforcement Learning for Code Generation" (arXiv 2604.14564; its
code, MARTI, was at hand). Theirs: agents with weights of their own share a search tree; Thompson sampling, from the
root down, decides between a new program by one of the agents and going on below one that exists (AB-MCTS); a fixed
number of calls; what a call earns is shaped by its parent and its siblings (`shape_rewards`); the estimator is `mars2`.

Simplified: two adapters of one model in the place of different models, told apart by their worked examples (one is
shown division, the other min and max); functions of one line; posteriors of Beta, and an arm for each child. Ours: a
program that passes all examples is not refined; one that does not run costs `BROKEN_COST`. They shape in place, so that
a parent's reward is sometimes shaped before its children are compared with it; here all are compared as earned.

Invariants: a run has exactly PROGRAMS calls, whatever is written; nothing of it is executed but by
`graphs.tiny_python`. The draws of the search are seeded by what it has seen, so equal states go on equally.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import Example, profile_to_messages
from graphs.function_checks import describe_failure
from graphs.tiny_python import RefusedExpression, expression_to_value, pass_rate, text_to_expression

PROGRAMS = 4
"""Calls of one run: the search budget."""
MAX_SHOWN_CHARACTERS = 60
"""Characters of a program that the next prompt shows."""
SHAPING = 0.5
"""How much of a program's lead over its parent and its siblings is added to what it earned (their alpha)."""
SIBLING_SHARE = 0.5
"""How much of that lead is over the siblings, where there are any, and not over the parent (their beta)."""
BROKEN_COST = 0.1
"""For a program without a value on any check."""

PROFILE = "You are a Coder. Write one Python expression for the result of the function, and nothing else."
EXAMPLES: dict[str, tuple[Example, ...]] = {
    "coder_a": (
        ("f(x) adds 50 to x\nExpression?", "x + 50"),
        (
            "f(x) divides x by 40 and rounds down\nWritten: x / 40\nf(1) gave nothing: an operation that is not known\n"
            "Expression?",
            "x // 40",
        ),
    ),
    "coder_b": (
        ("f(a, b) gives the smaller of a and b, times 40\nExpression?", "min(a, b) * 40"),
        ("f(x) gives the larger of x and 30\nWritten: x + 30\nf(1) gave 31 and not 30\nExpression?", "max(x, 30)"),
    ),
}
CODERS = tuple(EXAMPLES)


class Program(NamedTuple):
    """One node of the tree. `parent` is the position of the program that it refines; None: it began anew."""

    expression: str
    coder: str
    parent: int | None
    score: float  # share of the examples that pass


class SearchState(TypedDict, total=False):
    """The state that the nodes share. `parent` and `coder` are what the search chose for the next call."""

    request: str
    parameters: list[str]
    examples: list[list[Any]]
    tree: Annotated[list[Program], operator.add]
    parent: int | None
    coder: str


class CoderNode(Protocol):
    """A coder's node."""

    async def __call__(self, state: SearchState) -> SearchState:
        """Adds the coder's program to the tree."""


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled search, in which both coders call `model`."""

    def search(state: SearchState) -> SearchState:
        if len(state["tree"]) == PROGRAMS:
            return {}
        parent, chosen_coder = choose_expansion(state["tree"], state["request"])
        return {"parent": parent, "coder": chosen_coder}

    def coder(name: str) -> CoderNode:
        async def write(state: SearchState) -> SearchState:
            parent = state["parent"]
            refined = None if parent is None else state["tree"][parent].expression
            prompt = describe_task(state, refined)
            reply = await model.ainvoke(profile_to_messages(PROFILE, EXAMPLES[name], prompt))
            expression = text_to_expression(str(reply.text))
            score = pass_rate(expression, state["parameters"], [(a, value) for a, value in state["examples"]])
            return {"tree": [Program(expression, name, parent, score=score)]}

        return write

    def route_after_search(state: SearchState) -> Literal["coder_a", "coder_b", "__end__"]:
        if len(state["tree"]) == PROGRAMS:
            return "__end__"
        return "coder_a" if state["coder"] == "coder_a" else "coder_b"

    graph = StateGraph(SearchState)
    graph.add_node("search", search)
    graph.add_edge(START, "search")
    graph.add_conditional_edges("search", route_after_search)
    for name in CODERS:
        graph.add_node(name, coder(name))
        graph.add_edge(name, "search")
    return graph.compile(name="tree_search")


def choose_expansion(tree: Sequence[Program], request: str) -> tuple[int | None, str]:
    """The program to refine (None: begin anew) and the coder that does it, by Thompson sampling from the root down.

    At a node each coder has an arm, the scores of what it wrote right below the node; and each child that does not pass
    all examples yet, the scores of all programs from it down. Every arm draws from Beta(1 + sum of scores, 1 + sum of
    (1 - score)), so one without a score draws evenly. The largest draw wins: a coder's ends the walk, a child's leads
    down to it.
    """
    chance = random.Random(repr((request, [(program.parent, program.score) for program in tree])))
    node: int | None = None
    while True:
        arms: dict[int | str, list[float]] = {
            name: [program.score for program in tree if program.parent == node and program.coder == name]
            for name in CODERS
        }
        for child, program in enumerate(tree):
            if program.parent == node and program.score < 1:
                arms[child] = [tree[i].score for i in find_subtree(tree, child)]
        draws = {arm: chance.betavariate(1 + sum(s), 1 + len(s) - sum(s)) for arm, s in arms.items()}
        best = max(draws, key=lambda arm: draws[arm])
        if isinstance(best, str):
            return node, best
        node = best


def find_subtree(tree: Sequence[Program], top: int) -> list[int]:
    """Positions of a program and of all that refine it, directly or not."""
    members = [top]
    for i, program in enumerate(tree):  # a parent stands before its children
        if program.parent in members:
            members.append(i)
    return members


def find_best(tree: Sequence[Program]) -> Program:
    """The program that passes most examples; of several the latest, as theirs."""
    return max(enumerate(tree), key=lambda numbered: (numbered[1].score, numbered[0]))[1]


def describe_task(state: SearchState, refined: str | None) -> str:
    """The prompt: the request and, where a program is refined, that program and its first failure."""
    if refined is None:
        return f"{state['request']}\nExpression?"
    failure = describe_failure(refined, state["parameters"], state["examples"])
    return f"{state['request']}\nWritten: {refined[:MAX_SHOWN_CHARACTERS]}\n{failure}\nExpression?"


def shape_rewards(rewards: Sequence[float], parents: Sequence[int | None]) -> list[float]:
    """What each program of a tree earned, with its lead over parent and siblings added, as in MARS2::

        r' = r + SHAPING * (r - ((1 - SIBLING_SHARE) * r_parent + SIBLING_SHARE * mean of the siblings' r))

    Siblings are the other programs with the same parent, those that began anew among them. Where parent or siblings are
    not there the other stands alone; without both r' = r. In units of reward.
    """
    shaped = []
    for i, (reward_of_program, parent) in enumerate(zip(rewards, parents, strict=True)):
        siblings = [rewards[j] for j, second_parent in enumerate(parents) if second_parent == parent and j != i]
        over_siblings = sum(siblings) / len(siblings) if siblings else None
        over_parent = None if parent is None else rewards[parent]
        if over_siblings is None or over_parent is None:
            baseline = over_parent if over_siblings is None else over_siblings
        else:
            baseline = (1 - SIBLING_SHARE) * over_parent + SIBLING_SHARE * over_siblings
        shaped.append(reward_of_program + (0.0 if baseline is None else SHAPING * (reward_of_program - baseline)))
    return shaped


def task_to_input(task: dict[str, Any]) -> SearchState:
    """The request, the examples for the search, and an empty tree; the graph never sees the checks."""
    return {**{key: task[key] for key in ("request", "parameters", "examples")}, "tree": []}  # type: ignore[typeddict-item]


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one run, from its tree and its record.

    A program is worth half the share of checks that it passes, and a half more where it passes all. `reward` is what
    the chosen program is worth, `correct` whether it passes all checks, `found` whether any program of the tree does,
    and `broken` counts the programs that have no value on any check. `path` is a step reward of each call: what its
    program is worth, less BROKEN_COST where it is broken, shaped by the tree. It is absent where the record does not
    have exactly one call for each program.
    """
    tree = [Program(*program) for program in result["tree"]]
    checks = [(arguments, value) for arguments, value in task["checks"]]
    passed = [pass_rate(program.expression, task["parameters"], checks) for program in tree]
    values = [0.5 * share + 0.5 * (share == 1) for share in passed]
    costs = [0.0 if runs_somewhere(program.expression, task["parameters"], checks) else BROKEN_COST for program in tree]
    shaped = shape_rewards(
        [value - cost for value, cost in zip(values, costs, strict=True)], [program.parent for program in tree]
    )
    chosen = tree.index(find_best(tree)) if tree else None
    calls = [(action.action_id, action.node) for action in run.game().actions if action.node in CODERS]
    is_matched = [node for _, node in calls] == [program.coder for program in tree]
    return {
        "correct": 0.0 if chosen is None else float(passed[chosen] == 1),
        "found": float(1 in passed),
        "broken": float(sum(cost > 0 for cost in costs)),
        "reward": 0.0 if chosen is None else values[chosen],
        "path": {f"step:{call}": value for (call, _), value in zip(calls, shaped, strict=True)} if is_matched else None,
    }


def runs_somewhere(expression: str, parameters: Sequence[str], checks: Sequence[tuple[Sequence[int], int]]) -> bool:
    """Whether an expression has a value on any check, right or wrong."""
    for arguments, _ in checks:
        try:
            expression_to_value(expression, dict(zip(parameters, arguments, strict=True)))
        except RefusedExpression:
            continue
        return True
    return False
