"""`marft-bridge init`: an app -> a listing of its nodes, and a commented `bridge.toml` that trains some of them.

Invariants: the app is opened and inspected, and run only with --probe; what the inspection cannot tell is listed as
such, and every choice is the user's, by a flag or an answer; the file is written only when it is a valid configuration
whose tasks and reward load.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import sys
import textwrap
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from rich.table import Column, Table

from marft_bridge.commands.probe import NodeCalls, Probe, probe
from marft_bridge.commands.reward_choice import RewardChoice, complete_choice, text_to_choice
from marft_bridge.common.errors import ConfigError, GraphError, ServingError
from marft_bridge.common.extras import install_command, is_installed
from marft_bridge.common.files import write_atomically
from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import text_to_cell
from marft_bridge.config.bridge import BridgeConfig, GraphOptions, problem_to_line
from marft_bridge.config.models import ModelOptions
from marft_bridge.config.option_sentences import options_to_sentences
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.rewards.contract import RewardOptions
from marft_bridge.rollouts.agent_check import check_nodes
from marft_bridge.rollouts.app import options_to_app
from marft_bridge.rollouts.app_graph import call_app_factory, load_app_object, open_graph
from marft_bridge.rollouts.app_models import InspectedNode, ambiguity_lines, inspect_nodes, namesakes_to_line
from marft_bridge.rollouts.run_settings import context_fields
from marft_bridge.serving.base_models import PREPARED_MODEL, name_to_model_dir
from marft_bridge.tasks.options import text_to_tasks
from marft_bridge.tasks.reading import read_tasks

_PARSER = "hermes"
_PROBE_S = 300.0
_TASKS = (
    "Tasks: a JSONL or Parquet file, the name of an iterable, as my_app.py:tasks, or gsm8k:train.jsonl and its like"
)
_REWARD = (
    "Reward: a function (task, final state) -> number, as my_app.py:reward; or numeric, exact, math, code, "
    "reasoning_gym, with a field of the final state and one of the task, as numeric:answer=gold"
)
_NAMES_WIDTH = 40
_MADE_LATER = "made when the node runs"


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of the command line; None, and no nodes, are asked for where there is a terminal."""

    nodes: tuple[str, ...]
    tasks: str | None
    reward: str | None  # the name of a function, or a kind: see `reward_choice.text_to_choice`
    model: str | None
    out: Path
    yes: bool  # train every node with a model; with `probe`, every node that called one
    force: bool  # replace the file
    task_to_input: str | None = None
    probe: bool = False  # run the app once, on the first task, to see who calls a model
    context: str | None = None  # of its runs: a JSON object, or the name of a function task -> context
    run_config: str | None = None  # LangGraph's config of its runs: a JSON object, or the name of such a function


