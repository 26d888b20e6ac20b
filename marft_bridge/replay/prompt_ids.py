"""A run that came out the same, and the directories of its base models -> whether its prompts are so to the token.

The messages of its calls, and the tools that they offered, are the recorded ones by then. What is left are tokenizer
and chat template: their hashes are compared first, then what they make of each call today with the ids that the engine
counted. Invariants: prompts alone are rendered, no answer is tokenised again; no weights are read and torch is not
imported; what cannot be rendered as the engine did is counted in a note, and is no difference; a run is held against
the model of its own configuration where the store has that, and never against another than its variant's.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.extras import is_installed, missing_module_to_line
from marft_bridge.config.serve import argument_to_flag
from marft_bridge.ingest.recorded_chats import UnusableChatError, attributes_to_prompt, attributes_to_tools
from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.prompt_worker import BEHIND
from marft_bridge.replay.recorded_run import RecordedCall, RecordedRun, load_recorded
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.sandbox.worker_process import UnansweredJob, WorkerPool, WorkerSpec
from marft_bridge.serving.model_lineage import model_to_lineage
from marft_bridge.serving.noted_models import noted_to_directories, read_noted_config
from marft_bridge.serving.prepare_model import holds_tokenizer
from trace_store import conventions as c
from trace_store.records import RunRow

_LIBRARY = "transformers"
_PARTS = {"tokenizer": "tokenizer", "template": "chat template"}  # of a lineage -> for people
_SHOWN_DIGITS = 12  # of a hash
_LIMIT_S = 120.0  # for the prompts of one run
# Arguments of the model server by which it renders otherwise than its model's directory says.
_RENDERING_FLAGS = ("--chat-template", "--default-chat-template-kwargs", "--tokenizer", "--trust-request-chat-template")
_WORKER = WorkerSpec(
    "marft_bridge.replay.prompt_worker",
    failure_prefix="prompts could not be rendered",
    start_failure_prefix="prompts cannot be rendered here",
)


@dataclass(frozen=True, slots=True)
class ComparedPrompts:
    """What came of the prompts of one run."""

    divergence: Divergence | None = None
    count: int = 0  # of prompts that were compared, to the first difference
    note: str | None = None  # what could not be compared, and why


@dataclass(frozen=True, slots=True)
class _ComparedCall:
    """A call whose prompt is compared."""

    call: RecordedCall
    directory: Path
    attributes: Mapping[str, Any]  # of its recorded span
    attributes_now: Mapping[str, Any]  # of the span of the call that it answered
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptModels:
    """The base models that a run's calls were answered by, or are said to have been."""

    directories: Mapping[str, Path]  # by node; under "" that of all other nodes
    nodes: Collection[str] | None = None  # whose calls a served model answered; None: all that have ids
    other_rendering: Collection[str] = field(default_factory=frozenset)  # nodes whose server renders by other options
    variants: Collection[str] | None = None  # of `compare`, on these models; None: all runs are said to be
    is_noted: bool = False  # by the folder's last commands, and by none that names them for all runs
    by_run: Mapping[str, PromptModels | None] = field(default_factory=dict)  # run -> those of its own configuration

    def with_runs(self, rows: Iterable[RunRow]) -> PromptModels:
        """With the base models that the store notes of each run: those of the folder may have changed since."""
        return (
            replace(self, by_run={row.run_id: config_to_models(row.config) for row in rows}) if self.is_noted else self
        )

    def compare(self, run: RecordedRun, attributes_now: Mapping[str, Mapping[str, Any]]) -> ComparedPrompts:
        """Compares the prompts of a run.

        Args:
            run: whose replay came out the same.
            attributes_now: of the chat spans of the replay, by the id of the recorded call.
        """
        episode = run.trajectory.episode
        models = self.by_run.get(episode.run_id, self)
        if models is None:  # its command served none
            return ComparedPrompts()
        if episode.variant is not None and models.variants is not None and episode.variant not in models.variants:
            reason = f"variant {episode.variant!r} may run on another model than those noted"
            return ComparedPrompts(note=f"prompts compared without token ids: {reason}")
        try:
            return models._compare(run, attributes_now)
        except (ConfigError, OSError) as error:
            return ComparedPrompts(note=f"prompts compared without token ids: {error}")

    def _compare(self, run: RecordedRun, attributes_now: Mapping[str, Mapping[str, Any]]) -> ComparedPrompts:
        calls = [call for call in run.calls if call.action_id in attributes_now and self._is_known(call.node, run)]
        for node in dict.fromkeys(call.node for call in calls):
            if (divergence := self._compare_lineage(node, run.trajectory.episode.lineage)) is not None:
                return ComparedPrompts(divergence)
        spans = {span.span_id: span for span in run.spans}
        prompt_ids = {action.action_id: action.prompt_ids for action in run.trajectory.actions}
        with_ids = [
            _ComparedCall(
                call,
                self._directory_of(call.node),
                attributes=spans[call.action_id].attributes,
                attributes_now=attributes_now[call.action_id],
                ids=ids,
            )
            for call in calls
            if (ids := prompt_ids.get(call.action_id)) is not None
        ]
        if not with_ids:
            return ComparedPrompts()
        if not is_installed(_LIBRARY):
            return ComparedPrompts(note=f"prompts compared without token ids: {missing_module_to_line(_LIBRARY)}")
        return self._compare_ids(with_ids)

    def _directory_of(self, node: str) -> Path:
        return self.directories.get(node) or self.directories[""]

    def _is_known(self, node: str, run: RecordedRun) -> bool:
        """Whether the model of a node is at hand, and the record says that it is the one."""
        lineage = run.trajectory.episode.lineage
        says_it = self.nodes is None or (node in self.nodes and _recorded_part("tokenizer", node, lineage) is not None)
        return says_it and holds_tokenizer(self._directory_of(node))

    def _compare_lineage(self, node: str, lineage: Mapping[str, str]) -> Divergence | None:
        directory = self._directory_of(node)
        today = _read_lineage(directory, _directory_to_stamp(directory))
        for part, title in _PARTS.items():
            recorded, now = _recorded_part(part, node, lineage), today.get(part)
            if recorded is not None and recorded != now:
                return Divergence(
                    "tokenizer" if part == "tokenizer" else "template",
                    None,
                    None,
                    text=f"the {title} in {directory} is not that of the recorded calls",
                    recorded=recorded[:_SHOWN_DIGITS],
                    replayed=None if now is None else now[:_SHOWN_DIGITS],
                )
        return None

    def _compare_ids(self, calls: Sequence[_ComparedCall]) -> ComparedPrompts:
        refusals: Counter[str] = Counter()
        differences: dict[str, Mapping[str, Any] | None] = {}  # by action
        for directory in dict.fromkeys(compared.directory for compared in calls):
            chats = {}
            for compared in calls:
                if compared.directory == directory:
                    try:
                        chats[compared.call.action_id] = self._to_chat(compared)
                    except UnusableChatError as reason:
                        refusals[str(reason)] += 1
            for action_id, difference in zip(chats, _compare_chats(directory, list(chats.values())), strict=True):
                if difference is not None and "refused" in difference:
                    refusals[difference["refused"]] += 1
                else:
                    differences[action_id] = difference
        note = None
        if refusals:
            count = sum(refusals.values())
            note = f"{count} of {len(calls)} prompts compared without token ids: {'; '.join(sorted(refusals))}"
        with_prompt = [compared.call for compared in calls if compared.call.action_id in differences]
        for number, call in enumerate(with_prompt, start=1):
            if (difference := differences[call.action_id]) is not None:
                return ComparedPrompts(_to_divergence(call, difference), number, note)
        return ComparedPrompts(None, len(differences), note)

    def _to_chat(self, compared: _ComparedCall) -> dict[str, Any]:
        """What the worker renders: the recorded messages, which equal those of today but for ids that a run draws, with
        the tools and the options of today."""
        call = compared.call
        if call.node in self.other_rendering:
            raise UnusableChatError("serve.extra_args says how prompts are rendered")
        if call.options.tools is None:
            raise UnusableChatError("it offered tools that the record does not hold")
        rest = load_recorded(compared.attributes_now.get(c.REQUEST_REST)) or {}
        return {
            "messages": attributes_to_prompt(compared.attributes),
            "tools": attributes_to_tools(compared.attributes_now),
            "options": rest.get("chat_template_kwargs") or {},
            "ids": compared.ids,
            "started_s": call.started_ns / 1e9,
            "is_joined": any(_count_texts(message) > 1 for message in call.prompt),
        }


