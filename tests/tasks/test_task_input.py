"""Owns: tasks that are handed to a graph as they are must have a field that it reads; else one line says so.

- Whatever kind of state the graph has, and where only part of it is input. A graph that takes anything is not asked.
- Nothing is asked where a function makes the input.
- Commands refuse before a server starts; `init` before it writes a file or runs the app.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.func import entrypoint
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel
from typer.testing import CliRunner

from marft_bridge.cli import app as command_line
from marft_bridge.common.errors import GraphError
from marft_bridge.rollouts.app import App, task_as_input


class Whole(TypedDict):
    question: str
    said: str


class Part(TypedDict):
    question: str


@dataclass
class WithDefaults:
    question: str = "What is 1 + 1?"


class Checked(BaseModel):
    question: str = "What is 1 + 1?"


def graph_of(state: Any, **schemas: Any) -> Any:
    graph = StateGraph(state, **schemas)
    graph.add_node("node", lambda _: {})
    graph.add_edge(START, "node")
    return graph.compile()


@entrypoint()  # type: ignore[untyped-decorator]
def function(task: dict[str, Any]) -> dict[str, Any]:
    return task


def opened(graph: Any, task: dict[str, Any], to_input: Any = task_as_input) -> None:
    with (
        asyncio.Runner() as runner,
        App(lambda _: graph, [], [task], to_input, None, "", "my app").open_graph(None, runner),
    ):
        pass


@pytest.mark.parametrize(
    ("graph", "reads"),
    [
        (graph_of(Whole), "question, said"),
        (graph_of(Whole, input_schema=Part), "question"),
        (graph_of(WithDefaults), "question"),
        (graph_of(Checked), "question"),
        (graph_of(MessagesState), "messages"),
    ],
)
def test_a_task_without_a_field_that_the_graph_reads_is_refused(graph: Any, reads: str) -> None:
    with pytest.raises(GraphError) as refused:
        opened(graph, {"id": "t", "problem": "2 + 2"})
    assert str(refused.value) == (
        f"graph.tasks: task 't' has id, problem, and 'my app' reads {reads}: "
        "name a function task -> graph input in graph.task_to_input"
    )


def test_what_is_no_input_does_not_count_as_one() -> None:
    with pytest.raises(GraphError, match="reads question:"):
        opened(graph_of(Whole, input_schema=Part), {"id": "t", "said": "4"})


@pytest.mark.parametrize(
    ("graph", "field"),
    [
        (graph_of(Whole), "question"),
        (graph_of(WithDefaults), "question"),
        (graph_of(dict), "problem"),
        (function, "problem"),
    ],
)
def test_one_field_that_is_read_is_enough_and_a_graph_that_takes_anything_takes_it(graph: Any, field: str) -> None:
    opened(graph, {"id": "t", field: "2 + 2", "more": 1})


def test_a_function_that_makes_the_input_is_trusted() -> None:
    opened(graph_of(Whole), {"id": "t", "problem": "2 + 2"}, lambda task: {"question": task["problem"]})


@pytest.mark.parametrize("more", [[], ["--probe"]])
def test_init_writes_no_file_for_tasks_that_the_graph_does_not_read(tmp_path: Path, more: list[str]) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "bridge.toml"
    tasks.write_text("".join(f'{{"id": "t{n}", "problem": "{n} + 1"}}\n' for n in range(20)))
    argv = ["init", "graphs.math_duo:build", "--yes", "--tasks", str(tasks), "--reward", "graphs.math_duo:reward"]
    done = CliRunner().invoke(command_line, [*argv, "--out", str(out), *more])
    assert isinstance(done.exception, GraphError)
    assert "and 'graphs.math_duo:build' reads " in str(done.exception)
    assert not out.exists()
