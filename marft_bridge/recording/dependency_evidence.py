"""What a node or an LLM call depends on -> attributes of its span.

Two independent kinds of evidence: what the task could read and did read (`reads_to_attributes`), and whose answers and
tool results are in the prompt itself (`AnswerIndex`), by the ids of messages and tool calls. Invariant: a task is in an
exact list only when the dependency is certain; a merely possible one is in the `MAY_` list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import LLMResult

from marft_bridge.recording.key_writers import Writers
from marft_bridge.recording.node_bytecode import WHOLE_STATE
from marft_bridge.recording.span_messages import generation_to_message, known_class
from marft_bridge.recording.state_reads import Reads
from marft_bridge.recording.write_ledger import Sources
from trace_store import conventions as names


def sources_to_reads(sources: Sources, reads: Reads | None) -> tuple[list[str], list[str]]:
    """Tasks whose values were read so far, and tasks whose values may have been read: two lists without overlap."""
    certain_writers = dict.fromkeys(sources.argument_writers)
    possible_writers = dict.fromkeys(sources.maybe_argument_writers)
    certain_keys, possible_keys = WHOLE_STATE if reads is None else reads.so_far()
    for key, writers in sources.readable.items():
        was_read = key in certain_keys
        if was_read or possible_keys is None or key in possible_keys:
            for ns, is_certain in writers.items():
                (certain_writers if was_read and is_certain else possible_writers)[ns] = None
    return list(certain_writers), [ns for ns in possible_writers if ns not in certain_writers]


def sources_to_attributes(sources: Sources | None) -> dict[str, Any]:
    """Attributes of a node span at its start; none when the start of its task was not seen."""
    if sources is None:
        return {}
    return {
        names.TRIGGERED_BY: sources.triggered_by,
        names.SENT_BY: sources.sent_by,
        names.CALLED_BY: sources.caller,
    }


def reads_to_attributes(sources: Sources | None, reads: Reads | None) -> dict[str, Any]:
    """Attributes of what was read so far, for a call that starts or a node that ends."""
    if sources is None:
        return {}
    certain_writers, possible_writers = sources_to_reads(sources, reads)
    return {names.READS_FROM: certain_writers, names.MAY_READ_FROM: possible_writers}


def sources_to_input_writers(outer_sources: Sources, reads: Reads | None, inherits: bool, key: str) -> Writers:
    """Whose values a subgraph's input holds under `key`, given the sources and reads of the task that calls it.

    `inherits`: the input is that task's own state. Otherwise the task's function built the input from anything that it
    had read by then, so all of that is possible and none of it certain.
    """
    if inherits:
        return dict(outer_sources.readable.get(key, {}))
    if outer_sources.sent_by:
        return dict.fromkeys(outer_sources.sent_by, len(outer_sources.sent_by) == 1)
    certain_writers, possible_writers = sources_to_reads(outer_sources, reads)
    return dict.fromkeys((*certain_writers, *possible_writers), False)


class AnswerIndex:
    """The answers of one run, by the ids that later prompts can contain: message ids and tool call ids."""

    def __init__(self) -> None:
        self._messages: dict[str, str | None] = {}  # message id -> span id; None when two answers share it
        self._tool_calls: dict[str, str | None] = {}

    def add(self, response: LLMResult, span_id: str) -> None:
        """Notes that the call of span `span_id` gave this answer."""
        for generation in response.generations[0]:
            message = generation_to_message(generation)
            if type(message) is AIMessage or isinstance(message, AIMessage):  # LangChain's classes take long to tell
                _remember(self._messages, message.id, span_id)
                for call in message.tool_calls:
                    _remember(self._tool_calls, call["id"], span_id)

    def prompt_to_attributes(self, messages: Sequence[BaseMessage]) -> dict[str, Any]:
        """Attributes with the spans of the calls whose answers, or whose tools' results, are in the prompt."""
        attributes: dict[str, Any] = {}
        if self._messages:
            own_messages = (message for message in messages if known_class(type(message)) is AIMessage)
            answers = _find_spans(self._messages, (message.id for message in own_messages))
            attributes |= {names.SAW_ANSWERS: answers} if answers else {}
        if self._tool_calls:
            tool_messages = (message for message in messages if isinstance(message, ToolMessage))
            results = _find_spans(self._tool_calls, (message.tool_call_id for message in tool_messages))
            attributes |= {names.SAW_TOOL_RESULTS: results} if results else {}
        return attributes


def _remember(index: dict[str, str | None], key: str | None, span_id: str) -> None:
    if key:
        index[key] = span_id if index.get(key, span_id) == span_id else None


def _find_spans(index: dict[str, str | None], keys: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(span for key in keys if key and (span := index.get(key)) is not None))
