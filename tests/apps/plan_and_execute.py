"""Plan-and-execute after LangGraph's tutorial: a planner, an agent for each step, and a replanner that ends it."""

import operator
from typing import Annotated, TypedDict

from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="gpt-4o-mini", temperature=0)


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


agent_executor = create_agent(llm, [add], system_prompt="You are a helpful assistant.")


class PlanExecute(TypedDict):
    input: str
    plan: list[str]
    past_steps: Annotated[list[tuple], operator.add]
    response: str


class Plan(BaseModel):
    """What to do."""

    steps: list[str] = Field(description="The steps, in order.")


class Act(BaseModel):
    """Answer, or go on."""

    response: str = Field(description="The answer; empty where steps are left.")
    steps: list[str] = Field(description="The steps that are left.")


planner = ChatPromptTemplate.from_template("Make a plan, step by step: {input}") | llm.with_structured_output(Plan)
replanner = ChatPromptTemplate.from_template(
    "The task was {input}, the plan {plan}. Done so far: {past_steps}. Update the plan, or answer."
) | llm.with_structured_output(Act)


async def plan_step(state: PlanExecute):
    plan = await planner.ainvoke({"input": state["input"]})
    return {"plan": plan.steps}


async def execute_step(state: PlanExecute):
    task = state["plan"][0]
    response = await agent_executor.ainvoke({"messages": [("user", f"You execute this step: {task}.")]})
    return {"past_steps": [(task, response["messages"][-1].text)]}


async def replan_step(state: PlanExecute):
    output = await replanner.ainvoke(state)
    return {"response": output.response} if output.response else {"plan": output.steps}


def should_end(state: PlanExecute):
    return END if state.get("response") else "agent"


workflow = StateGraph(PlanExecute)
workflow.add_node("planner", plan_step)
workflow.add_node("agent", execute_step)
workflow.add_node("replan", replan_step)
workflow.add_edge(START, "planner")
workflow.add_edge("planner", "agent")
workflow.add_edge("agent", "replan")
workflow.add_conditional_edges("replan", should_end, ["agent", END])
graph = workflow.compile()

tasks = [{"id": str(n), "input": f"What is {n} + 5? Say it in words.", "gold": n + 5} for n in range(12)]


def reward(task, state):
    return float(str(task["gold"]) in state["response"])
