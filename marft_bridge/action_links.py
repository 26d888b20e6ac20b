"""What a node or an LLM call depends on -> attributes of its span.

Two independent kinds of evidence: what the task could read and did read (`task_sources_to_attributes`), and whose
answers and tool results are in the very prompt (`AnswerIndex`), by the ids of messages and tool calls. Invariant: a
name is in an exact list only when the dependency was observed; what is merely possible is in the `MAY_` list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from marft_bridge.state_reads import Reads
from marft_bridge.task_writes import Sources, Writers
from trace_store import conventions as names


def sources_to_reads(sources: Sources, reads: Reads | None) -> tuple[list[str], list[str]]:
    """Tasks whose values were read so far, and tasks whose values may have been: two lists without overlap."""
    known = dict.fromkeys(sources.given)
    maybe = dict.fromkeys(sources.maybe_given)
    for key, writers in sources.readable.items():
        seen = reads is not None and key in reads.keys
        if seen or reads is None or reads.bounded:
            for ns, wrote in writers.items():
                (known if seen and wrote else maybe)[ns] = None
    return list(known), [ns for ns in maybe if ns not in known]


def sources_to_attributes(sources: Sources | None) -> dict[str, Any]:
    """What a node span says at its start; nothing when nobody saw the task start."""
    if sources is None:
        return {}
    return {
        names.TRIGGERED_BY: sources.triggered_by,
        names.SENT_BY: sources.sent_by,
        names.CALLED_BY: sources.caller,
    }


def reads_to_attributes(sources: Sources | None, reads: Reads | None) -> dict[str, Any]:
    """What was read by now, for a call that starts or a node that ends."""
    if sources is None:
        return {}
    known, maybe = sources_to_reads(sources, reads)
    return {names.READS_FROM: known, names.MAY_READ_FROM: maybe}


def around_to_input_writers(around: Sources, reads: Reads | None, inherits: bool, key: str) -> Writers:
    """Whose values a graph's input holds under `key`, given the task around the graph.

    `inherits`: the input is the very state of that task. Else its function made the input up, from whatever it had
    read by then.
    """
    if inherits:
        return dict(around.readable.get(key, {}))
    if around.sent_by:
        return dict.fromkeys(around.sent_by, len(around.sent_by) == 1)
    known, maybe = sources_to_reads(around, reads)
    return dict.fromkeys((*known, *maybe), False)


class AnswerIndex:
    """The answers of one run by the ids that later prompts can name: message ids and tool call ids."""

    def __init__(self) -> None:
        self._messages: dict[str, str | None] = {}  # message id -> span id; None when two answers share it
        self._tool_calls: dict[str, str | None] = {}

    def add(self, response: LLMResult, span_id: str) -> None:
        """Remembers which call gave this answer."""
        for generation in response.generations[0]:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            if isinstance(message, AIMessage):
                _remember(self._messages, message.id, span_id)
                for call in message.tool_calls:
                    _remember(self._tool_calls, call["id"], span_id)

    def prompt_to_attributes(self, messages: Sequence[BaseMessage]) -> dict[str, Any]:
        """Spans of the calls whose answers, or whose tools' results, are in the prompt."""
        answers = _found(self._messages, (m.id for m in messages if isinstance(m, AIMessage)))
        results = _found(self._tool_calls, (m.tool_call_id for m in messages if isinstance(m, ToolMessage)))
        return {names.SAW_ANSWERS: answers or None, names.SAW_TOOL_RESULTS: results or None}


def _remember(index: dict[str, str | None], key: str | None, span_id: str) -> None:
    if key:
        index[key] = span_id if index.get(key, span_id) == span_id else None


def _found(index: dict[str, str | None], keys: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(span for key in keys if key and (span := index.get(key)) is not None))
