"""Spans of the OpenTelemetry GenAI conventions, whose attribute names the store uses too -> readings.

Deprecated names are read as well: `gen_ai.system`, prompt and completion tokens, a workflow's own name. Readings have
no LangGraph node or step: the conventions have no attributes for supersteps and checkpoint namespaces.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.ingest.messages import messages_to_json, to_messages
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Kind, Reading, as_text, first_present, unflatten
from trace_store import conventions as c
from trace_store.call_attributes import check_call_attributes

CONVENTION = "genai"
SYSTEM = "gen_ai.system"  # former name of the provider attribute
_CONVERSATION = "gen_ai.conversation.id"
_LLM_OPERATIONS = (c.CHAT, "text_completion", "generate_content")
_CURRENT_NAMES = (
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


def matches(span: WireSpan) -> bool:
    """Whether a span follows this convention."""
    return c.OPERATION in span.attributes or SYSTEM in span.attributes


def span_to_reading(span: WireSpan) -> Reading:
    """The reading of one span of the GenAI conventions."""
    attributes = span.attributes
    kind = operation_to_kind(attributes.get(c.OPERATION))
    call_attributes, unreadable = check_call_attributes(
        to_llm_attributes(attributes) if kind == "llm" else to_tool_attributes(attributes, kind)
    )
    return Reading(
        convention=CONVENTION,
        kind=kind,
        name=span_to_run_name(span),
        agent=span_to_agent_name(span) if kind == "agent" else None,
        session=as_text(attributes.get(_CONVERSATION)),
        subject=as_text(first_present(attributes, "user.id", "enduser.id")),
        attributes=call_attributes,
        unreadable=unreadable,
    )


def operation_to_kind(operation: Any) -> Kind:
    """The kind of span that an operation name of the conventions stands for."""
    if operation in _LLM_OPERATIONS:
        return "llm"
    return "tool" if operation == c.EXECUTE_TOOL else "agent" if operation == c.INVOKE_AGENT else "other"


def span_to_run_name(span: WireSpan) -> str:
    """The name of the run that a span stands for: that of a workflow, under today's name or the former one."""
    if span.attributes.get(c.OPERATION) != c.INVOKE_WORKFLOW:
        return span.name
    return as_text(first_present(span.attributes, c.AGENT_NAME, c.WORKFLOW_NAME)) or span.name


def span_to_agent_name(span: WireSpan) -> str:
    """The agent's name, or the span's where it has none."""
    return as_text(span.attributes.get(c.AGENT_NAME)) or span.name


def to_llm_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """An LLM call's attributes under the current names; messages under the former, flattened ones included."""
    completions = unflatten(attributes, "gen_ai.completion")
    reasons = [item["finish_reason"] for item in completions if as_text(item.get("finish_reason"))]
    current = {key: attributes.get(key) for key in _CURRENT_NAMES}
    return current | {
        c.PROVIDER: first_present(attributes, c.PROVIDER, SYSTEM),
        c.FINISH_REASONS: attributes.get(c.FINISH_REASONS) or reasons,
        c.USAGE_INPUT_TOKENS: first_present(attributes, c.USAGE_INPUT_TOKENS, "gen_ai.usage.prompt_tokens"),
        c.USAGE_OUTPUT_TOKENS: first_present(attributes, c.USAGE_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens"),
        c.INPUT_MESSAGES: current[c.INPUT_MESSAGES]
        or messages_to_json(to_messages(unflatten(attributes, "gen_ai.prompt"))),
        c.OUTPUT_MESSAGES: current[c.OUTPUT_MESSAGES] or messages_to_json(to_messages(completions)),
    }


def to_tool_attributes(attributes: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """A tool call's attributes; empty for another kind of span."""
    if kind != "tool":
        return {}
    return {key: attributes.get(key) for key in (c.TOOL_NAME, c.TOOL_CALL_ID, c.TOOL_ARGUMENTS, c.TOOL_RESULT)}
