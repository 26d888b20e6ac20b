"""Owns: what the user names is loaded, or refused in one line before any episode starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphs import math_duo
from marft_bridge.app import load_name, node_names, options_to_app, read_tasks
from marft_bridge.config import GraphOptions
from marft_bridge.errors import GraphError
from marft_bridge.scripted import ScriptedPolicy

NOT_A_GRAPH = 3
TASK_LIST = [{"id": 1, "q": "a"}, {"id": 2, "q": "b"}]
WRONG_KIND = [1, 2]
UNSERIALISABLE = [{"id": 1, "q": {1, 2}}]


def not_a_builder(_model: Any) -> int:
    return 3


def broken_builder(_model: Any) -> None:
    raise RuntimeError("no database")


COMPILED = math_duo.build(ScriptedPolicy())


def duo_options(**changes: Any) -> GraphOptions:
    options = {
        "app": "graphs.math_duo:build",
        "nodes": ("reasoner", "actor"),
        "tasks": "graphs.math_duo:tasks",
        "reward": "graphs.math_duo:reward",
        "task_to_input": "graphs.math_duo:task_to_input",
        "task_fields": ("question", "answer"),
    }
    return GraphOptions.model_validate(options | changes)


def refusal(**changes: Any) -> str:
    with pytest.raises(GraphError) as caught:
        options_to_app(duo_options(**changes)).build(ScriptedPolicy())
    assert "\n" not in str(caught.value)
    return str(caught.value)


HERE = f"{Path(__file__)}"


def test_a_name_may_be_a_module_or_a_file(tmp_path: Path) -> None:
    assert load_name("graphs.math_duo:build", "k") is math_duo.build
    (tmp_path / "mine.py").write_text("class Box:\n    value = 5\n")
    assert load_name(f"{tmp_path / 'mine.py'}:Box.value", "k") == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"app": "graphs.math_duo"}, "is not a name of the form package.module:attribute"),
        ({"app": "graphs.nothing:build"}, "graph.app: importing 'graphs.nothing' failed: ModuleNotFoundError"),
        ({"app": "nowhere/app.py:build"}, "graph.app: there is no file 'nowhere/app.py'"),
        ({"app": "graphs.math_duo:bild"}, "graph.app: 'graphs.math_duo' has no 'bild'; it has: "),
        ({"nodes": ("reasoner", "critic")}, "has no node 'critic'; its nodes: reasoner, actor"),
        ({"app": f"{HERE}:NOT_A_GRAPH"}, "is a int, not a function"),
        ({"app": f"{HERE}:not_a_builder"}, "returned a int, not a compiled graph; call .compile()"),
        ({"app": f"{HERE}:broken_builder"}, "failed: RuntimeError: no database"),
        ({"app": f"{HERE}:COMPILED"}, "is a compiled graph, whose models cannot be pointed at the adapters"),
        ({"reward": f"{HERE}:NOT_A_GRAPH"}, "graph.reward: "),
        (
            {"task_fields": ("question", "solution")},
            "task 1 of 'graphs.math_duo:tasks' lacks 'solution'; it has: answer",
        ),
        ({"tasks": f"{HERE}:NOT_A_GRAPH"}, "is not a JSONL file, an iterable, or a function that gives one"),
        ({"tasks": f"{HERE}:WRONG_KIND"}, "task 1 of"),
        ({"tasks": f"{HERE}:UNSERIALISABLE"}, "cannot be written as JSON"),
        ({"tasks": "none.jsonl"}, "cannot read 'none.jsonl'"),
        ({"tasks": f"{HERE}:TASK_LIST", "task_fields": (), "heldout": 0.0001}, "leave no held-out task"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_with_the_app_is_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": 1}\n{"id": 2', "line 2 of"),
        ("[1]\n", "line 1 of .* is not a JSON object"),
        ('{"id": 1}\n{"id": "1"}\n', "task 2 of .* repeats the id '1'"),
        ('{"question": "?"}\n', "task 1 of .* lacks 'id'"),
        ("\n", "holds no task"),
    ],
)
def test_a_bad_task_file_is_refused_with_the_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(lines)
    with pytest.raises(GraphError, match=message):
        read_tasks(str(path), ())


def test_tasks_from_a_file_keep_their_order_and_get_text_ids(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 2, "q": "b"}\n\n{"id": "one", "q": "a"}\n')
    assert read_tasks(str(path), ("q",)) == [{"id": "2", "q": "b"}, {"id": "one", "q": "a"}]


def test_the_duo_has_the_papers_two_nodes_and_over_a_hundred_heldout_tasks() -> None:
    assert node_names(COMPILED) == ["reasoner", "actor"]
    app = options_to_app(duo_options(heldout=0.33))
    assert len(app.heldout_tasks) >= 120
    assert len(app.train_tasks) + len(app.heldout_tasks) == 405
    assert {t["id"] for t in app.train_tasks}.isdisjoint(t["id"] for t in app.heldout_tasks)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The sum is 12.", {"correct": 1.0, "reward": 1.0}),
        ("12 apples, or is it 13", {"correct": 0.0, "reward": 0.1}),
        ("3 + 4", {"correct": 0.0, "reward": 0.0}),
        ("", {"correct": 0.0, "reward": 0.0}),
        ("-12", {"correct": 0.0, "reward": 0.0}),
    ],
)
def test_the_duos_reward_is_the_last_number_with_a_tenth_for_naming_it(answer: str, expected: dict[str, float]) -> None:
    assert math_duo.reward({"answer": 12}, {"answer": answer}) == expected
