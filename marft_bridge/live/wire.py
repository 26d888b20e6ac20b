"""A client's request -> the engine's, and the engine's answer -> the client's, with its exact tokens extracted.

The engine is asked for token ids, log-probs and counts besides what the client wants; the client gets back only what it
asked for. Invariants: the client's sampling settings are not changed; an answer that cannot be parsed is passed on as
it came, and has no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.model_calls.token_capture import ExactTokens, add_wire_answer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_DONE = b"[DONE]"
# Settings under which the engine's log-probs are not the policy's own, with the value at which each does nothing.
_NEUTRAL_SAMPLERS: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "use_beam_search": False,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": [],
}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client asked to have in the answer."""

    stream: bool
    logprobs: bool
    token_ids: bool
    usage: bool  # at the end of a stream


def body_to_engine(path: str, body: Mapping[str, Any], model: str) -> tuple[dict[str, Any], AnswerOptions]:
    """The request to the engine under the served name `model`, and what the client gets of its answer."""
    engine_body = dict(body)
    engine_body["model"] = model
    stream_options = body.get("stream_options")
    answer_options = AnswerOptions(
        stream=bool(body.get("stream")),
        logprobs=body.get("logprobs") not in (None, False),
        token_ids=bool(body.get("return_token_ids")),
        usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )
    if path == CHAT:
        engine_body["return_token_ids"] = True
        if not body.get("top_logprobs"):  # without log-probs the engine refuses these: left for it to refuse
            engine_body["logprobs"] = True
    elif not body.get("echo"):  # an echoed prompt would come back among the sampled tokens
        engine_body["return_token_ids"] = True
        engine_body["logprobs"] = body.get("logprobs") if answer_options.logprobs else 0
    if answer_options.stream and (stream_options is None or isinstance(stream_options, Mapping)):
        engine_body["stream_options"] = {**(stream_options or {}), "include_usage": True}
    return engine_body, answer_options


def body_to_unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request without streaming."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def body_to_untrainable_reason(path: str, body: Mapping[str, Any]) -> str | None:
    """Why, by the request's settings, the answer's tokens cannot be trained on; None when they can."""
    active_samplers = [name for name, neutral in _NEUTRAL_SAMPLERS.items() if (body.get(name) or neutral) != neutral]
    if path == COMPLETION and body.get("echo"):
        active_samplers.append("echo")
    return (
        f"sampled with {', '.join(active_samplers)}: its log-probs are not the policy's own"
        if active_samplers
        else None
    )


@dataclass(slots=True)
class Answer:
    """The engine's answer to one request, read chunk by chunk or at once."""

    options: AnswerOptions
    tokens: ExactTokens = field(default_factory=ExactTokens)
    messages: dict[int, dict[str, Any]] = field(default_factory=dict)  # choice -> message in OpenAI's form
    error: str | None = None  # of the engine, or of an answer that cannot be parsed
    is_complete: bool = False  # it was read to its end

    @property
    def stream_error(self) -> str | None:
        """The error in a stream that was read to its end, as `Type: text`."""
        return f"EngineError: {self.error}" if self.error is not None else None

    def body_to_client(self, content: bytes) -> bytes:
        """Reads an answer in one piece; returns what the client gets."""
        body = _parse_object(content)
        if body is None:
            self.error = "an answer that is no JSON object"
            return content
        self.is_complete = True
        self._record(body)
        return _dump_json(self._strip_extras(body))

    def event_to_client(self, event: bytes) -> bytes:
        """Reads one event of a stream (without its blank line); returns what the client gets, possibly nothing."""
        if not event.startswith(b"data:"):
            return event + b"\n\n"
        data = event[5:].strip()
        if data == _DONE:
            self.is_complete = True
            return event + b"\n\n"
        body = _parse_object(data)
        if body is None:
            return event + b"\n\n"
        self._record(body)
        if not body.get("choices") and body.get("usage") and not self.options.usage:
            return b""  # the extra chunk that only we asked for
        return b"data: " + _dump_json(self._strip_extras(body)) + b"\n\n"

    def _record(self, body: dict[str, Any]) -> None:
        choices = [choice for choice in body.get("choices") or () if isinstance(choice, dict)]
        add_wire_answer(self.tokens, body | {"choices": [_choice_to_chat(choice) for choice in choices]})
        for choice in choices:
            if self.tokens.prompt_ids is None and choice.get("prompt_token_ids") is not None:
                self.tokens.prompt_ids = list(choice["prompt_token_ids"])
            message = self.messages.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""})
            _append_delta(message, choice.get("message") or choice.get("delta") or {"content": choice.get("text")})
        if isinstance(body.get("error"), dict):
            self.error = str(body["error"].get("message"))

    def _strip_extras(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer without what only we asked for."""
        for part in (body, *(choice for choice in body.get("choices") or () if isinstance(choice, dict))):
            if not self.options.token_ids:
                part.pop("token_ids", None)
                part.pop("prompt_token_ids", None)
            if not self.options.logprobs and "logprobs" in part:
                part["logprobs"] = None
        if self.options.stream and not self.options.usage:
            body.pop("usage", None)
        return body


class EventSplitter:
    """Pieces of a stream, cut anywhere -> server-sent events, each as soon as its blank line has come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        return events

    @property
    def rest(self) -> bytes:
        """The bytes of an event without an end."""
        return self._rest


def _choice_to_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a plain completion -> with its log-probs where a chat completion has them."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or logprobs.get("token_logprobs") is None:
        return choice
    return choice | {"logprobs": {"content": [{"logprob": value} for value in logprobs["token_logprobs"]]}}


def _append_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    calls = message.setdefault("tool_calls", [])
    for position, part in enumerate(delta.get("tool_calls") or ()):
        index = part.get("index", position)
        calls += [{"function": {"name": "", "arguments": ""}} for _ in range(index + 1 - len(calls))]
        function = part.get("function") or {}
        calls[index]["id"] = part.get("id") or calls[index].get("id")
        for name in ("name", "arguments"):
            calls[index]["function"][name] += function.get(name) or ""


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _dump_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
