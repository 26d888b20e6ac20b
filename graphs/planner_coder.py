"""CoRe-Code's Planner -> Coder: a requested function -> a plan -> a program, which unit tests judge.

After "CoRe-Code: Collaborative Reinforcement Learning for Code Generation": a planner that writes a plan in words and a
coder that follows it, both trained on the tests' outcome by group-relative advantages. Simplified: functions of one
line (`graphs.function_tasks`), and the collaboration-aware stage is the team reward, which reaches the planner along D.

The graph never runs the program, since a model wrote it: the reward `code` of the configuration does, in a sandbox.
Invariant: the final state has one program, whatever the coder wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from graphs.few_shot import profile_to_messages
from graphs.first_line import first_line
from graphs.function_tasks import FUNCTION_NAME

PLANNER = "You are the Planner. Say in a few words how the function gets its result. Write no code."
PLANNER_EXAMPLES = (
    ("f(x) adds 50 to x\nPlan?", "Take x and add 50 to it."),
    ("f(a, b) gives the smaller of a and b, times 40\nPlan?", "Take min of a and b, then multiply it by 40."),
)
CODER = "You are the Coder. Follow the plan and write the line of Python that returns the result."
CODER_EXAMPLES = (
    ("f(x) adds 50 to x\nPlan: Take x and add 50 to it.\nCode?", "return x + 50"),
    (
        "f(a, b) gives the smaller of a and b, times 40\nPlan: Take min of a and b, then multiply it by 40.\nCode?",
        "return min(a, b) * 40",
    ),
)


class CodeState(TypedDict, total=False):
    """The state that the two nodes share."""

    request: str
    parameters: list[str]
    plan: str
    program: str


def build(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The compiled chain, in which both nodes call `model`."""

    async def planner(state: CodeState) -> CodeState:
        prompt = f"{state['request']}\nPlan?"
        reply = await model.ainvoke(profile_to_messages(PLANNER, PLANNER_EXAMPLES, prompt))
        return {"plan": first_line(str(reply.text))}

    async def coder(state: CodeState) -> CodeState:
        prompt = f"{state['request']}\nPlan: {state['plan']}\nCode?"
        reply = await model.ainvoke(profile_to_messages(CODER, CODER_EXAMPLES, prompt))
        return {"program": text_to_program(str(reply.text), state["parameters"])}

    graph = StateGraph(CodeState)
    graph.add_node("planner", planner)
    graph.add_node("coder", coder)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", END)
    return graph.compile(name="planner_coder")


def text_to_program(text: str, parameters: Sequence[str]) -> str:
    """The text itself where it defines the function; else a function whose body is its first line."""
    if f"def {FUNCTION_NAME}(" in text:
        return text
    line = first_line(text)
    body = line if line.startswith("return") else f"return {line}"
    return f"def {FUNCTION_NAME}({', '.join(parameters)}):\n    {body}\n"


def task_to_input(task: dict[str, Any]) -> CodeState:
    """The request without its tests, which the graph never sees."""
    return {"request": task["request"], "parameters": task["parameters"]}
