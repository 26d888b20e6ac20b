"""OpenInference spans -> readings. Seen with openinference-instrumentation-langchain 0.1.80.

LangGraph's coordinates are in the JSON text `metadata`, messages are flattened into dotted keys, and what the model
answered is once more in `output.value`, which is where log-probs are when the app asked for them.
"""

from __future__ import annotations

from marft_bridge.ingest.messages import (
    langchain_answer,
    langchain_answer_ids,
    langchain_prompt_ids,
    langchain_tool_call_id,
    messages_text,
    to_messages,
)
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import (
    Kind,
    Reading,
    call_attributes,
    first,
    mapping,
    request_attributes,
    text,
    unflattened,
    whole_number,
)
from trace_store import conventions as c

DIALECT = "openinference"
_KIND = "openinference.span.kind"
_KINDS: dict[str, Kind] = {"LLM": "llm", "TOOL": "tool", "AGENT": "agent"}


def speaks(span: WireSpan) -> bool:
    """Whether a span is written in this dialect."""
    return _KIND in span.attributes


def span_to_reading(span: WireSpan) -> Reading:
    """One span as OpenInference means it."""
    a = span.attributes
    metadata = mapping(a.get("metadata"))
    kind: Kind = _KINDS.get(str(a[_KIND]).upper(), "other")
    found, unreadable = call_attributes(_llm(span) if kind == "llm" else _tool(span) if kind == "tool" else {})
    return Reading(
        dialect=DIALECT,
        kind=kind,
        name=span.name,
        node=text(metadata.get("langgraph_node")),
        checkpoint_ns=text(metadata.get("langgraph_checkpoint_ns")),
        step=whole_number(metadata.get("langgraph_step")),
        agent=(text(a.get("agent.name")) or span.name) if kind == "agent" else None,
        session=text(a.get("session.id")) or text(metadata.get("thread_id")),
        subject=text(a.get("user.id")) or text(metadata.get("user_id")),
        task=mapping(a.get("input.value")) or None,
        attributes=found,
        unreadable=unreadable,
        answer_ids=langchain_answer_ids(a.get("output.value")) if kind == "llm" else (),
        prompt_ids=langchain_prompt_ids(a.get("input.value")) if kind == "llm" else (),
    )


def _llm(span: WireSpan) -> dict[str, object]:
    a = span.attributes
    asked = request_attributes(mapping(a.get("llm.invocation_parameters")))
    answered = langchain_answer(a.get("output.value"))
    finish = text(a.get("llm.finish_reason"))
    said = {
        c.PROVIDER: first(a, "llm.provider", "llm.system"),
        c.REQUEST_MODEL: first(a, "llm.request.model_name", "llm.model_name"),
        c.RESPONSE_MODEL: first(a, "llm.response.model_name"),
        c.FINISH_REASONS: [finish] if finish else None,
        c.USAGE_INPUT_TOKENS: a.get("llm.token_count.prompt"),
        c.USAGE_OUTPUT_TOKENS: a.get("llm.token_count.completion"),
        c.INPUT_MESSAGES: messages_text(to_messages(unflattened(a, "llm.input_messages"))),
        c.OUTPUT_MESSAGES: messages_text(to_messages(unflattened(a, "llm.output_messages"))),
    }
    return asked | answered | {key: value for key, value in said.items() if value is not None}


def _tool(span: WireSpan) -> dict[str, object]:
    a = span.attributes
    return {
        c.TOOL_NAME: text(a.get("tool.name")) or span.name,
        c.TOOL_CALL_ID: first(a, "tool_call.id", "tool.id") or langchain_tool_call_id(a.get("output.value")),
        c.TOOL_ARGUMENTS: a.get("input.value"),
        c.TOOL_RESULT: a.get("output.value"),
    }
