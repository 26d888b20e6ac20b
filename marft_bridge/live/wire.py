"""A client's request -> the engine's, and the engine's answer -> the client's, with its exact tokens extracted.

The engine is asked for token ids, log-probs and counts besides what the client wants; the client gets back only what it
asked for. Invariants: the client's sampling settings are not changed; an answer that cannot be parsed is passed on as
it came, and has no tokens; an answer takes bounded memory, whatever an engine sends and however long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.common.errors import ServingError
from marft_bridge.common.json_memory import is_json_within
from marft_bridge.common.server_events import EventReader, event_to_data, replace_data
from marft_bridge.live.upstream import EngineFailed
from marft_bridge.model_calls.token_capture import ExactTokens, add_wire_answer
from trace_store.json_text import read_json

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_EVENT_BYTES = 16 << 20  # bytes of one event of a stream
MAX_PARSED_BYTES = 256 << 20  # memory that one event, or one whole answer, may take to be parsed
MAX_RECORDED_BYTES = 32 << 20  # bytes of a stream from which its record is made; more is passed on only
MAX_PARTS = 1024  # answers to one request, and tool calls of one answer
_DONE = b"[DONE]"
_ERROR_CHARACTERS = 1000  # of an engine's error that are recorded
# Settings under which the engine's log-probs are not the policy's own, with the value at which each does nothing.
_NEUTRAL_SAMPLERS: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,  # until then no end is sampled
    "thinking_token_budget": None,  # what follows is forced; 0 is a budget too
    "vllm_xargs": {},  # for a logits processor of the server
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


def body_to_hosted(body: Mapping[str, Any], model: str) -> tuple[dict[str, Any], AnswerOptions]:
    """The request to a hosted model, as the client sent it but for the name, and what the client gets of its answer.

    A stream counts its tokens, for us.
    """
    hosted_body = {**body, "model": model}
    stream_options, logprobs = body.get("stream_options"), body.get("logprobs")
    answer_options = AnswerOptions(
        stream=bool(body.get("stream")),
        logprobs=logprobs is not None and logprobs is not False,  # 0 asks a completion for those of its own tokens
        token_ids=bool(body.get("return_token_ids")),
        usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )
    if answer_options.stream and (stream_options is None or isinstance(stream_options, Mapping)):
        hosted_body["stream_options"] = {**(stream_options or {}), "include_usage": True}
    return hosted_body, answer_options


def body_to_engine(path: str, body: Mapping[str, Any], model: str) -> tuple[dict[str, Any], AnswerOptions]:
    """As `body_to_hosted`, of the engine under the served name `model`, which also tells token ids and log-probs."""
    engine_body, answer_options = body_to_hosted(body, model)
    if path == CHAT:
        engine_body["return_token_ids"] = True
        if not body.get("top_logprobs"):  # without log-probs the engine refuses these: left for it to refuse
            engine_body["logprobs"] = True
    elif not body.get("echo"):  # an echoed prompt would come back among the sampled tokens
        engine_body["return_token_ids"] = True
        engine_body["logprobs"] = body.get("logprobs") if answer_options.logprobs else 0
    return engine_body, answer_options


def body_to_unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request without streaming."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def body_to_untrainable_reason(path: str, body: Mapping[str, Any]) -> str | None:
    """Why, by the request's settings, the answer's tokens cannot be trained on; None when they can."""
    active_samplers = [
        name for name, neutral in _NEUTRAL_SAMPLERS.items() if body.get(name) is not None and body[name] != neutral
    ]
    if path == COMPLETION and body.get("echo"):
        active_samplers.append("echo")
    return (
        f"sampled with {', '.join(active_samplers)}: its log-probs are not the policy's own"
        if active_samplers
        else None
    )


@dataclass(slots=True)
class _ToolCall:
    """A tool call, of which a stream sends piece after piece."""

    call_id: str | None = None
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def add(self, function: Mapping[str, Any]) -> None:
        """Adds a piece of its function. Raises TypeError for one of something else than texts."""
        self.name.append(_text(function.get("name")))
        self.arguments.append(_text(function.get("arguments")))


@dataclass(slots=True)
class _Message:
    """One choice of an answer, likewise; pieces are joined once, since adding to a text copies it."""

    content: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: list[_ToolCall] = field(default_factory=list)
    function_call: _ToolCall | None = None  # the older form of one call, which has no id

    def add(self, delta: Mapping[str, Any]) -> None:
        """Adds a piece. Raises TypeError or ValueError for one that is none."""
        self.content.append(_text(delta.get("content")))
        self.refusal.append(_text(delta.get("refusal")))
        for position, part in enumerate(delta.get("tool_calls") or ()):
            index = _check_index(part.get("index", position))
            self.tool_calls += [_ToolCall() for _ in range(index + 1 - len(self.tool_calls))]
            call, function = self.tool_calls[index], part.get("function") or {}
            call.call_id = part.get("id") or call.call_id
            call.add(function)
        if delta.get("function_call"):
            self.function_call = self.function_call or _ToolCall()
            self.function_call.add(delta["function_call"])

    def to_openai(self) -> dict[str, Any]:
        """The message in OpenAI's form; what a model refuses with is its text."""
        calls = [
            {"id": call.call_id, "function": {"name": "".join(call.name), "arguments": "".join(call.arguments)}}
            for call in (*self.tool_calls, *([] if self.function_call is None else [self.function_call]))
        ]
        return {
            "role": "assistant",
            "content": "".join(self.content) or "".join(self.refusal),
            "tool_calls": calls,
        }


