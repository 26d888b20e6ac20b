"""OpenInference spans -> readings. Seen with openinference-instrumentation-langchain 0.1.80.

LangGraph's coordinates are in the JSON text `metadata`, messages are flattened into dotted keys, and what the model
answered is once more in `output.value`, which is where log-probs are when the app asked for them.
"""

from __future__ import annotations

from marft_bridge.common.agent_names import AGENT_NAME_METADATA
from marft_bridge.ingest.messages import (
    langchain_inputs_to_answer_ids,
    langchain_output_to_tool_call_id,
    langchain_outputs_to_answer_ids,
    langchain_outputs_to_attributes,
    messages_to_json,
    to_messages,
)
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import (
    Kind,
    Reading,
    as_integer,
    as_mapping,
    as_text,
    first_present,
    settings_to_attributes,
    unflatten,
)
from trace_store import conventions as c
from trace_store.call_attributes import check_call_attributes

CONVENTION = "openinference"
_KIND = "openinference.span.kind"
_KINDS: dict[str, Kind] = {"LLM": "llm", "TOOL": "tool", "AGENT": "agent"}


def matches(span: WireSpan) -> bool:
    """Whether a span follows this convention."""
    return _KIND in span.attributes


def span_to_reading(span: WireSpan) -> Reading:
    """The reading of one OpenInference span."""
    attributes = span.attributes
    metadata = as_mapping(attributes.get("metadata"))
    kind: Kind = _KINDS.get(str(attributes[_KIND]).upper(), "other")
    call_attributes, unreadable = check_call_attributes(
        _llm_attributes(span) if kind == "llm" else _tool_attributes(span) if kind == "tool" else {}
    )
    return Reading(
        convention=CONVENTION,
        kind=kind,
        name=span.name,
        node=as_text(metadata.get("langgraph_node")),
        checkpoint_ns=as_text(metadata.get("langgraph_checkpoint_ns")),
        declared_name=as_text(metadata.get(AGENT_NAME_METADATA)),
        step=as_integer(metadata.get("langgraph_step")),
        agent=(as_text(attributes.get("agent.name")) or span.name) if kind == "agent" else None,
        session=as_text(attributes.get("session.id")) or as_text(metadata.get("thread_id")),
        subject=as_text(attributes.get("user.id")) or as_text(metadata.get("user_id")),
        task=as_mapping(attributes.get("input.value")) or None,
        attributes=call_attributes,
        unreadable=unreadable,
        answer_ids=langchain_outputs_to_answer_ids(attributes.get("output.value")) if kind == "llm" else (),
        prompt_ids=langchain_inputs_to_answer_ids(attributes.get("input.value")) if kind == "llm" else (),
    )


def _llm_attributes(span: WireSpan) -> dict[str, object]:
    attributes = span.attributes
    request_attributes = settings_to_attributes(as_mapping(attributes.get("llm.invocation_parameters")))
    langchain_attributes = langchain_outputs_to_attributes(attributes.get("output.value"))
    finish = as_text(attributes.get("llm.finish_reason"))
    own_attributes = {
        c.PROVIDER: first_present(attributes, "llm.provider", "llm.system"),
        c.REQUEST_MODEL: first_present(attributes, "llm.request.model_name", "llm.model_name"),
        c.RESPONSE_MODEL: first_present(attributes, "llm.response.model_name"),
        c.FINISH_REASONS: [finish] if finish else None,
        c.USAGE_INPUT_TOKENS: attributes.get("llm.token_count.prompt"),
        c.USAGE_OUTPUT_TOKENS: attributes.get("llm.token_count.completion"),
        c.INPUT_MESSAGES: messages_to_json(to_messages(unflatten(attributes, "llm.input_messages"))),
        c.OUTPUT_MESSAGES: messages_to_json(to_messages(unflatten(attributes, "llm.output_messages"))),
    }
    return (
        request_attributes
        | langchain_attributes
        | {key: value for key, value in own_attributes.items() if value is not None}
    )


def _tool_attributes(span: WireSpan) -> dict[str, object]:
    attributes = span.attributes
    return {
        c.TOOL_NAME: as_text(attributes.get("tool.name")) or span.name,
        c.TOOL_CALL_ID: first_present(attributes, "tool_call.id", "tool.id")
        or langchain_output_to_tool_call_id(attributes.get("output.value")),
        c.TOOL_ARGUMENTS: attributes.get("input.value"),
        c.TOOL_RESULT: attributes.get("output.value"),
    }
