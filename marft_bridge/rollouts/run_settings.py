"""`graph.context` and `graph.config` -> what a run of the app's graph on one task is invoked with.

Invariants: a value in the configuration holds for every run; a function of the app is asked for each task. What the
user can mend is a `GraphError` of one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from marft_bridge.common.errors import GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.config.graph_runs import RunConfigOptions, check_run_config
from marft_bridge.tasks.reading import Task


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the app wants its runs."""

    context: Mapping[str, Any] | Callable[[Task], Any] | None = None
    config: RunConfigOptions | Callable[[Task], Any] | None = None

    def to_arguments(self, task: Task, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments `config` and `context` of `graph.ainvoke`.

        Args:
            config: the caller's own keys of LangGraph's config, which are added: a thread, callbacks.

        Raises:
            GraphError: a function of the app failed, or returned no config.
        """
        app_config = self._task_to_config(task).to_langgraph()
        configurable = {**app_config.get("configurable", {}), **config.get("configurable", {})}
        arguments: dict[str, Any] = {"config": {**app_config, **config, "configurable": configurable}}
        if self.context is not None:
            context = _ask(self.context, task, "graph.context") if callable(self.context) else dict(self.context)
            arguments["context"] = context
        return arguments

    def _task_to_config(self, task: Task) -> RunConfigOptions:
        if not callable(self.config):
            return self.config or RunConfigOptions()
        table = _ask(self.config, task, "graph.config")
        try:
            options = check_run_config(dict(table) if isinstance(table, Mapping) else table)
        except ValueError as error:
            raise GraphError(f"graph.config: for task {task['id']!r}: {error}") from None
        if not isinstance(options, RunConfigOptions):
            raise GraphError(
                f"graph.config: for task {task['id']!r} the function returned a {type(table).__name__}, not a dict"
            )
        return options

    def check_context(self, graph: Any) -> None:
        """Refuses a table that the graph's context schema lacks a field for, or that lacks one of its fields.

        Raises:
            GraphError: with the field.
        """
        fields = context_fields(graph)
        if fields is None or self.context is None or callable(self.context):
            return
        schema = graph.context_schema.__name__
        if missing_fields := [name for name, required in fields.items() if required and name not in self.context]:
            raise GraphError(f"graph.context: the app's {schema} needs {missing_fields[0]!r}; add it to the table")
        if unknown_fields := [name for name in self.context if name not in fields]:
            known_fields = ", ".join(fields) or "nothing"
            raise GraphError(f"graph.context: the app's {schema} has no {unknown_fields[0]!r}; it has {known_fields}")


def load_run_settings(context: Mapping[str, Any] | str | None, config: RunConfigOptions | str | None) -> RunSettings:
    """Loads the functions that the options name. Raises GraphError."""
    return RunSettings(
        _load_function(context, "graph.context") if isinstance(context, str) else context,
        _load_function(config, "graph.config") if isinstance(config, str) else config,
    )


def context_fields(graph: Any) -> dict[str, bool] | None:
    """The fields of the graph's context schema, and which are required; None where it is no dataclass or pydantic
    model, whose fields LangGraph would fill."""
    schema = getattr(graph, "context_schema", None)
    if not isinstance(schema, type):
        return None
    if issubclass(schema, BaseModel):
        if schema.model_config.get("extra") == "allow" or any(f.alias for f in schema.model_fields.values()):
            return None
        return {name: field.is_required() for name, field in schema.model_fields.items()}
    if not dataclasses.is_dataclass(schema):
        return None
    return {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(schema)
        if field.init
    }


def _load_function(name: str, key: str) -> Callable[[Task], Any]:
    function = load_name(name, key)
    if not callable(function):
        raise GraphError(f"{key}: {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # whatever it returns is checked where it is used


def _ask(function: Callable[[Task], Any], task: Task, key: str) -> Any:
    try:
        return function(task)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise GraphError(f"{key}: the function failed on task {task['id']!r}: {text}") from error
