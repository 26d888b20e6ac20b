"""A code assistant after LangGraph's tutorial: code is generated, run, and generated again with the error."""

from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import AnyMessage, add_messages
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="gpt-4o-mini")
MAX_ITERATIONS = 3


class Code(BaseModel):
    """A solution."""

    prefix: str = Field(description="What the solution does.")
    expression: str = Field(description="One expression of Python.")


class GraphState(TypedDict):
    error: str
    messages: Annotated[list[AnyMessage], add_messages]
    generation: Code
    iterations: int


def generate(state: GraphState):
    solution = llm.with_structured_output(Code).invoke([("system", "You write Python."), *state["messages"]])
    reply = ("assistant", f"{solution.prefix}: {solution.expression}")
    return {"generation": solution, "messages": [reply], "iterations": state.get("iterations", 0) + 1}


def code_check(state: GraphState):
    try:
        compile(state["generation"].expression, "solution", "eval")
    except SyntaxError as error:
        return {"messages": [("user", f"Your solution failed: {error}. Try again.")], "error": "yes"}
    return {"error": "no"}


def decide_to_finish(state: GraphState):
    return END if state["error"] == "no" or state["iterations"] == MAX_ITERATIONS else "generate"


workflow = StateGraph(GraphState)
workflow.add_node("generate", generate)
workflow.add_node("check_code", code_check)
workflow.add_edge(START, "generate")
workflow.add_edge("generate", "check_code")
workflow.add_conditional_edges("check_code", decide_to_finish, ["generate", END])
graph = workflow.compile()

tasks = [{"id": str(n), "messages": [("user", f"Add {n} and 2.")]} for n in range(12)]


def reward(task, state):
    return float(state["error"] == "no")
