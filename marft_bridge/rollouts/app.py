"""Names in the configuration -> the user's graph, tasks, input function and reward.

Invariant: a mistake on the user's side (an import, a node name, a task field) is a `GraphError` of one line, raised
before any episode starts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from langchain_core.language_models import BaseChatModel

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.config.bridge import BridgeConfig, GraphOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.span_processor import check_options
from marft_bridge.rewards.contract import RewardOptions
from marft_bridge.rewards.limit_reward import LimitReward
from marft_bridge.rewards.scoring import Scorer
from marft_bridge.rollouts.agent_check import check_nodes
from marft_bridge.rollouts.app_graph import call_app_factory, input_keys, load_app_object, open_graph
from marft_bridge.rollouts.run_settings import RunSettings, load_run_settings
from marft_bridge.tasks.reading import Task, read_tasks


@dataclass(frozen=True, slots=True)
class App:
    """The user's graph, tasks and reward, loaded and checked."""

    build: Callable[[Any], Any]  # chat model or None -> the source that `open_graph` opens
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    task_to_input: Callable[[Task], Any]  # `task_as_input` where none is named
    reward: Callable[..., Any] | None  # graph.reward; None: only the tables of [[rewards]]
    reward_source: str
    name: str = "the app"
    runs: RunSettings = field(default_factory=RunSettings)
    nodes: tuple[str, ...] = ()  # the trained nodes, which must exist
    frozen: tuple[str, ...] = ()  # nodes that run on the served model untrained, which must exist too
    subject_field: str | None = None  # the field of a task that says whose data it holds
    reward_options: tuple[RewardOptions, ...] = ()  # the tables of [[rewards]]
    reward_timeout_s: float = 60.0
    limit_reward: LimitReward | None = None  # of a run that one of its limits cut short; None: it has no reward

    def scorer(self) -> Scorer:
        """The scorer of all rewards. Raises BridgeError where one of them cannot be computed here."""
        function = (self.reward, self.reward_source) if self.reward is not None else None
        return Scorer(self.reward_options, function, self.reward_timeout_s, agents=(*self.nodes, *self.frozen))

    def subject_of(self, task: Task) -> str | None:
        """The person whose data a task holds; None where it names none.

        Raises:
            GraphError: the field holds neither a text nor a whole number nor null.
        """
        subject = None if self.subject_field is None else task[self.subject_field]
        if subject is None:
            return None
        if not isinstance(subject, (str, int)) or isinstance(subject, bool):
            raise GraphError(
                f"graph.subject_field: {self.subject_field!r} of task {task['id']!r} is a {type(subject).__name__};"
                " name a field that holds a text, a whole number or null"
            )
        return str(subject)

    @contextmanager
    def open_graph(self, model: BaseChatModel | None, runner: asyncio.Runner) -> Iterator[Any]:
        """The compiled graph, its nodes checked, opened on the loop that it runs on and closed when the block ends.

        Without a model the app calls its own models.

        Raises:
            GraphError: the app cannot be opened, lacks a node, or reads no field of a task.
        """
        with open_graph(self.build(model), self.name, runner) as graph:
            self.check_input(graph)
            self.runs.check_context(graph)
            check_nodes(graph, self.nodes, self.name)
            check_nodes(graph, self.frozen, self.name, key="graph.frozen")
            yield graph

    def check_input(self, graph: Any) -> None:
        """Refuses tasks of which the graph reads no field, where they are its input without a function in between.

        LangGraph drops fields that are not keys of the state, so the nodes would run without the task, and some would
        not even fail.
        """
        keys = input_keys(graph)
        if keys is None or self.task_to_input is not task_as_input:
            return
        for task in chain(self.train_tasks, self.heldout_tasks):
            if keys.isdisjoint(task):
                raise GraphError(
                    f"graph.tasks: task {task['id']!r} has {', '.join(task)}, and {self.name!r} reads "
                    f"{', '.join(sorted(keys))}: name a function task -> graph input in graph.task_to_input"
                )


