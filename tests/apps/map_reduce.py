"""Map and reduce after LangGraph's tutorial: subjects of a topic, a joke on each at once, and the best of them."""

import operator
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel

model = ChatOpenAI(model="gpt-4o-mini")


class Subjects(BaseModel):
    subjects: list[str]


class Joke(BaseModel):
    joke: str


class BestJoke(BaseModel):
    id: int


class OverallState(TypedDict):
    topic: str
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best_selected_joke: str


class JokeState(TypedDict):
    subject: str


def generate_topics(state: OverallState):
    prompt = f"List three subjects that belong to {state['topic']}."
    return {"subjects": model.with_structured_output(Subjects).invoke(prompt).subjects}


def generate_joke(state: JokeState):
    response = model.with_structured_output(Joke).invoke(f"Tell a joke about {state['subject']}.")
    return {"jokes": [response.joke]}


def continue_to_jokes(state: OverallState):
    return [Send("generate_joke", {"subject": subject}) for subject in state["subjects"]]


def best_joke(state: OverallState):
    jokes = "\n\n".join(state["jokes"])
    response = model.with_structured_output(BestJoke).invoke(f"Which joke about {state['topic']} is best?\n\n{jokes}")
    return {"best_selected_joke": state["jokes"][response.id]}


builder = StateGraph(OverallState)
builder.add_node("generate_topics", generate_topics)
builder.add_node("generate_joke", generate_joke)
builder.add_node("best_joke", best_joke)
builder.add_edge(START, "generate_topics")
builder.add_conditional_edges("generate_topics", continue_to_jokes, ["generate_joke"])
builder.add_edge("generate_joke", "best_joke")
builder.add_edge("best_joke", END)
graph = builder.compile()

TOPICS = (
    "animals",
    "tools",
    "plants",
    "games",
    "food",
    "weather",
    "maps",
    "music",
    "cities",
    "rivers",
    "coats",
    "birds",
)
tasks = [{"id": topic, "topic": topic} for topic in TOPICS]


def reward(task, state):
    return float(len(state["best_selected_joke"]) < 80)
