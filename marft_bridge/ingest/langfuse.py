"""Langfuse observations, as its SDK sends them over OTLP -> readings. Seen with langfuse 5.0.4 and server 3 and 4.

`langfuse_export` brings exported observations to the same attributes. LangGraph's node, step and namespace are entries
of an observation's metadata. Langfuse keeps one name of the model, that of the answer where the model gave one, and
neither finish reasons nor the ids of messages.

Invariant: what a model or a user wrote is never read as structure. The answer is one message of the assistant,
whatever role its text claims, and the content of a message is not parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from marft_bridge.common.agent_names import AGENT_NAME_METADATA
from marft_bridge.ingest.messages import Message, langchain_output_to_tool_call_id, messages_to_json, to_message
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import (
    Kind,
    Reading,
    as_integer,
    as_list,
    as_mapping,
    as_text,
    first_present,
    parse_json,
    settings_to_attributes,
)
from trace_store import conventions as c
from trace_store.call_attributes import check_call_attributes

CONVENTION = "langfuse"
OBSERVATION = "langfuse.observation."
TYPE = OBSERVATION + "type"
LEVEL, STATUS_MESSAGE = OBSERVATION + "level", OBSERVATION + "status_message"
INPUT, OUTPUT = OBSERVATION + "input", OBSERVATION + "output"
METADATA = OBSERVATION + "metadata"
MODEL, MODEL_PARAMETERS = OBSERVATION + "model.name", OBSERVATION + "model.parameters"
USAGE, COST = OBSERVATION + "usage_details", OBSERVATION + "cost_details"
SESSION, USER = "session.id", "user.id"
TRACE_NAME = "langfuse.trace.name"
END_ABSENT = "langfuse.export.end_absent"  # true on an exported observation that never ended
_KINDS: dict[str, Kind] = {"GENERATION": "llm", "TOOL": "tool", "AGENT": "agent"}
_ANSWER_ROLES = {"assistant", "ai", "model"}


def matches(span: WireSpan) -> bool:
    """Whether a span is an observation of Langfuse's SDK or export."""
    return TYPE in span.attributes


def span_to_reading(span: WireSpan) -> Reading:
    """The reading of one observation."""
    attributes = span.attributes
    kind: Kind = _KINDS.get(str(attributes[TYPE]).upper(), "other")
    call_attributes, unreadable = check_call_attributes(
        _llm_attributes(attributes) if kind == "llm" else _tool_attributes(span) if kind == "tool" else {}
    )
    return Reading(
        convention=CONVENTION,
        kind=kind,
        name=span.name,
        node=as_text(_metadata(attributes, "langgraph_node")),
        checkpoint_ns=as_text(_metadata(attributes, "langgraph_checkpoint_ns")),
        declared_name=as_text(_metadata(attributes, AGENT_NAME_METADATA)),
        step=_to_integer(_metadata(attributes, "langgraph_step")),
        agent=span.name if kind == "agent" else None,
        session=as_text(attributes.get(SESSION)) or as_text(_metadata(attributes, "thread_id")),
        subject=as_text(attributes.get(USER)) or as_text(_metadata(attributes, "user_id")),
        task=as_mapping(attributes.get(INPUT)) or None,
        attributes=call_attributes,
        unreadable=(*unreadable, *(("end time",) if attributes.get(END_ABSENT) is True else ())),
    )


def _metadata(attributes: Mapping[str, Any], key: str) -> Any:
    """An entry of the metadata. The SDK's newer versions write texts as JSON, its older ones as they are."""
    value = attributes.get(f"{METADATA}.{key}")
    if isinstance(value, str) and value[:1] == value[-1:] == '"':
        content = parse_json(value)
        return content if isinstance(content, str) else value
    return value


def _to_integer(value: Any) -> int | None:
    """A whole number, also where it is written as text: the export's columns hold texts."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    return as_integer(value)


def _to_number(value: Any) -> Any:
    """A setting that is a number written as text, as the SDK's version 2 did; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value


