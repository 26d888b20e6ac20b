"""Owns: who an app's agents are, before it runs, while it runs, and in the configuration.

- What a run records is what the inspection lists, or could have come from a place that it marks.
- What `init` writes, with a probe and without, `collect` accepts; a name that nobody can act under is refused.
- Two agents that declare names are two, wherever they run, and each is answered by its own adapter.
- What is ambiguous is said, with the way to tell the agents apart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from support.edge_rig import SaysNext, calls_tool, recorded_trajectories, says

from marft_bridge.commands.probe import probe
from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.routing import Route, Routing, calling_node, current_routing
from marft_bridge.recording.episode_context import EpisodeContext, current_episode
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.agent_check import check_nodes
from marft_bridge.rollouts.app_models import ambiguity_lines, inspect_nodes
from trace_store.journal import Journal


def graph_of(**nodes: Any) -> Any:
    graph = StateGraph(MessagesState)
    for before, (name, node) in zip([START, *nodes], nodes.items(), strict=False):
        graph.add_node(name, node)
        graph.add_edge(before, name)
    return graph.compile()


def asks(agent: Any, name: str) -> Any:
    """A tool that asks an agent."""

    @tool(name)
    def ask(question: str) -> str:
        """Asks somebody."""
        return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].text)

    return ask


def boss_of(*tools: Any, name: str | None = "boss") -> Any:
    calls = calls_tool(*(each.name for each in tools), question="why")
    return create_agent(says(calls, "done"), list(tools), name=name)


def agents_as_tools() -> Any:
    poet, critic = (create_agent(says(), name=name) for name in ("poet", "critic"))
    return boss_of(asks(poet, "ask_poet"), asks(critic, "ask_critic"))


def unnamed_behind_a_tool() -> Any:
    return boss_of(asks(create_agent(says()), "ask_somebody"))


def agents_in_one_node() -> Any:
    reader, writer = (create_agent(says(), name=name) for name in ("reader", "writer"))

    def team(state: MessagesState) -> Any:
        return writer.invoke({"messages": reader.invoke(state)["messages"]})

    return graph_of(plan=lambda state: {"messages": [MODEL.invoke(state["messages"])]}, team=team)


MODEL = says()


def three_deep() -> Any:
    inner = graph_of(draft=lambda state: {"messages": [MODEL.invoke(state["messages"])]})

    def supervisor_tools(state: MessagesState) -> Any:
        return {"messages": inner.invoke(state)["messages"][-1:]}

    return graph_of(research=graph_of(supervisor_tools=supervisor_tools, judge=create_agent(says(), name="judge")))


def made_at_run_time() -> Any:
    def late(state: MessagesState) -> Any:
        agents = [create_agent(says(), name="late"), create_agent(says())]
        return {"messages": [agent.invoke(state)["messages"][-1] for agent in agents]}

    return graph_of(first=graph_of(second=graph_of(late=late)))


def of_the_config() -> Any:
    def run(state: MessagesState, config: RunnableConfig) -> Any:
        MODEL.invoke("x")
        return config["configurable"]["agent"].invoke(state)

    return graph_of(run=run)


def functional() -> Any:
    agent = create_agent(says(), name="helper")

    @task
    def step(question: str) -> str:
        return str(MODEL.invoke(question).text)

    @entrypoint()
    def flow(state: dict[str, Any]) -> dict[str, Any]:
        agent.invoke(state)
        return {"messages": [step("x").result()]}

    return flow


def routers() -> Any:
    graph = StateGraph(MessagesState)
    for name in ("web", "rag", "end"):
        graph.add_node(name, lambda state: {"messages": [MODEL.invoke(state["messages"])]})
    graph.add_conditional_edges(START, lambda state: MODEL.invoke("where?") and "web", ["web", "rag"])
    graph.add_conditional_edges("web", lambda state: MODEL.invoke("where?") and "end", ["end"])
    return graph_of(outer=graph.compile())


def own_tool_loop() -> Any:
    by_name = {each.name: each for each in (asks(create_agent(says(), name="clerk"), "ask_clerk"),)}

    def run_tools(state: MessagesState) -> Any:
        return {"messages": [str(each.invoke({"question": "x"})) for each in by_name.values()]}

    return graph_of(run_tools=run_tools)


APPS: dict[str, Callable[[], Any]] = {
    app.__name__: app
    for app in (
        *(agents_as_tools, unnamed_behind_a_tool, agents_in_one_node, three_deep, made_at_run_time, of_the_config),
        *(functional, routers, own_tool_loop),
    )
}
AGENTS = {
    "agents_as_tools": {"boss", "poet", "critic"},
    "unnamed_behind_a_tool": {"boss", "boss/tools/model"},
    "agents_in_one_node": {"plan", "reader", "writer"},
    "three_deep": {"research/supervisor_tools/draft", "judge"},
    "made_at_run_time": {"late", "first/second/late/model"},
    "of_the_config": {"run", "given"},
    "functional": {"helper", "flow/step"},
    "own_tool_loop": {"clerk"},
}
QUESTION = {"messages": [HumanMessage("why?")]}


def arguments() -> dict[str, Any]:
    return {"config": {"configurable": {"thread_id": "t", "agent": create_agent(says(), name="given")}}}


def recorded_agents(app: Any, folder: Path) -> set[str]:
    recorder = Recorder(Journal(folder / "journal"))
    wrap(app, recorder).invoke(QUESTION, **arguments())
    (trajectory,) = recorded_trajectories(recorder)
    return {str(action.node) for action in trajectory.actions}


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_has_its_own_name_in_the_record(name: str, tmp_path: Path) -> None:
    assert recorded_agents(APPS[name](), tmp_path) == AGENTS[name]


@pytest.mark.parametrize("name", APPS)
def test_what_a_probe_sees_and_what_the_inspection_lists_is_accepted(name: str) -> None:
    app = APPS[name]()
    with asyncio.Runner() as runner:
        run = probe(app, QUESTION, arguments(), runner=runner, limit_s=30)
    assert run.failure is None
    assert run.nodes
    listed = [node.name for node in inspect_nodes(app) if node.models]
    check_nodes(app, [*run.nodes, *listed], name)


@pytest.mark.parametrize("name", ["agents_as_tools", "agents_in_one_node", "own_tool_loop", "functional"])
def test_agents_that_show_are_listed_by_the_names_that_the_recorder_writes(name: str, tmp_path: Path) -> None:
    app = APPS[name]()
    listed = {node.name for node in inspect_nodes(app) if node.models}
    assert listed == AGENTS[name]
    assert recorded_agents(app, tmp_path) == listed


@pytest.mark.parametrize(
    "agent",
    ["__start__", "outer/__start__", "outer/__start__:router", "outer/web:router", "__start__:router", "outer:router"],
)
def test_a_router_anywhere_is_accepted(agent: str) -> None:
    check_nodes(routers(), [agent], "app")


@pytest.mark.parametrize("agent", ["nobody", "outer/nobody", "nobody:router", "outer/nobody/__start__", "__start__/x"])
def test_a_name_that_nobody_can_act_under_is_refused(agent: str) -> None:
    with pytest.raises(GraphError, match="has no node"):
        check_nodes(routers(), [agent], "app")


def test_the_path_of_an_agent_that_declares_a_name_is_refused_with_the_name() -> None:
    with pytest.raises(GraphError, match=r"graph\.nodes: the agent at 'model' declares a name; call it 'boss'"):
        check_nodes(agents_as_tools(), ["model"], "app")


def test_routing_functions_with_a_model_are_listed_as_agents_of_their_own() -> None:
    listed = {node.name for node in inspect_nodes(routers()) if node.models}
    assert listed == {"outer/web", "outer/rag", "outer/end", "outer/__start__:router", "outer/web:router"}


# What is ambiguous


def two_unnamed() -> Any:
    one, two = create_agent(says()), create_agent(says())

    def team(state: MessagesState) -> Any:
        return two.invoke({"messages": one.invoke(state)["messages"]})

    return graph_of(team=team)


def test_agents_that_cannot_be_told_apart_are_said_by_the_inspection_and_by_a_probe() -> None:
    app = two_unnamed()
    (line,) = ambiguity_lines(inspect_nodes(app))
    assert line.startswith("2 agents are called 'team/model' and share one adapter: if they should not, tell them")
    assert "create_agent(name=...)" in line
    with asyncio.Runner() as runner:
        assert probe(app, QUESTION, arguments(), runner=runner, limit_s=30).namesakes == {"team/model": 2}


def test_an_agent_and_a_plain_node_of_one_name_are_said_to_be_two() -> None:
    agent = create_agent(says(), name="writer")

    def writer(state: MessagesState) -> Any:
        return {"messages": [MODEL.invoke(agent.invoke(state)["messages"])]}

    (line,) = ambiguity_lines(inspect_nodes(graph_of(writer=writer)))
    assert line.startswith("2 agents are called 'writer'")


@pytest.mark.parametrize("name", APPS)
def test_an_app_whose_agents_differ_in_name_is_not_called_ambiguous(name: str) -> None:
    assert ambiguity_lines(inspect_nodes(APPS[name]())) == []


def test_one_agent_in_two_places_is_one_agent(tmp_path: Path) -> None:
    agent = create_agent(says(), name="helper")

    def second(state: MessagesState) -> Any:
        return agent.with_config(tags=["again"]).invoke(state)

    app = graph_of(first=agent, second=second)
    assert [node.name for node in inspect_nodes(app) if node.models] == ["helper"]
    assert ambiguity_lines(inspect_nodes(app)) == []
    assert recorded_agents(app, tmp_path) == {"helper"}


def test_an_agent_that_can_call_itself_is_inspected_once() -> None:
    class Chat(TypedDict):
        messages: Annotated[list[Any], add_messages]

    graphs: dict[str, Any] = {}

    def think(state: Chat) -> Any:
        return (
            {"messages": [MODEL.invoke(state["messages"])]}
            if len(state["messages"]) > 3
            else graphs["own"].invoke(state)
        )

    graph = StateGraph(Chat)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    graphs["own"] = graph.compile()
    assert [node.name for node in inspect_nodes(graphs["own"])][:1] == ["think"]


# Whose adapter answers


class SaysWho(SaysNext):
    """Notes the agent that each call is made for, as the redirection to adapters asks for it."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        CALLERS[calling_node()] += 1
        return super()._generate(*args, **kwargs)


