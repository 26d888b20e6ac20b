"""Owns: tasks of any shape are read, or refused in our own one line, and what is taken can be stored as it is.

Any JSON value at the keys that the layouts read, through each of them; lines that are hardly JSON; Python values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marft_bridge.common.errors import GraphError
from marft_bridge.tasks.options import AnySource, Gsm8kTasks, HumanEvalTasks, JsonlTasks, MathTasks
from marft_bridge.tasks.reading import read_tasks
from trace_store.journal import json_text, storable_text

KEYS = (
    "id",
    "task_id",
    "unique_id",
    "question",
    "answer",
    "problem",
    "solution",
    "level",
    "prompt",
    "test",
    "entry_point",
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["\ud800", "\udfff", "#### 7", "\\\\boxed{1}", "Level 2", "def f(): ...", "def check(f): ...", "f"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
RECORDS = st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=8) | JSON_VALUES


def is_one_line(message: str) -> bool:
    return message.isprintable() and 0 < len(message) <= 2_000


def refusal(tasks: str | AnySource) -> str:
    with pytest.raises(GraphError) as refused:
        read_tasks(tasks, ())
    assert is_one_line(str(refused.value))
    return str(refused.value)


def check(tasks: str | AnySource) -> None:
    taken, message = [], "read"
    try:
        taken = read_tasks(tasks, ())
    except GraphError as error:
        message = str(error)
    assert is_one_line(message)
    stored_ids = [storable_text(task["id"]) for task in taken]
    assert len(set(stored_ids)) == len(taken)
    assert stored_ids == [task["id"] for task in taken]
    for task in taken:
        json_text(task)
        assert "inf" not in str(task).lower() or "inf" in json.dumps(task).lower()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_records_of_any_shape_are_tasks_or_one_line(tmp_path: Path, records: list[Any]) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = (str(path), *(kind(path=str(path)) for kind in (JsonlTasks, MathTasks, Gsm8kTasks, HumanEvalTasks)))
    for source in sources:
        check(source)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=60) | st.sampled_from([b'{"id":', b'{"id":1}', b"NaN", b"[", b"\xef\xbb\xbf{}"]))
def test_lines_of_any_bytes_are_tasks_or_one_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(line)
    check(str(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": 1, "n": 1e400}', "1e400 is beyond the numbers that can be stored"),
        ('{"id": 1, "n": [{"m": -1e999}]}', "-1e999 is beyond the numbers that can be stored"),
        ('{"id": "\\ud800"}', "the id of task 1"),
        ('{"id": ' + "9" * 5_000 + "}", "is not JSON"),
        ('{"id": 1, "n": ' + "[" * 5_000 + "]" * 5_000 + "}", "is not JSON"),
        ('{"id": 1, "n": ' + "[" * 150 + "]" * 150 + "}", "more than 100 lists or tables in each other"),
        ('{"a\\nb": 1}', "lacks 'id'; it has: a\\nb"),
        ('{"' + "x" * 100_000 + '": 1}', "lacks 'id'"),
        ('{"id": ""}', "is empty"),
        ('{"id": "' + "x" * 100_000 + '"}\n{"id": "' + "x" * 100_000 + '"}', "repeats the id"),
    ],
    ids=lambda value: value[:24],
)
def test_what_cannot_be_stored_as_it_is_is_refused_in_one_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(line + "\n")
    assert reason in refusal(str(path))


def test_two_ids_that_would_be_stored_as_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "\\ud800"}\n{"id": "\\ud801"}\n')
    assert "holds half of a character" in refusal(str(path))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "task",
    [
        {"id": 10**5_000},
        {"id": "\ud800"},
        {"id": 1, "n": float("inf")},
        {"id": 1, "n": nested(200)},
        {"id": 1, "n": nested(50_000)},
        {1: 2, "x": 3},
        {"id": object()},
        {"id": b"1"},
        ["id"],
        None,
    ],
    ids=lambda task: str(type(task)),
)
def test_values_of_an_iterable_are_refused_in_one_line(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    monkeypatch.setattr(builtins, "TASKS_OF_THE_TEST", [task], raising=False)
    assert refusal("builtins:TASKS_OF_THE_TEST").startswith("graph.tasks: ")