@dataclass(slots=True)
class Answer:
    """The engine's answer to one request, read chunk by chunk or at once."""

    options: AnswerOptions
    tokens: ExactTokens = field(default_factory=ExactTokens)
    error: str | None = None  # of the engine, or of an answer that cannot be parsed or recorded
    is_complete: bool = False  # it was read to its end
    _messages: dict[int, _Message] = field(default_factory=dict)  # by choice
    _recorded_bytes: int = 0
    _is_recorded: bool = True  # false from what could not be recorded on

    @property
    def messages(self) -> dict[int, dict[str, Any]]:
        """The message of each choice, in OpenAI's form."""
        return {choice: message.to_openai() for choice, message in self._messages.items()}

    @property
    def stream_error(self) -> str | None:
        """The error in a stream that was read to its end, as `Type: text`."""
        return f"EngineError: {self.error}" if self.error is not None else None

    def body_to_client(self, content: bytes) -> bytes:
        """Reads an answer in one piece; returns what the client gets."""
        body = _parse_object(content)
        if body is None:
            self.error = "an answer that is no JSON object, or too large a one"
            return content
        self.is_complete = True
        return self._record_and_strip(body, content)

    def event_to_client(self, event: bytes) -> bytes:
        """Reads one event of a stream (without its blank line); returns what the client gets, possibly nothing."""
        data = event_to_data(event)
        self.is_complete = self.is_complete or data == _DONE
        body = None if data is None else _parse_object(data)
        if data is None or body is None:
            return event + b"\n\n"
        self._recorded_bytes += len(data)
        if self._recorded_bytes > MAX_RECORDED_BYTES:
            self._give_up(f"a stream of more than {MAX_RECORDED_BYTES >> 20} MiB is not recorded")
        is_usage_only = not body.get("choices") and bool(body.get("usage"))
        client_data = self._record_and_strip(body, data)
        if client_data is data:
            return event + b"\n\n"
        if is_usage_only and not self.options.usage:
            return b""  # the extra chunk that only we asked for
        return replace_data(event, client_data)

    def _record_and_strip(self, body: dict[str, Any], content: bytes) -> bytes:
        """What the client gets of a parsed body; `content` itself, unrecorded, where the body is no answer."""
        try:
            if self._is_recorded:
                self._record(body)
            return _dump_json(self._strip_extras(body))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, ServingError) as error:
            self._give_up(f"a malformed answer ({type(error).__name__})")
            return content

    def _give_up(self, reason: str) -> None:
        """Records no tokens, which would not be all of them, and nothing of what is still to come."""
        if self._is_recorded:
            self._is_recorded, self.tokens, self.error = False, ExactTokens(), reason

    def _record(self, body: dict[str, Any]) -> None:
        choices = [choice for choice in body.get("choices") or () if isinstance(choice, dict)]
        indices = [_check_index(choice.get("index", 0)) for choice in choices]
        add_wire_answer(self.tokens, body | {"choices": [_choice_to_chat(choice) for choice in choices]})
        for index, choice in zip(indices, choices, strict=True):
            if self.tokens.prompt_ids is None and choice.get("prompt_token_ids") is not None:
                self.tokens.prompt_ids = list(choice["prompt_token_ids"])
            delta = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            self._messages.setdefault(index, _Message()).add(delta)
        if isinstance(body.get("error"), dict):
            self.error = str(body["error"].get("message"))[:_ERROR_CHARACTERS]

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


class EventSplitter(EventReader):
    """As `EventReader`, in bounded memory."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes. Raises EngineFailed for one of more than MAX_EVENT_BYTES."""
        events = super().feed(piece)
        if len(self._rest) > MAX_EVENT_BYTES:
            reason = f"the model server sent an event of more than {MAX_EVENT_BYTES >> 20} MiB"
            raise EngineFailed(502, "engine_answer", reason)
        return events


def _choice_to_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a plain completion -> with its log-probs where a chat completion has them."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or logprobs.get("token_logprobs") is None:
        return choice
    return choice | {"logprobs": {"content": [{"logprob": value} for value in logprobs["token_logprobs"]]}}


def _check_index(index: Any) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < MAX_PARTS:
        raise ValueError(f"an index that is none of 0 to {MAX_PARTS - 1}")
    return index


def _text(value: Any) -> str:
    """A text, "" for None. Raises TypeError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("a part that is no text")
    return value


def _parse_object(data: bytes) -> dict[str, Any] | None:
    if not is_json_within(data, MAX_PARSED_BYTES):
        return None
    try:
        body = read_json(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _dump_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
