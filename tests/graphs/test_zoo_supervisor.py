"""Owns: the zoo's supervisor: routing by text makes D as it was routed, its rewards, and that training reaches it.

Also that langgraph-supervisor, with tool calls, over the same two tools, is recorded with the same order of agents.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph_supervisor import create_supervisor
from support.edge_rig import calls_tool, edges_of, recorded_edges, recorded_traces, recorded_trajectories, says
from support.zoo_answers import half_right
from support.zoo_rig import ZOO, train_zoo

from graphs import supervisor
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as names
from trace_store.journal import Journal

TWO_STEPS = {
    "id": "t",
    "question": "What is 3 plus 4, times 2?",
    "steps": [["adder", 3, 4], ["multiplier", 7, 2]],
    "answer": 14,
}
RIGHT = [("adder", (4, 3), 7), ("multiplier", (7, 2), 14)]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, **answers: list[str]) -> dict[str, Any]:
    graph = wrap(supervisor.build(ScriptedPolicy(answers=answers)), recorder)
    return asyncio.run(graph.ainvoke(supervisor.task_to_input(TWO_STEPS)))


def test_specialists_depend_on_who_routed_to_them_and_the_supervisor_on_what_they_reported(recorder: Recorder) -> None:
    result = run(
        recorder, supervisor=["ROUTE: ADDER", "multiplier", "ROUTE: DONE"], adder=["3, 4"], multiplier=["7 and 2"]
    )
    assert (result["value"], result["routes"]) == (14, ["adder", "multiplier"])
    assert supervisor.reward(TWO_STEPS, result)["reward"] == 1.0
    assert recorded_edges(recorder) == {
        "trigger": "adder>supervisor2 multiplier>supervisor3 supervisor1>adder supervisor2>multiplier",
        # All read the calls so far, which each specialist adds to. The routes are counted after the call only.
        "data": "adder>multiplier adder>supervisor2 adder>supervisor3 multiplier>supervisor3",
    }


def test_the_tools_of_the_specialists_are_recorded_with_their_arguments(recorder: Recorder) -> None:
    run(recorder, supervisor=["ADDER", "DONE"], adder=["3, 4"])
    (spans,) = recorded_traces(recorder)
    assert [span.attributes[names.TOOL_NAME] for span in spans if names.TOOL_NAME in span.attributes] == ["add"]


def test_a_first_route_that_names_nobody_ends_the_run_without_a_value(recorder: Recorder) -> None:
    result = run(recorder, supervisor=["I cannot say."])
    assert "value" not in result
    assert recorded_edges(recorder) == {}
    rewards = {"correct": 0.0, "calls": 0.0, "reward": 0.0, "local": {"agent:supervisor": 0.0}}
    assert supervisor.reward(TWO_STEPS, result) == rewards


def test_a_supervisor_that_never_ends_is_not_asked_after_its_last_route(recorder: Recorder) -> None:
    routes = supervisor.MAX_ROUTES
    result = run(recorder, supervisor=["ADDER"] * routes, adder=["3 4", "none", "7 4"])
    assert result["calls"] == [("adder", (3, 4), 7), ("adder", None, None), ("adder", (7, 4), 11)]
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["supervisor", "adder"] * routes
    assert trajectory.episode.outcome == "terminated"
    # Begun rightly (0.2) with the right numbers (0.2), one call more than the two that are needed (-0.1).
    assert supervisor.reward(TWO_STEPS, result)["reward"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("routes", "calls", "value", "earned", "local"),
    [
        (["adder", "multiplier"], RIGHT, 14, 1.0, (1.0, 1.0, 1.0)),
        (["adder", "multiplier", "multiplier"], [*RIGHT, ("multiplier", (7, 2), 14)], 14, 0.9, (1.0, 1.0, 1.0)),
        (["adder"], RIGHT[:1], 7, 0.4, (0.5, 1.0, None)),
        (["adder"], [("adder", (3, 3), 6)], 6, 0.2, (0.5, 0.0, None)),
        (["adder"], [("adder", None, None)], None, 0.2, (0.5, 0.0, None)),
        (["multiplier", "adder"], [("multiplier", (3, 4), 12), ("adder", (3, 4), 7)], 7, 0.0, (0.0, 1.0, 0.0)),
    ],
)
def test_rewards_are_those_worked_out_by_hand(
    routes: list[str], calls: list[Any], value: int | None, earned: float, local: tuple[float | None, ...]
) -> None:
    result = {"routes": routes, "calls": calls} | ({} if value is None else {"value": value})
    found = supervisor.reward(TWO_STEPS, result)
    assert found["reward"] == pytest.approx(earned)
    assert found["correct"] == float(value == 14)
    agents = ["agent:supervisor", "agent:adder", "agent:multiplier"]
    assert tuple(found["local"].get(agent) for agent in agents) == local


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("ROUTE: ADDER", "adder"),
        ("The Multiplier, then the adder", "multiplier"),
        ("done. Not the adder", "__end__"),
        ("add, then done", "adder"),
        ("", "__end__"),
        ("x" * 100_000, "__end__"),
    ],
)
def test_a_reply_goes_to_the_first_that_it_names(text: str, route: str) -> None:
    assert supervisor.reply_to_route(text) == route


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2, 5", (2, 5)), ("add 12 to 7 and 9", (12, 7)), ("5", None), ("9" * 5000 + " 1 2", (1, 2)), ("", None)],
)
def test_a_reply_gives_its_first_two_numbers_of_bounded_length(text: str, numbers: tuple[int, int] | None) -> None:
    assert supervisor.reply_to_numbers(text) == numbers


def test_tasks_are_distinct_and_their_steps_lead_to_their_answers() -> None:
    tasks = list(supervisor.tasks())
    assert tasks == list(supervisor.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == len({task["question"] for task in tasks}) >= 100
    for task in tasks:
        value = None
        for name, a, b in task["steps"]:
            assert value is None or a == value
            value = a + b if name == "adder" else a * b
        assert value == task["answer"]
        assert set(supervisor.task_to_input(task)) == {"question"}


@pytest.mark.slow
def test_training_moves_every_agent_and_pulls_it_towards_what_paid(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "supervisor.toml", half_right, tmp_path, rounds=4, episodes=16)
    assert set(trained.norms) == {"supervisor", "adder", "multiplier"}
    assert all(norm > 0 for norm in trained.norms.values())
    paid = sorted(t.team_reward("reward") or 0.0 for t in trained.trained)
    assert paid[0] <= 0.2 < 0.8 <= paid[-1]
    assert trained.pull("supervisor") > 0.2
    assert {edge.kind for t in trained.trained for edge in t.edges} == {"trigger", "data"}


@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")  # of langgraph-supervisor
def test_langgraph_supervisor_over_the_same_tools_is_recorded_in_the_order_of_its_handoffs(recorder: Recorder) -> None:
    adder = create_agent(says(calls_tool("add", a=3, b=4), "7"), [supervisor.add], name="adder")
    multiplier = create_agent(says(calls_tool("multiply", a=7, b=2), "14"), [supervisor.multiply], name="multiplier")
    boss = says(calls_tool("transfer_to_adder"), calls_tool("transfer_to_multiplier"), "14")
    graph = create_supervisor([adder, multiplier], model=boss, supervisor_name="supervisor").compile()
    result = wrap(graph, recorder).invoke({"messages": [HumanMessage(TWO_STEPS["question"])]})
    assert result["messages"][-1].content == "14"
    (trajectory,) = recorded_trajectories(recorder)
    triggers = re.sub("/(agent|model)", "", edges_of(trajectory)["trigger"]).split()
    assert sorted(triggers) == [
        *("adder1>adder2", "adder2>supervisor2", "multiplier1>multiplier2", "multiplier2>supervisor3"),
        *("supervisor1>adder1", "supervisor2>multiplier1"),
    ]
