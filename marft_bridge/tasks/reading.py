"""`graph.tasks` -> the list of tasks, whatever it names.

Invariants: each task is an object that can be stored as JSON, with a unique `id` made a text, and with the fields that
the configuration asks for; what is wrong is one line with the place. Reading stops at MAX_TASKS. It knows no graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from marft_bridge.errors import GraphError
from marft_bridge.load_name import load_name
from marft_bridge.tasks.gsm8k import gsm8k_to_tasks
from marft_bridge.tasks.humaneval import humaneval_to_tasks
from marft_bridge.tasks.lines import Placed, jsonl_to_objects
from marft_bridge.tasks.math_problems import math_to_tasks
from marft_bridge.tasks.options import (
    AnySource,
    Gsm8kTasks,
    HumanEvalTasks,
    JsonlTasks,
    MathTasks,
    ParquetTasks,
    tasks_to_text,
)
from marft_bridge.tasks.parquet import parquet_to_objects

Task = dict[str, Any]

MAX_TASKS = 1_000_000
_LINES, _TABLES = (".jsonl", ".jsonl.gz"), (".parquet",)


def read_tasks(tasks: str | AnySource, fields: Sequence[str]) -> list[Task]:
    """All tasks, each with a unique `id` (made a string) and the needed fields.

    Args:
        tasks: a path that ends in .jsonl, .jsonl.gz or .parquet, the name of an iterable, or a table.

    Raises:
        GraphError: they cannot be read, there are none, or one is no task.
    """
    name = tasks_to_text(tasks)
    found: list[Task] = []
    seen: set[str] = set()
    for where, task in _placed(tasks):
        if len(found) == MAX_TASKS:
            raise GraphError(f"graph.tasks: {name!r} holds more than {MAX_TASKS} tasks; give a part of them")
        missing = [field for field in ("id", *fields) if field not in task]
        if missing:
            has = ", ".join(sorted(task)) or "nothing"
            raise GraphError(f"graph.tasks: {where} lacks {missing[0]!r}; it has: {has}")
        if not isinstance(task["id"], (str, int)) or isinstance(task["id"], bool):
            raise GraphError(f"graph.tasks: the id of {where} is a {type(task['id']).__name__}, not a text or a number")
        name_of_task = str(task["id"])
        if name_of_task in seen:
            raise GraphError(f"graph.tasks: {where} repeats the id {name_of_task!r}")
        seen.add(name_of_task)
        found.append(task | {"id": name_of_task})
    if not found:
        raise GraphError(f"graph.tasks: {name!r} holds no task")
    return found


def _placed(tasks: str | AnySource) -> Iterator[Placed]:
    if isinstance(tasks, str):
        if tasks.endswith(_LINES):
            return _numbered(jsonl_to_objects(Path(tasks)), tasks)
        if tasks.endswith(_TABLES):
            return _numbered(parquet_to_objects(Path(tasks)), tasks)
        return _iterated(tasks)
    if isinstance(tasks, JsonlTasks):
        some = _with_ids(jsonl_to_objects(Path(tasks.path)), tasks.id_from)
    elif isinstance(tasks, ParquetTasks):
        some = _with_ids(parquet_to_objects(Path(tasks.path)), tasks.id_from)
    elif isinstance(tasks, MathTasks):
        some = math_to_tasks(tasks)
    elif isinstance(tasks, Gsm8kTasks):
        some = gsm8k_to_tasks(tasks)
    elif isinstance(tasks, HumanEvalTasks):
        some = humaneval_to_tasks(tasks)
    else:
        from marft_bridge.gym.entries import gym_to_tasks  # with what it needs of reasoning-gym

        return gym_to_tasks(tasks)
    return islice(some, tasks.limit)


def _numbered(records: Iterable[Placed], name: str) -> Iterator[Placed]:
    for number, (_, record) in enumerate(records, start=1):
        yield f"task {number} of {name!r}", record


def _with_ids(records: Iterable[Placed], id_from: str) -> Iterator[Placed]:
    for where, record in records:
        if id_from not in record:
            has = ", ".join(sorted(record)) or "nothing"
            raise GraphError(f"graph.tasks: {where} lacks {id_from!r}, the field of id_from; it has: {has}")
        if id_from != "id" and "id" in record:
            raise GraphError(f"graph.tasks: {where} has an 'id' besides {id_from!r}; leave out id_from, or rename it")
        yield where, record | {"id": record[id_from]}


def _iterated(name: str) -> Iterator[Placed]:
    found = load_name(name, "graph.tasks")
    try:
        items: Iterator[Any] = iter(found() if callable(found) else found)
    except TypeError:
        raise GraphError(
            f"graph.tasks: {name!r} is not a JSONL or Parquet file, an iterable, or a function that gives one"
        ) from None
    for number, task in enumerate(items, start=1):
        where = f"task {number} of {name!r}"
        if not isinstance(task, Mapping):
            raise GraphError(f"graph.tasks: {where} is a {type(task).__name__}, not a mapping")
        try:
            json.dumps(dict(task), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GraphError(f"graph.tasks: {where} cannot be written as JSON: {error}") from None
        yield where, dict(task)