def init(app: str, flags: Flags, reporter: Reporter, ask_user: Callable[[str, str | None], str]) -> None:
    """Prints the listing, asks for the choices that no flag makes, and writes the file.

    Args:
        ask_user: (question, default or None) -> answer; called only when standard input is a terminal.

    Raises:
        ConfigError: a choice is missing and there is no terminal, or the file exists already or is a folder.
        GraphError: the app, its tasks or the reward do not load, or a node does not exist.
    """
    if flags.out.is_dir():
        raise ConfigError(f"init: {str(flags.out)!r} is a folder; name a file in it with --out")
    if flags.out.exists() and not flags.force:
        raise ConfigError(f"init: {str(flags.out)!r} exists; name another file with --out, or say --force")
    if not flags.out.absolute().parent.is_dir():
        raise ConfigError(f"init: there is no folder {str(flags.out.parent)!r}")
    context, run_config = _text_to_option(flags.context, "context"), _text_to_option(flags.run_config, "run-config")
    stand_in = ScriptedPolicy(script=lambda *_: "1")  # for the served model, where the app takes one
    source = call_app_factory(load_app_object(app, "graph.app"), app, stand_in)
    with asyncio.Runner() as runner, open_graph(source, app, runner) as graph:
        check_nodes(graph, flags.nodes, app, key="--nodes")
        nodes = inspect_nodes(graph, app)
        if context is None:
            context = _default_context(graph, reporter)
        tasks, to_input = flags.tasks, flags.task_to_input
        calls_by_node = None
        run: Probe | None = None
        namesakes = ambiguity_lines(nodes)
        if flags.probe:
            if tasks is None:
                _require_terminal(flags, graph)
            tasks = tasks or ask_user(_TASKS, None)
            to_input = to_input or _ask_for_input(app, graph, tasks, ask_user=ask_user, reporter=reporter)
            source = text_to_tasks(tasks)
            options = GraphOptions(
                app=app, nodes=(app,), tasks=source, task_to_input=to_input, context=context, config=run_config
            )
            run = _probe_app(options, graph, runner, reporter=reporter)
            calls_by_node = run.nodes
            namesakes += [
                namesakes_to_line(name, count)
                for name, count in run.namesakes.items()
                if not any(repr(name) in line for line in namesakes)
            ]
            nodes += [InspectedNode(name) for name in calls_by_node if name not in {node.name for node in nodes}]
        nodes_with_model = [
            node.name
            for node in nodes
            if (node.models and not node.runs_tools if calls_by_node is None else node.name in calls_by_node)
        ]
        chosen = flags.nodes or (nodes_with_model if flags.yes else None)
        reporter.console.print(_nodes_to_table(nodes, stand_in, chosen, calls_by_node=calls_by_node))
        for line in namesakes:
            reporter.say(line)
        if chosen is None or tasks is None or flags.reward is None:
            _require_terminal(flags, graph)
        if chosen is None:
            answer = ask_user("Nodes to train, with commas between", ",".join(nodes_with_model) or None)
            check_nodes(graph, chosen := commas_to_names(answer), app, key="nodes to train")
    if not chosen:
        raise ConfigError(_no_choice_to_line(nodes, run))
    tasks = tasks or ask_user(_TASKS, None)
    if calls_by_node is None:  # a probe has asked already
        to_input = to_input or _ask_for_input(app, graph, tasks, ask_user=ask_user, reporter=reporter)
    read = read_tasks(text_to_tasks(tasks), ())
    reward_text = flags.reward or ask_user(_REWARD, _fitting_reward(read, graph))
    choice = text_to_choice(reward_text)
    if choice is not None:
        choice = complete_choice(choice, read, graph)
    reward = reward_text if choice is None else choice.to_options(read)
    frozen = [node.name for node in nodes if node.name not in chosen and node.holds(stand_in)]
    offering_nodes = {node.name for node in nodes if node.tools}
    offering_nodes |= {name for name, node_calls in (calls_by_node or {}).items() if node_calls.tools}
    nodes_with_tools = [node.name for node in nodes if node.name in (*chosen, *frozen) and node.name in offering_nodes]
    text = "".join(
        _file_lines(
            app,
            chosen,
            frozen,
            tasks=tasks,
            task_to_input=to_input,
            reward=reward,
            context=context,
            run_config=run_config,
            model=flags.model,
            tools=bool(nodes_with_tools),
        )
    )
    try:
        config = BridgeConfig.model_validate(tomllib.loads(text))
    except ValidationError as error:  # of what a flag said
        raise ConfigError(f"init: {problem_to_line(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"init: --context or --run-config has a value that TOML has no form for: {error}") from None
    loaded = options_to_app(config.graph, config.rewards)
    write_atomically(flags.out, text)
    reporter.say(
        f"{flags.out}: trains {', '.join(chosen)} on {len(loaded.train_tasks)} tasks, "
        f"and keeps {len(loaded.heldout_tasks)} for comparison"
    )
    try:
        if config.model.path != PREPARED_MODEL:
            name_to_model_dir(config.model.path)
    except (ConfigError, ServingError) as error:  # it may be fetched later, or be on another machine
        reporter.say(f"model.path: {error}")
    if choice is not None:
        reporter.say(f"the reward is {choice}: {_choice_to_text(choice)}")
        if choice.kind == "math" and not is_installed("math_verify"):
            reporter.say(f"its kind needs {install_command('math')}")
    if flags.model is None:
        reporter.say(f"model.path is {config.model.path!r}, a small one to try things with; --model names another")
    for node in nodes:
        if node.runs_tools and node.models and node.name not in chosen and calls_by_node is None:
            reporter.say(
                f"{node.name} runs tools, one of which holds a model: --probe shows whether it is called there"
            )
    for name in chosen:
        if name not in nodes_with_model:
            verb = "was seen in" if calls_by_node is None else "was called on that task by"
            reporter.say(f"no model {verb} node {name!r}: `marft-bridge collect` says if it makes no call")
    if nodes_with_tools:
        verb = "offer" if len(nodes_with_tools) > 1 else "offers"
        reporter.say(
            f"{', '.join(nodes_with_tools)} {verb} tools: serve.tool_call_parser is {_PARSER!r}; set the parser of "
            "your model"
        )
    reporter.say(f"next: marft-bridge collect --config {shlex.quote(str(flags.out))}")
    reporter.give(
        {
            "file": str(flags.out),
            "nodes": [
                {
                    "node": node.name,
                    "models": list(node.models),
                    "tools": list(node.tools),
                    "calls": None if calls_by_node is None else getattr(calls_by_node.get(node.name), "calls", 0),
                    "trained": node.name in chosen,
                }
                for node in nodes
            ],
            "train_tasks": len(loaded.train_tasks),
            "heldout_tasks": len(loaded.heldout_tasks),
            "reward": reward_text if choice is None else str(choice),
        }
    )


def _no_choice_to_line(nodes: Sequence[InspectedNode], run: Probe | None) -> str:
    """Why no node is to be trained: what was looked at, and what to do."""
    if run is None:
        return "init: no node was seen to hold a chat model; name the nodes to train with --nodes"
    with_model = [node.name for node in nodes if node.models and not node.runs_tools]
    hint = f": {','.join(with_model)}" if with_model else ""
    if run.failure is None:
        return f"init: no node called a model on that task; name the nodes to train with --nodes{hint}"
    return (
        f"init: the run of --probe failed before a node called a model ({run.failure}); mend that, or leave --probe "
        f"out and name the nodes to train with --nodes{hint}"
    )


def _ask_for_input(
    app: str, graph: Any, tasks: str, ask_user: Callable[[str, str | None], str], reporter: Reporter
) -> str | None:
    """Asks for a function task -> graph input, where the graph reads no field of a task; else None.

    Raises:
        GraphError: there is no terminal to ask on.
    """
    loaded = options_to_app(GraphOptions(app=app, nodes=(app,), tasks=text_to_tasks(tasks)))
    try:
        loaded.check_input(graph)
    except GraphError as error:
        if not sys.stdin.isatty():
            raise
        reporter.say(str(error))
        return ask_user("Input: a function task -> graph input, as my_app.py:task_to_input", None)
    return None


def _text_to_option(text: str | None, flag: str) -> dict[str, Any] | str | None:
    """What a flag gives: a JSON object, or a name of the form `my_app.py:function`."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"init: --{flag} is no JSON object: {error}") from None


def _default_context(graph: Any, reporter: Reporter) -> dict[str, Any] | None:
    """The empty context, where the graph declares one whose fields all have defaults: LangGraph's own server gives it.

    Without any, an app's nodes would find None instead.
    """
    fields = context_fields(graph)
    if fields is None:
        return None
    if required_fields := [name for name, is_required in fields.items() if is_required]:
        reporter.say(f"the app's runs need a context with {', '.join(required_fields)}: give it with --context")
        return None
    return {}


def _probe_app(options: GraphOptions, graph: Any, runner: asyncio.Runner, reporter: Reporter) -> Probe:
    """Runs the app once on the first task, and reports the number of model calls."""
    loaded = options_to_app(options)
    loaded.runs.check_context(graph)
    task = read_tasks(options.tasks, ())[0]
    arguments = loaded.runs.to_arguments(task, {"configurable": {"thread_id": uuid.uuid4().hex}})
    run = probe(graph, loaded.task_to_input(task), arguments, runner=runner, limit_s=_PROBE_S)
    calls = sum(node_calls.calls for node_calls in run.nodes.values())
    reporter.say(f"probe: {calls} model calls on task {task['id']}" + (f"; {run.failure}" if run.failure else ""))
    return run


def _fitting_reward(tasks: Sequence[Mapping[str, Any]], graph: Any) -> str | None:
    """What `--reward` could say for tasks that show what they expect; None where they do not."""
    choice = complete_choice(None, tasks, graph)
    return None if choice is None or choice.answer_from is None else str(choice)


def _choice_to_text(choice: RewardChoice) -> str:
    expected = "" if choice.expected_from is None else f" against {choice.expected_from!r} of the task"
    return f"{choice.answer_from!r} of the final state{expected}; look whether these are the fields you mean"


def _require_terminal(flags: Flags, graph: Any) -> None:
    if sys.stdin.isatty():
        return
    missing = [] if flags.nodes or flags.yes else ["--nodes (or --yes for every node with a model)"]
    missing += [f"--{name}" for name in ("tasks", "reward") if getattr(flags, name) is None]
    hint = ""
    if flags.reward is None and flags.tasks is not None:
        fitting = _fitting_reward(read_tasks(text_to_tasks(flags.tasks), ()), graph)
        hint = "" if fitting is None else f"; what the tasks expect fits --reward {fitting}"
    raise ConfigError(f"init: there is no terminal to ask on; give {', '.join(missing)}{hint}")


def commas_to_names(text: str) -> tuple[str, ...]:
    """`a, b` -> the names, each once."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _nodes_to_table(
    nodes: Sequence[InspectedNode],
    stand_in: ScriptedPolicy,
    chosen: Collection[str] | None,
    calls_by_node: Mapping[str, NodeCalls] | None,
) -> Table:
    """The listing. The column "trained" needs a choice, and "called" a probe; else they are left out."""
    probed, trained = (["called"] if calls_by_node is not None else []), (["trained"] if chosen is not None else [])
    # A narrow terminal folds cells: cut off, two long names of nodes would look the same.
    names_width = min(max((len(node.name) for node in nodes), default=0), _NAMES_WIDTH)
    table = Table(Column("node", overflow="fold", min_width=names_width))
    for title in ("model", "tools", *probed, *trained):
        table.add_column(title, overflow="fold")
    for node in nodes:
        node_calls = (calls_by_node or {}).get(node.name)
        tools = {**node.tools, **(node_calls.tools if node_calls else {})}
        cells = [node.name, _models_to_text(node, stand_in), ", ".join(tools)]
        if calls_by_node is not None:
            models = ", ".join(node_calls.models) or "a model" if node_calls else ""
            cells.append("" if node_calls is None else f"{node_calls.calls} x {models}")
        if chosen is not None:
            cells.append("yes" if node.name in chosen else "")
        table.add_row(*map(text_to_cell, cells))  # names of an app are no markup
    return table