def task_as_input(task: Task) -> Task:
    """The default input function: the graph gets the task's fields as they are."""
    return task


def options_to_app(
    options: GraphOptions, rewards: Sequence[RewardOptions] = (), limit_reward: LimitReward | None = None
) -> App:
    """Loads everything that `[graph]` and `[[rewards]]` name; `limit_reward` is as of `BridgeConfig`.

    Raises:
        GraphError: a name does not import, does not exist, or is of the wrong kind.
    """
    app = load_app_object(options.app, "graph.app")
    reward = load_reward(options)
    to_input: Callable[[Task], Any] = task_as_input
    if options.task_to_input is not None:
        loaded = load_name(options.task_to_input, "graph.task_to_input")
        to_input = _require_callable(loaded, "graph.task_to_input", options.task_to_input)
    subject_fields = () if options.subject_field is None else (options.subject_field,)
    train, heldout = split_tasks(read_tasks(options.tasks, (*options.task_fields, *subject_fields)), options.heldout)

    def build(model: BaseChatModel | None) -> Any:
        return call_app_factory(app, options.app, model)

    user_app = App(
        build=build,
        train_tasks=train,
        heldout_tasks=heldout,
        task_to_input=to_input,
        reward=reward,
        reward_source=options.reward or "",
        name=options.app,
        runs=load_run_settings(options.context, options.config),
        nodes=options.nodes,
        frozen=options.frozen,
        subject_field=options.subject_field,
        reward_options=tuple(rewards),
        reward_timeout_s=options.reward_timeout_s,
        limit_reward=limit_reward,
    )
    user_app.scorer()
    for task in (*train, *heldout):
        user_app.subject_of(task)  # raises for a value that names nobody
    return user_app


def load_reward(options: GraphOptions) -> Callable[..., Any] | None:
    """The function that `graph.reward` names; None where it names none. Raises GraphError."""
    if options.reward is None:
        return None
    return _require_callable(load_name(options.reward, "graph.reward"), "graph.reward", options.reward)


def _require_callable(loaded: Any, key: str, name: str) -> Callable[..., Any]:
    if not callable(loaded):
        raise GraphError(f"{key}: {name!r} is a {type(loaded).__name__}, not a function")
    return loaded  # type: ignore[no-any-return]  # whatever the user's function returns is checked where it is used


def split_tasks(tasks: Sequence[Task], heldout: float) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, by a hash of the id: a task stays on its side when other tasks come or go."""
    sides: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        digest = hashlib.sha256(f"marft/{task['id']}".encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < heldout * 2**64].append(task)
    for side, name in zip(sides, ("training", "held-out"), strict=True):
        if not side:
            raise GraphError(f"graph.tasks: no {name} task is left of {len(tasks)} at heldout = {heldout}; add tasks")
    return sides


def load_app(config: BridgeConfig) -> App:
    """The user's app, checked before any server starts: its nodes on a scripted model, and the recording options.

    Raises:
        GraphError: see `options_to_app`.
        ConfigError: `compare.tasks` is larger than the number of held-out tasks.
    """
    check_options(config.record)
    app = options_to_app(config.graph, config.rewards, config.limit_reward)
    heldout_count, all_tasks = len(app.heldout_tasks), len(app.train_tasks) + len(app.heldout_tasks)
    if (requested_tasks := config.compare.tasks or 0) > heldout_count:
        raise ConfigError(
            f"compare.tasks asks for {requested_tasks} held-out tasks, but graph.heldout = {config.graph.heldout} "
            f"leaves {heldout_count} of {all_tasks}: lower compare.tasks or add tasks"
        )
    return check_app(app)


def check_app(app: App, *, own_models: bool = False) -> App:
    """Opens the app once, on a scripted model or on its own ones, which checks its nodes. Returns it unchanged."""
    with asyncio.Runner() as runner, app.open_graph(None if own_models else ScriptedPolicy(), runner):
        return app
