"""Owns: live traffic over real HTTP, with OpenAI's own client and a LangGraph app, in front of the fake vLLM.

- Every node of one run, and every request of one key, gets one team; without a key it is base, said once and counted.
- Streams come piece by piece; a client that leaves ends the engine's work; what fails is OpenAI's kind of error.
- Nothing gets in without the key or beyond a limit, and the key is written nowhere.
- The mirror never answers and never delays, whatever the candidate does.
- When it stops, nothing of it is left running.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import httpx
import openai
import pytest
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from support.fake_vllm import END_OF_TURN
from support.live_rig import ENGINE_KEY, KEY, NODES, SALT, SAY, TEAMS, LiveRig, episodes, live_rig

from marft_bridge.common.errors import ServingError
from marft_bridge.live import mirror, proxy, upstream
from marft_bridge.live.proxy import LivePlan
from marft_bridge.live.proxy_server import proxy_server
from marft_bridge.live.split import BASE, CANDIDATE, MIRRORED, Split, key_to_variant
from marft_bridge.model_calls.call_monitor import CallsUnderWay

HALF = Split(50, 50)


def keys_of(variant: str, split: Split, count: int) -> list[str]:
    found = (f"user-{number}" for number in range(100_000))
    return [key for key, _ in zip((k for k in found if key_to_variant(SALT, k, split) == variant), range(count))]  # noqa: B905


def answered_by(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    variant = answer.headers["x-marft-variant"]
    text = answer.json()["choices"][0]["message"]["content"]
    assert text == f"{TEAMS[variant].served_names['planner']} speaks"
    return variant


# Who answers


@pytest.mark.slow
def test_a_key_keeps_its_team_over_requests_and_restarts(tmp_path: Path) -> None:
    keys = [f"user-{number}" for number in range(40)]
    rounds = []
    for restart in range(2):
        with live_rig(tmp_path / str(restart), (50, 50)) as rig:
            rounds += [{key: answered_by(rig.say(user=key)) for key in keys} for _ in range(2)]
            assert not rig.warnings
    expected = {key: key_to_variant(SALT, key, HALF) for key in keys}
    assert rounds == [expected] * 4
    assert set(expected.values()) == {BASE, CANDIDATE}


def test_a_request_without_a_key_is_answered_by_base_said_once_and_counted(tmp_path: Path) -> None:
    with live_rig(tmp_path, (0, 100)) as rig:
        assert [answered_by(rig.say()) for _ in range(3)] == [BASE] * 3
        assert answered_by(rig.say(user="ada")) == CANDIDATE
        assert len(rig.warnings) == 1
        assert "neither session, user nor trace" in rig.warnings[0]
        told = rig.live()
        assert (told["without_key"], told["keys"]) == (3, {"user": 1})
        assert (told["variants"][BASE]["requests"], told["variants"][CANDIDATE]["requests"]) == (3, 1)


def test_a_run_keeps_the_team_it_began_with_even_where_its_nodes_name_different_keys(tmp_path: Path) -> None:
    (base,), (candidate,) = keys_of(BASE, HALF, 1), keys_of(CANDIDATE, HALF, 1)
    with live_rig(tmp_path, (50, 50)) as rig:
        run = {"x-marft-run": "run-1"}
        assert answered_by(rig.say(headers=run | {"x-marft-session": candidate})) == CANDIDATE
        assert answered_by(rig.say(headers=run | {"x-marft-session": base})) == CANDIDATE
        assert answered_by(rig.say(headers=run)) == CANDIDATE
        assert answered_by(rig.say(headers={"x-marft-session": base})) == BASE


class Text(TypedDict):
    text: str


def two_nodes(rig: LiveRig, client: httpx.AsyncClient) -> Any:
    """planner -> writer, each a ChatOpenAI of its own that sends the thread as the user."""

    def node(name: str) -> Any:
        chat = ChatOpenAI(model=name, base_url=rig.base_url, api_key=KEY, max_retries=0, http_async_client=client)

        async def run(state: Text, config: RunnableConfig) -> Text:
            answer = await chat.ainvoke(state["text"], user=config["configurable"]["thread_id"])
            return {"text": f"{state['text']} | {answer.text}"}

        return run

    graph = StateGraph(Text)
    for name in NODES:
        graph.add_node(name, node(name))
    for edge in zip((START, *NODES), (*NODES, END), strict=True):
        graph.add_edge(*edge)
    return graph.compile()


def test_every_node_of_a_graph_run_is_answered_by_one_team(tmp_path: Path) -> None:
    threads = [f"thread-{number}" for number in range(24)]
    with live_rig(tmp_path, (50, 50)) as rig:

        async def runs() -> list[Text]:
            async with httpx.AsyncClient(trust_env=False) as client:
                graph = two_nodes(rig, client)
                each = [graph.ainvoke({"text": "go"}, {"configurable": {"thread_id": thread}}) for thread in threads]
                return await asyncio.gather(*each)

        results = asyncio.run(runs())
        for thread, result in zip(threads, results, strict=True):
            served = TEAMS[key_to_variant(SALT, thread, HALF)].served_names
            assert result["text"] == f"go | {served['planner']} speaks | {served['writer']} speaks"


# Answers


def test_openais_client_sees_what_it_asked_for_and_the_nodes_as_models(tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig, rig.client() as client:
        assert [model.id for model in client.models.list()] == list(NODES)
        answer = client.chat.completions.create(model="writer", messages=SAY, user="ada", logprobs=True)
        assert answer.choices[0].message.content == f"{answer.model} speaks"
        assert answer.choices[0].logprobs is not None
        plain = client.chat.completions.create(model="writer", messages=SAY, user="ada")
        assert plain.choices[0].logprobs is None
        assert "token_ids" not in plain.choices[0].model_dump()
        assert "prompt_token_ids" not in plain.model_dump()
        assert plain.usage is not None
        written = client.completions.create(model="planner", prompt="once")
        assert written.choices[0].text == f"{written.model} wrote"
        assert {body["return_token_ids"] for body in rig.engine.asked} == {True}


def test_a_stream_comes_through_piece_by_piece(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(handler: Any, body: dict[str, Any]) -> None:
        begin_stream(handler)
        handler.wfile.write(chunk("one"))
        assert gate.wait(20)
        handler.wfile.write(chunk("two") + b"data: [DONE]\n\n")

    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = slow
        stream = client.chat.completions.create(model="planner", messages=SAY, stream=True)
        assert next(stream).choices[0].delta.content == "one"  # while the engine waits for us
        gate.set()
        assert [piece.choices[0].delta.content for piece in stream] == ["two"]
        told = rig.wait_for(lambda told: told["variants"][BASE]["in_flight"] == 0)
        assert told["variants"][BASE]["first_piece_ms"]["p50"] <= told["variants"][BASE]["latency_ms"]["p50"]


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_watches_the_engine_is_told_of_every_request_until_its_answer_ends(
    stream: bool, tmp_path: Path
) -> None:
    """Without it nobody would notice an engine that hangs."""
    gates = [threading.Event(), threading.Event()]
    calls = CallsUnderWay()

    def slow(handler: Any, body: dict[str, Any]) -> None:
        gates[0].wait(20)
        if not stream:
            handler._answer(200, {"choices": []})
            return
        begin_stream(handler)
        handler.wfile.write(chunk("one"))
        gates[1].wait(20)
        handler.wfile.write(b"data: [DONE]\n\n")

    with live_rig(tmp_path, calls=calls) as rig, ThreadPoolExecutor(1) as client:
        rig.engine.odd["planner@0"] = slow
        assert calls.silence_s() == 0
        answer = client.submit(rig.say, stream=stream)
        assert eventually(lambda: calls.count == 1 and calls.silence_s() > 0.3)
        gates[0].set()
        if stream:
            assert eventually(lambda: calls.silence_s() < 0.3)
            assert calls.count == 1
        gates[1].set()
        answer.result(20)
        assert eventually(lambda: calls.count == 0)
        assert calls.silence_s() == 0


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("end", [b"data: [DONE]\n", b"data: [DONE]", b"event: done\ndata: [DONE]\r\n"])
def test_a_whole_stream_without_a_last_blank_line_is_an_answer(end: bytes, tmp_path: Path) -> None:
    def hurried(handler: Any, body: dict[str, Any]) -> None:
        begin_stream(handler)
        handler.wfile.write(chunk("all") + end)

    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = hurried
        stream = client.chat.completions.create(model="planner", messages=SAY, stream=True)
        assert [piece.choices[0].delta.content for piece in stream] == ["all"]
        told = rig.wait_for(lambda told: told["variants"][BASE]["in_flight"] == 0)["variants"][BASE]
        assert (told["left"], told["errors"], told["latency_ms"] is None) == (0, 0, False)


def test_a_client_that_closes_once_it_has_read_the_last_event_was_answered(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow_to_close(handler: Any, body: dict[str, Any]) -> None:
        begin_stream(handler)
        handler.wfile.write(chunk("all") + b"data: [DONE]\n\n")
        gate.wait(20)  # the client is gone long before the engine's connection ends

    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = slow_to_close
        stream = client.chat.completions.create(model="planner", messages=SAY, stream=True)
        assert [piece.choices[0].delta.content for piece in stream] == ["all"]
        told = rig.wait_for(lambda told: told["variants"][BASE]["in_flight"] == 0)["variants"][BASE]
        gate.set()
        assert (told["left"], told["errors"], told["latency_ms"] is None) == (0, 0, False)


def begin_stream(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()


def chunk(text: str) -> bytes:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "planner@0"}
    ids = list(text.encode())
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": ids}
    choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]}
    return f"data: {json.dumps(frame | {'choices': [choice]})}\n\n".encode()


def test_an_engine_that_dies_in_the_middle_of_a_stream_is_an_error_and_no_answer(tmp_path: Path) -> None:
    def dies(handler: Any, body: dict[str, Any]) -> None:
        begin_stream(handler)
        handler.wfile.write(chunk("half an ans"))

    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = dies
        stream = client.chat.completions.create(model="planner", messages=SAY, stream=True)
        assert next(stream).choices[0].delta.content == "half an ans"
        with pytest.raises(openai.APIError, match="ended the stream before its end"):
            next(stream)
        told = rig.wait_for(lambda told: told["variants"][BASE]["in_flight"] == 0)
        assert told["variants"][BASE]["errors"] == 1
        assert told["variants"][BASE]["latency_ms"] is None
    (episode,) = episodes(tmp_path / "store.duckdb")
    (action,) = episode.actions
    assert episode.episode.outcome == "failed"
    assert (action.trainable, action.completion) == (False, "half an ans")
    assert "before its end" in str(episode.episode.reason)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_engines_work(stream: bool, tmp_path: Path) -> None:
    ended, begun = threading.Event(), threading.Event()

    def endless(handler: Any, body: dict[str, Any]) -> None:
        if stream:
            begin_stream(handler)
            handler.wfile.write(chunk("on"))
        begun.set()
        handler.connection.settimeout(20)
        assert handler.connection.recv(1) == b""  # the proxy hangs up
        ended.set()

    with live_rig(tmp_path) as rig:
        rig.engine.odd["planner@0"] = endless
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{rig.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {KEY}"},
                json={"model": "planner", "messages": SAY, "stream": stream},
                timeout=httpx.Timeout(20, read=0.5),
                trust_env=False,
            )
        assert begun.is_set()
        assert ended.wait(20)
        told = rig.wait_for(lambda told: told["variants"][BASE]["in_flight"] == 0)
        assert (told["variants"][BASE]["left"], told["variants"][BASE]["errors"]) == (1, 0)
    (episode,) = episodes(tmp_path / "store.duckdb")
    assert str(episode.episode.reason).startswith("ClientGone")
    assert not episode.actions[0].trainable


def test_the_engines_errors_are_passed_on_as_they_are(tmp_path: Path) -> None:
    def refuses(handler: Any, body: dict[str, Any]) -> None:
        handler._answer(400, {"error": {"message": "max_tokens is too large", "type": "BadRequestError", "code": 400}})

    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = refuses
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="max_tokens is too large"):
                client.chat.completions.create(model="planner", messages=SAY, stream=stream)
        assert rig.live()["variants"][BASE]["errors"] == 2


def test_an_engine_that_hangs_up_or_falls_silent_is_an_error_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "SILENCE_TIMEOUT_S", 0.3)
    release = threading.Event()
    with live_rig(tmp_path) as rig, rig.client() as client:
        rig.engine.odd["planner@0"] = lambda handler, body: None
        rig.engine.odd["writer@0"] = lambda handler, body: release.wait(20)
        with pytest.raises(openai.APIStatusError) as gone:
            client.chat.completions.create(model="planner", messages=SAY)
        assert (gone.value.status_code, gone.value.code) == (502, "engine_unreachable")
        with pytest.raises(openai.APIStatusError) as silent:
            client.chat.completions.create(model="writer", messages=SAY)
        assert (silent.value.status_code, silent.value.code) == (504, "engine_timeout")
        release.set()


def mad_event(event: bytes) -> Any:
    def answers(handler: Any, body: dict[str, Any]) -> None:
        if body.get("stream"):
            begin_stream(handler)
            handler.wfile.write(b"data: " + event + b"\n\ndata: [DONE]\n\n")
        else:
            handler._send(200, event)

    return answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":20000000}]}}]}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":-1}]}}]}',
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":"one"}]}}]}',
        b"[" * 100_000,
        b'{"x":' + b"9" * 5_000 + b"}",
    ],
    ids=["huge", "negative", "text", "deep", "long"],
)
def test_an_engine_gone_mad_is_passed_on_as_it_is(event: bytes, stream: bool, tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig:
        rig.engine.odd["planner@0"] = mad_event(event)
        answer = rig.say(stream=stream)
        assert answer.status_code == 200
        assert event in answer.content
        assert rig.live()["variants"][BASE]["requests"] == 1
    (trajectory,) = episodes(tmp_path / "store.duckdb")
    assert [action.sampled_ids for action in trajectory.actions] == [None]


def test_a_body_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_PARSED_BYTES", 1 << 20)
    with live_rig(tmp_path) as rig:
        answer = rig.post(content=b'{"model":"planner","x":[' + b"[]," * 100_000 + b"1]}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert rig.engine.asked == []


def test_an_unknown_model_is_answered_with_the_names_of_the_nodes(tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig, rig.client() as client:
        for model in ("gpt-4o", "planner@3", "base"):
            with pytest.raises(openai.NotFoundError, match="nodes here: planner, writer") as caught:
                client.chat.completions.create(model=model, messages=SAY)
            assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
            client.responses.create(model="planner", input="hello")
        assert rig.engine.asked == []
        assert rig.live()["refused"] == {"model_not_found": 3}


# Who gets in


@pytest.mark.parametrize("key", ["none", "wrong", KEY[:-1], KEY + "x", KEY.upper(), ENGINE_KEY])
def test_nothing_is_answered_without_the_key(key: str, tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig:
        told = rig.post(key=key, content=b"{" + b" " * 100)
        assert told.status_code == 401
        assert told.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/marft/live"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{rig.proxy.url}{path}", headers=headers, trust_env=False).status_code == 401
        assert httpx.get(f"{rig.proxy.url}/health", trust_env=False).status_code == 200
        assert rig.engine.asked == []


def test_bodies_and_headers_have_limits(tmp_path: Path) -> None:
    with live_rig(tmp_path) as rig:
        big = b'{"model": "planner", "x": "' + b"x" * (17 << 20) + b'"}'
        assert rig.post(content=big).status_code == 413
        # Without a length in front it is counted as it comes.
        assert rig.post(content=(big[at : at + 65536] for at in range(0, len(big), 65536))).status_code == 413
        try:
            status = rig.post(content=b"{}", headers={"x-marft-session": "x" * 1_000_000}).status_code
        except httpx.TransportError:  # it hung up before we had sent all of it
            status = 400
        assert status == 400
        for wrong in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
            assert rig.post(content=wrong).status_code == 400
        assert answered_by(rig.say()) == BASE


def test_the_keys_are_written_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with live_rig(tmp_path, mirror=True) as rig:
        rig.say(user="ada")
        rig.post(key="wrong", json={})
        rig.engine.odd["planner@0"] = lambda handler, body: None
        rig.say(user="ada")
        said = json.dumps(rig.live())
    captured = capfd.readouterr()
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    for text in (captured.out, captured.err, caplog.text, said, *written):
        assert KEY not in text
        assert ENGINE_KEY not in text


# Mirror


def garbage(handler: Any, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"\xff<html>")


def broken(handler: Any, body: dict[str, Any]) -> None:
    handler._answer(500, {"error": {"message": "engine error", "code": 500}})


def hangs_up(handler: Any, body: dict[str, Any]) -> None:
    return None


@pytest.mark.parametrize("candidate", [garbage, broken, hangs_up])
def test_the_mirror_never_answers_whatever_the_candidate_does(candidate: Any, tmp_path: Path) -> None:
    with live_rig(tmp_path, (100, 0), mirror=True) as rig, rig.client() as client:
        rig.engine.odd["planner@3"] = candidate
        assert answered_by(rig.say(user="ada")) == BASE
        stream = client.chat.completions.create(model="planner", messages=SAY, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in stream) == "planner@0 speaks"
        told = rig.wait_for(lambda told: told["variants"][MIRRORED]["errors"] == 2)
        assert told["variants"][BASE] | {"latency_ms": 0, "first_piece_ms": 0} == {
            "requests": 2,
            "errors": 0,
            "left": 0,
            "in_flight": 0,
            "fallbacks": {},
            "unjudged": {},
            "latency_ms": 0,
            "first_piece_ms": 0,
        }
        assert "stream" not in rig.engine.asked[-1]  # the shadow is asked for one piece
    shadows = [found for found in episodes(tmp_path / "store.duckdb") if found.episode.variant == MIRRORED]
    assert [shadow.episode.outcome for shadow in shadows] == ["failed", "failed"]
    assert not any(action.trainable for shadow in shadows for action in shadow.actions)


def test_a_slow_candidate_delays_no_answer_and_what_does_not_fit_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MAX_WAITING", 3)
    release = threading.Event()

    def slow(handler: Any, body: dict[str, Any]) -> None:
        assert release.wait(60)
        handler._answer(200, {"choices": []})

    with live_rig(tmp_path, (100, 0), mirror=True) as rig:
        rig.engine.odd["planner@3"] = slow
        for _ in range(mirror.WORKERS):
            assert answered_by(rig.say(user="ada")) == BASE
        rig.wait_for(lambda told: told["variants"][MIRRORED]["in_flight"] == mirror.WORKERS)
        began = time.monotonic()
        for _ in range(10):
            assert answered_by(rig.say(user="ada")) == BASE
        assert time.monotonic() - began < 10  # the candidate has not answered one
        told = rig.wait_for(lambda told: told["mirror_dropped"] == 7)
        assert told["mirror_waiting"] == 3
        release.set()
        rig.wait_for(lambda told: told["variants"][MIRRORED]["requests"] == mirror.WORKERS + 3)


def test_only_what_base_answered_is_mirrored(tmp_path: Path) -> None:
    (candidate,) = keys_of(CANDIDATE, HALF, 1)
    with live_rig(tmp_path, (50, 50), mirror=True) as rig:
        assert answered_by(rig.say(user=candidate)) == CANDIDATE
        rig.engine.odd["planner@0"] = broken
        assert rig.say().status_code == 500
        rig.say("writer")
        told = rig.wait_for(lambda told: told["variants"][MIRRORED]["latency_ms"] is not None)
        assert told["variants"][MIRRORED]["requests"] == 1
        assert [body["model"] for body in rig.engine.asked] == ["planner@3", "planner@0", "writer@0", "writer@3"]


# Many at once, and the end


@pytest.mark.slow
def test_many_clients_at_once_get_their_own_answers(tmp_path: Path) -> None:
    with live_rig(tmp_path, (50, 50), mirror=True) as rig:
        rig.engine.answer = lambda body: f"{body['model']} heard {body['messages'][0]['content']}"

        def ask(number: int) -> None:
            key = f"user-{number % 37}"
            answer = rig.post(
                json={"model": "writer", "messages": [{"role": "user", "content": str(number)}], "user": key}
            )
            served = TEAMS[key_to_variant(SALT, key, HALF)].served_names["writer"]
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == f"{served} heard {number}"

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(ask, range(200)))
        told = rig.live()
        assert sum(told["variants"][name]["requests"] for name in (BASE, CANDIDATE)) == 200
        assert told["not_recorded"] == {"calls": 0, "spans": 0}
    found = [t for t in episodes(tmp_path / "store.duckdb") if t.episode.variant != MIRRORED]
    assert len(found) == 200
    assert {action.sampled_ids[-1] for t in found for action in t.actions if action.sampled_ids} == {END_OF_TURN}


@pytest.mark.slow
def test_when_it_stops_what_is_under_way_is_cut_off_recorded_and_nothing_is_left(tmp_path: Path) -> None:
    begun = threading.Event()

    def hangs(handler: Any, body: dict[str, Any]) -> None:
        begun.set()
        handler.connection.settimeout(30)
        assert handler.connection.recv(1) == b""

    threads = set(threading.enumerate())
    failures: list[Exception] = []
    with live_rig(tmp_path) as rig:
        rig.engine.odd["planner@0"] = hangs

        def ask() -> None:
            try:
                rig.say()
            except httpx.HTTPError as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(20)
        port = rig.proxy.port
    asking.join(20)
    assert not asking.is_alive()
    # The journal's own thread ends by itself when nothing was written for a second.
    deadline = time.monotonic() + 20
    while left := {thread for thread in set(threading.enumerate()) - threads if thread.is_alive()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    (episode,) = episodes(tmp_path / "store.duckdb")
    assert str(episode.episode.reason).startswith("ClientGone")


def test_a_port_that_is_taken_is_said() -> None:
    plan = LivePlan({}, Split(50, 50), b"", (), print)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServingError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*choose another --port"):
            proxy_server(plan, ("", ""), None, taken.getsockname()[1], mirrored=False)
