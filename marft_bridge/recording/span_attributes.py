"""LLM answers and exact tokens -> attributes of a chat span. None marks what was not reported; nothing is made up."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from langchain_core.outputs import LLMResult

from marft_bridge.model_calls.teacher import TeacherAnswer
from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.run_facts import value_to_text
from marft_bridge.recording.span_messages import generation_to_message, messages_to_text, text_to_message, to_json
from marft_bridge.recording.tool_definitions import MAX_LENGTH
from trace_store import conventions as names
from trace_store.packed import floats_to_text, ints_to_text

# Providers as LangChain names them -> as the conventions do, where the two differ.
_PROVIDERS = {
    "amazon_bedrock": "aws.bedrock",
    "anthropic_bedrock": "aws.bedrock",
    "azure": "azure.ai.openai",
    "azure_openai": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "google_anthropic_vertex": "gcp.vertex_ai",
    "google_genai": "gcp.gemini",
    "google_vertexai": "gcp.vertex_ai",
    "ibm": "ibm.watsonx.ai",
    "mistral": "mistral_ai",
    "mistralai": "mistral_ai",
    "moonshot": "moonshot_ai",
    "xai": "x_ai",
}

_DRAWN_IDS = ("lc_", "run-")  # how the ids begin that LangChain gives to messages that have none

_RESPONSE_FORMATS = ("json_object", "json_schema")
_REQUEST_KEYS = {
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
    "top_k": names.REQUEST_TOP_K,
    "seed": names.REQUEST_SEED,
}


def provider_name(provider: str | None) -> str | None:
    """A provider by LangChain's name, by that of the conventions."""
    return _PROVIDERS.get(provider, provider) if isinstance(provider, str) else provider


def request_to_attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a model call's parameters, as LangChain passes them on; only of those that it was given."""
    attributes = {}
    for key, name in _REQUEST_KEYS.items():
        if (value := parameters.get(key)) is not None:
            attributes[name] = value
    if (max_tokens := parameters.get("max_tokens") or parameters.get("max_completion_tokens")) is not None:
        attributes[names.REQUEST_MAX_TOKENS] = max_tokens
    if (stop := parameters.get("stop")) is not None:
        attributes[names.REQUEST_STOP] = [stop] if isinstance(stop, str) else stop
    if (choices := parameters.get("n")) is not None and choices != 1:
        attributes[names.REQUEST_CHOICES] = choices
    if parameters.get("stream") is True:
        attributes[names.REQUEST_STREAM] = True
    if (rest := _request_to_rest(parameters)) is not None:
        attributes[names.REQUEST_REST] = rest
    return attributes