def _llm_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {key: _to_number(value) for key, value in as_mapping(attributes.get(MODEL_PARAMETERS)).items()}
    model = as_text(attributes.get(MODEL))
    prompt, tools = _input_to_messages(attributes.get(INPUT))
    return settings_to_attributes(parameters) | {
        c.PROVIDER: as_text(_metadata(attributes, "ls_provider")),
        c.REQUEST_MODEL: as_text(_metadata(attributes, "ls_model_name")) or model,
        c.RESPONSE_MODEL: model,
        **_usage_to_attributes(attributes.get(USAGE)),
        c.INPUT_MESSAGES: messages_to_json(prompt),
        c.OUTPUT_MESSAGES: messages_to_json(_output_to_messages(attributes.get(OUTPUT))),
        c.TOOL_DEFINITIONS: json.dumps(tools, ensure_ascii=False) if tools else None,
    }


def _usage_to_attributes(usage: Any) -> dict[str, Any]:
    """Counts by kind of token, which exclude each other -> all of the prompt, all of the answer, and cached ones."""
    counts = {str(key): _to_integer(value) for key, value in as_mapping(usage).items()}
    # OpenAI's own names, which the SDK leaves to the server, are totals: details of theirs are no further tokens.
    prompt, sampled = counts.get("prompt_tokens"), counts.get("completion_tokens")
    if prompt is None and sampled is None:
        prompt, sampled = _sum_of(counts, "input"), _sum_of(counts, "output")
    cached = first_present(counts, "input_cached_tokens", "input_cache_read", "cache_read_input_tokens")
    return {c.USAGE_INPUT_TOKENS: prompt, c.USAGE_OUTPUT_TOKENS: sampled, c.USAGE_CACHE_READ_TOKENS: cached}


def _sum_of(counts: Mapping[str, int | None], word: str) -> int | None:
    """The sum of what is named after `word`, as Langfuse sums it; None where there is nothing of that name."""
    parts = [count for name, count in counts.items() if word in name and count is not None]
    return sum(parts) if parts else None


def _input_to_messages(value: Any) -> tuple[list[Message], list[Any]]:
    """What a model was given -> its messages, and the tools that it was offered.

    LangChain's handler puts the offered tools behind the messages, as messages of a tool that answer no call.
    """
    content = parse_json(value)
    request = content if isinstance(content, dict) else {}
    tools = [tool for tool in as_list(request.get("tools")) if isinstance(tool, dict)]
    values = request.get("messages", request if "role" in request else None)
    values = values if isinstance(values, list) else [values] if isinstance(values, dict) else as_list(content)
    messages: list[Message] = []
    for item in values:
        if isinstance(item, dict) and item.get("role") == "tool" and not item.get("tool_call_id"):
            definition = parse_json(item.get("content"))
            if isinstance(definition, dict) and ("function" in definition or "name" in definition):
                tools.append(definition)
                continue
        message = to_message(item)
        if message is None:  # not a conversation: all of it is one text
            return _text_to_messages(value, "user"), []
        messages.append(message)
    return (messages, tools) if messages else (_text_to_messages(value, "user"), tools)


def _output_to_messages(value: Any) -> list[Message]:
    """What a model answered -> one message of the assistant."""
    content = parse_json(value)
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if isinstance(content, dict) and len(as_list(content.get("choices"))) == 1:
        content = content["choices"][0].get("message") if isinstance(content["choices"][0], dict) else None
    if isinstance(content, dict) and content.get("role") in _ANSWER_ROLES:
        message = to_message(content)
        if message is not None:
            return [message | {"role": "assistant"}]
    return _text_to_messages(value, "assistant")


def _text_to_messages(value: Any, role: str) -> list[Message]:
    if value in (None, ""):
        return []
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [{"role": role, "parts": [{"type": "text", "content": text}]}]


def _tool_attributes(span: WireSpan) -> dict[str, Any]:
    attributes = span.attributes
    return {
        c.TOOL_NAME: span.name,
        c.TOOL_CALL_ID: as_text(_metadata(attributes, "tool_call_id"))
        or langchain_output_to_tool_call_id(attributes.get(OUTPUT)),
        c.TOOL_ARGUMENTS: attributes.get(INPUT),
        c.TOOL_RESULT: attributes.get(OUTPUT),
    }
