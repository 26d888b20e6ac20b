"""Owns: a text that an episode gives a node, in place of the system message that the node's calls begin with.

- Every client and every way to call sends the text, to the served model and to a hosted one, and the record has it.
- Exactly that message changes: not the others, not the app's own objects, not another node's call.
- A call that begins with no system message is refused by name, also where the app catches the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from support.client_rig import WRITER, ClientRig, client_rig, graph_of
from support.fake_vllm import FakeVllm
from support.hosted_apis import HostedApis

from marft_bridge.common.errors import GraphError
from trace_store import conventions as names

NEW, OLD = "You are terse.", "You are verbose."
CHAT: Any = [
    {"role": "system", "content": OLD},
    {"role": "user", "content": "hello"},
    {"role": "system", "content": "one more"},
]
SENT = [("system", NEW), ("user", "hello"), ("system", "one more")]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ClientRig]:
    with client_rig(tmp_path, FakeVllm()) as rig:
        rig.prompts = {"writer": NEW}
        yield rig


def langchain(rig: ClientRig) -> ChatOpenAI:
    return ChatOpenAI(model="base", base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0)


async def astreamed(rig: ClientRig) -> None:
    async for _ in langchain(rig).astream(CHAT):
        pass


async def openai_async(rig: ClientRig) -> None:
    async with AsyncOpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0) as client:
        await client.chat.completions.create(model="base", messages=CHAT)


def openai_sync(rig: ClientRig, messages: Any = CHAT, **fields: Any) -> None:
    with OpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0) as client:
        answer = client.chat.completions.create(model="base", messages=messages, **fields)
        list(answer) if fields.get("stream") else None


WAYS: dict[str, Callable[[ClientRig], Any]] = {
    "invoke": lambda rig: langchain(rig).invoke(CHAT),
    "ainvoke": lambda rig: langchain(rig).ainvoke(CHAT),
    "stream": lambda rig: list(langchain(rig).stream(input=CHAT)),
    "astream": astreamed,
    "openai": openai_sync,
    "openai async": openai_async,
    "openai stream": lambda rig: openai_sync(rig, stream=True),
    "openai extra body": lambda rig: openai_sync(rig, messages=[], extra_body={"messages": CHAT}),
}


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_sends_the_text_and_the_record_has_it(way: str, is_served: bool, rig: ClientRig) -> None:
    given = json.dumps(CHAT)
    rig.routes = {"writer": WRITER} if is_served else {}

    async def writer(_: Any) -> dict[str, Any]:
        answer = await asyncio.to_thread(WAYS[way], rig)
        if asyncio.iscoroutine(answer):
            await answer
        return {"out": ""}

    _, (action,) = rig.recorded(rig.run_async, graph_of(writer=writer), redirected=True)
    asked, other = (rig.ours, rig.hosted) if is_served else (rig.hosted, rig.ours)
    (body,) = asked.asked
    assert [(message["role"], message["content"]) for message in body["messages"]] == SENT
    assert other.asked == []
    (span,) = rig.chat_spans()
    recorded = span.attributes[names.INPUT_MESSAGES]
    assert (recorded.count(NEW), recorded.count(OLD), recorded.count("one more")) == (1, 0, 1)
    assert (action.trainable, action.adapter) == ((True, "writer@3") if is_served else (False, None))
    assert rig.routing is not None
    assert set(rig.routing.prompted_calls) == {"writer"}
    assert json.dumps(CHAT) == given  # the app's own messages are as they were


@pytest.mark.parametrize("is_served", [True, False])
def test_anthropic_and_the_responses_api_have_the_text_where_they_keep_instructions(
    is_served: bool, tmp_path: Path
) -> None:
    def writer(_: Any) -> dict[str, Any]:
        user = {"role": "user", "content": "hello"}
        with Anthropic(base_url=rig.hosted.url, api_key="hosted", max_retries=0) as anthropic:
            anthropic.messages.create(model="base", max_tokens=100, system=OLD, messages=[user])  # type: ignore[list-item]
        with OpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0) as openai:
            openai.responses.create(model="base", instructions=OLD, input="hello")
            openai.responses.create(model="base", input=[{"role": "developer", "content": OLD}, user])  # type: ignore[list-item]
        return {"out": ""}

    with client_rig(tmp_path, HostedApis()) as rig:
        rig.prompts, rig.routes = {"writer": NEW}, {"writer": WRITER} if is_served else {}
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=writer), redirected=True)
        sent = json.dumps(rig.ours.asked if is_served else rig.hosted.asked)
        assert (sent.count(NEW), sent.count(OLD)) == (3, 0)
        recorded = [span.attributes[names.INPUT_MESSAGES] for span in rig.chat_spans()]
        assert [(text.count(NEW), text.count(OLD)) for text in recorded] == [(1, 0)] * 3


@pytest.mark.slow  # litellm takes seconds to load
@pytest.mark.filterwarnings("ignore")  # litellm and its pydantic models warn of themselves
@pytest.mark.parametrize("is_served", [True, False])
def test_litellm_has_the_text_too(is_served: bool, rig: ClientRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    rig.routes = {"writer": WRITER} if is_served else {}

    def writer(_: Any) -> dict[str, Any]:
        fields = {"api_base": f"{rig.hosted.url}/v1", "api_key": "hosted", "max_retries": 0}
        litellm.completion("openai/base", CHAT, **fields)
        litellm.completion(model="openai/base", messages=CHAT, **fields)
        return {"out": ""}

    rig.recorded(lambda app: app.invoke({}), graph_of(writer=writer), redirected=True)
    bodies = (rig.ours if is_served else rig.hosted).asked
    assert [[(m["role"], m["content"]) for m in body["messages"]] for body in bodies] == [SENT] * 2


def test_another_nodes_call_and_a_call_outside_an_episode_are_as_the_app_wrote_them(rig: ClientRig) -> None:
    def call(_: Any) -> dict[str, Any]:
        langchain(rig).invoke(CHAT)
        return {"out": ""}

    rig.routes = {}
    rig.recorded(lambda app: app.invoke({}), graph_of(reader=call), redirected=True)
    langchain(rig).invoke(CHAT)
    assert [body["messages"][0]["content"] for body in rig.hosted.asked] == [OLD, OLD]


@pytest.mark.parametrize(
    "call",
    [
        lambda rig: langchain(rig).invoke("hello"),
        lambda rig: langchain(rig).invoke(CHAT[1:]),
        lambda rig: openai_sync(rig, messages=CHAT[1:]),
    ],
)
def test_a_call_that_begins_with_no_system_message_is_refused_also_where_the_app_catches_it(
    call: Callable[[ClientRig], Any], rig: ClientRig
) -> None:
    def writer(_: Any) -> dict[str, Any]:
        with contextlib.suppress(Exception):
            call(rig)
        return {"out": ""}

    with contextlib.suppress(Exception):  # a run without a recorded call has no trajectory
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=writer), redirected=True)
    assert rig.ours.asked == rig.hosted.asked == []
    assert rig.routing is not None
    assert isinstance(rig.routing.refusal, GraphError)
    assert str(rig.routing.refusal).startswith("prompts: a call of node 'writer' begins with no system message")
