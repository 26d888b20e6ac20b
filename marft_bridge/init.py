"""`marft-bridge init`: an app -> a listing of its nodes, and a commented `bridge.toml` that trains some of them.

Invariants: the app is opened and looked at, and run only when --probe says so; what cannot be told is said, and what
decides is asked for or given as a flag; a file is written only when it is a valid configuration whose tasks and reward
load. It knows no servers and no training.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from marft_bridge.app import options_to_app
from marft_bridge.app_graph import app_to_product, check_nodes, load_app_object, opened_graph
from marft_bridge.app_models import SeenNode, graph_to_seen_nodes
from marft_bridge.config import BridgeConfig, GraphOptions
from marft_bridge.errors import ConfigError, GraphError
from marft_bridge.files import write_atomically
from marft_bridge.model_options import ModelOptions
from marft_bridge.option_sentences import options_to_sentences
from marft_bridge.probe import Called, probe
from marft_bridge.progress import Reporter
from marft_bridge.scripted import ScriptedPolicy
from marft_bridge.server_command import ServeOptions
from marft_bridge.tasks.options import text_to_tasks
from marft_bridge.tasks.reading import read_tasks
from trainers.config import TrainerOptions

_PARSER = "hermes"
_PROBE_S = 300.0
_MANY, _KL_LIMIT = 4, 0.12  # chains of so many agents fell apart without the limit, and learned with it: docs/zoo.md
_TASKS = (
    "Tasks: a JSONL or Parquet file, the name of an iterable, as my_app.py:tasks, or gsm8k:train.jsonl and its like"
)
_MADE_LATER = "made when the node runs"


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line said; None, and no nodes, is asked for where there is a terminal."""

    nodes: tuple[str, ...]
    tasks: str | None
    reward: str | None
    model: str | None
    out: Path
    yes: bool  # train every node in which a model was seen; with `probe`, that called one
    force: bool  # replace the file
    task_to_input: str | None = None
    probe: bool = False  # run the app once, on the first task, to see who calls a model


def init(app: str, flags: Flags, reporter: Reporter, ask: Callable[[str, str | None], str]) -> None:
    """Prints the listing, settles what is open, and writes the file.

    Args:
        ask: (question, default or None) -> answer; called only when standard input is a terminal.

    Raises:
        ConfigError: something is missing and there is nobody to ask, or the file is there already.
        GraphError: the app, its tasks or the reward do not load, or a node does not exist.
    """
    if flags.out.exists() and not flags.force:
        raise ConfigError(f"init: {str(flags.out)!r} exists; name another file with --out, or say --force")
    if not flags.out.absolute().parent.is_dir():
        raise ConfigError(f"init: there is no folder {str(flags.out.parent)!r}")
    given = ScriptedPolicy(script=lambda *_: "1")  # what stands for the served model where the app takes one
    product = app_to_product(load_app_object(app, "graph.app"), app, given)
    with asyncio.Runner() as runner, opened_graph(product, app, runner) as graph:
        check_nodes(graph, flags.nodes, app, "--nodes")
        nodes = graph_to_seen_nodes(graph)
        tasks, to_input = flags.tasks, flags.task_to_input
        called = None
        if flags.probe:
            if tasks is None:
                _require_terminal(flags)
            tasks = tasks or ask(_TASKS, None)
            to_input = to_input or _missing_input(app, graph, tasks, ask, reporter)
            called = _probed(app, graph, to_input, tasks, runner, reporter)
            nodes += [SeenNode(name) for name in called if name not in {node.name for node in nodes}]
        with_model = [node.name for node in nodes if (node.models if called is None else node.name in called)]
        chosen = flags.nodes or (with_model if flags.yes else None)
        reporter.console.print(_nodes_to_table(nodes, given, chosen, called))
        if chosen is None or tasks is None or flags.reward is None:
            _require_terminal(flags)
        if chosen is None:
            answer = ask("Nodes to train, with commas between", ",".join(with_model) or None)
            check_nodes(graph, chosen := commas_to_names(answer), app, "nodes to train")
    if not chosen:
        raise ConfigError("init: no node was seen to hold a chat model; name the nodes to train with --nodes")
    tasks = tasks or ask(_TASKS, None)
    if called is None:  # a probe has asked already
        to_input = to_input or _missing_input(app, graph, tasks, ask, reporter)
    reward = flags.reward or ask("Reward: a function (task, final state) -> number, as my_app.py:reward", None)
    frozen = [node.name for node in nodes if node.name not in chosen and node.holds(given)]
    offering = {node.name for node in nodes if node.tools} | {n for n, seen in (called or {}).items() if seen.tools}
    with_tools = [node.name for node in nodes if node.name in (*chosen, *frozen) and node.name in offering]
    text = "".join(_file(app, chosen, frozen, tasks, to_input, reward, flags.model, bool(with_tools)))
    config = BridgeConfig.model_validate(tomllib.loads(text))
    loaded = options_to_app(config.graph)
    write_atomically(flags.out, text)
    reporter.say(
        f"{flags.out}: trains {', '.join(chosen)} on {len(loaded.train_tasks)} tasks, "
        f"and keeps {len(loaded.heldout_tasks)} for comparison"
    )
    if flags.model is None:
        reporter.say(f"model.path is {config.model.path!r}, a small one to try things with; --model names another")
    for name in chosen:
        if name not in with_model:
            how = "was seen in" if called is None else "was called on that task by"
            reporter.say(f"no model {how} node {name!r}: `marft-bridge collect` says if it makes no call")
    if with_tools:
        reporter.say(
            f"{', '.join(with_tools)} offers tools: serve.tool_call_parser is {_PARSER!r}; set the parser of your model"
        )
    reporter.say(f"next: marft-bridge collect --config {flags.out}")


