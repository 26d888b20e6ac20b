"""Owns: one name for each agent, from LangGraph's namespaces and agent-name metadata.

- A declared name replaces the path of the graph that declares it, wherever that graph runs.
- A name that was only handed down from the agent around a graph names nobody in that graph.
"""

from __future__ import annotations

import pytest

from marft_bridge.common.agent_names import AGENT_NAME_METADATA, Actors
from marft_bridge.common.node_names import graph_run_apart, namespace_in_task

# Every task of a run in the order in which it starts: (checkpoint namespace, name in its metadata, its agent).
RUNS = {
    "nobody declares a name": [
        ("plan:1", None, "plan"),
        ("team:2", None, "team"),
        ("team:2|model:3", None, "team/model"),
    ],
    "the outermost graph is an agent": [("model:1", "boss", "boss"), ("tools:2", "boss", "boss/tools")],
    "agents behind the tools of an agent": [
        ("boss:1", None, "boss"),
        ("boss:1|model:2", "boss", "boss"),
        ("boss:1|tools:3", "boss", "boss/tools"),
        ("boss:1|tools:3|model:4", "critic", "critic"),
        ("boss:1|tools:3|1|model:5", "poet", "poet"),
        ("boss:1|tools:3|2|model:6", "boss", "boss/tools/model"),  # it declares none: the name is the boss's
        ("boss:1|tools:3|tools:7", "critic", "critic/tools"),
    ],
    "two agents in one node": [
        ("team:1", None, "team"),
        ("team:1|model:2", "reader", "reader"),
        ("team:1|1|model:3", "writer", "writer"),
        ("team:1|2|model:4", None, "team/model"),
    ],
    "a plain graph inside an agent, with an agent inside": [
        ("model:1", "boss", "boss"),
        ("tools:2", "boss", "boss/tools"),
        ("tools:2|draft:3", "boss", "boss/tools/draft"),
        ("tools:2|draft:3|model:4", "poet", "poet"),
    ],
    "an agent of the older kind, and its middleware": [
        ("a:1", None, "a"),
        ("a:1|agent:2", "amy", "amy"),
        ("a:1|Summary.before_model:3", "amy", "amy/Summary.before_model"),
    ],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_declared_name_counts_for_the_graph_that_declares_it_and_no_other(run: str) -> None:
    actors = Actors()
    named = []
    for namespace, name, _ in RUNS[run]:
        actors.note(namespace, {AGENT_NAME_METADATA: name} if name else {})
        named.append(actors.agent_at(namespace))
    assert named == [agent for _, _, agent in RUNS[run]]


def test_a_task_that_nobody_noted_has_the_path_of_its_node() -> None:
    assert Actors().agent_at("team:1|1|model:2") == "team/model"
    assert Actors().agent_at("") == ""


@pytest.mark.parametrize("value", [None, "", 3, ["a"], {}])
def test_metadata_that_is_no_name_names_nobody(value: object) -> None:
    assert Actors().note("model:1", {AGENT_NAME_METADATA: value}) == "model"


@pytest.mark.parametrize(
    ("checkpoint_ns", "task_ns", "own_ns"),
    [
        ("x:1", "in:7|01", "in:7|01|x:1"),
        ("in:7|01|x:1", "in:7|01", "in:7|01|x:1"),
        ("x:1|y:2", "in:7|01|x:1", "in:7|01|x:1|y:2"),
        ("x|y:2", "in:7|01|x:1", "in:7|01|x:1|y:2"),  # the graph in x keeps its own state
        ("z:3", "in:7|01|x:1|02", "in:7|01|x:1|02|z:3"),
        ("", "in:7|01", ""),
    ],
)
def test_what_runs_in_a_graph_that_is_run_as_if_it_were_the_outermost_is_named_below_it(
    checkpoint_ns: str, task_ns: str, own_ns: str
) -> None:
    assert namespace_in_task(checkpoint_ns, task_ns) == own_ns
    assert graph_run_apart("in:7", 1) == "in:7|01"


@pytest.mark.parametrize(
    ("checkpoint_ns", "task_ns", "own_ns"),
    [
        ("in|x:1", "in:7", "in:7|x:1"),  # the graph in `in` keeps its own state
        ("in|1|x:1", "in:7", "in:7|1|x:1"),  # and is the second one that `in` runs
        ("out|in|x:1", "out:5|in:7", "out:5|in:7|x:1"),
        ("out|in|x:1", "out:5|1|in:7", "out:5|1|in:7|x:1"),
        ("in|x:1|y:2", "in:7|x:1", "in:7|x:1|y:2"),  # a graph in it that does not
        ("in|x:1", "in:7|x:1", "in:7|x:1"),
        ("in|x:1", "in:7:router", "in:7:router|x:1"),
        ("in:7|x:1", "in:7", "in:7|x:1"),
        ("in|x:1", "other:7", "in|x:1"),
        ("x:1", "", "x:1"),
    ],
)
def test_a_graph_that_keeps_its_own_state_is_named_with_the_tasks_around_it(
    checkpoint_ns: str, task_ns: str, own_ns: str
) -> None:
    assert namespace_in_task(checkpoint_ns, task_ns) == own_ns