def _request_to_rest(parameters: Mapping[str, Any]) -> str | None:
    """What else a request says of its answer and prompt, as JSON; None where it says nothing, or JSON has no form."""
    extra_body = parameters.get("extra_body")
    parts = {
        "tool_choice": parameters.get("tool_choice"),
        "response_format": _response_format_to_json(parameters.get("response_format")),
        # what a model server lets an app say to its chat template, so that it makes another prompt
        "chat_template_kwargs": extra_body.get("chat_template_kwargs") if isinstance(extra_body, Mapping) else None,
    }
    rest = {name: part for name, part in parts.items() if part is not None}
    try:
        text = json.dumps(rest, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if rest and len(text) <= MAX_LENGTH else None


def _response_format_to_json(response_format: Any) -> Any:
    """OpenAI's form, also of a class that stands for its schema; None for any other, which a client converts later."""
    if isinstance(response_format, type):
        return _class_to_response_format(response_format)
    is_openais = isinstance(response_format, Mapping) and response_format.get("type") in _RESPONSE_FORMATS
    return response_format if is_openais else None


@functools.lru_cache(maxsize=64)  # a node declares the same class in each of its calls
def _class_to_response_format(declared: Any) -> Any:
    try:
        schema = declared.model_json_schema()
    except Exception:  # noqa: BLE001 - no class of pydantic, or one with parts that have no schema
        return None
    return {"type": "json_schema", "json_schema": {"name": declared.__name__, "schema": schema}}


def answer_to_attributes(response: LLMResult) -> dict[str, Any]:
    """Attributes of the model's answer, as LangChain reports it."""
    generation = response.generations[0][0]
    output = response.llm_output or {}
    info = generation.generation_info or {}
    message = generation_to_message(generation)
    metadata = message.response_metadata if message is not None else {}
    usage: Mapping[str, Any] | None = getattr(message, "usage_metadata", None)
    finish_reason = info.get("finish_reason") or metadata.get("finish_reason")
    attributes = {
        names.RESPONSE_ID: output.get("id") or metadata.get("id"),
        names.RESPONSE_MODEL: output.get("model_name") or metadata.get("model_name"),
        names.FINISH_REASONS: [finish_reason] if finish_reason else None,
        names.OUTPUT_MESSAGES: (
            to_json([text_to_message("assistant", generation.text)]) if message is None else messages_to_text([message])
        ),
    }
    if message is not None and (rest := _message_to_rest(message)):
        attributes[names.ANSWER_REST] = value_to_text(rest)
    if usage:
        attributes |= _usage_to_attributes(usage)
    if len(response.generations[0]) > 1:
        attributes[names.UNTRAINABLE] = f"n={len(response.generations[0])}: one call with several answers"
    return attributes


def _message_to_rest(message: Any) -> dict[str, Any]:
    """What a message of a model has beside its parts, which a program may read; ids that LangChain draws are none."""
    rest: dict[str, Any] = {}
    if message.id is not None and not str(message.id).startswith(_DRAWN_IDS):
        rest["id"] = message.id
    if not isinstance(message.content, str):
        rest["content"] = message.content
    if message.additional_kwargs:
        fields = {
            key: value
            for key, value in message.additional_kwargs.items()
            if value is not None and key not in ("tool_calls", "function_call")  # among the parts
        }
        if fields:
            rest["additional_kwargs"] = fields
    return rest


def _usage_to_attributes(usage: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {
        names.USAGE_INPUT_TOKENS: usage.get("input_tokens"),
        names.USAGE_OUTPUT_TOKENS: usage.get("output_tokens"),
    }
    if input_details := usage.get("input_token_details"):
        attributes[names.USAGE_CACHE_READ_TOKENS] = input_details.get("cache_read")
        attributes[names.USAGE_CACHE_WRITE_TOKENS] = input_details.get("cache_creation")
    if output_details := usage.get("output_token_details"):
        attributes[names.USAGE_REASONING_TOKENS] = output_details.get("reasoning")
    return attributes


def decision_to_attributes(response: Any) -> dict[str, Any]:
    """Attributes of what a decision model answered: it judges a text, and samples none."""
    usage: Mapping[str, Any] = getattr(response, "usage", None) or {}
    answers = value_to_text(getattr(response, "answers", response))
    return {
        names.RESPONSE_ID: getattr(response, "request_id", None),
        names.RESPONSE_MODEL: getattr(response, "model", None),
        names.USAGE_INPUT_TOKENS: usage.get("input_tokens"),
        names.USAGE_OUTPUT_TOKENS: usage.get("output_tokens"),
        names.OUTPUT_MESSAGES: to_json([text_to_message("assistant", answers)]),
        names.UNTRAINABLE: "a decision model answers questions and samples no text",
    }


def tokens_to_attributes(tokens: ExactTokens) -> dict[str, Any]:
    """Attributes of the engine's exact tokens and of their sampling; None for what it did not send."""
    if tokens.given is not None:
        return dict(tokens.given)
    attributes: dict[str, Any] = {
        names.PROMPT_IDS: None if tokens.prompt_ids is None else ints_to_text(tokens.prompt_ids),
        names.SAMPLED_IDS: None if tokens.sampled_ids is None else ints_to_text(tokens.sampled_ids),
        names.LOGPROBS: None if tokens.logprobs is None else floats_to_text(tokens.logprobs),
        names.REQUEST_SEED: tokens.seed,
        names.PROVIDER: tokens.provider,
        names.RESPONSE_ID: tokens.response_id,
        names.RESPONSE_MODEL: tokens.model,
        names.FINISH_REASONS: [tokens.finish_reason] if tokens.finish_reason else None,
        names.USAGE_INPUT_TOKENS: tokens.prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: tokens.completion_tokens,
        names.UNTRAINABLE: _untrainable_reason(tokens),
    }
    if tokens.teacher is not None:
        attributes |= _teacher_to_attributes(tokens.teacher)
    if tokens.route is not None and tokens.route.answer is None:
        attributes |= {
            names.REQUEST_TEMPERATURE: tokens.route.temperature,
            names.REQUEST_TOP_P: 1.0,
            names.REQUEST_MAX_TOKENS: tokens.max_tokens,
            names.REQUEST_MODEL: tokens.route.model,
            names.ADAPTER: tokens.route.adapter,
            names.ADAPTER_VERSION: tokens.route.version,
        }
    return attributes


def _teacher_to_attributes(answer: TeacherAnswer) -> dict[str, Any]:
    """Attributes of what the node's own model answered to the same call."""
    if answer.message is None:
        return {names.TEACHER_ERROR: answer.error}
    metadata = answer.message.response_metadata
    usage: Mapping[str, Any] = answer.message.usage_metadata or {}
    return {
        names.TEACHER_MESSAGES: messages_to_text([answer.message]),
        names.TEACHER_FINISH_REASON: metadata.get("finish_reason") or metadata.get("stop_reason"),
        names.TEACHER_MODEL: metadata.get("model_name") or metadata.get("model"),
        names.TEACHER_INPUT_TOKENS: usage.get("input_tokens"),
        names.TEACHER_OUTPUT_TOKENS: usage.get("output_tokens"),
    }


def _untrainable_reason(tokens: ExactTokens) -> str | None:
    if tokens.choices > 1:
        return f"n={tokens.choices}: one call with several answers"
    if tokens.route is not None and tokens.route.answer is not None:
        return f"node {tokens.node} was answered by a fixed text, and no model was asked"
    if tokens.route is not None and not tokens.route.trainable:
        return f"node {tokens.node} is declared frozen"
    return None
