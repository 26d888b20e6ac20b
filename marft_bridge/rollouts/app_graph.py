"""The object that `graph.app` names -> a compiled graph, open until a block ends.

An app is a compiled graph, a StateGraph, or a factory of one: a function that takes a chat model, or what
LangGraph's own server would pass (a config, a runtime), or nothing; sync, async, or a context manager of either
kind. Invariant: the kind is read from the object and its signature alone; an ambiguous signature is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime

from marft_bridge.common.errors import GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.recording.wrap import graph_to_original
from marft_bridge.rollouts.langgraph_json import (
    FILE_NAME,
    install_hint,
    lists_graph,
    load_listed_graph,
    open_listed_store,
)

_FORMS = f"package.module:attribute, path/file.py:attribute, or a graph of {FILE_NAME}"


def load_app_object(name: str, key: str) -> Any:
    """Loads the object called `name`: by module, by file, as `path/langgraph.json:graph`, or as a graph that the
    langgraph.json of the working directory lists.

    Raises:
        GraphError: the name leads to no object.
    """
    file = _listing_file(name)
    if file is not None:
        if ":" not in name and not file.is_file():
            raise GraphError(f"{key}: {name!r} is not a name of the form {_FORMS} (there is none here)")
        return load_listed_graph(file, name.rpartition(":")[2], key)
    try:
        return load_name(name, key)
    except GraphError as error:
        raise GraphError(f"{error}{install_hint(error.__cause__, Path.cwd(), ['.'])}") from error.__cause__


def _listing_file(name: str) -> Path | None:
    """The langgraph.json that lists the graph called `name`; None for a name of another form."""
    file, colon, _ = name.rpartition(":")
    if not colon:
        return Path(FILE_NAME)
    return Path(file) if file.endswith(".json") else None


def call_app_factory(app: Any, name: str, model: BaseChatModel | None) -> Any:
    """Calls `app` where it is a factory, and returns what it gives, for `open_graph`; any other app is returned as is.

    Args:
        model: for a factory that takes one; None leaves it with models of its own.

    Raises:
        GraphError: its signature is ambiguous, it needs a model and gets none, or the call failed.
    """
    if _is_graph(app) or hasattr(app, "compile") or not callable(app):
        return app
    arguments = _factory_arguments(app, name, model)
    try:
        return app(**arguments)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(f"graph.app: calling {name!r} failed: {_one_line(error)}") from error


@contextmanager
def open_graph(source: Any, name: str, runner: asyncio.Runner) -> Iterator[Any]:
    """The compiled graph that `source` leads to, closed when the block ends.

    Args:
        source: a graph, compiled or not, or a coroutine or context manager that gives one.
        runner: the loop that the graph runs on. What an app opens (clients, connections) belongs to a loop.

    Raises:
        GraphError: the source gives no graph, or opening or closing it failed.
    """
    block_error: BaseException | None = None
    is_open = False
    try:
        with ExitStack() as stack:
            graph = _enter_source(source, name, runner, stack=stack)
            is_open = True
            try:
                yield graph
            except BaseException as error:
                block_error = error
                raise
    except Exception as error:
        if error is block_error or not is_open:
            raise
        if block_error is not None:  # what ended the block says more than an exit that fails after it
            raise block_error from error
        raise GraphError(f"graph.app: closing {name!r} failed: {_one_line(error)}") from error


def _enter_source(source: Any, name: str, runner: asyncio.Runner, *, stack: ExitStack) -> Any:
    """The graph of a source; what has to be closed again is left to the stack. Raises as `open_graph`."""
    try:
        if inspect.isawaitable(source):
            source = runner.run(_result_of(source))
        if isinstance(source, AbstractAsyncContextManager):
            source = stack.enter_context(_enter_async(source, runner))
        elif isinstance(source, AbstractContextManager) and not _is_graph(source):
            source = stack.enter_context(source)
        graph = source.compile() if not _is_graph(source) and hasattr(source, "compile") else source
    except Exception as error:
        raise GraphError(f"graph.app: opening {name!r} failed: {_one_line(error)}") from error
    if not _is_graph(graph):
        raise GraphError(f"graph.app: {name!r} gave a {type(graph).__name__}, not a LangGraph graph")
    return _with_server_store(graph, name)


def _with_server_store(graph: Any, name: str) -> Any:
    """A graph that a langgraph.json lists gets a store where it has none, as from LangGraph's server: its nodes may
    ask for one, and would find None. Any other graph stays as it is."""
    file = _listing_file(name)
    if file is None or not isinstance(graph, Pregel) or graph.store is not None:
        return graph
    if not lists_graph(file, name.rpartition(":")[2], "graph.app"):  # a name for messages alone
        return graph
    return graph_to_original(graph).copy({"store": open_listed_store(file, "graph.app")})


async def _result_of(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _enter_async(manager: AbstractAsyncContextManager[Any], runner: asyncio.Runner) -> Iterator[Any]:
    """Enters and leaves an async context manager in one and the same task, as task groups (anyio) require."""
    closing = asyncio.Event()

    async def hold(entered: asyncio.Future[Any]) -> None:
        try:
            async with manager as resource:
                entered.set_result(resource)
                await closing.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    async def enter() -> tuple[asyncio.Task[None], Any]:
        entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(hold(entered))
        return task, await entered

    async def leave(task: asyncio.Task[None]) -> None:
        closing.set()
        await task

    task, resource = runner.run(enter())
    try:
        yield resource
    finally:
        runner.run(leave(task))


def _is_graph(candidate: Any) -> bool:
    return hasattr(candidate, "ainvoke") and hasattr(candidate, "nodes")


def _factory_arguments(factory: Callable[..., Any], name: str, model: BaseChatModel | None) -> dict[str, Any]:
    """The keyword arguments for the factory, by the annotation of each parameter, else by its name."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise GraphError(f"graph.app: the signature of {name!r} cannot be read; wrap it in a function") from None
    try:
        hints = typing.get_type_hints(factory if inspect.isroutine(factory) else type(factory).__call__)
    except Exception:  # noqa: BLE001  a name that exists for type checkers only; the parameters' names must do
        hints = {}
    arguments: dict[str, Any] = {}
    models = []
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = _parameter_kind(parameter.name, hints.get(parameter.name, parameter.annotation))
        required = parameter.default is parameter.empty
        if kind == "config":
            arguments[parameter.name] = {"configurable": {}}
        elif kind == "runtime":
            arguments[parameter.name] = Runtime()
        elif kind == "model" or (required and kind == "untyped"):
            if model is None and required:
                raise GraphError(
                    f"graph.app: {name!r} takes the model in {parameter.name!r} and has none of its own; name a graph "
                    "that was written with its models"
                )
            if model is None:
                continue  # the parameter's default
            arguments[parameter.name] = model
            models.append(parameter.name)
        elif required:
            raise GraphError(
                f"graph.app: {name!r} needs {parameter.name!r}, which is neither a chat model nor a RunnableConfig; "
                "name a function that needs no more"
            )
    if len(models) > 1:
        raise GraphError(
            f"graph.app: {name!r} takes {' and '.join(map(repr, models))}; a factory takes one chat model, "
            "which answers each node by its own adapter"
        )
    _refuse_positional_only(parameters, arguments, name)
    return arguments


