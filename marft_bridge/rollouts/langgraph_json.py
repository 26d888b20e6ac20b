"""A graph's name in the app's own langgraph.json -> the object that it names.

As in LangGraph's own server, local `dependencies` become importable and `env` is read before the graph is imported.
Invariant: an environment variable that is set already keeps its value; an env file that is not there is a warning, for
the variables may be set by other means. The server's store is one in memory here (`open_listed_store`). The other keys
(auth, http, checkpointer) configure that server and are ignored.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

from marft_bridge.common.errors import GraphError
from marft_bridge.common.import_name import load_name

log = logging.getLogger("marft_bridge")
FILE_NAME = "langgraph.json"


def load_listed_graph(file: Path, graph: str, key: str) -> Any:
    """Loads the object that `file` lists as `graph`.

    Args:
        key: the configuration key that names the graph, for error messages.

    Raises:
        GraphError: the file is missing or malformed, does not list the graph, or the listed object does not load.
    """
    content = _read(file, key)
    graphs = content.get("graphs")
    if not isinstance(graphs, Mapping):
        raise GraphError(f"{key}: {str(file)!r} has no table 'graphs'")
    if graph not in graphs:
        raise GraphError(f"{key}: {str(file)!r} lists no graph {graph!r}; it lists: {', '.join(sorted(graphs))}")
    entry = graphs[graph]
    name = entry.get("path") if isinstance(entry, Mapping) else entry
    if not isinstance(name, str):
        raise GraphError(f"{key}: graph {graph!r} of {str(file)!r} is not a name and has no 'path'")
    folder = file.resolve().parent
    _make_importable(folder, content.get("dependencies") or ())
    _set_environment(folder, content.get("env"), file, key=key)
    module, colon, attribute = name.rpartition(":")
    if module.endswith(".py"):
        module = str(folder / module)
    try:
        return load_name(f"{module}{colon}{attribute}", key)
    except GraphError as error:
        hint = install_hint(error.__cause__, folder, content.get("dependencies") or ())
        raise GraphError(f"{error}{hint}") from error.__cause__


def lists_graph(file: Path, graph: str, key: str) -> bool:
    """Whether there is such a file, and it lists the graph. Raises GraphError for one that is malformed."""
    graphs = _read(file, key).get("graphs") if file.is_file() else None
    return isinstance(graphs, Mapping) and graph in graphs


class ServerStore(InMemoryStore):
    """A store that nobody but a langgraph.json gave to a graph, which may have no use for it."""


def open_listed_store(file: Path, key: str) -> BaseStore:
    """An empty store in memory, in the place of the one that LangGraph's server gives to the graphs of `file`.

    It searches by meaning where the file's `store.index` says how.

    Raises:
        GraphError: the embeddings that it names cannot be made.
    """
    settings = _read(file, key).get("store")
    index = settings.get("index") if isinstance(settings, Mapping) else None
    if not isinstance(index, Mapping):
        return ServerStore()
    try:
        embed = index.get("embed")
        module, colon, attribute = embed.rpartition(":") if isinstance(embed, str) else ("", "", "")
        if module.endswith(".py"):  # else a provider and its model, which LangGraph makes itself
            embed = load_name(f"{file.resolve().parent / module}{colon}{attribute}", key)
        return ServerStore(index={**index, "embed": embed})  # type: ignore[arg-type]  # as the file has it
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise GraphError(f"{key}: the store.index of {str(file)!r} cannot be made: {reason}") from error


def install_hint(cause: BaseException | None, folder: Path, dependencies: Any) -> str:
    """How to make a package of the app importable, where an import of it is what failed."""
    if not isinstance(cause, ModuleNotFoundError) or not cause.name:
        return ""
    package = cause.name.partition(".")[0]
    for dependency in _local_dependencies(folder, dependencies):
        places = (dependency / source / package for source in ("src", "."))
        if any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
            return f"; install the app first: pip install -e {shlex.quote(_short_path(dependency))}"
    return ""


def _short_path(path: Path) -> str:
    path = path.resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _local_dependencies(folder: Path, dependencies: Any) -> list[Path]:
    return [folder / name for name in dependencies if isinstance(name, str) and name.startswith(".")]


@functools.cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)  # a command loads an app several times


def _read(file: Path, key: str) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GraphError(f"{key}: there is no file {str(file)!r}") from None
    except (OSError, ValueError) as error:
        raise GraphError(f"{key}: cannot read {str(file)!r}: {error}") from None
    if not isinstance(content, Mapping):
        raise GraphError(f"{key}: {str(file)!r} is not a JSON object")
    return content


def _make_importable(folder: Path, dependencies: Any) -> None:
    """Puts the file's own folder and each local dependency on sys.path; other packages must be installed already."""
    for path in (folder, *_local_dependencies(folder, dependencies)):
        if path.is_dir() and str(path.resolve()) not in sys.path:
            sys.path.append(str(path.resolve()))


def _set_environment(folder: Path, env: Any, file: Path, key: str) -> None:
    if isinstance(env, str):
        if not (folder / env).exists():
            _warn_once(f"{key}: {str(file)!r} names the env file {env!r}, which is not there; its variables are unset")
            return
        try:
            read_values = dotenv_values(stream=io.StringIO((folder / env).read_text(encoding="utf-8")))
            values = {name: value for name, value in read_values.items() if value is not None}
        except (OSError, UnicodeDecodeError) as error:
            raise GraphError(f"{key}: cannot read the env file {env!r} of {str(file)!r}: {error}") from None
    elif isinstance(env, Mapping):
        values = {str(name): str(value) for name, value in env.items()}
    elif env is None:
        return
    else:
        raise GraphError(f"{key}: 'env' of {str(file)!r} is a {type(env).__name__}, not a file name or a table")
    for name, value in values.items():
        os.environ.setdefault(name, value)
