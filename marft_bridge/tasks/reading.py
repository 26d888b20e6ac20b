"""`graph.tasks` -> the list of tasks: from a file of any layout, a table, or a Python iterable.

Invariants: each task is an object that can be stored as JSON, with an `id` (a string) that is unique as it is stored,
and the fields that the configuration requires; a refused task is one line with its location. More than MAX_TASKS tasks
are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import BridgeError, GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.common.plain_values import nesting_fault
from marft_bridge.tasks.gsm8k import gsm8k_to_tasks
from marft_bridge.tasks.humaneval import humaneval_to_tasks
from marft_bridge.tasks.lines import LocatedRecord, jsonl_to_objects
from marft_bridge.tasks.math_problems import math_to_tasks
from marft_bridge.tasks.options import (
    AnySource,
    Gsm8kTasks,
    GymTasks,
    HumanEvalTasks,
    JsonlTasks,
    MathTasks,
    ParquetTasks,
    tasks_to_text,
)
from marft_bridge.tasks.parquet import parquet_to_objects

Task = dict[str, Any]

MAX_TASKS = 1_000_000
_JSONL_SUFFIXES, _PARQUET_SUFFIXES = (".jsonl", ".jsonl.gz"), (".parquet",)
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".gz", ".zip", ".xlsx", ".yaml", ".yml")


def read_tasks(tasks: str | AnySource, fields: Sequence[str]) -> list[Task]:
    """All tasks, each with a unique `id` (made a string) and the required fields.

    Args:
        tasks: a path that ends in .jsonl, .jsonl.gz or .parquet, the name of an iterable, or a table.

    Raises:
        GraphError: they cannot be read, there are none, or one is no task.
    """
    name = tasks_to_text(tasks)
    valid_tasks: list[Task] = []
    seen_ids: set[str] = set()
    for location, task in _read_records(tasks):
        if len(valid_tasks) == MAX_TASKS:
            raise GraphError(f"graph.tasks: {name!r} holds more than {MAX_TASKS} tasks; give a part of them")
        missing = [field for field in ("id", *fields) if field not in task]
        if missing:
            present_fields = ", ".join(sorted(map(str, task))) or "nothing"
            raise GraphError(f"graph.tasks: {location} lacks {missing[0]!r}; it has: {present_fields}")
        if not isinstance(task["id"], (str, int)) or isinstance(task["id"], bool):
            raise GraphError(
                f"graph.tasks: the id of {location} is a {type(task['id']).__name__}, not a text or a number"
            )
        task_id = str(task["id"])
        if not task_id:
            raise GraphError(f"graph.tasks: the id of {location} is empty; an episode needs one that names its task")
        if any("\ud800" <= letter <= "\udfff" for letter in task_id):  # a store would keep U+FFFD for each of them
            raise GraphError(f"graph.tasks: the id of {location} holds half of a character: {task_id!r:.80}")
        if task_id in seen_ids:
            raise GraphError(f"graph.tasks: {location} repeats the id {task_id!r:.200}")
        seen_ids.add(task_id)
        valid_tasks.append(task | {"id": task_id})
    if not valid_tasks:
        raise GraphError(f"graph.tasks: {name!r} holds no task")
    return valid_tasks


def _read_records(tasks: str | AnySource) -> Iterator[LocatedRecord]:
    if isinstance(tasks, str):
        if tasks.endswith(_JSONL_SUFFIXES):
            return _number_records(jsonl_to_objects(Path(tasks)), tasks)
        if tasks.endswith(_PARQUET_SUFFIXES):
            return _number_records(parquet_to_objects(Path(tasks)), tasks)
        return _read_iterable(tasks)
    return islice(_READERS[type(tasks)](tasks), getattr(tasks, "limit", None))


def _number_records(records: Iterable[LocatedRecord], name: str) -> Iterator[LocatedRecord]:
    for number, (_, record) in enumerate(records, start=1):
        yield f"task {number} of {name!r}", record


def _set_ids(records: Iterable[LocatedRecord], id_from: str) -> Iterator[LocatedRecord]:
    for location, record in records:
        if id_from not in record:
            present_fields = ", ".join(sorted(record)) or "nothing"
            raise GraphError(
                f"graph.tasks: {location} lacks {id_from!r}, the field of id_from; it has: {present_fields}"
            )
        if id_from != "id" and "id" in record:
            raise GraphError(
                f"graph.tasks: {location} has an 'id' besides {id_from!r}; leave out id_from, or rename it"
            )
        yield location, record | {"id": record[id_from]}


def _read_iterable(name: str) -> Iterator[LocatedRecord]:
    if ":" not in name and ("/" in name or name.lower().endswith(_FILE_SUFFIXES)):
        raise GraphError(
            f"graph.tasks: {name!r} is no file of tasks: those end in .jsonl, .jsonl.gz or .parquet, or are named in a "
            'table with a kind; a function of yours reads any other, as in "my_app.py:tasks"'
        )
    source = load_name(name, "graph.tasks")
    with _named_failures(name):
        value = source() if callable(source) else source
    try:
        items: Iterator[Any] = iter(value)
    except TypeError:
        raise GraphError(
            f"graph.tasks: {name!r} is not a JSONL or Parquet file, an iterable, or a function that gives one"
        ) from None
    for number, task in enumerate(_each_item(items, name), start=1):
        location = f"task {number} of {name!r}"
        if not isinstance(task, Mapping):
            raise GraphError(f"graph.tasks: {location} is a {type(task).__name__}, not a mapping")
        try:
            json.dumps(dict(task), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GraphError(
                f"graph.tasks: {location} cannot be written as JSON: {error}; give plain values, and let "
                "graph.task_to_input (init: --task-to-input) make the graph's input of them"
            ) from None
        if (fault := nesting_fault(dict(task))) is not None:
            raise GraphError(f"graph.tasks: {location} holds {fault}")
        yield location, dict(task)


def _each_item(items: Iterator[Any], name: str) -> Iterator[Any]:
    while True:
        with _named_failures(name):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextmanager
def _named_failures(name: str) -> Iterator[None]:
    """Whatever the user's function raises is one line that names it, and not the file that it could not open."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise GraphError(f"graph.tasks: {name!r} failed: {reason}") from error


def _read_gym(tasks: GymTasks) -> Iterator[LocatedRecord]:
    from marft_bridge.tasks.reasoning_gym import gym_to_tasks  # lazily: it needs the extra

    return gym_to_tasks(tasks)


_READERS: dict[type[AnySource], Callable[[Any], Iterator[LocatedRecord]]] = {
    JsonlTasks: lambda tasks: _set_ids(jsonl_to_objects(Path(tasks.path)), tasks.id_from),
    ParquetTasks: lambda tasks: _set_ids(parquet_to_objects(Path(tasks.path)), tasks.id_from),
    MathTasks: math_to_tasks,
    Gsm8kTasks: gsm8k_to_tasks,
    HumanEvalTasks: humaneval_to_tasks,
    GymTasks: _read_gym,
}
