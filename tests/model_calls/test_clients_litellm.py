"""Owns: a node's calls with litellm are recorded as its actions, and redirected.

- Every way to call gives the caller the same, whenever the functions were imported; streams chunk by chunk.
- Whoever answers, it is one span; redirected, the action has the engine's exact tokens and is trainable.
- What the served model cannot do is refused with our own line, not one of litellm's.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched when litellm is imported
litellm = pytest.importorskip("litellm")

from litellm import acompletion, completion  # noqa: E402
from support import fake_vllm  # noqa: E402
from support.client_rig import ClientRig, client_rig, graph_of, without_other_recorders  # noqa: E402
from support.fake_vllm import FakeVllm, id_to_logprob, text_to_ids  # noqa: E402
from support.hosted_apis import TEXT, HostedApis  # noqa: E402

from marft_bridge.common.errors import GraphError, ServingError  # noqa: E402
from trace_store import conventions as names  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # litellm and its pydantic models warn of themselves

HELLO: Any = [{"role": "user", "content": "hello"}]


def codes_of_the_package() -> dict[Any, Any]:
    return {function: function.__code__ for function in (completion, acompletion)}


@pytest.fixture(autouse=True)
def clients_are_not_shared() -> Iterator[None]:
    """litellm keeps clients, whose connections belong to the loop of one test."""
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()


def _event_loops() -> list[asyncio.BaseEventLoop]:
    # by type(): other tests leave objects about that raise when they are asked for their class
    return [each for each in gc.get_objects() if issubclass(type(each), asyncio.BaseEventLoop)]


@pytest.fixture(scope="module", autouse=True)
def loops_are_closed() -> Iterator[None]:
    """litellm opens an event loop of its own, and leaves it to the collector."""
    older_ids = {id(loop) for loop in _event_loops()}
    yield
    for loop in _event_loops():
        if id(loop) not in older_ids and not loop.is_running():
            loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ClientRig]:
    hosted = FakeVllm()
    with client_rig(tmp_path, hosted) as rig:
        rig.ours.answer = hosted.answer = lambda _: TEXT
        yield rig


def fields_of(rig: ClientRig) -> dict[str, Any]:
    return {"messages": HELLO, "api_base": f"{rig.hosted.url}/v1", "api_key": "hosted", "max_retries": 0}


def plain(answer: Any) -> Any:
    """An answer with the types that the caller got, as far as it may not depend on who answered."""
    if isinstance(answer, list):
        return [plain(chunk) for chunk in answer]
    fields = answer.model_dump(mode="json", exclude={"id", "created", "model", "provider_specific_fields"})
    for choice in fields["choices"]:
        choice.pop("provider_specific_fields", None)
        choice.pop("token_ids", None)
        choice.pop("stop_reason", None)
        for part in ("message", "delta"):
            choice.get(part, {}).pop("provider_specific_fields", None)
    for name in ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params"):
        fields.pop(name, None)
    return [type(answer).__name__, fields]


SYNC: dict[str, Callable[[dict[str, Any]], Any]] = {
    "completion": lambda f: completion(model="openai/base", **f),
    "by position": lambda f: completion("openai/base", **f),
    "by the module": lambda f: litellm.completion(model="openai/base", temperature=0.3, max_tokens=150, **f),
    "stream": lambda f: list(completion(model="openai/base", stream=True, **f)),
    "stream with usage": lambda f: list(
        completion(model="openai/base", stream=True, stream_options={"include_usage": True}, **f)
    ),
}


async def _stream(fields: dict[str, Any]) -> Any:
    return [chunk async for chunk in await acompletion(model="openai/base", stream=True, **fields)]


async def _router(fields: dict[str, Any]) -> Any:
    model = {"model": "openai/base", "api_base": fields["api_base"], "api_key": fields["api_key"]}
    router = litellm.Router(model_list=[{"model_name": "mine", "litellm_params": model}], num_retries=0)
    return await router.acompletion(model="mine", messages=HELLO)


ASYNC: dict[str, Callable[[dict[str, Any]], Any]] = {
    "acompletion": lambda f: acompletion(model="openai/base", **f),
    "stream": _stream,
    "router": _router,
}


def check_ways(rig: ClientRig, run: Callable[[Any], Any], node: Callable[..., Any]) -> None:
    graph = graph_of(writer=node)
    unrecorded = run(graph)["out"]
    recorded, (action,) = rig.recorded(run, graph)
    assert recorded["out"] == unrecorded
    assert (action.node, action.trainable, action.finish_reason) == ("writer", False, "stop")
    (span,) = rig.chat_spans()
    (message,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
    assert (message["parts"], span.attributes[names.PROVIDER]) == ([{"type": "text", "content": TEXT}], "openai")
    assert json.loads(span.attributes[names.INPUT_MESSAGES])[0]["parts"][0]["content"] == "hello"
    rig.hosted.asked.clear()
    redirected, (action,) = rig.recorded(run, graph, redirected=True)
    assert redirected["out"] == unrecorded
    assert rig.hosted.asked == []
    (body,) = rig.ours.asked
    assert (action.node, action.trainable, action.untrainable_reason) == ("writer", True, None)
    assert action.prompt_ids == tuple(json.dumps(body["messages"]).encode())
    assert action.sampled_ids == tuple(text_to_ids(TEXT))
    assert action.logprobs == tuple(id_to_logprob(token) for token in text_to_ids(TEXT))
    assert (action.model, action.adapter, action.adapter_version) == ("writer@3", "writer@3", 3)


@pytest.mark.parametrize("how", SYNC)
def test_a_sync_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    check_ways(rig, lambda app: app.invoke({}), lambda _: {"out": plain(SYNC[how](fields_of(rig)))})


@pytest.mark.parametrize("how", ASYNC)
def test_an_async_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    async def node(_: Any) -> Any:
        return {"out": plain(await ASYNC[how](fields_of(rig)))}

    async def close() -> None:
        await litellm.close_litellm_async_clients()

    check_ways(rig, lambda app: rig.run_async(app, close), node)


def test_another_provider_is_recorded_by_its_name(tmp_path: Path) -> None:
    with client_rig(tmp_path, HostedApis()) as rig:
        rig.ours.answer = lambda _: TEXT

        def node(_: Any) -> Any:
            fields: Any = {"messages": HELLO, "api_base": rig.hosted.url, "api_key": "hosted"}
            whole = completion(model="anthropic/claude-mine", **fields)
            parts = completion(model="anthropic/claude-mine", stream=True, **fields)
            texts = [part.choices[0].delta.content or "" for part in parts]
            return {"out": [whole.choices[0].message.content, "".join(texts)]}

        for redirected in False, True:
            result, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
            assert result["out"] == [TEXT] * 2
            assert [action.trainable for action in actions] == [redirected] * 2
            if not redirected:
                for span in rig.chat_spans():
                    assert span.attributes[names.PROVIDER] == "anthropic"
                    assert json.loads(span.attributes[names.OUTPUT_MESSAGES])[0]["parts"][0]["content"] == TEXT
        assert len(rig.hosted.asked) == 2


def test_the_functions_are_the_same_objects_and_restored(rig: ClientRig) -> None:
    def node(_: Any) -> Any:
        assert litellm.completion is completion
        assert completion.__code__ is not before[completion]
        assert inspect.iscoroutinefunction(acompletion)
        return {"out": completion(model="openai/base", messages=HELLO, mock_response="by itself").id}

    with without_other_recorders():
        before = codes_of_the_package()
        _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
        assert codes_of_the_package() == before
    assert action.finish_reason == "stop"
    assert completion(model="openai/base", messages=HELLO, mock_response="by itself").choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "image"),
        ({"n": 2}, "n=2 answers of one call"),
    ],
)
def test_what_the_served_model_cannot_do_is_refused_with_our_line(
    rig: ClientRig, fields: dict[str, Any], wish: str
) -> None:
    node = lambda _: completion(model="openai/base", **(fields_of(rig) | fields))  # noqa: E731
    with pytest.raises(GraphError, match="node 'writer'") as caught:
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert wish in str(caught.value)
    assert rig.ours.asked == rig.hosted.asked == []


def test_an_answer_without_usable_tokens_fails_the_call(rig: ClientRig, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = fake_vllm._choice
    monkeypatch.setattr(fake_vllm, "_choice", lambda *parts: choice(*parts) | {"token_ids": None})
    node = lambda _: completion(model="openai/base", **fields_of(rig))  # noqa: E731
    with pytest.raises(ServingError, match="malformed answer of the model server to node 'writer'"):
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)


@pytest.mark.parametrize("redirected", [False, True])
def test_a_failed_request_raises_litellms_error(rig: ClientRig, redirected: bool) -> None:
    rig.ours.fail_next = rig.hosted.fail_next = 1

    def node(_: Any) -> Any:
        with pytest.raises(litellm.InternalServerError, match="engine error"):
            completion(model="openai/base", **fields_of(rig))
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
    assert "InternalServerError" in (action.untrainable_reason or "")
