"""Spans of LangSmith's OpenTelemetry export -> readings. Seen with langsmith 0.15.0.

Former GenAI names (`gen_ai.prompt`, `gen_ai.completion`, which hold LangChain's own JSON) and every metadata entry
of the run under `langsmith.metadata.`. `langsmith.span.kind` decides the kind of a span: the operation name of prompt
runs is `chat` too.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.common.agent_names import AGENT_NAME_METADATA
from marft_bridge.ingest import genai
from marft_bridge.ingest.messages import (
    langchain_inputs_to_answer_ids,
    langchain_inputs_to_messages,
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
    as_list,
    as_mapping,
    as_text,
    first_present,
)
from trace_store import conventions as c
from trace_store.call_attributes import check_call_attributes

CONVENTION = "langsmith"
_PREFIX = "langsmith."
_METADATA = "langsmith.metadata."
_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_KINDS: dict[str, Kind] = {"llm": "llm", "tool": "tool"}


def matches(span: WireSpan) -> bool:
    """Whether a span follows this convention."""
    return any(key.startswith(_PREFIX) for key in span.attributes)


def span_to_reading(span: WireSpan) -> Reading:
    """The reading of one span of LangSmith's export."""
    attributes = span.attributes
    kind: Kind = _KINDS.get(str(attributes.get("langsmith.span.kind")), "other")
    call_attributes, unreadable = check_call_attributes(
        _llm_attributes(attributes)
        if kind == "llm"
        else _tool_attributes(attributes, span.name)
        if kind == "tool"
        else {}
    )
    return Reading(
        convention=CONVENTION,
        kind=kind,
        name=as_text(attributes.get("langsmith.trace.name")) or span.name,
        node=as_text(attributes.get(_METADATA + "langgraph_node")),
        checkpoint_ns=as_text(attributes.get(_METADATA + "langgraph_checkpoint_ns")),
        declared_name=as_text(attributes.get(_METADATA + AGENT_NAME_METADATA)),
        step=as_integer(attributes.get(_METADATA + "langgraph_step")),
        session=as_text(first_present(attributes, _METADATA + "session_id", _METADATA + "thread_id")),
        subject=as_text(attributes.get(_METADATA + "user_id")),
        task=as_mapping(attributes.get(_PROMPT)) or None,
        attributes=call_attributes,
        unreadable=unreadable,
        answer_ids=langchain_outputs_to_answer_ids(attributes.get(_COMPLETION)) if kind == "llm" else (),
        prompt_ids=langchain_inputs_to_answer_ids(attributes.get(_PROMPT)) if kind == "llm" else (),
    )


def _llm_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = as_mapping(attributes.get(_PROMPT)), as_mapping(attributes.get(_COMPLETION))
    # LangChain's runs hold generations; runs of a wrapped OpenAI client hold the request and the response as they are.
    choices = to_messages(completion.get("choices"))
    own_attributes = genai.to_llm_attributes(attributes) | {
        c.PROVIDER: first_present(attributes, _METADATA + "ls_provider", c.PROVIDER, genai.SYSTEM),
        c.INPUT_MESSAGES: messages_to_json(langchain_inputs_to_messages(prompt)),
        c.OUTPUT_MESSAGES: messages_to_json(choices),
        c.REQUEST_MODEL: first_present(attributes, c.REQUEST_MODEL, _METADATA + "ls_model_name"),
        c.REQUEST_TEMPERATURE: first_present(attributes, c.REQUEST_TEMPERATURE, _METADATA + "ls_temperature"),
        c.REQUEST_MAX_TOKENS: first_present(attributes, c.REQUEST_MAX_TOKENS, _METADATA + "ls_max_tokens"),
    }
    if len(as_list(completion.get("choices"))) == 1:
        tokens = as_list(as_mapping(as_mapping(completion["choices"][0]).get("logprobs")).get("content"))
        own_attributes[c.LOGPROBS] = [as_mapping(token).get("logprob") for token in tokens]
    langchain_attributes = {
        key: value for key, value in langchain_outputs_to_attributes(completion).items() if value is not None
    }
    return langchain_attributes | {key: value for key, value in own_attributes.items() if value not in (None, [])}


def _tool_attributes(attributes: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        c.TOOL_NAME: as_text(attributes.get(c.TOOL_NAME)) or name,
        c.TOOL_CALL_ID: as_text(attributes.get(c.TOOL_CALL_ID))
        or langchain_output_to_tool_call_id(attributes.get(_COMPLETION)),
        c.TOOL_ARGUMENTS: attributes.get(_PROMPT),
        c.TOOL_RESULT: attributes.get(_COMPLETION),
    }
