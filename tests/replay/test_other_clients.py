"""Owns: calls of the packages openai, anthropic and litellm are given their recorded answers in the package's own form.

What the app gets of a replayed call is what it got, whole or streamed, sync or async; the provider is gone by then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import anthropic
import openai
import pytest
from langgraph.graph import START, StateGraph
from support.fake_vllm import FakeVllm, running
from support.hosted_apis import HostedApis
from support.replay_rig import differences, record_runs, replay_all

QUESTION: Any = [{"role": "user", "content": "Count to four."}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object"}}}
]


class State(TypedDict, total=False):
    out: Any


def graph_of(node: Callable[..., Any]) -> Any:
    graph = StateGraph(State)
    graph.add_node("writer", node)
    graph.add_edge(START, "writer")
    return graph.compile()


@pytest.fixture
def chat_url() -> Iterator[str]:
    server = FakeVllm()
    server.adapters["gpt"] = "hosted"
    server.auto_tools = True
    server.answer = lambda body: [("look_up", {"of": "owls"})] if body.get("tools") else "one two"
    with running(server):
        yield f"{server.url}/v1"


def check(node: Callable[[State], Any], tmp_path: Path, expected: Any, *, is_async: bool = False) -> None:
    graph = graph_of(node)
    runs = record_runs(graph, [{"out": None}], tmp_path, is_async=is_async)
    assert runs[0].output["out"] == expected
    replayed = replay_all(graph, runs)
    assert differences(replayed) == [None]
    assert replayed[0].call_count == 1


@pytest.mark.parametrize("kind", ["whole", "stream", "tools", "async", "async stream"])
def test_chat_completions(kind: str, chat_url: str, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=chat_url, api_key="x", max_retries=0)

    def whole(_: State) -> State:
        return {"out": client.chat.completions.create(model="gpt", messages=QUESTION).choices[0].message.content}

    def stream(_: State) -> State:
        with client.chat.completions.create(model="gpt", messages=QUESTION, stream=True) as chunks:
            return {"out": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)}

    def tools(_: State) -> State:
        message = client.chat.completions.create(model="gpt", messages=QUESTION, tools=TOOLS).choices[0].message
        call: Any = (message.tool_calls or [])[0]
        return {"out": [call.function.name, call.function.arguments]}

    async def call_async(_: State) -> State:
        async with openai.AsyncOpenAI(base_url=chat_url, api_key="x", max_retries=0) as own:
            return {
                "out": (await own.chat.completions.create(model="gpt", messages=QUESTION)).choices[0].message.content
            }

    async def stream_async(_: State) -> State:
        async with openai.AsyncOpenAI(base_url=chat_url, api_key="x", max_retries=0) as own:
            chunks = await own.chat.completions.create(model="gpt", messages=QUESTION, stream=True)
            return {"out": "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])}

    nodes: dict[str, Callable[[State], Any]] = {
        "whole": whole, "stream": stream, "tools": tools, "async": call_async, "async stream": stream_async
    }  # fmt: skip
    expected = ["look_up", '{"of": "owls"}'] if kind == "tools" else "one two"
    with client:
        check(nodes[kind], tmp_path, expected, is_async=kind.startswith("async"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("package", ["responses", "anthropic"])
def test_other_apis(package: str, stream: bool, tmp_path: Path) -> None:
    with (
        running(HostedApis()) as hosted,
        openai.OpenAI(base_url=f"{hosted.url}/v1", api_key="x", max_retries=0) as client,
        anthropic.Anthropic(base_url=hosted.url, api_key="x", max_retries=0) as claude,
    ):

        def responses(_: State) -> State:
            if not stream:
                return {"out": client.responses.create(model="gpt", input="Count to four.").output_text}
            events: Any = client.responses.create(model="gpt", input="Count to four.", stream=True)
            return {"out": "".join(event.delta for event in events if event.type == "response.output_text.delta")}

        def messages(_: State) -> State:
            fields: Any = {"model": "claude", "max_tokens": 20, "messages": QUESTION}
            if not stream:
                content: Any = claude.messages.create(**fields).content[0]
                return {"out": content.text}
            with claude.messages.stream(**fields) as parts:
                return {"out": "".join(parts.text_stream)}

        check(responses if package == "responses" else messages, tmp_path, "one two three four")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # litellm leaves an event loop of its own to the collector
def test_litellm(chat_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched when litellm is imported
    import litellm

    def whole(_: State) -> State:
        reply: Any = litellm.completion(model="openai/gpt", messages=QUESTION, api_base=chat_url, api_key="x")
        return {"out": reply.choices[0].message.content}

    async def whole_async(_: State) -> State:
        reply: Any = await litellm.acompletion(model="openai/gpt", messages=QUESTION, api_base=chat_url, api_key="x")
        return {"out": reply.choices[0].message.content}

    (tmp_path / "sync").mkdir()
    check(whole, tmp_path / "sync", "one two")
    (tmp_path / "async").mkdir()
    check(whole_async, tmp_path / "async", "one two", is_async=True)
    gc.collect()  # here, and not in whatever test comes next, which does not ignore it


def test_a_changed_prompt_of_another_client_is_named_and_not_sent(chat_url: str, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=chat_url, api_key="x", max_retries=2) as client:

        def asks(text: str) -> Callable[[State], State]:
            messages: Any = [{"role": "user", "content": text}]
            return lambda _: {
                "out": client.chat.completions.create(model="gpt", messages=messages).choices[0].message.content
            }

        runs = record_runs(graph_of(asks("Count to four.")), [{"out": None}], tmp_path, is_async=False)
        (changed,) = differences(replay_all(graph_of(asks("Count to five.")), runs))
    assert changed == ('writer, call 1: message 0 (user) differs at word 2: recorded "four.", now "five."')


def test_another_option_of_another_client_is_named(chat_url: str, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=chat_url, api_key="x", max_retries=0) as client:

        def asks(temperature: float) -> Callable[[State], State]:
            def ask(_: State) -> State:
                answer = client.chat.completions.create(model="gpt", messages=QUESTION, temperature=temperature)
                return {"out": answer.choices[0].message.content}

            return ask

        runs = record_runs(graph_of(asks(0.0)), [{"out": None}], tmp_path, is_async=False)
        assert differences(replay_all(graph_of(asks(0.0)), runs)) == [None]
        (changed,) = differences(replay_all(graph_of(asks(1.9)), runs))
    assert changed == 'writer, call 1: it asks its model for another temperature: recorded "0.0", now "1.9"'


def test_two_calls_at_once_of_another_client(chat_url: str, tmp_path: Path) -> None:
    async def asks_twice(_: State) -> State:
        async with openai.AsyncOpenAI(base_url=chat_url, api_key="x", max_retries=0) as own:
            create: Any = own.chat.completions.create
            replies = await asyncio.gather(*(create(model="gpt", messages=QUESTION) for _ in range(2)))
            return {"out": [reply.choices[0].message.content for reply in replies]}

    graph = graph_of(asks_twice)
    runs = record_runs(graph, [{"out": None}], tmp_path)
    assert differences(replay_all(graph, runs)) == [None]