def _models_to_text(node: InspectedNode, stand_in: ScriptedPolicy) -> str:
    if not node.models:
        return "cannot tell" if node.may_hide_model else "none"
    made_later = {name: f"{name} ({_MADE_LATER})" for name, model in node.models.items() if model is None}
    return ", ".join(
        "the one it is given" if model is stand_in else made_later.get(name, name)
        for name, model in node.models.items()
    )


def _file_lines(
    app: str,
    nodes: Sequence[str],
    frozen: Sequence[str],
    tasks: str,
    task_to_input: str | None,
    reward: str | RewardOptions,
    context: dict[str, Any] | str | None,
    run_config: dict[str, Any] | str | None,
    model: str | None,
    tools: bool,
) -> Iterator[str]:
    """The text of bridge.toml, each key below the sentence of its option; keys that may be needed next are commented
    out."""
    yield "# Written by `marft-bridge init`. What is left out has its default: docs/config.md has every option.\n\n"
    yield _key_lines(BridgeConfig, "name", _app_to_name(app))
    yield "\n[graph]\n"
    yield _key_lines(GraphOptions, "app", app)
    yield _key_lines(GraphOptions, "nodes", list(nodes))
    yield _key_lines(GraphOptions, "frozen", list(frozen), idle=not frozen)
    yield _key_lines(GraphOptions, "tasks", text_to_tasks(tasks))
    yield _key_lines(
        GraphOptions, "task_to_input", task_to_input or "my_app.py:task_to_input", idle=task_to_input is None
    )
    if context is not None:
        yield _key_lines(GraphOptions, "context", context)
    if run_config is not None:
        yield _key_lines(GraphOptions, "config", run_config)
    if isinstance(reward, str):
        yield _key_lines(GraphOptions, "reward", reward)
    else:
        yield from _reward_lines(reward)
    yield "\n[model]\n"
    yield _key_lines(ModelOptions, "path", model or ModelOptions().path)
    adapters = 2 * len(nodes) + len(frozen)  # two versions of a trained node around an update, one of a frozen node
    fits_default = adapters <= ServeOptions().max_loras
    if tools or not fits_default:
        yield "\n[serve]\n"
        if not fits_default:
            yield _key_lines(ServeOptions, "max_loras", adapters)
        if tools:
            yield _key_lines(ServeOptions, "tool_call_parser", _PARSER)


