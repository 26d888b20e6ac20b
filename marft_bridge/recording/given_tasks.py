"""Tasks of a recorded run -> the same tasks of a run that repeats it, which get what they wrote and do not run.

LangGraph applies the recorded writes as if the nodes had made them just now, so state, routes and D follow as ever; the
spans of the tasks are copied, under new ids and namespaces. Invariants: every task is given once, in its superstep;
nothing runs before all are given, and a task that the record lacks there is an error.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.types import PregelExecutableTask

from marft_bridge.common.errors import GraphError
from marft_bridge.recording.write_ledger import ENTRY
from trace_store import conventions as names
from trace_store.records import SpanRow

TaskKey = tuple[int, tuple[Any, ...]]
"""Superstep of a task of the outermost graph, and LangGraph's path of it."""
_NAMESPACES = (
    names.CHECKPOINT_NS,
    names.TRIGGERED_BY,
    names.SENT_BY,
    names.READS_FROM,
    names.MAY_READ_FROM,
)
_SPAN_IDS = (names.SAW_ANSWERS, names.SAW_TOOL_RESULTS)


@dataclass(frozen=True, slots=True)
class GivenTask:
    """One task of the record."""

    namespace: str
    writes: Sequence[tuple[str, Any]]  # (channel, value), in the order in which it wrote them
    spans: Sequence[SpanRow]  # of its executions and of what they called; each after the one around it


@dataclass(frozen=True, slots=True)
class GivenTasks:
    """The tasks of whole supersteps from the start of a run on."""

    tasks: Mapping[TaskKey, GivenTask]
    answers: Mapping[str, AIMessage]  # span id of a call of theirs -> its answer
    offered_tools: Mapping[str, Sequence[str]] = field(default_factory=dict)  # node -> tools, each as canonical JSON

    @property
    def span_ids(self) -> frozenset[str]:
        """The recorded spans of these tasks: their executions, calls and tools."""
        return frozenset(row.span_id for task in self.tasks.values() for row in task.spans)

    def begin(self) -> OpenGivenTasks:
        """The tasks for one run, none of them given yet."""
        return OpenGivenTasks(self)


class OpenGivenTasks:
    """The tasks while one run is given them. Safe for the threads that its tasks run in."""

    def __init__(self, recorded: GivenTasks) -> None:
        self.answers, self.offered_tools = recorded.answers, recorded.offered_tools
        self.span_ids: dict[str, str] = {}  # recorded -> copied
        self._namespaces: dict[str, str] = {}  # recorded -> of the task that was given its writes
        self._open = dict(recorded.tasks)
        rows = [row for task in recorded.tasks.values() for row in task.spans]
        times_ns = sorted({at_ns for row in rows for at_ns in (row.start_ns, row.end_ns)})
        self._ranks = {at_ns: rank for rank, at_ns in enumerate(times_ns)}
        self._begun_ns: int | None = None
        self._lock = threading.Lock()

    def take(self, task: PregelExecutableTask) -> GivenTask | None:
        """What is given to a task that starts; None where it runs itself, as all do after the last one that is given.

        Raises:
            GraphError: the record has no such task in this superstep.
        """
        if task.name == ENTRY:
            return None
        with self._lock:
            if not self._open:
                return None
            key = (int(task.config["metadata"]["langgraph_step"]), task.path)
            given_task = self._open.pop(key, None)
            if given_task is None:
                raise GraphError(f"superstep {key[0]} runs {task.name}, which the record does not have there")
            self._namespaces[given_task.namespace] = task.config["configurable"]["checkpoint_ns"]
            self._begun_ns = self._begun_ns or time.time_ns()
            return given_task

    def to_time(self, recorded_ns: int) -> int:
        """When a copy happened: now, all a nanosecond apart, in the order and with the overlaps of the record."""
        assert self._begun_ns is not None  # a task was taken
        return self._begun_ns + self._ranks[recorded_ns]

    def to_attributes(self, row: SpanRow) -> dict[str, Any]:
        """The attributes of a copied span, apart from the ids of other spans: see `to_seen`."""
        attributes = {key: value for key, value in row.attributes.items() if key not in _SPAN_IDS}
        for key in _NAMESPACES:
            if key in attributes:
                attributes[key] = _rename(attributes[key], self._namespaces)
        if row.operation in (names.CHAT, names.EXECUTE_TOOL):
            attributes[names.REPLAYED_FROM] = row.span_id
        return attributes

    def to_seen(self, row: SpanRow) -> dict[str, Any]:
        """The attributes of a copied span that name other spans, once these are copied."""
        return {key: _rename(row.attributes[key], self.span_ids) for key in _SPAN_IDS if key in row.attributes}


def _rename(value: Any, new_names: Mapping[str, str]) -> Any:
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    if isinstance(value, str):
        return new_names.get(value, value)
    return [new_names.get(name, name) for name in value]


def copy_writes(given_task: GivenTask) -> list[tuple[str, Any]]:
    """What a task wrote, in objects that no other run shares."""
    return list(copy.deepcopy(list(given_task.writes)))


given_tasks_of_run: ContextVar[OpenGivenTasks | None] = ContextVar("marft_given_tasks", default=None)
"""What the tasks of the run that is called in this context are given."""


@contextmanager
def giving_tasks(given_tasks: GivenTasks | None) -> Iterator[OpenGivenTasks | None]:
    """The recorded run that is called in the block is given these tasks."""
    open_tasks = None if given_tasks is None else given_tasks.begin()
    reset_token = given_tasks_of_run.set(open_tasks)
    try:
        yield open_tasks
    finally:
        given_tasks_of_run.reset(reset_token)
