"""Names in the configuration -> the user's graph, tasks, input function and reward.

Invariant: whatever is wrong with the user's side (an import, a node name, a task field) is a `GraphError` of one
line before any episode starts. It knows nothing of servers, stores or training.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from langchain_core.language_models import BaseChatModel

from marft_bridge.app_graph import app_to_product, check_nodes, input_keys, load_app_object, opened_graph
from marft_bridge.config import GraphOptions
from marft_bridge.errors import GraphError
from marft_bridge.load_name import load_name
from marft_bridge.rewards.contract import RewardOptions
from marft_bridge.rewards.scoring import Scorer
from marft_bridge.tasks.reading import Task, read_tasks


@dataclass(frozen=True, slots=True)
class App:
    """What the user brought, loaded and checked."""

    build: Callable[[Any], Any]  # chat model, or None -> compiled graph, or what `opened_graph` makes one of
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    task_to_input: Callable[[Task], Any]  # `task_itself` where none is named
    reward: Callable[..., Any] | None  # graph.reward; None: only what is declared
    reward_source: str
    name: str = "the app"
    nodes: tuple[str, ...] = ()  # that must exist: trained,
    frozen: tuple[str, ...] = ()  # or run on the served model untrained
    subject_field: str | None = None  # of a task: whose data it holds
    declared: tuple[RewardOptions, ...] = ()  # the tables of [[rewards]]
    reward_timeout_s: float = 60.0

    def scorer(self) -> Scorer:
        """What computes the rewards of a run. Raises a BridgeError where one cannot work here."""
        function = (self.reward, self.reward_source) if self.reward is not None else None
        return Scorer(self.declared, function, self.reward_timeout_s, (*self.nodes, *self.frozen))

    def subject_of(self, task: Task) -> str | None:
        """Whose data a task holds; None for nobody's."""
        found = None if self.subject_field is None else task[self.subject_field]
        if found is None:
            return None
        if not isinstance(found, (str, int)) or isinstance(found, bool):
            raise GraphError(
                f"graph.subject_field: {self.subject_field!r} of task {task['id']!r} is a {type(found).__name__};"
                " name a field that holds a text, a whole number or null"
            )
        return str(found)

    @contextmanager
    def opened(self, model: BaseChatModel | None, runner: asyncio.Runner) -> Iterator[Any]:
        """The compiled graph, its nodes checked, until the block ends; on the loop that it will run on.

        Without a model the app calls those that it was written with.

        Raises:
            GraphError: the app cannot be opened, lacks a node, or reads nothing of a task.
        """
        with opened_graph(self.build(model), self.name, runner) as graph:
            self.check_input(graph)
            check_nodes(graph, self.nodes, self.name)
            check_nodes(graph, self.frozen, self.name, "graph.frozen")
            yield graph

    def check_input(self, graph: Any) -> None:
        """Refuses tasks that are handed over as they are to a graph that knows none of their fields.

        LangGraph drops fields that are no keys of the state, so its nodes would run without the task, and some do
        not even fail.
        """
        keys = input_keys(graph)
        if keys is None or self.task_to_input is not task_itself:
            return
        for task in chain(self.train_tasks, self.heldout_tasks):
            if keys.isdisjoint(task):
                raise GraphError(
                    f"graph.tasks: task {task['id']!r} has {', '.join(task)}, and {self.name!r} reads "
                    f"{', '.join(sorted(keys))}: name a function task -> graph input in graph.task_to_input"
                )


def task_itself(task: Task) -> Task:
    """What the graph gets where nothing says how to make its input of a task."""
    return task


def options_to_app(options: GraphOptions, rewards: Sequence[RewardOptions] = ()) -> App:
    """Loads everything that `[graph]` and `[[rewards]]` name.

    Raises:
        GraphError: something does not import, does not exist, or has the wrong shape.
    """
    app = load_app_object(options.app, "graph.app")
    reward = load_reward(options)
    to_input: Callable[[Task], Any] = task_itself
    if options.task_to_input is not None:
        loaded = load_name(options.task_to_input, "graph.task_to_input")
        to_input = _callable(loaded, "graph.task_to_input", options.task_to_input)
    subject = () if options.subject_field is None else (options.subject_field,)
    train, heldout = split_tasks(read_tasks(options.tasks, (*options.task_fields, *subject)), options.heldout)

    def build(model: BaseChatModel | None) -> Any:
        return app_to_product(app, options.app, model)

    app_of_user = App(
        *(build, train, heldout, to_input, reward, options.reward or ""),
        name=options.app,
        nodes=options.nodes,
        frozen=options.frozen,
        subject_field=options.subject_field,
        declared=tuple(rewards),
        reward_timeout_s=options.reward_timeout_s,
    )
    app_of_user.scorer()
    for task in (*train, *heldout):
        app_of_user.subject_of(task)  # raises for a value that names nobody
    return app_of_user


def load_reward(options: GraphOptions) -> Callable[..., Any] | None:
    """The function that `graph.reward` names; None where it names none. Raises GraphError."""
    if options.reward is None:
        return None
    return _callable(load_name(options.reward, "graph.reward"), "graph.reward", options.reward)


def _callable(found: Any, key: str, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise GraphError(f"{key}: {name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # whatever the user's function returns is checked where it is used


def split_tasks(tasks: Sequence[Task], heldout: float) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, by hash of the id: a task keeps its side whatever else is in the file."""
    sides: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        digest = hashlib.sha256(f"marft/{task['id']}".encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < heldout * 2**64].append(task)
    for side, what in zip(sides, ("training", "held-out"), strict=True):
        if not side:
            raise GraphError(f"graph.tasks: no {what} task is left of {len(tasks)} at heldout = {heldout}; add tasks")
    return sides
