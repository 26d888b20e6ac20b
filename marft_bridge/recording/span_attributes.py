"""LLM answers and exact tokens -> attributes of a chat span. None marks what was not reported; nothing is made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.outputs import LLMResult

from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.run_facts import value_to_text
from marft_bridge.recording.span_messages import generation_to_message, messages_to_text, text_to_message, to_json
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


def provider_name(provider: str | None) -> str | None:
    """A provider by LangChain's name, by that of the conventions."""
    return None if provider is None else _PROVIDERS.get(provider, provider)


def request_to_attributes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a model call's parameters, as LangChain passes them on; None for those that it was not given."""
    choices, stop = parameters.get("n"), parameters.get("stop")
    return {
        names.REQUEST_TEMPERATURE: parameters.get("temperature"),
        names.REQUEST_TOP_P: parameters.get("top_p"),
        names.REQUEST_TOP_K: parameters.get("top_k"),
        names.REQUEST_MAX_TOKENS: parameters.get("max_tokens") or parameters.get("max_completion_tokens"),
        names.REQUEST_SEED: parameters.get("seed"),
        names.REQUEST_STOP: [stop] if isinstance(stop, str) else stop,
        names.REQUEST_CHOICES: choices if choices != 1 else None,
        names.REQUEST_STREAM: True if parameters.get("stream") is True else None,
    }


def answer_to_attributes(response: LLMResult) -> dict[str, Any]:
    """Attributes of the model's answer, as LangChain reports it."""
    generation = response.generations[0][0]
    output = response.llm_output or {}
    info = generation.generation_info or {}
    message = generation_to_message(generation)
    metadata = message.response_metadata if message is not None else {}
    usage: Mapping[str, Any] = getattr(message, "usage_metadata", None) or {}
    input_details = usage.get("input_token_details") or {}
    finish_reason = info.get("finish_reason") or metadata.get("finish_reason")
    attributes = {
        names.RESPONSE_ID: output.get("id") or metadata.get("id"),
        names.RESPONSE_MODEL: output.get("model_name") or metadata.get("model_name"),
        names.FINISH_REASONS: [finish_reason] if finish_reason else None,
        names.USAGE_INPUT_TOKENS: usage.get("input_tokens"),
        names.USAGE_OUTPUT_TOKENS: usage.get("output_tokens"),
        names.USAGE_CACHE_READ_TOKENS: input_details.get("cache_read"),
        names.USAGE_CACHE_WRITE_TOKENS: input_details.get("cache_creation"),
        names.USAGE_REASONING_TOKENS: (usage.get("output_token_details") or {}).get("reasoning"),
        names.OUTPUT_MESSAGES: (
            to_json([text_to_message("assistant", generation.text)]) if message is None else messages_to_text([message])
        ),
    }
    if len(response.generations[0]) > 1:
        attributes[names.UNTRAINABLE] = f"n={len(response.generations[0])}: one call with several answers"
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


def tokens_to_attributes(tokens: ExactTokens | None) -> dict[str, Any]:
    """Attributes of the engine's exact tokens and of their sampling, None for what it did not send; none for a model that
    reports no tokens."""
    if tokens is None:
        return {}
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


def _untrainable_reason(tokens: ExactTokens) -> str | None:
    if tokens.choices > 1:
        return f"n={tokens.choices}: one call with several answers"
    if tokens.route is not None and tokens.route.answer is not None:
        return f"node {tokens.node} was answered by a fixed text, and no model was asked"
    if tokens.route is not None and not tokens.route.trainable:
        return f"node {tokens.node} is declared frozen"
    return None