def _reward_lines(reward: RewardOptions) -> Iterator[str]:
    """A table of `[[rewards]]`; the sentence of its kind stands above it."""
    sentence = " ".join((inspect.getdoc(type(reward)) or "").split())
    yield f"\n{_to_comment(f'{sentence} Several tables may stand side by side.')}\n[[rewards]]\n"
    sentences = {**options_to_sentences(RewardOptions), **options_to_sentences(type(reward))}
    for name in ("name", "kind", *sorted(reward.model_fields_set - {"name", "kind"})):
        if name in sentences:
            yield _key_lines(type(reward), name, getattr(reward, name), sentence=sentences[name])
        else:
            yield f"{name} = {_toml_value(getattr(reward, name))}\n"


def _key_lines(
    options: type[BaseModel],
    name: str,
    value: str | float | list[str] | dict[str, Any] | BaseModel,
    idle: bool = False,
    sentence: str | None = None,
) -> str:
    """A TOML line below the sentence of its option; with `idle` the line is commented out too."""
    comment = _to_comment(sentence or options_to_sentences(options)[name])
    return f"{comment}\n{'# ' if idle else ''}{name} = {_toml_value(value)}\n"


def _to_comment(sentence: str) -> str:
    return textwrap.fill(sentence, 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _toml_value(value: Any) -> str:
    """A value in TOML's syntax; a table on one line."""
    if isinstance(value, dict):
        inside = ", ".join(
            f"{json.dumps(key, ensure_ascii=False)} = {_toml_value(inner)}" for key, inner in value.items()
        )
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if not isinstance(value, BaseModel):
        return json.dumps(value, ensure_ascii=False)
    fields = {name: getattr(value, name) for name in ("kind", *sorted(value.model_fields_set - {"kind"}))}
    return "{ " + ", ".join(f"{name} = {_toml_value(inner)}" for name, inner in fields.items()) + " }"


def _app_to_name(app: str) -> str:
    """`path/my_app.py:graph` and `package.my_app:graph` -> my_app; a graph of a langgraph.json -> its name there."""
    module, colon, attribute = app.rpartition(":")
    name = Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    name = attribute if not colon or module.endswith(".json") else name
    return re.sub(r"[^\w-]+", "-", name) or "app"
