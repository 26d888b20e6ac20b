"""A client's request -> the engine's, and the engine's answer -> the client's, with its exact tokens noted in between.

The engine is asked for token ids, log-probs and counts besides what the client wants; the client gets back what it
asked for and nothing of the rest. Invariants: sampling is the client's, nothing of it is changed; an answer that
cannot be read is passed on as it came, and has no tokens. It knows neither HTTP nor spans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.exact_tokens import ExactTokens, add_wire_answer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_DONE = b"[DONE]"
# What makes a log-prob mean something else than the policy's own, with the value at which it does nothing.
_SAMPLERS: dict[str, Any] = {
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
class Shown:
    """What the client asked to see of the answer."""

    stream: bool
    logprobs: bool
    token_ids: bool
    usage: bool  # at the end of a stream


def body_to_engine(path: str, body: Mapping[str, Any], model: str) -> tuple[dict[str, Any], Shown]:
    """The request for the engine under the served name `model`, and what to show of its answer."""
    asked = dict(body)
    asked["model"] = model
    options = body.get("stream_options")
    shown = Shown(
        stream=bool(body.get("stream")),
        logprobs=body.get("logprobs") not in (None, False),
        token_ids=bool(body.get("return_token_ids")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
    )
    if path == CHAT:
        asked["return_token_ids"] = True
        if not body.get("top_logprobs"):  # the engine refuses these without log-probs, and shall go on to
            asked["logprobs"] = True
    elif not body.get("echo"):  # an echoed prompt would come back among the sampled tokens
        asked["return_token_ids"] = True
        asked["logprobs"] = body.get("logprobs") if shown.logprobs else 0
    if shown.stream and (options is None or isinstance(options, Mapping)):
        asked["stream_options"] = {**(options or {}), "include_usage": True}
    return asked, shown


def body_to_whole(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, to be answered in one piece."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def body_to_untrainable(path: str, body: Mapping[str, Any]) -> str | None:
    """Why the tokens of the answer cannot be trained on, as far as the request tells; None when it does not."""
    found = [name for name, idle in _SAMPLERS.items() if (body.get(name) or idle) != idle]
    if path == COMPLETION and body.get("echo"):
        found.append("echo")
    return f"sampled with {', '.join(found)}: its log-probs are not the policy's own" if found else None


@dataclass(slots=True)
class Answer:
    """What the engine said to one request, chunk by chunk or at once."""

    shown: Shown
    tokens: ExactTokens = field(default_factory=ExactTokens)
    messages: dict[int, dict[str, Any]] = field(default_factory=dict)  # choice -> message in OpenAI's form
    error: str | None = None  # that a stream ended with
    whole: bool = False  # it came to its end

    @property
    def stream_error(self) -> str | None:
        """What a stream that came to its end says went wrong."""
        return f"EngineError: {self.error}" if self.error is not None else None

    def whole_to_client(self, sent: bytes) -> bytes:
        """Notes an answer in one piece; gives back what the client gets."""
        body = _parsed(sent)
        if body is None:
            self.error = "an answer that is no JSON object"
            return sent
        self.whole = True
        self._note(body)
        return _written(self._hidden(body))

    def event_to_client(self, event: bytes) -> bytes:
        """Notes one event of a stream (without its blank line); gives back what the client gets, maybe nothing."""
        if not event.startswith(b"data:"):
            return event + b"\n\n"
        data = event[5:].strip()
        if data == _DONE:
            self.whole = True
            return event + b"\n\n"
        body = _parsed(data)
        if body is None:
            return event + b"\n\n"
        self._note(body)
        if not body.get("choices") and body.get("usage") and not self.shown.usage:
            return b""  # the extra chunk that only we asked for
        return b"data: " + _written(self._hidden(body)) + b"\n\n"

    def _note(self, body: dict[str, Any]) -> None:
        choices = [choice for choice in body.get("choices") or () if isinstance(choice, dict)]
        add_wire_answer(self.tokens, body | {"choices": [_choice_to_chat(choice) for choice in choices]})
        for choice in choices:
            if self.tokens.prompt_ids is None and choice.get("prompt_token_ids") is not None:
                self.tokens.prompt_ids = list(choice["prompt_token_ids"])
            message = self.messages.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""})
            _add_said(message, choice.get("message") or choice.get("delta") or {"content": choice.get("text")})
        if isinstance(body.get("error"), dict):
            self.error = str(body["error"].get("message"))

    def _hidden(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer without what only we asked for."""
        for part in (body, *(choice for choice in body.get("choices") or () if isinstance(choice, dict))):
            if not self.shown.token_ids:
                part.pop("token_ids", None)
                part.pop("prompt_token_ids", None)
            if not self.shown.logprobs and "logprobs" in part:
                part["logprobs"] = None
        if self.shown.stream and not self.shown.usage:
            body.pop("usage", None)
        return body


class Events:
    """Pieces of a stream, cut anywhere -> whole events, each handed on as soon as its blank line is there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        return events

    @property
    def rest(self) -> bytes:
        """What is left of an event that never ended."""
        return self._rest


def _choice_to_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a plain completion has its log-probs in another place."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or logprobs.get("token_logprobs") is None:
        return choice
    return choice | {"logprobs": {"content": [{"logprob": value} for value in logprobs["token_logprobs"]]}}


def _add_said(message: dict[str, Any], said: Mapping[str, Any]) -> None:
    message["content"] += said.get("content") or ""
    calls = message.setdefault("tool_calls", [])
    for at, part in enumerate(said.get("tool_calls") or ()):
        index = part.get("index", at)
        calls += [{"function": {"name": "", "arguments": ""}} for _ in range(index + 1 - len(calls))]
        function = part.get("function") or {}
        calls[index]["id"] = part.get("id") or calls[index].get("id")
        for name in ("name", "arguments"):
            calls[index]["function"][name] += function.get(name) or ""


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _written(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
