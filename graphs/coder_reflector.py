"""A coder, an environment that tests its expression, and a reflector that suggests changes: at most three tries.

After the MARFT paper, section 5.3, which announces several steps with a "reflector" agent on coding tasks; as in the
coding environment of siiRL's port of it, an episode ends with the first correct try. The environment is a node
without a model: it evaluates the coder's expression on the examples of the task (`graphs.tiny_python`; no Python
is run) and reports the first one that fails. Simplified: functions of one line instead of contest problems.

Invariant: after MAX_TRIES tries the graph ends by itself. Its final state is a result like any other and is rewarded,
while a run that is cut from outside (a time, token or recursion limit) has no result and is recorded as truncated.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line
from graphs.function_checks import describe_failure
from graphs.tiny_python import pass_rate, text_to_expression

MAX_TRIES = 3
MAX_SHOWN_CHARACTERS = 60
"""Characters of an expression or a hint that the next prompt shows."""
TRY_COST = 0.05

CODER = "You are the Coder. Write one Python expression for the result of the function, and nothing else."
CODER_EXAMPLES = (
    ("f(x) adds 50 to x\nExpression?", "x + 50"),
    (
        "f(x) multiplies x by 40\nWritten: x + 40\nf(1) gave 41 and not 40\nHint: Use * and not +.\nExpression?",
        "x * 40",
    ),
)
REFLECTOR = "You are the Reflector. Say in a few words what the Coder has to change."
REFLECTOR_EXAMPLES = (
    ("f(x) multiplies x by 40\nWritten: x + 40\nf(1) gave 41 and not 40\nHint?", "Use * and not +."),
    ("f(a, b) gives the smaller of a and b\nWritten: min(a)\nf(2, 1) gave nothing\nHint?", "Use a and b in min."),
)


class TriesState(TypedDict, total=False):
    """The state that the nodes share. `scores` holds the share of examples that pass, try by try."""

    request: str
    parameters: list[str]
    examples: list[list[Any]]
    expression: str
    feedback: str
    hint: str
    scores: Annotated[list[float], operator.add]


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled loop, in which coder and reflector call `model`."""

    async def coder(state: TriesState) -> TriesState:
        context = f"{_describe_try(state)}\nHint: {state['hint']}\n" if state["scores"] else f"{state['request']}\n"
        reply = await model.ainvoke(profile_to_messages(CODER, CODER_EXAMPLES, f"{context}Expression?"))
        return {"expression": text_to_expression(str(reply.text))}

    def environment(state: TriesState) -> TriesState:
        expression, parameters, examples = state["expression"], state["parameters"], state["examples"]
        score = pass_rate(expression, parameters, [(arguments, value) for arguments, value in examples])
        feedback = "" if score == 1 else describe_failure(expression, parameters, examples)
        return {"scores": [score], "feedback": feedback}

    async def reflector(state: TriesState) -> TriesState:
        prompt = f"{_describe_try(state)}\nHint?"
        reply = await model.ainvoke(profile_to_messages(REFLECTOR, REFLECTOR_EXAMPLES, prompt))
        return {"hint": first_line(str(reply.text))[:MAX_SHOWN_CHARACTERS]}

    def route_after_environment(state: TriesState) -> Literal["reflector", "__end__"]:
        scores = state["scores"]
        return "__end__" if scores[-1] == 1 or len(scores) == MAX_TRIES else "reflector"

    graph = StateGraph(TriesState)
    graph.add_node("coder", coder)
    graph.add_node("environment", environment)
    graph.add_node("reflector", reflector)
    graph.add_edge(START, "coder")
    graph.add_edge("coder", "environment")
    graph.add_conditional_edges("environment", route_after_environment, {"reflector": "reflector", "__end__": END})
    graph.add_edge("reflector", "coder")
    return graph.compile(name="coder_reflector")


def _describe_try(state: TriesState) -> str:
    return f"{state['request']}\nWritten: {state['expression'][:MAX_SHOWN_CHARACTERS]}\n{state['feedback']}"


def task_to_input(task: dict[str, Any]) -> TriesState:
    """The request, and the examples for the environment; the graph never sees the checks."""
    return {key: task[key] for key in ("request", "parameters", "examples")}  # type: ignore[return-value]


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `correct` is 1 where the last expression passes all checks, `passed` the share of them, `tries` the number of tries.
    `reward`, which is trained on, is half of each of the first two, less TRY_COST for every try after the first.
    `progress` is a step reward: what each try of the coder added to the share of examples that pass. It reaches the
    coder's call and the hints before it. It is absent where the record does not have exactly one call for each try.
    """
    checks = [(arguments, value) for arguments, value in task["checks"]]
    passed = pass_rate(result["expression"], task["parameters"], checks)
    scores = result["scores"]
    calls = [action.action_id for action in run.game().actions if action.node == "coder"]
    gains = [score - previous for previous, score in zip([0.0, *scores], scores, strict=False)]
    return {
        "correct": float(passed == 1),
        "passed": passed,
        "tries": float(len(scores)),
        "reward": 0.5 * passed + 0.5 * (passed == 1) - TRY_COST * (len(scores) - 1),
        "progress": {f"step:{call}": gain for call, gain in zip(calls, gains, strict=True)}
        if len(calls) == len(gains)
        else None,
    }