def _refuse_positional_only(parameters: typing.Mapping[str, Any], arguments: dict[str, Any], name: str) -> None:
    positional_only = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.name in arguments]
    if positional_only:
        raise GraphError(f"graph.app: {name!r} takes {positional_only[0]!r} by position only; wrap it in a function")


def _parameter_kind(parameter: str, annotation: Any) -> str:
    """One of model, config, runtime, untyped (neither annotation nor name tells), other."""
    if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, str):
        by_name = {"config": "config", "runtime": "runtime"}
        return by_name.get(parameter, "model" if parameter in ("model", "llm", "chat", "chat_model") else "untyped")
    for candidate in typing.get_args(annotation) or (annotation,):
        origin = typing.get_origin(candidate) or candidate
        if origin is RunnableConfig or (parameter == "config" and origin is dict):
            return "config"
        if isinstance(origin, type) and origin.__name__ in ("Runtime", "ServerRuntime"):
            return "runtime"
        # A NodeChat is passed for a base class of chat models and for any chat model class.
        if isinstance(origin, type) and (issubclass(origin, BaseChatModel) or origin in BaseChatModel.__mro__[:-1]):
            return "model"
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and origin.__name__ in ("Runtime", "ServerRuntime"):
        return "runtime"
    return "other"


def input_keys(graph: Any) -> frozenset[str] | None:
    """The state keys of the graph's input; None where the graph accepts any input or declares no schema."""
    builder = getattr(graph, "builder", None)
    channels = getattr(builder, "schemas", {}).get(getattr(builder, "input_schema", None))
    return None if not channels or "__root__" in channels else frozenset(channels)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
