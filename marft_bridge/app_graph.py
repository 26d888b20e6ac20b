"""What the user calls their app -> a compiled graph, for as long as it is needed.

An app is a compiled graph, a StateGraph, or a factory of one: a function that takes a chat model, or what
LangGraph's own server would pass (a config, a runtime), or nothing; sync, async, or a context manager of either
kind. Invariant: which kind it is, is read from the object and its signature; what could be two things is refused.
It knows nothing of servers, stores or training.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime

from marft_bridge.errors import GraphError
from marft_bridge.langgraph_json import FILE_NAME, load_listed_graph
from marft_bridge.load_name import load_name

_FORMS = f"package.module:attribute, path/file.py:attribute, or a graph of {FILE_NAME}"


def load_app_object(name: str, key: str) -> Any:
    """The object called `name`: by module, by file, as `path/langgraph.json:graph`, or as a graph that the
    langgraph.json of the working directory lists.

    Raises:
        GraphError: there is no such thing.
    """
    file, colon, graph = name.rpartition(":")
    if colon and file.endswith(".json"):
        return load_listed_graph(Path(file), graph, key)
    if not colon:
        if not Path(FILE_NAME).is_file():
            raise GraphError(f"{key}: {name!r} is not a name of the form {_FORMS} (there is none here)")
        return load_listed_graph(Path(FILE_NAME), name, key)
    return load_name(name, key)


def app_to_product(app: Any, name: str, model: BaseChatModel | None) -> Any:
    """What `app` gives when it is asked for a graph; `opened_graph` makes a graph of it.

    Args:
        model: for a factory that takes one; None leaves it with models of its own.

    Raises:
        GraphError: it is no app, its signature can mean two things, it needs a model and gets none, or it failed.
    """
    if _is_graph(app) or hasattr(app, "compile") or not callable(app):
        return app
    arguments = _arguments(app, name, model)
    try:
        return app(**arguments)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(f"graph.app: calling {name!r} failed: {_one_line(error)}") from error


@contextmanager
def opened_graph(product: Any, name: str, runner: asyncio.Runner) -> Iterator[Any]:
    """The compiled graph in `product`, which may be or hold a coroutine, a context manager, or a graph to compile.

    `runner` is the loop that the graph will run on: what an app opens there belongs to it.

    Raises:
        GraphError: there is no graph in it, or opening it failed.
    """
    with ExitStack() as stack:
        try:
            if inspect.isawaitable(product):
                product = runner.run(_result_of(product))
            if isinstance(product, AbstractAsyncContextManager):
                product = stack.enter_context(_held_open(product, runner))
            elif isinstance(product, AbstractContextManager) and not _is_graph(product):
                product = stack.enter_context(product)
            graph = product.compile() if not _is_graph(product) and hasattr(product, "compile") else product
        except Exception as error:
            raise GraphError(f"graph.app: opening {name!r} failed: {_one_line(error)}") from error
        if not _is_graph(graph):
            raise GraphError(f"graph.app: {name!r} gave a {type(graph).__name__}, not a LangGraph graph")
        yield graph


async def _result_of(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def _held_open(manager: AbstractAsyncContextManager[Any], runner: asyncio.Runner) -> Iterator[Any]:
    """An async context manager, entered and left in one task: clients built on task groups insist on it."""
    closing = asyncio.Event()

    async def hold(entered: asyncio.Future[Any]) -> None:
        try:
            async with manager as inside:
                entered.set_result(inside)
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

    task, inside = runner.run(enter())
    try:
        yield inside
    finally:
        runner.run(leave(task))


def _is_graph(found: Any) -> bool:
    return hasattr(found, "ainvoke") and hasattr(found, "nodes")


def _arguments(factory: Callable[..., Any], name: str, model: BaseChatModel | None) -> dict[str, Any]:
    """What to call the factory with, by the annotation of each parameter, else by its name."""
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
        kind = _kind(parameter.name, hints.get(parameter.name, parameter.annotation))
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
                continue  # what it takes by itself
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
    only = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and p.name in arguments]
    if only:
        raise GraphError(f"graph.app: {name!r} takes {only[0]!r} by position only; wrap it in a function")


def _kind(parameter: str, annotation: Any) -> str:
    """model, config, runtime, untyped (says nothing) or other."""
    if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, str):
        by_name = {"config": "config", "runtime": "runtime"}
        return by_name.get(parameter, "model" if parameter in ("model", "llm", "chat", "chat_model") else "untyped")
    for candidate in typing.get_args(annotation) or (annotation,):
        origin = typing.get_origin(candidate) or candidate
        if origin is RunnableConfig or (parameter == "config" and origin is dict):
            return "config"
        if isinstance(origin, type) and origin.__name__ in ("Runtime", "ServerRuntime"):
            return "runtime"
        # What a NodeChat can be passed as: a base of chat models, or one of them.
        if isinstance(origin, type) and (issubclass(origin, BaseChatModel) or origin in BaseChatModel.__mro__[:-1]):
            return "model"
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and origin.__name__ in ("Runtime", "ServerRuntime"):
        return "runtime"
    return "other"


def node_names(graph: Any) -> list[str]:
    """Every node of the graph, those of subgraphs with their path: `outer/inner`."""
    names = [name for name in graph.nodes if not name.startswith("__")]
    if hasattr(graph, "get_subgraphs"):
        for path, subgraph in graph.get_subgraphs(recurse=True):
            prefix = path.replace("|", "/")
            names += [f"{prefix}/{name}" for name in subgraph.nodes if not name.startswith("__")]
    return names


def input_keys(graph: Any) -> frozenset[str] | None:
    """The keys of the state that the graph reads its input into; None where it takes anything, or does not say."""
    builder = getattr(graph, "builder", None)
    channels = getattr(builder, "schemas", {}).get(getattr(builder, "input_schema", None))
    return None if not channels or "__root__" in channels else frozenset(channels)


def check_nodes(graph: Any, wanted: Sequence[str], app_name: str, key: str = "graph.nodes") -> None:
    """Refuses a node that the graph does not have.

    A graph that a node builds when it runs cannot be seen before it runs: `outer/inner` is taken on trust when
    nothing is known of what is inside `outer`. That it made no call is said after the episodes.
    """
    existing = node_names(graph)
    for name in wanted:
        outer, _, inner = name.partition("/")
        opaque = inner and outer in existing and not any(known.startswith(f"{outer}/") for known in existing)
        if name not in existing and not opaque:
            raise GraphError(f"{key}: {app_name!r} has no node {name!r}; its nodes: {', '.join(existing)}")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
