"""Owns: what the engine is asked for besides what the client wants, and that the client sees nothing of it.

An engine gone mad is passed on or refused, in bounded memory, and what was not all recorded has no tokens.
The engine's side is the fake vLLM's own shapes: what a client gets through is compared with what the same engine
answers to the client's request itself.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from support.fake_vllm import FakeVllm, id_to_logprob, running, text_to_ids

from marft_bridge.live import upstream, wire
from marft_bridge.live.counts import VariantCounts
from marft_bridge.live.proxy import _Relay
from marft_bridge.live.upstream import EngineFailed
from marft_bridge.live.wire import (
    CHAT,
    COMPLETION,
    Answer,
    EventSplitter,
    body_to_engine,
    body_to_unstreamed,
    body_to_untrainable_reason,
)

SAY = [{"role": "user", "content": "say it"}]


def whole(engine: FakeVllm, body: dict[str, Any]) -> bytes:
    return httpx.post(f"{engine.url}{CHAT}", json=body, trust_env=False).content


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True},
        {"logprobs": True, "return_token_ids": True},
        {"return_token_ids": True},
        {"logprobs": False},
        {"n": 2},
    ],
)
@pytest.mark.parametrize("stream", [None, {}, {"include_usage": True}])
def test_a_client_gets_what_the_engine_would_have_answered_it(
    asked: dict[str, Any], stream: dict[str, Any] | None
) -> None:
    body = {"model": "base", "messages": SAY} | asked
    if stream is not None:
        body |= {"stream": True, "stream_options": stream} if stream else {"stream": True}
    with running(FakeVllm()) as engine:
        sent, shown = body_to_engine(CHAT, body, "base")
        answer = Answer(shown)
        plain, through = whole(engine, body), whole(engine, sent)
    if stream is None:
        assert without_absent(json.loads(answer.body_to_client(through))) == without_absent(json.loads(plain))
    else:
        relayed = b"".join(answer.event_to_client(event) for event in EventSplitter().feed(through))
        assert events(relayed) == events(plain)
    assert answer.is_complete
    if "n" not in asked:
        assert answer.tokens.sampled_ids == text_to_ids("base speaks")
        assert answer.tokens.logprobs == [id_to_logprob(token) for token in text_to_ids("base speaks")]
        assert answer.tokens.prompt_ids == list(json.dumps(SAY).encode())
        assert answer.tokens.completion_tokens == len(text_to_ids("base speaks"))
    else:
        assert (answer.tokens.choices, answer.tokens.sampled_ids) == (2, None)
    assert [message["content"] for message in answer.messages.values()] == ["base speaks"] * asked.get("n", 1)


def events(stream: bytes) -> list[Any]:
    found = [event[5:].strip() for event in stream.split(b"\n\n") if event]
    return [event if event == b"[DONE]" else without_absent(json.loads(event)) for event in found]


def without_absent(body: Any) -> Any:
    """An absent field and one of null say the same."""
    if isinstance(body, dict):
        return {key: without_absent(value) for key, value in body.items() if value is not None}
    return [without_absent(item) for item in body] if isinstance(body, list) else body


def test_sampling_is_the_clients_and_nothing_of_it_is_changed() -> None:
    body = {"model": "planner", "messages": SAY, "temperature": 0.2, "top_p": 0.5, "seed": 7, "stop": ["x"], "foo": 1}
    sent, _ = body_to_engine(CHAT, body, "planner@3")
    assert sent == body | {"model": "planner@3", "logprobs": True, "return_token_ids": True}
    assert body["model"] == "planner"


def test_what_the_engine_would_refuse_is_left_for_it_to_refuse() -> None:
    sent, _ = body_to_engine(CHAT, {"model": "m", "messages": SAY, "top_logprobs": 3}, "m@1")
    assert "logprobs" not in sent


def test_an_echoed_prompt_is_not_taken_for_sampled_tokens() -> None:
    body = {"model": "m", "prompt": "x", "echo": True}
    sent, _ = body_to_engine(COMPLETION, body, "m@1")
    assert sent == body | {"model": "m@1"}
    assert body_to_untrainable_reason(COMPLETION, body) == "sampled with echo: its log-probs are not the policy's own"


def test_the_tokens_of_a_plain_completion_are_read_where_the_engine_puts_them() -> None:
    sent, shown = body_to_engine(COMPLETION, {"model": "m", "prompt": "x"}, "m@1")
    assert (sent["logprobs"], sent["return_token_ids"]) == (0, True)
    choice = {"index": 0, "text": "hi", "finish_reason": "stop", "prompt_token_ids": [5], "token_ids": [7, 8]}
    choice["logprobs"] = {"token_logprobs": [-0.5, -0.25], "tokens": ["h", "i"]}
    answer = Answer(shown)
    told = json.loads(answer.body_to_client(json.dumps({"model": "m@1", "choices": [choice]}).encode()))
    assert (answer.tokens.prompt_ids, answer.tokens.sampled_ids, answer.tokens.logprobs) == ([5], [7, 8], [-0.5, -0.25])
    assert told["choices"] == [{"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}]


@pytest.mark.parametrize(("asked", "is_shown"), [(None, False), (False, False), (0, True), (1, True)])
def test_a_completions_log_probs_are_shown_to_a_client_that_asks_for_them_also_for_none_besides(
    asked: Any, is_shown: bool
) -> None:
    sent, shown = body_to_engine(COMPLETION, {"model": "m", "prompt": "x", "logprobs": asked}, "m@1")
    assert sent["logprobs"] == (asked or 0)
    choice = {"index": 0, "text": "h", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5], "tokens": ["h"]}}
    told = json.loads(Answer(shown).body_to_client(json.dumps({"model": "m@1", "choices": [choice]}).encode()))
    assert (told["choices"][0]["logprobs"] == choice["logprobs"]) is is_shown


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, None),
        ({"presence_penalty": 0, "min_p": 0.0, "logit_bias": {}, "repetition_penalty": 1.0, "bad_words": None}, None),
        ({"temperature": 0.3, "top_p": 0.4}, None),  # in the record themselves; the trainer knows them
        ({"presence_penalty": 0.5, "min_p": 0.1}, "sampled with presence_penalty, min_p"),
        ({"use_beam_search": True}, "sampled with use_beam_search"),
        ({"min_tokens": 0, "thinking_token_budget": None, "vllm_xargs": {}}, None),
        ({"min_tokens": 64}, "sampled with min_tokens"),  # the end is masked until then
        ({"thinking_token_budget": 32}, "sampled with thinking_token_budget"),
        ({"thinking_token_budget": 0}, "sampled with thinking_token_budget"),
        ({"vllm_xargs": {"strength": 2.0}}, "sampled with vllm_xargs"),
    ],
)
def test_samplers_that_change_what_a_log_prob_means_are_named(asked: dict[str, Any], reason: str | None) -> None:
    found = body_to_untrainable_reason(CHAT, asked)
    assert found is reason is None or (found or "").startswith(reason or "-")


@given(st.lists(st.binary(min_size=1).filter(lambda text: b"\n" not in text and b"\r" not in text)), st.data())
def test_events_come_out_whole_however_the_stream_was_cut(texts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(text + data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for text in texts)
    reader, found, at = EventSplitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        found += reader.feed(stream[at : at + size])
        at += size
    assert (found, reader.rest) == (texts, b"")


OPEN_CHARACTERS = st.characters(min_codepoint=0x20, exclude_characters='"\\', exclude_categories=["Cs"])
"""What JSON may hold as it is."""
BESIDES = st.sampled_from([b"", b": ping\n", b"event: message\n", b"id: 5\r\n", b"retry: 9\r", b"event: x\n: ping\n"])
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.text(OPEN_CHARACTERS | st.sampled_from("\u2028\u2029\x85\x7f"))), st.data())
def test_what_the_client_reads_is_recorded_whatever_lines_an_event_has_and_however_the_stream_is_cut(
    texts: list[str], data: st.DataObject
) -> None:
    pieces, answer = EventSplitter(), Answer(body_to_engine(CHAT, {"messages": SAY, "stream": True}, "m")[1])
    end = data.draw(LINE_ENDS)
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "token_ids": [7]}]} for text in texts]
    stream = b"".join(
        data.draw(BESIDES) + b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + end + end for chunk in chunks
    )
    stream += data.draw(BESIDES) + b"data: [DONE]" + data.draw(st.sampled_from([b"", end, end + end]))
    sent, at = b"", 0
    while at < len(stream):
        size = data.draw(st.integers(1, 200))
        sent += b"".join(answer.event_to_client(event) for event in pieces.feed(stream[at : at + size]))
        at += size
    if pieces.rest:
        sent += answer.event_to_client(pieces.rest)
    assert answer.is_complete
    assert b"token_ids" not in sent
    client = SSEDecoder()
    read = [event.data for event in client.iter_bytes(iter([sent])) if event.data]
    assert read.pop() == "[DONE]"
    assert [json.loads(each)["choices"][0]["delta"]["content"] for each in read] == texts
    assert [message["content"] for message in answer.messages.values()] == (["".join(texts)] if texts else [])
    assert answer.tokens.sampled_ids == ([7] * len(texts) or None)


def test_streamed_tool_calls_are_put_together_by_their_place() -> None:
    _, shown = body_to_engine(CHAT, {"messages": SAY, "stream": True}, "m")
    answer = Answer(shown)
    parts = [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "sub", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for part in parts:
        answer.event_to_client(b"data: " + json.dumps({"choices": [{"index": 0, "delta": part}]}).encode())
    assert answer.messages[0]["tool_calls"] == [
        {"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}},
        {"id": "b", "function": {"name": "sub", "arguments": "{}"}},
    ]
    assert not answer.is_complete


@pytest.mark.parametrize("sent", [b"", b"<html>", b"[1]", b"\xff\xfe"])
def test_an_answer_that_cannot_be_read_is_passed_on_as_it_came(sent: bytes) -> None:
    answer = Answer(body_to_engine(CHAT, {"messages": SAY}, "m")[1])
    assert answer.body_to_client(sent) == sent
    assert answer.error is not None
    assert answer.tokens.sampled_ids is None
    streamed = Answer(body_to_engine(CHAT, {"messages": SAY, "stream": True}, "m")[1])
    assert streamed.event_to_client(b"data: " + sent) == b"data: " + sent + b"\n\n"
    assert streamed.event_to_client(b": keep-alive") == b": keep-alive\n\n"


def test_a_request_to_be_answered_in_one_piece_is_otherwise_the_same() -> None:
    body = {"messages": SAY, "stream": True, "stream_options": {"include_usage": True}, "seed": 3}
    assert body_to_unstreamed(body) == {"messages": SAY, "seed": 3}


MALFORMED: dict[str, Any] = {
    "a huge index": {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 20_000_000}]}}]},
    "a negative index": {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": -1}]}}]},
    "an index of text": {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": "0"}]}}]},
    "a part of text": {"choices": [{"index": 0, "delta": {"tool_calls": ["x"]}}]},
    "a function of text": {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": "x"}]}}]},
    "arguments of a number": {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": 1}}]}}]},
    "calls of a number": {"choices": [{"index": 0, "delta": {"tool_calls": 7}}]},
    "content of a list": {"choices": [{"index": 0, "delta": {"content": ["x"]}}]},
    "a delta of text": {"choices": [{"index": 0, "delta": "x"}]},
    "a choice of a huge index": {"choices": [{"index": 10**12, "delta": {"content": "x"}}]},
    "a choice of a list": {"choices": [{"index": [], "delta": {"content": "x"}}]},
    "choices of a number": {"choices": 7},
    "choices of text": {"choices": [{"index": "a"}]},
    "tokens of a number": {"choices": [{"index": 0, "token_ids": 7, "delta": {}}]},
    "log-probs of text": {"choices": [{"index": 0, "logprobs": {"content": [{"logprob": "x"}]}, "delta": {}}]},
    "log-probs of a list": {"choices": [{"index": 0, "logprobs": [1], "delta": {}}]},
    "usage of a list": {"choices": [{"index": 0}], "usage": [1]},
    "a prompt of a number": {"choices": [], "prompt_token_ids": 7},
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
@pytest.mark.parametrize("stream", [True, False])
def test_a_malformed_answer_is_passed_on_as_it_came_and_has_no_tokens(name: str, stream: bool) -> None:
    answer = Answer(body_to_engine(CHAT, {"messages": SAY, "stream": stream}, "m")[1])
    sent = json.dumps(MALFORMED[name]).encode()
    good = {"choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [7]}]}
    if stream:
        answer.event_to_client(b"data: " + json.dumps(good).encode())
        assert answer.tokens.sampled_ids == [7]
        assert answer.event_to_client(b"data: " + sent) == b"data: " + sent + b"\n\n"
        shown = answer.event_to_client(b"data: " + json.dumps(good).encode())  # what follows is stripped all the same
        assert json.loads(shown.removeprefix(b"data: ")) == {"choices": [{"index": 0, "delta": {"content": "hi"}}]}
    else:
        assert answer.body_to_client(sent) == sent
    assert answer.tokens.sampled_ids is None
    assert "malformed answer" in (answer.error or "")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CHOICE_KEYS = ("index", "delta", "message", "text", "logprobs", "token_ids", "prompt_token_ids", "finish_reason")


@given(st.data(), st.booleans())
def test_wrong_types_at_every_key_end_in_an_answer(data: st.DataObject, stream: bool) -> None:
    def maybe(keys: tuple[str, ...]) -> dict[str, Any]:
        return {key: data.draw(JSON_VALUES) for key in data.draw(st.sets(st.sampled_from(keys)))}

    calls = [maybe(("index", "id", "function")) | {"function": maybe(("name", "arguments"))}]
    choice = {"delta": maybe(("content", "tool_calls")) | {"tool_calls": calls}} | maybe(CHOICE_KEYS)
    body = {"choices": [choice]} | maybe(("choices", "usage", "error", "id", "model", "prompt_token_ids"))
    answer = Answer(body_to_engine(CHAT, {"messages": SAY, "stream": stream}, "m")[1])
    sent = json.dumps(body).encode()
    shown = answer.event_to_client(b"data: " + sent) if stream else answer.body_to_client(sent)
    assert isinstance(shown, bytes)
    assert isinstance(answer.messages, dict)


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, **more}]}).encode() + b"\n\n"


ENDLESS: dict[str, Callable[[], Iterator[bytes]]] = {
    "one line": lambda: repeat(b"x" * 4096),
    "one event": lambda: repeat(b"data: x\n"),
    "one event, byte by byte": lambda: repeat(b"\r\n"[:1]),
    "words": lambda: repeat(chunk({"content": "word " * 100})),
    "tokens": lambda: repeat(chunk({}, token_ids=list(range(100)))),
    "tool calls": lambda: repeat(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "x" * 500}}]})),
    "comments": lambda: repeat(b": keep-alive " + b"x" * 1000 + b"\n\n"),
    "nothing": lambda: repeat(b"\n\n" * 1000),
    "ends": lambda: repeat(b"data: [DONE]\n\n" * 100),
    "no JSON": lambda: repeat(b"data: " + b"[" * 10_000 + b"\n\n"),
    "objects": lambda: repeat(b'data: {"choices":[' + b"{}," * 30_000 + b"{}]}\n\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENDLESS))
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_without_end_takes_bounded_memory(name: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent for 2 MiB, beyond limits of 256 KiB; what the client would be sent is thrown away."""
    for module, limit in ((wire, "MAX_EVENT_BYTES"), (wire, "MAX_RECORDED_BYTES"), (upstream, "MAX_ANSWER_BYTES")):
        monkeypatch.setattr(module, limit, 1 << 18)
    monkeypatch.setattr(wire, "MAX_PARSED_BYTES", 1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        sent_bytes = 0
        for piece in ENDLESS[name]():
            sent_bytes += max(len(piece), 64)
            if sent_bytes > 2 << 20:
                return
            yield piece

    async def send(_message: Any) -> None:
        return

    answer = Answer(body_to_engine(CHAT, {"messages": SAY, "stream": stream}, "m")[1])
    response = SimpleNamespace(status_code=200, headers={}, aiter_raw=pieces)
    request: Any = SimpleNamespace(team=SimpleNamespace(name="base"), hosted_model=None)
    relay = _Relay(send, request, VariantCounts(), began=0.0)
    tracemalloc.start()
    try:
        asyncio.run(relay.relay_answer(response, answer))
        status = 200
    except EngineFailed as failure:
        status = failure.status
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 << 20
    assert status in (200, 502)
    if name in ("words", "tokens", "tool calls"):
        assert answer.tokens.sampled_ids is None
