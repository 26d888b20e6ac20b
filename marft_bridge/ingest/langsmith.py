"""Spans of LangSmith's OpenTelemetry export -> readings. Seen with langsmith 0.15.0.

Former GenAI names (`gen_ai.prompt`, `gen_ai.completion`, which hold LangChain's own JSON) and every metadata entry
of the run under `langsmith.metadata.`. The span kind decides what a span is: the operation name calls prompts chats.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.ingest import genai
from marft_bridge.ingest.messages import (
    langchain_answer,
    langchain_answer_ids,
    langchain_prompt,
    langchain_prompt_ids,
    langchain_tool_call_id,
    messages_text,
    to_messages,
)
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Kind, Reading, call_attributes, first, items, mapping, text, whole_number
from trace_store import conventions as c

DIALECT = "langsmith"
_PREFIX = "langsmith."
_METADATA = "langsmith.metadata."
_PROMPT, _COMPLETION = "gen_ai.prompt", "gen_ai.completion"
_KINDS: dict[str, Kind] = {"llm": "llm", "tool": "tool"}


def speaks(span: WireSpan) -> bool:
    """Whether a span is written in this dialect."""
    return any(key.startswith(_PREFIX) for key in span.attributes)


def span_to_reading(span: WireSpan) -> Reading:
    """One span as LangSmith means it."""
    a = span.attributes
    kind: Kind = _KINDS.get(str(a.get("langsmith.span.kind")), "other")
    found, unreadable = call_attributes(_llm(a) if kind == "llm" else _tool(a, span.name) if kind == "tool" else {})
    return Reading(
        dialect=DIALECT,
        kind=kind,
        name=text(a.get("langsmith.trace.name")) or span.name,
        node=text(a.get(_METADATA + "langgraph_node")),
        checkpoint_ns=text(a.get(_METADATA + "langgraph_checkpoint_ns")),
        step=whole_number(a.get(_METADATA + "langgraph_step")),
        session=text(first(a, _METADATA + "session_id", _METADATA + "thread_id")),
        subject=text(a.get(_METADATA + "user_id")),
        task=mapping(a.get(_PROMPT)) or None,
        attributes=found,
        unreadable=unreadable,
        answer_ids=langchain_answer_ids(a.get(_COMPLETION)) if kind == "llm" else (),
        prompt_ids=langchain_prompt_ids(a.get(_PROMPT)) if kind == "llm" else (),
    )


def _llm(a: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = mapping(a.get(_PROMPT)), mapping(a.get(_COMPLETION))
    # LangChain's runs hold generations; runs of a wrapped OpenAI client hold the request and the response as they are.
    choices = to_messages(completion.get("choices"))
    found = genai.llm_attributes(a) | {
        c.PROVIDER: first(a, _METADATA + "ls_provider", c.PROVIDER, genai.SYSTEM),
        c.INPUT_MESSAGES: messages_text(langchain_prompt(prompt)),
        c.OUTPUT_MESSAGES: messages_text(choices),
        c.REQUEST_MODEL: first(a, c.REQUEST_MODEL, _METADATA + "ls_model_name"),
        c.REQUEST_TEMPERATURE: first(a, c.REQUEST_TEMPERATURE, _METADATA + "ls_temperature"),
        c.REQUEST_MAX_TOKENS: first(a, c.REQUEST_MAX_TOKENS, _METADATA + "ls_max_tokens"),
    }
    if len(items(completion.get("choices"))) == 1:
        tokens = items(mapping(mapping(completion["choices"][0]).get("logprobs")).get("content"))
        found[c.LOGPROBS] = [mapping(token).get("logprob") for token in tokens]
    answered = {key: value for key, value in langchain_answer(completion).items() if value is not None}
    return answered | {key: value for key, value in found.items() if value not in (None, [])}


def _tool(a: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        c.TOOL_NAME: text(a.get(c.TOOL_NAME)) or name,
        c.TOOL_CALL_ID: text(a.get(c.TOOL_CALL_ID)) or langchain_tool_call_id(a.get(_COMPLETION)),
        c.TOOL_ARGUMENTS: a.get(_PROMPT),
        c.TOOL_RESULT: a.get(_COMPLETION),
    }
