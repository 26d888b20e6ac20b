"""A graph's name in the app's own langgraph.json -> the object that it means.

What LangGraph's own server does before it imports a graph is done here too: local `dependencies` become importable,
and `env` is read. Invariant: a variable that is set already keeps its value. The other keys (auth, http, store,
checkpointer) configure that server and mean nothing here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marft_bridge.errors import GraphError
from marft_bridge.load_name import load_name

FILE_NAME = "langgraph.json"


def load_listed_graph(file: Path, graph: str, key: str) -> Any:
    """The object that `file` lists as `graph`; `key` is the configuration key that names it, for the message.

    Raises:
        GraphError: the file is missing or has another form, does not list the graph, or what it lists does not load.
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
    _set_environment(folder, content.get("env"), file, key)
    module, colon, attribute = name.rpartition(":")
    if module.endswith(".py"):
        module = str(folder / module)
    return load_name(f"{module}{colon}{attribute}", key)


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
    """The file's own folder and each local dependency; packages of an index must be installed already."""
    local = [folder / name for name in dependencies if isinstance(name, str) and name.startswith(".")]
    for path in (folder, *local):
        if path.is_dir() and str(path.resolve()) not in sys.path:
            sys.path.append(str(path.resolve()))


def _set_environment(folder: Path, env: Any, file: Path, key: str) -> None:
    if isinstance(env, str):
        try:
            values = dict(_env_file_to_values((folder / env).read_text(encoding="utf-8")))
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


def _env_file_to_values(text: str) -> list[tuple[str, str]]:
    """Lines `NAME=value`, with `export` before it or quotes around the value; the rest is comment."""
    values = []
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or name.lstrip().startswith("#"):
            continue
        value = value.strip()
        if value[:1] in ("'", '"'):
            value = value[1:].partition(value[0])[0]
        else:
            value = value.partition(" #")[0].rstrip()
        values.append((name.strip(), value))
    return values
