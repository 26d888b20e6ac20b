"""Hierarchical teams after LangGraph's tutorial: a supervisor over two teams, each with a supervisor over its agents.

Three deep: the graph runs a team's graph in a node, which runs an agent's graph in a node.
"""

from typing import Literal

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

llm = ChatOpenAI(model="gpt-4o-mini")


class State(MessagesState):
    next: str


def make_supervisor_node(team, members):
    """A node that asks the model who of the members acts next."""

    class Router(BaseModel):
        next: Literal[*members, "FINISH"]

    prompt = f"You supervise the {team}: {', '.join(members)}. Who acts next? Respond with FINISH when all is done."

    def supervisor_node(state: State):
        messages = [{"role": "system", "content": prompt}, *state["messages"]]
        choice = llm.with_structured_output(Router).invoke(messages).next
        return Command(goto=END if choice == "FINISH" else choice, update={"next": choice})

    return supervisor_node


def make_worker_node(name, agent):
    """A node that has an agent answer what was said so far."""

    def worker_node(state: State):
        result = agent.invoke({"messages": state["messages"]})
        reply = {"role": "user", "content": result["messages"][-1].text, "name": name}
        return Command(update={"messages": [reply]}, goto="supervisor")

    return worker_node


def make_team(team, **agents):
    builder = StateGraph(State)
    builder.add_node("supervisor", make_supervisor_node(team, list(agents)), destinations=(*agents, END))
    for name, agent in agents.items():
        builder.add_node(name, make_worker_node(name, agent), destinations=("supervisor",))
    builder.add_edge(START, "supervisor")
    return builder.compile()


def search(topic: str) -> str:
    """Searches the web."""
    return f"{topic} is well known"


def scrape(url: str) -> str:
    """Reads a web page."""
    return f"{url} says little"


def write_document(text: str) -> str:
    """Writes a document."""
    return "written"


search_agent = create_agent(llm, [search], system_prompt="You search.")
scraper_agent = create_agent(llm, [scrape], system_prompt="You read web pages.")
writer_agent = create_agent(llm, [write_document], system_prompt="You write documents.")

research_graph = make_team("research team", search=search_agent, web_scraper=scraper_agent)
writing_graph = make_team("writing team", doc_writer=writer_agent)


def make_team_node(name, team):
    def call_team(state: State):
        response = team.invoke({"messages": [state["messages"][-1]]})
        reply = {"role": "user", "content": response["messages"][-1].text, "name": name}
        return Command(update={"messages": [reply]}, goto="supervisor")

    return call_team


teams = {"research_team": research_graph, "writing_team": writing_graph}
super_builder = StateGraph(State)
super_builder.add_node("supervisor", make_supervisor_node("teams", list(teams)), destinations=(*teams, END))
for team_name, team_graph in teams.items():
    super_builder.add_node(team_name, make_team_node(team_name, team_graph), destinations=("supervisor",))
super_builder.add_edge(START, "supervisor")
graph = super_builder.compile()

TOPICS = ("owls", "bees", "rain", "tea", "maps", "chess")
tasks = [
    {"id": f"{topic}-{n}", "messages": [("user", f"Write on {topic} ({n}).")], "topic": topic}
    for topic in TOPICS
    for n in range(2)
]


def reward(task, state):
    return float(task["topic"] in state["messages"][-1].text)
