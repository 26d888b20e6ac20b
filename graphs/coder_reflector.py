"""A coder, an environment that tries out what it wrote, and a reflector that says what to change: at most three tries.

After the MARFT paper, section 5.3, which announces several steps with a "reflector" agent on coding tasks; as in the
coding environment of siiRL's port of it, an episode ends with the first try that is right. The environment is a node
without a model: it works the coder's expression out on the examples of the task (`graphs.tiny_python`; no Python
is run) and says which one fails. Simplified: functions of one line instead of contest problems.

Invariant: after MOST_TRIES tries the graph ends by itself. That is a result, which is rewarded: the task allows no more
tries. A run that is cut from outside (a time, token or recursion limit) has none, and the record says truncated.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line
from graphs.function_tasks import call_to_text
from graphs.tiny_python import Refused, expression_to_value, passed_share, text_to_expression

MOST_TRIES = 3
MOST_SHOWN = 60
"""Letters of an expression or a hint that the next prompt shows."""
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
    """What the nodes share. `scores`: of each try the share of examples that it got right."""

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
        before = f"{_written(state)}\nHint: {state['hint']}\n" if state["scores"] else f"{state['request']}\n"
        reply = await model.ainvoke(profile_to_messages(CODER, CODER_EXAMPLES, f"{before}Expression?"))
        return {"expression": text_to_expression(str(reply.text))}

    def environment(state: TriesState) -> TriesState:
        expression, parameters, examples = state["expression"], state["parameters"], state["examples"]
        score = passed_share(expression, parameters, [(given, value) for given, value in examples])
        return {"scores": [score], "feedback": "" if score == 1 else _feedback(expression, parameters, examples)}

    async def reflector(state: TriesState) -> TriesState:
        reply = await model.ainvoke(profile_to_messages(REFLECTOR, REFLECTOR_EXAMPLES, f"{_written(state)}\nHint?"))
        return {"hint": first_line(str(reply.text))[:MOST_SHOWN]}

    def after_environment(state: TriesState) -> Literal["reflector", "__end__"]:
        scores = state["scores"]
        return "__end__" if scores[-1] == 1 or len(scores) == MOST_TRIES else "reflector"

    graph = StateGraph(TriesState)
    graph.add_node("coder", coder)
    graph.add_node("environment", environment)
    graph.add_node("reflector", reflector)
    graph.add_edge(START, "coder")
    graph.add_edge("coder", "environment")
    graph.add_conditional_edges("environment", after_environment, {"reflector": "reflector", "__end__": END})
    graph.add_edge("reflector", "coder")
    return graph.compile(name="coder_reflector")


def _written(state: TriesState) -> str:
    return f"{state['request']}\nWritten: {state['expression'][:MOST_SHOWN]}\n{state['feedback']}"


def _feedback(expression: str, parameters: list[str], examples: list[list[Any]]) -> str:
    """The first example that fails: `f(1) gave 2 and not 3`, or why there was no value."""
    for given, value in examples:
        try:
            got = expression_to_value(expression, dict(zip(parameters, given, strict=True)))
        except Refused as why:
            return f"{call_to_text(given)} gave nothing: {why}"
        if got != value:
            return f"{call_to_text(given)} gave {got} and not {value}"
    return ""


def task_to_input(task: dict[str, Any]) -> TriesState:
    """The examples belong to the environment; the graph never sees the checks."""
    return {key: task[key] for key in ("request", "parameters", "examples")}  # type: ignore[return-value]


def reward(task: dict[str, Any], result: dict[str, Any], run: Any) -> dict[str, Any]:
    """Rewards of one episode, from its final state and its record.

    `correct` is 1 where the last expression passes all checks, `passed` the share of them, `tries` how many there were.
    `reward`, which is trained on, is half of each of the first two, less TRY_COST for every try after the first.
    `progress` is a reward of steps: what each try of the coder added to the share of examples that pass. It reaches
    the coder's call and the hints before it, and is absent where the record has not one call for each try.
    """
    passed = passed_share(result["expression"], task["parameters"], [(given, value) for given, value in task["checks"]])
    scores = result["scores"]
    calls = [action.action_id for action in run.game().actions if action.node == "coder"]
    gains = [after - before for before, after in zip([0.0, *scores], scores, strict=False)]
    return {
        "correct": float(passed == 1),
        "passed": passed,
        "tries": float(len(scores)),
        "reward": 0.5 * passed + 0.5 * (passed == 1) - TRY_COST * (len(scores) - 1),
        "progress": {f"step:{call}": gain for call, gain in zip(calls, gains, strict=True)}
        if len(calls) == len(gains)
        else None,
    }
