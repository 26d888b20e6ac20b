"""Spans after the OpenTelemetry GenAI conventions -> readings; our own attribute names are these.

Knows the names that the conventions gave up (`gen_ai.system`, prompt and completion tokens). It knows no LangGraph:
the conventions have no words for supersteps and checkpoint namespaces.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.ingest.messages import messages_text, to_messages
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Kind, Reading, call_attributes, first, text, unflattened
from trace_store import conventions as c

DIALECT = "genai"
SYSTEM = "gen_ai.system"  # the provider's former name
_CONVERSATION = "gen_ai.conversation.id"
_LLM_OPERATIONS = (c.CHAT, "text_completion", "generate_content")
_PLAIN = (
    c.REQUEST_MODEL,
    c.REQUEST_TEMPERATURE,
    c.REQUEST_TOP_P,
    c.REQUEST_TOP_K,
    c.REQUEST_SEED,
    c.REQUEST_MAX_TOKENS,
    c.RESPONSE_ID,
    c.RESPONSE_MODEL,
    c.INPUT_MESSAGES,
    c.OUTPUT_MESSAGES,
)


def speaks(span: WireSpan) -> bool:
    """Whether a span is written in this dialect."""
    return c.OPERATION in span.attributes or SYSTEM in span.attributes


def span_to_reading(span: WireSpan) -> Reading:
    """One span as the conventions mean it."""
    a = span.attributes
    kind = operation_to_kind(a.get(c.OPERATION))
    found, unreadable = call_attributes(llm_attributes(a) if kind == "llm" else tool_attributes(a, kind))
    return Reading(
        dialect=DIALECT,
        kind=kind,
        name=span.name,
        agent=agent_of(span) if kind == "agent" else None,
        session=text(a.get(_CONVERSATION)),
        subject=text(first(a, "user.id", "enduser.id")),
        attributes=found,
        unreadable=unreadable,
    )


def operation_to_kind(operation: Any) -> Kind:
    """What kind of thing an operation of the conventions is."""
    if operation in _LLM_OPERATIONS:
        return "llm"
    return "tool" if operation == c.EXECUTE_TOOL else "agent" if operation == c.INVOKE_AGENT else "other"


def agent_of(span: WireSpan) -> str:
    """The agent's name, or the span's where it has none."""
    return text(span.attributes.get(c.AGENT_NAME)) or span.name


def llm_attributes(a: dict[str, Any]) -> dict[str, Any]:
    """An LLM call under the current names; lists flattened under the former ones included."""
    completions = unflattened(a, "gen_ai.completion")
    reasons = [item["finish_reason"] for item in completions if text(item.get("finish_reason"))]
    found = {key: a.get(key) for key in _PLAIN}
    return found | {
        c.PROVIDER: first(a, c.PROVIDER, SYSTEM),
        c.FINISH_REASONS: a.get(c.FINISH_REASONS) or reasons,
        c.USAGE_INPUT_TOKENS: first(a, c.USAGE_INPUT_TOKENS, "gen_ai.usage.prompt_tokens"),
        c.USAGE_OUTPUT_TOKENS: first(a, c.USAGE_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens"),
        c.INPUT_MESSAGES: found[c.INPUT_MESSAGES] or messages_text(to_messages(unflattened(a, "gen_ai.prompt"))),
        c.OUTPUT_MESSAGES: found[c.OUTPUT_MESSAGES] or messages_text(to_messages(completions)),
    }


def tool_attributes(a: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """A tool call; nothing for another kind of span."""
    if kind != "tool":
        return {}
    return {key: a.get(key) for key in (c.TOOL_NAME, c.TOOL_CALL_ID, c.TOOL_ARGUMENTS, c.TOOL_RESULT)}
