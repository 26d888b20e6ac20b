"""A workflow in LangGraph's functional API, as its documentation chains prompts: tasks that an entrypoint calls."""

from langchain_openai import ChatOpenAI
from langgraph.func import entrypoint, task

llm = ChatOpenAI(model="gpt-4o-mini")


@task
def generate_joke(topic: str):
    return llm.invoke(f"Write a short joke about {topic}").text


@task
def improve_joke(joke: str):
    return llm.invoke(f"Make this joke funnier by adding wordplay: {joke}").text


@task
def polish_joke(joke: str):
    return llm.invoke(f"Add a surprising twist to this joke: {joke}").text


def has_punchline(joke: str):
    return "?" in joke or "!" in joke


@entrypoint()
def graph(inputs: dict):
    joke = generate_joke(inputs["topic"]).result()
    if has_punchline(joke):
        return {"joke": joke}
    improved = improve_joke(joke).result()
    return {"joke": polish_joke(improved).result()}


TOPICS = ("owls", "bees", "rain", "tea", "maps", "chess", "cats", "bread", "trains", "snow", "clocks", "soup")
tasks = [{"id": topic, "topic": topic} for topic in TOPICS]


def reward(task, state):
    return float(len(state["joke"]) < 200)
