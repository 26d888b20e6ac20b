"""OpenLLMetry (Traceloop) spans -> readings. Seen with opentelemetry-instrumentation-langchain 0.62.4.

It writes the GenAI conventions, their former names in older versions, and `traceloop.*` attributes. LangGraph's node,
step and namespace are association properties. A model name of "unknown" is read as absent.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.common.agent_names import AGENT_NAME_METADATA
from marft_bridge.ingest import genai
from marft_bridge.ingest.messages import langchain_output_to_tool_call_id
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import (
    Kind,
    Reading,
    as_integer,
    as_mapping,
    as_text,
    first_present,
)
from trace_store import conventions as c
from trace_store.call_attributes import check_call_attributes

CONVENTION = "traceloop"
_PREFIX = "traceloop."
_KIND = "traceloop.span.kind"
_ENTITY = "traceloop.entity."
_PROPERTIES = "traceloop.association.properties."
_REQUEST_TYPE = "llm.request.type"  # chat or completion, in versions without an operation name
_SCOPE = "opentelemetry.instrumentation.langchain"
_UNKNOWN_MODEL = "unknown"


def matches(span: WireSpan) -> bool:
    """Whether a span follows this convention."""
    return (
        span.scope == _SCOPE
        or _REQUEST_TYPE in span.attributes
        or any(key.startswith(_PREFIX) for key in span.attributes)
    )


def span_to_reading(span: WireSpan) -> Reading:
    """The reading of one OpenLLMetry span."""
    attributes = span.attributes
    kind = _attributes_to_kind(attributes)
    call_attributes, unreadable = check_call_attributes(
        _llm_attributes(attributes) if kind == "llm" else _tool_attributes(span) if kind == "tool" else {}
    )
    name = as_text(attributes.get(_ENTITY + "name"))
    return Reading(
        convention=CONVENTION,
        kind=kind,
        name=name or span.name,
        node=as_text(attributes.get(_PROPERTIES + "langgraph_node")),
        checkpoint_ns=as_text(attributes.get(_PROPERTIES + "langgraph_checkpoint_ns")),
        declared_name=as_text(attributes.get(_PROPERTIES + AGENT_NAME_METADATA)),
        step=as_integer(attributes.get(_PROPERTIES + "langgraph_step")),
        agent=(as_text(attributes.get(c.AGENT_NAME)) or name or span.name) if kind == "agent" else None,
        session=as_text(
            first_present(attributes, _PROPERTIES + "session_id", _PROPERTIES + "thread_id", "gen_ai.conversation.id")
        ),
        subject=as_text(attributes.get(_PROPERTIES + "user_id")),
        task=as_mapping(as_mapping(attributes.get(_ENTITY + "input")).get("inputs")) or None,
        attributes=call_attributes,
        unreadable=unreadable,
    )


def _attributes_to_kind(attributes: dict[str, Any]) -> Kind:
    if as_text(attributes.get(_REQUEST_TYPE)) in {"chat", "completion"}:
        return "llm"
    span_kind = as_text(attributes.get(_KIND))
    if span_kind in ("tool", "agent"):
        return "tool" if span_kind == "tool" else "agent"
    # A whole graph is an agent to its operation name and a workflow to its own attribute.
    return "other" if span_kind is not None else genai.operation_to_kind(attributes.get(c.OPERATION))


def _llm_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    genai_attributes = genai.to_llm_attributes(attributes)
    unknown_models = {
        key: None for key in (c.REQUEST_MODEL, c.RESPONSE_MODEL) if genai_attributes[key] == _UNKNOWN_MODEL
    }
    return genai_attributes | unknown_models


def _tool_attributes(span: WireSpan) -> dict[str, Any]:
    attributes = span.attributes
    genai_attributes = genai.to_tool_attributes(attributes, "tool")
    output = attributes.get(_ENTITY + "output")
    return {
        c.TOOL_NAME: genai_attributes[c.TOOL_NAME] or as_text(attributes.get(_ENTITY + "name")),
        c.TOOL_CALL_ID: genai_attributes[c.TOOL_CALL_ID] or langchain_output_to_tool_call_id(output),
        c.TOOL_ARGUMENTS: genai_attributes[c.TOOL_ARGUMENTS] or attributes.get(_ENTITY + "input"),
        c.TOOL_RESULT: genai_attributes[c.TOOL_RESULT] or output,
    }
