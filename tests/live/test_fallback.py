"""Owns: live traffic whose local answers are not good enough, and the hosted model that answers instead.

- What is good comes from the engine, a stream as early as without a fall-back, and the hosted model is not asked.
- A failure, an answer that takes too long, and one in another format than its request declares are replaced whole; an
  answer that has begun to reach the client is not.
- Both calls are recorded in one episode; nobody has read the replaced one. The key goes to the hosted model only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support import fake_vllm
from support.fake_vllm import FakeVllm
from support.live_rig import KEY, SALT, SAY, LiveRig, episodes, live_rig

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.live.fallback import FallbackKeys
from marft_bridge.live.split import BASE, LiveFile
from marft_bridge.live.status import read_live_lines
from marft_bridge.runs.run_folder import RunFolder

LOCAL = "planner@0"
HOSTED, HOSTED_KEY = "hosted-large", "key-of-the-provider"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


@pytest.fixture
def hosted() -> Iterator[FakeVllm]:
    with fake_vllm.running(FakeVllm(HOSTED_KEY)) as server:
        server.adapters = {HOSTED: "a model of its own"}
        server.answer = lambda body: '{"n": 7}' if body.get("response_format") else "hosted speaks"
        yield server


def options(hosted: FakeVllm, **changes: Any) -> tuple[FallbackOptions, FallbackKeys]:
    fields = {"base_url": f"{hosted.url}/v1", "models": {"planner": HOSTED}, "api_key_env": "KEY"} | changes
    return FallbackOptions.model_validate(fields), FallbackKeys(HOSTED_KEY)


def content(answer: Any) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


def fallbacks(rig: LiveRig) -> dict[str, int]:
    counted: dict[str, int] = rig.live()["variants"][BASE]["fallbacks"]
    return counted


def test_a_good_answer_is_the_engines_and_the_hosted_model_is_not_asked(tmp_path: Path, hosted: FakeVllm) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.answer = lambda body: '{"n": 1}' if body.get("response_format") else "local speaks"
        assert content(rig.say()) == "local speaks"
        answer = rig.say(response_format=JSON)
        assert content(answer) == '{"n": 1}'
        assert "x-marft-fallback" not in answer.headers
        assert fallbacks(rig) == {}
    assert hosted.asked == []
    assert all(action.trainable for trajectory in episodes(rig.path) for action in trajectory.actions)


def test_a_failed_call_is_answered_by_the_hosted_model_and_both_are_one_episode(
    tmp_path: Path, hosted: FakeVllm
) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.fail_next = 1
        answer = rig.say(temperature=0.3)
        assert content(answer) == "hosted speaks"
        assert answer.headers["x-marft-fallback"] == HOSTED
        assert fallbacks(rig) == {"failure": 1}
        told = rig.live()["variants"][BASE]
        assert (told["requests"], told["errors"], told["in_flight"]) == (1, 0, 0)
    assert hosted.asked == [{"model": HOSTED, "messages": SAY, "temperature": 0.3}]  # nothing that only an engine takes
    (trajectory,) = episodes(rig.path)
    local, replacing = trajectory.actions
    assert (local.adapter, local.trainable) == (LOCAL, False)
    assert (replacing.model, replacing.adapter, replacing.adapter_version) == (HOSTED, None, None)
    assert not replacing.trainable
    assert replacing.completion is not None
    assert trajectory.episode.outcome == "truncated"


def test_status_says_what_share_fell_back_and_why(tmp_path: Path, hosted: FakeVllm) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with (
        live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig,
        LiveFile(folder.live, SALT, KEY).announced(rig.base_url),
    ):
        for fails in (1, 0, 0, 0):
            rig.engine.fail_next = fails
            rig.say()
        said = read_live_lines(folder)
    assert said[0] == f"live traffic at {rig.base_url}: split 100/0"
    assert "    25.0% fell back to a hosted model: failure 1" in said
    assert read_live_lines(folder) == []  # it runs no more


def test_an_engine_that_is_gone_is_a_failure_too(tmp_path: Path, hosted: FakeVllm) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.shutdown()
        rig.engine.server_close()
        assert content(rig.say()) == "hosted speaks"
        assert rig.say("writer").status_code == 502  # has no fall-back


def test_an_answer_that_takes_too_long_is_replaced(tmp_path: Path, hosted: FakeVllm) -> None:
    released = threading.Event()

    def slow(handler: Any, body: dict[str, Any]) -> None:
        released.wait(20)
        handler._answer(200, {"choices": []})

    with live_rig(tmp_path, (100, 0), fallback=options(hosted, after_s=0.2)) as rig:
        rig.engine.odd[LOCAL] = slow
        began = time.monotonic()
        assert content(rig.say()) == "hosted speaks"
        assert time.monotonic() - began < 10
        assert fallbacks(rig) == {"time": 1}
        released.set()
    (trajectory,) = episodes(rig.path)
    assert [(action.adapter, action.model) for action in trajectory.actions] == [(LOCAL, None), (None, HOSTED)]


@pytest.mark.parametrize(
    ("said", "request_parts"),
    [
        ("seven", {"response_format": JSON}),
        ('{"n": "seven"}', {"response_format": JSON}),
        ("[7]", {"response_format": {"type": "json_object"}}),
        ("seven", {"tools": [TOOL], "tool_choice": "required"}),
        ([("count", {"n": "seven"})], {"tools": [TOOL], "tool_choice": "required"}),
        ([("other", {"n": 7})], {"tools": [TOOL], "tool_choice": "required"}),
    ],
)
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_format_than_the_request_declares_is_replaced_whole(
    said: Any, request_parts: dict[str, Any], stream: bool, tmp_path: Path, hosted: FakeVllm
) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.answer = lambda _: said
        if stream:
            chunks = list(
                rig.client().chat.completions.create(model="planner", messages=SAY, stream=True, **request_parts)
            )  # type: ignore[call-overload]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            text = content(rig.say(**request_parts))
        assert text == ('{"n": 7}' if "response_format" in request_parts else "hosted speaks")
        assert fallbacks(rig) == {"format": 1}


def test_what_is_not_judged_is_not_replaced(tmp_path: Path, hosted: FakeVllm) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.auto_tools = True
        assert content(rig.say(tools=[TOOL])) == f"{LOCAL} speaks"  # tools were merely offered
        odd_schema = {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}
        rig.engine.answer = lambda _: "{}"
        assert content(rig.say(response_format=odd_schema)) == "{}"
        assert fallbacks(rig) == {}


def test_a_stream_without_a_format_goes_out_with_its_first_piece_and_is_not_replaced_after_it(
    tmp_path: Path, hosted: FakeVllm
) -> None:
    seen = threading.Event()

    def breaks_off(handler: Any, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        piece = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        piece["choices"] = [{"index": 0, "delta": {"content": "begun"}, "finish_reason": None}]
        handler.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        handler.wfile.flush()
        assert seen.wait(20)  # longer than `after_s`: the time is that to the first piece
        time.sleep(0.4)
        handler.close_connection = True

    with live_rig(tmp_path, (100, 0), fallback=options(hosted, after_s=0.3)) as rig:
        rig.engine.odd[LOCAL] = breaks_off
        create: Any = rig.client().chat.completions.create
        chunks = iter(create(model="planner", messages=SAY, stream=True))
        assert next(chunks).choices[0].delta.content == "begun"
        seen.set()
        with pytest.raises(openai.APIError):
            list(chunks)
        rig.wait_for(lambda told: told["variants"][BASE]["errors"] == 1)
        assert fallbacks(rig) == {}
    assert hosted.asked == []


def test_where_both_fail_the_client_gets_the_hosted_error_counted_once(tmp_path: Path, hosted: FakeVllm) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.fail_next = hosted.fail_next = 1
        assert rig.say().status_code == 500
        told = rig.live()["variants"][BASE]
        assert (told["requests"], told["errors"], told["fallbacks"]) == (1, 1, {"failure": 1})
    (trajectory,) = episodes(rig.path)
    assert trajectory.episode.outcome == "failed"


def test_nobody_has_read_a_replaced_answer(tmp_path: Path, hosted: FakeVllm) -> None:
    run = {"x-marft-run": "run-1"}
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.answer = lambda body: "no JSON" if body.get("response_format") else "local speaks"
        assert content(rig.say(headers=run, response_format=JSON)) == '{"n": 7}'
        assert content(rig.say("writer", headers=run)) == "local speaks"
    (trajectory,) = episodes(rig.path)
    replaced, replacing, after = trajectory.actions
    assert {edge.src for edge in trajectory.edges if edge.dst == after.action_id} == {replacing.action_id}
    assert not [edge for edge in trajectory.edges if replaced.action_id in (edge.src, edge.dst)]
    assert replaced.sampled_ids is not None  # what the policy said is known all the same


def test_the_mirror_shadows_the_hosted_answer(tmp_path: Path, hosted: FakeVllm) -> None:
    with live_rig(tmp_path, (100, 0), mirror=True, fallback=options(hosted)) as rig:
        rig.engine.fail_next = 1
        rig.say()
        rig.wait_for(lambda told: told["variants"]["candidate (mirror)"]["latency_ms"] is not None)
    shadow = next(t for t in episodes(rig.path) if t.episode.variant == "candidate (mirror)")
    assert [action.model for action in shadow.actions] == ["planner@3"]


def test_the_key_of_the_provider_is_recorded_nowhere_and_the_apps_key_is_not_sent_on(
    tmp_path: Path, hosted: FakeVllm
) -> None:
    with live_rig(tmp_path, (100, 0), fallback=options(hosted)) as rig:
        rig.engine.fail_next = 1
        assert rig.say().status_code == 200  # the hosted server refuses any key but its own
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not any(key.encode() in path.read_bytes() for key in (KEY, HOSTED_KEY))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_url": "https://api.example.com/v1"}, "another machine, which would see the prompts"),
        ({"base_url": "http://api.example.com/v1", "allow_remote": True}, "a key does not go to another machine"),
        ({"base_url": "http://127.0.0.1:9"}, "ends with /v1"),
        ({"models": {}}, "at least 1"),
        ({"models": {"nobody": "m"}}, "fallback.models.nobody: not in graph.nodes"),
        ({"after_s": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_a_fallback_is_refused(fields: dict[str, Any], message: str) -> None:
    graph = {"app": "a:b", "nodes": ["planner"], "tasks": "a:t", "reward": "a:r"}
    fallback = {"base_url": "http://127.0.0.1:9/v1", "models": {"planner": "m"}, "api_key_env": "KEY"} | fields
    with pytest.raises(ValueError, match=message):
        BridgeConfig.model_validate({"graph": graph, "fallback": fallback})


def test_a_key_that_is_not_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from marft_bridge.live.command import _read_fallback

    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    fields = {"base_url": "http://127.0.0.1:9/v1", "models": {"planner": "m"}, "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(ConfigError, match="fallback: environment variable 'NO_SUCH_KEY'"):
        _read_fallback(FallbackOptions.model_validate(fields))