def _missing_input(
    app: str, graph: Any, tasks: str, ask: Callable[[str, str | None], str], reporter: Reporter
) -> str | None:
    """The function that makes the graph's input, asked for where a task has nothing that the graph reads."""
    loaded = options_to_app(GraphOptions(app=app, nodes=(app,), tasks=text_to_tasks(tasks)))
    try:
        loaded.check_input(graph)
    except GraphError as error:
        if not sys.stdin.isatty():
            raise
        reporter.say(str(error))
        return ask("Input: a function task -> graph input, as my_app.py:task_to_input", None)
    return None


def _probed(
    app: str, graph: Any, to_input: str | None, tasks: str, runner: asyncio.Runner, reporter: Reporter
) -> dict[str, Called]:
    """Runs the app once on the first task, and says what came of it."""
    source = text_to_tasks(tasks)
    loaded = options_to_app(GraphOptions(app=app, nodes=(app,), tasks=source, task_to_input=to_input))
    task = read_tasks(source, ())[0]
    found = probe(graph, loaded.task_to_input(task), runner, _PROBE_S)
    calls = sum(seen.calls for seen in found.nodes.values())
    reporter.say(f"probe: {calls} model calls on task {task['id']}" + (f"; {found.failed}" if found.failed else ""))
    return found.nodes


def _require_terminal(flags: Flags) -> None:
    if sys.stdin.isatty():
        return
    missing = [] if flags.nodes or flags.yes else ["--nodes (or --yes for every node with a model)"]
    missing += [f"--{name}" for name in ("tasks", "reward") if getattr(flags, name) is None]
    raise ConfigError(f"init: there is no terminal to ask on; give {', '.join(missing)}")


def commas_to_names(text: str) -> tuple[str, ...]:
    """`a, b` -> the names; a name given twice counts once."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _nodes_to_table(
    nodes: Sequence[SeenNode],
    given: ScriptedPolicy,
    chosen: Collection[str] | None,
    called: Mapping[str, Called] | None,
) -> Table:
    """Without a choice the last column is absent, and without a probe the one before it."""
    probed, trained = (["called"] if called is not None else []), (["trained"] if chosen is not None else [])
    table = Table("node", "model", "tools", *probed, *trained)
    for node in nodes:
        seen = (called or {}).get(node.name)
        cells = [node.name, _models_to_text(node, given), ", ".join({**node.tools, **(seen.tools if seen else {})})]
        if called is not None:
            cells.append("" if seen is None else f"{seen.calls} x {', '.join(seen.models) or 'a model'}")
        if chosen is not None:
            cells.append("yes" if node.name in chosen else "")
        table.add_row(*map(Text, cells))  # names of an app are no markup
    return table


def _models_to_text(node: SeenNode, given: ScriptedPolicy) -> str:
    if not node.models:
        return "cannot tell" if node.unseen else "none"
    made_later = {name: f"{name} ({_MADE_LATER})" for name, model in node.models.items() if model is None}
    return ", ".join(
        "the one it is given" if model is given else made_later.get(name, name) for name, model in node.models.items()
    )


def _file(
    app: str,
    nodes: Sequence[str],
    frozen: Sequence[str],
    tasks: str,
    task_to_input: str | None,
    reward: str,
    model: str | None,
    tools: bool,
) -> Iterator[str]:
    """What matters, each key below the sentence of its option; what the user may need next is commented out."""
    yield "# Written by `marft-bridge init`. What is left out has its default: docs/config.md has every option.\n\n"
    yield _key(BridgeConfig, "name", _app_to_name(app))
    yield "\n[graph]\n"
    yield _key(GraphOptions, "app", app)
    yield _key(GraphOptions, "nodes", list(nodes))
    yield _key(GraphOptions, "frozen", list(frozen), idle=not frozen)
    yield _key(GraphOptions, "tasks", text_to_tasks(tasks))
    yield _key(GraphOptions, "task_to_input", task_to_input or "my_app.py:task_to_input", idle=task_to_input is None)
    yield _key(GraphOptions, "reward", reward)
    yield "\n[model]\n"
    yield _key(ModelOptions, "path", model or ModelOptions().path)
    adapters = 2 * len(nodes) + len(frozen)  # a node's version before and after, and one of a node that stays
    few = adapters <= ServeOptions().max_loras
    if tools or not few:
        yield "\n[serve]\n"
        if not few:
            yield _key(ServeOptions, "max_loras", adapters)
        if tools:
            yield _key(ServeOptions, "tool_call_parser", _PARSER)
    if len(nodes) >= _MANY:
        yield "\n[train.trainer]\n"
        yield _key(TrainerOptions, "kl_limit", _KL_LIMIT)


def _key(options: type[BaseModel], name: str, value: str | float | list[str] | BaseModel, idle: bool = False) -> str:
    """A TOML line below its comment; idle: commented out itself."""
    said = textwrap.fill(
        options_to_sentences(options)[name], 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    return f"{said}\n{'# ' if idle else ''}{name} = {_value(value)}\n"


def _value(value: Any) -> str:
    """As TOML writes it; a table on one line."""
    if not isinstance(value, BaseModel):
        return json.dumps(value, ensure_ascii=False)
    given = {name: getattr(value, name) for name in ("kind", *sorted(value.model_fields_set - {"kind"}))}
    return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in given.items()) + " }"


def _app_to_name(app: str) -> str:
    """`path/my_app.py:graph` and `package.my_app:graph` are called my_app; a graph of a langgraph.json, by its name."""
    before, colon, attribute = app.rpartition(":")
    name = Path(before).stem if before.endswith(".py") else before.rpartition(".")[2]
    name = attribute if not colon or before.endswith(".json") else name
    return re.sub(r"[^\w-]+", "-", name) or "app"