def _count_texts(message: Any) -> int:
    """The texts of a message's content."""
    parts = message.get("parts") if isinstance(message, Mapping) else None
    return sum(isinstance(part, Mapping) and part.get("type") == "text" for part in parts or ())


def _recorded_part(part: str, node: str, lineage: Mapping[str, str]) -> str | None:
    """The hash of a part of a node's base model, see `model_lineage`; None where it was not recorded."""
    has_own = f"base/{node}" in lineage  # it runs on another model than that of [model]
    return lineage.get(f"{part}/{node}" if has_own else part)


def _directory_to_stamp(directory: Path) -> str:
    """What changes with every file of a model."""
    paths = [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*")]
    stats = [(path.name, path.stat()) for path in sorted(paths) if path.is_file()]
    return repr([(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


@functools.lru_cache(maxsize=8)
def _read_lineage(directory: Path, stamp: str) -> Mapping[str, str]:  # noqa: ARG001 - other files have other hashes
    return model_to_lineage(directory)


def _compare_chats(directory: Path, chats: list[dict[str, Any]]) -> Iterator[Mapping[str, Any] | None]:
    """The first difference of each prompt; see `prompt_worker.chat_to_difference`."""
    job = {"model": str(directory.absolute()), "stamp": _directory_to_stamp(directory), "chats": chats}
    try:
        reply = _pool_of(os.getpid()).run_job(job, _LIMIT_S) if chats else {"differences": []}
    except (UnansweredJob, GraphError) as reason:
        reply = {"refused": str(reason)}
    if "refused" in reply:
        return iter([{"refused": f"{directory}: {reply['refused']}"}] * len(chats))
    return iter(reply["differences"])


@functools.lru_cache(maxsize=1)
def _pool_of(pid: int) -> WorkerPool:  # noqa: ARG001 - a process that was forked has no worker of its parent's
    return WorkerPool(_WORKER, 1)


def _to_divergence(call: RecordedCall, difference: Mapping[str, Any]) -> Divergence:
    """The difference of a prompt whose messages are the same, in one line."""
    message, position = difference["message"], ""
    if message == BEHIND:
        position = ", behind the messages"
    elif message is not None:
        position = f", in message {message} ({difference['role']})"
    renders = "the tokenizer splits them" if difference["is_same_text"] else "the chat template renders them"
    text = f"the messages are the same, and {renders} otherwise, from token {difference['token']} on{position}"
    return Divergence(
        "prompt ids", call.node, call.number, text=text, recorded=difference["recorded"], replayed=difference["now"]
    )


def path_to_models(path: Path) -> PromptModels | None:
    """The base models that a run folder notes, or the folder that a store or an export lies in; None: it notes none."""
    is_run = RunFolder(path).notes.is_file()
    models = config_to_models(read_noted_config(path if is_run else path.parent))
    return None if models is None else replace(models, is_noted=True)


def config_to_models(config: Mapping[str, Any]) -> PromptModels | None:
    """The base models of a configuration as it is noted; None where it names none."""
    directories = noted_to_directories(config)
    if not directories:
        return None
    graph = config.get("graph")
    tables = [("", config), *((name, table) for name, table in _tables(config.get("models")))]
    nodes = {node for key in ("nodes", "frozen") for node in _texts(graph, key)}
    by_models = {node for _, table in tables[1:] for node in _texts(table, "nodes")}
    other_rendering: set[str] = set()
    for name, table in tables:
        flags = map(argument_to_flag, _texts(table.get("serve"), "extra_args"))
        if any(flag is not None and flag.startswith(_RENDERING_FLAGS) for flag in flags):
            other_rendering |= set(_texts(table, "nodes")) if name else nodes - by_models
    return PromptModels(directories, nodes, other_rendering=other_rendering, variants=_config_to_variants(config))


def _config_to_variants(config: Mapping[str, Any]) -> set[str]:
    """The variants of `compare` that run on the models of a configuration.

    Those of a comparison's plan where there is one, which has mixed teams and opponents too, else the declared ones.
    """
    planned, declared = (_list_tables(config.get(key), "variants") for key in ("plan", "compare"))
    paths = (None, _text(config.get("model"), "path"))
    on_models = {
        name
        for table in planned or declared
        if (name := _text(table, "name")) is not None and table.get("model") in paths and not table.get("own_models")
    }
    return on_models if planned or declared else {"before", "after"}


def _list_tables(table: Any, key: str) -> list[Mapping[str, Any]]:
    value = table.get(key) if isinstance(table, Mapping) else None
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, (list, tuple)) else []


def _text(table: Any, key: str) -> str | None:
    value = table.get(key) if isinstance(table, Mapping) else None
    return value if isinstance(value, str) else None


def _tables(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables in a table; anybody may have written it."""
    for name, table in value.items() if isinstance(value, Mapping) else ():
        if isinstance(table, Mapping):
            yield name, table


def _texts(table: Any, key: str) -> list[str]:
    value = table.get(key) if isinstance(table, Mapping) else None
    return [text for text in value if isinstance(text, str)] if isinstance(value, (list, tuple)) else []


def directory_to_models(directory: Path) -> PromptModels:
    """One base model that all calls with token ids are said to have been answered by.

    Raises:
        ConfigError: prompts cannot be rendered by it.
    """
    if not holds_tokenizer(directory):
        raise ConfigError(f"replay: there is no tokenizer in {directory}; give the directory of the base model")
    if not is_installed(_LIBRARY):
        raise ConfigError(f"replay: prompts are compared by {_LIBRARY}: {missing_module_to_line(_LIBRARY)}")
    return PromptModels({"": directory})