CALLERS: Counter[str] = Counter()


@pytest.mark.parametrize("keeps_state", [None, True])
def test_the_agent_of_a_call_is_the_same_for_its_route_and_its_record(keeps_state: Any, tmp_path: Path) -> None:
    CALLERS.clear()
    names = ("poet", "critic", None)
    poet, critic, other = (create_agent(SaysWho(), name=name, checkpointer=keeps_state) for name in names)
    tools = [asks(poet, "ask_poet"), asks(critic, "ask_critic"), asks(other, "ask_other")]
    boss = create_agent(SaysWho(answers=[calls_tool(*(t.name for t in tools), question="x")]), tools, name="boss")
    recorder = Recorder(Journal(tmp_path / "journal"))
    episode = EpisodeContext("r", "t", "train", recorder=recorder)

    async def play() -> None:
        current_episode.set(episode)
        current_routing.set(Routing({"boss": Route("m", None, None, 1.0, 8)}, actors=episode.actors))
        team = graph_of(team=boss)
        team.checkpointer = InMemorySaver()
        await wrap(team, recorder).ainvoke(QUESTION, {"configurable": {"thread_id": "t"}})

    asyncio.run(play())
    (trajectory,) = recorded_trajectories(recorder)
    assert Counter(str(action.node) for action in trajectory.actions) == CALLERS
    assert CALLERS == {"boss": 2, "poet": 1, "critic": 1, "boss/tools/model": 1}
