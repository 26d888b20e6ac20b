"""OpenLLMetry (Traceloop) spans -> readings. Seen with opentelemetry-instrumentation-langchain 0.62.4.

The GenAI conventions, their former names in older versions, and `traceloop.*` around them. LangGraph's coordinates
are association properties. A model that it does not know is called "unknown", which here is absent.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.ingest import genai
from marft_bridge.ingest.messages import langchain_tool_call_id
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Kind, Reading, call_attributes, first, mapping, text, whole_number
from trace_store import conventions as c

DIALECT = "traceloop"
_PREFIX = "traceloop."
_KIND = "traceloop.span.kind"
_ENTITY = "traceloop.entity."
_PROPERTIES = "traceloop.association.properties."
_REQUEST_TYPE = "llm.request.type"  # chat or completion, in versions without an operation name
_SCOPE = "opentelemetry.instrumentation.langchain"
_STAND_IN = "unknown"


def speaks(span: WireSpan) -> bool:
    """Whether a span is written in this dialect."""
    return (
        span.scope == _SCOPE
        or _REQUEST_TYPE in span.attributes
        or any(key.startswith(_PREFIX) for key in span.attributes)
    )


def span_to_reading(span: WireSpan) -> Reading:
    """One span as OpenLLMetry means it."""
    a = span.attributes
    kind = _kind(a)
    found, unreadable = call_attributes(_llm(a) if kind == "llm" else _tool(span) if kind == "tool" else {})
    name = text(a.get(_ENTITY + "name"))
    return Reading(
        dialect=DIALECT,
        kind=kind,
        name=name or span.name,
        node=text(a.get(_PROPERTIES + "langgraph_node")),
        checkpoint_ns=text(a.get(_PROPERTIES + "langgraph_checkpoint_ns")),
        step=whole_number(a.get(_PROPERTIES + "langgraph_step")),
        agent=(text(a.get(c.AGENT_NAME)) or name or span.name) if kind == "agent" else None,
        session=text(first(a, _PROPERTIES + "session_id", _PROPERTIES + "thread_id", "gen_ai.conversation.id")),
        subject=text(a.get(_PROPERTIES + "user_id")),
        task=mapping(mapping(a.get(_ENTITY + "input")).get("inputs")) or None,
        attributes=found,
        unreadable=unreadable,
    )


def _kind(a: dict[str, Any]) -> Kind:
    if text(a.get(_REQUEST_TYPE)) in {"chat", "completion"}:
        return "llm"
    said = text(a.get(_KIND))
    if said in ("tool", "agent"):
        return "tool" if said == "tool" else "agent"
    # A whole graph is an agent to its operation name and a workflow to its own attribute.
    return "other" if said is not None else genai.operation_to_kind(a.get(c.OPERATION))


def _llm(a: dict[str, Any]) -> dict[str, Any]:
    found = genai.llm_attributes(a)
    models = {key: None for key in (c.REQUEST_MODEL, c.RESPONSE_MODEL) if found[key] == _STAND_IN}
    return found | models


def _tool(span: WireSpan) -> dict[str, Any]:
    a = span.attributes
    found = genai.tool_attributes(a, "tool")
    output = a.get(_ENTITY + "output")
    return {
        c.TOOL_NAME: found[c.TOOL_NAME] or text(a.get(_ENTITY + "name")),
        c.TOOL_CALL_ID: found[c.TOOL_CALL_ID] or langchain_tool_call_id(output),
        c.TOOL_ARGUMENTS: found[c.TOOL_ARGUMENTS] or a.get(_ENTITY + "input"),
        c.TOOL_RESULT: found[c.TOOL_RESULT] or output,
    }
