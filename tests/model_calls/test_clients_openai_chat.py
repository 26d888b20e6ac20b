"""Owns: a node's calls with the openai package's chat completions are recorded as its actions, and redirected.

- Every way to call gives the caller the same, recorded, redirected or neither; streams chunk by chunk.
- The span has what the call had; redirected, the action has the engine's exact tokens and is trainable.
- What the served model cannot do is refused by name; a call that is none of a node is not recorded; none is recorded
  twice.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from support import fake_vllm
from support.client_rig import WRITER, ClientRig, client_rig, graph_of, without_other_recorders
from support.fake_vllm import Answer, FakeVllm, calls_to_text, id_to_logprob, text_to_ids
from support.paths import ROOT

from marft_bridge.common.errors import GraphError, ServingError
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.scripted_answer import text_to_route
from trace_store import conventions as names
from trace_store.records import Action

HELLO: Any = [{"role": "user", "content": "hello"}]
OWL_CALL = {"type": "tool_call", "name": "look_up", "arguments": {"word": "owl"}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


class Verdict(BaseModel):
    grade: int
    why: str


def scripted(body: dict[str, Any]) -> Answer:
    """The same on both servers, so that only the tokens tell who answered."""
    if body.get("tools"):
        return [("look_up", {"word": "owl"})]
    if body.get("response_format"):
        return json.dumps({"grade": 4, "why": "clear"})
    return "one two three four"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ClientRig]:
    hosted = FakeVllm()
    with client_rig(tmp_path, hosted) as rig:
        rig.ours.answer = hosted.answer = scripted
        hosted.auto_tools = True
        yield rig


def client_of(rig: ClientRig, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", **({"max_retries": 0} | options))


def async_client_of(rig: ClientRig, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", **({"max_retries": 0} | options))


def plain(answer: Any) -> Any:
    """An answer with the types that the caller got, as far as it may not depend on who answered."""
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    if isinstance(answer, BaseModel):
        fields = answer.model_dump(mode="json", exclude_unset=True, exclude={"model"}, warnings=False)
        for choice in fields.get("choices") or ():
            for name in ("token_ids", "stop_reason"):  # the provider of these tests is a vLLM too
                assert choice.pop(name, None) is None or "token" not in name
        usage = fields.get("usage")
        return [type(answer).__name__, fields | ({"usage": usage} if usage else {})]
    return answer


def with_raw(client: OpenAI) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="base", messages=HELLO)
    return [type(raw).__name__, raw.status_code, raw.parse()]


def with_raw_stream(client: OpenAI) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="base", messages=HELLO, stream=True)
    return list(raw.parse())


def with_streaming_response(client: OpenAI) -> Any:
    with client.chat.completions.with_streaming_response.create(model="base", messages=HELLO) as response:
        return [type(response).__name__, response.parse()]


def with_lines(client: OpenAI) -> Any:
    with client.chat.completions.with_streaming_response.create(model="base", messages=HELLO, stream=True) as response:
        return [json.loads(line[6:])["object"] for line in response.iter_lines() if line.startswith("data: {")]


def in_context(client: OpenAI) -> Any:
    with client.chat.completions.create(model="base", messages=HELLO, stream=True) as stream:
        return list(stream)


def helper(client: OpenAI) -> Any:
    with client.chat.completions.stream(model="base", messages=HELLO) as stream:
        events = [event.type for event in stream]
        return [events, stream.get_final_completion()]


SYNC: dict[str, Callable[[OpenAI], Any]] = {
    "create": lambda c: c.chat.completions.create(model="base", messages=HELLO),
    "create with all": lambda c: c.chat.completions.create(
        model="base", messages=HELLO, temperature=0.5, max_tokens=100, stop=["zzz"], seed=3, top_p=0.9
    ),
    "logprobs": lambda c: c.chat.completions.create(model="base", messages=HELLO, logprobs=True),
    "tools": lambda c: c.chat.completions.create(model="base", messages=HELLO, tools=[TOOL]),
    "stream": lambda c: list(c.chat.completions.create(model="base", messages=HELLO, stream=True)),
    "stream with usage": lambda c: list(
        c.chat.completions.create(model="base", messages=HELLO, stream=True, stream_options={"include_usage": True})
    ),
    "streamed tools": lambda c: list(
        c.chat.completions.create(model="base", messages=HELLO, stream=True, tools=[TOOL])
    ),
    "parse": lambda c: c.chat.completions.parse(model="base", messages=HELLO, response_format=Verdict),
    "raw": with_raw,
    "raw stream": with_raw_stream,
    "streaming response": with_streaming_response,
    "lines": with_lines,
    "context manager": in_context,
    "helper": helper,
    "options": lambda c: c.with_options(timeout=30).chat.completions.create(model="base", messages=HELLO, timeout=20),
}


async def _all(stream: Any) -> list[Any]:
    return [chunk async for chunk in await stream]


async def _helper(client: AsyncOpenAI) -> Any:
    async with client.chat.completions.stream(model="base", messages=HELLO) as stream:
        events = [event.type async for event in stream]
        return [events, await stream.get_final_completion()]


async def _raw(client: AsyncOpenAI) -> Any:
    raw = await client.chat.completions.with_raw_response.create(model="base", messages=HELLO)
    return [raw.status_code, raw.parse()]


async def _streaming_response(client: AsyncOpenAI) -> Any:
    async with client.chat.completions.with_streaming_response.create(model="base", messages=HELLO) as response:
        return await response.parse()


ASYNC: dict[str, Callable[[AsyncOpenAI], Any]] = {
    "create": lambda c: c.chat.completions.create(model="base", messages=HELLO),
    "tools": lambda c: c.chat.completions.create(model="base", messages=HELLO, tools=[TOOL]),
    "stream": lambda c: _all(c.chat.completions.create(model="base", messages=HELLO, stream=True)),
    "streamed tools": lambda c: _all(
        c.chat.completions.create(model="base", messages=HELLO, stream=True, tools=[TOOL])
    ),
    "parse": lambda c: c.chat.completions.parse(model="base", messages=HELLO, response_format=Verdict),
    "raw": _raw,
    "streaming response": _streaming_response,
    "helper": _helper,
}


def check_tokens(action: Action, body: dict[str, Any]) -> None:
    """The action is what our server was asked and sampled, worked out from its answer."""
    answer = scripted(body)
    expected = text_to_ids(answer if isinstance(answer, str) else calls_to_text(answer))
    assert (action.node, action.trainable, action.untrainable_reason) == ("writer", True, None)
    assert action.prompt_ids == tuple(json.dumps(body["messages"]).encode())
    assert action.sampled_ids == tuple(expected)
    assert action.logprobs == tuple(id_to_logprob(token) for token in expected)
    assert (action.model, action.adapter, action.adapter_version) == ("writer@3", "writer@3", 3)
    assert (action.temperature, action.top_p, action.max_tokens) == (0.7, 1.0, body["max_tokens"])
    assert action.seed == body["seed"]
    assert action.finish_reason == ("stop" if isinstance(answer, str) else "tool_calls")


def check_ways(rig: ClientRig, run: Callable[[Any], Any], node: Callable[..., Any]) -> None:
    """The same to the caller three times, and one action each time but the first."""
    graph = graph_of(writer=node)
    unrecorded = run(graph)["out"]
    recorded, (action,) = rig.recorded(run, graph)
    assert recorded["out"] == unrecorded
    assert (action.node, action.model, action.trainable) == ("writer", "base", False)
    assert action.sampled_ids is None
    rig.hosted.asked.clear()
    redirected, (action,) = rig.recorded(run, graph, redirected=True)
    assert redirected["out"] == unrecorded
    assert rig.hosted.asked == []
    (body,) = rig.ours.asked
    assert body["model"] == "writer@3"
    check_tokens(action, body)


@pytest.mark.parametrize("how", SYNC)
def test_a_sync_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    client = client_of(rig)
    check_ways(rig, lambda app: app.invoke({}), lambda _: {"out": plain(SYNC[how](client))})


@pytest.mark.parametrize("how", ASYNC)
def test_an_async_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    async def node(_: Any) -> Any:
        async with async_client_of(rig) as client:
            return {"out": plain(await ASYNC[how](client))}

    check_ways(rig, rig.run_async, node)


# The span


def test_a_span_has_what_the_call_had(rig: ClientRig) -> None:
    asked = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "owl"}'}}
    earlier: Any = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": "a bird"},
    ]

    def node(_: Any) -> Any:
        client = client_of(rig)
        fields: Any = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_completion_tokens": 77, "stop": "zzz"}
        return {"out": client.chat.completions.create(model="base", messages=earlier, tools=[TOOL], **fields).id}

    _, trajectory = rig.trajectory(lambda app: app.invoke({}), graph_of(writer=node))
    (span,) = rig.chat_spans()
    attributes = span.attributes
    prompt = json.loads(attributes[names.INPUT_MESSAGES])
    assert prompt == [
        {"role": "system", "parts": [{"type": "text", "content": "be short"}]},
        {"role": "user", "parts": [{"type": "text", "content": "hello"}]},
        {"role": "assistant", "parts": [OWL_CALL | {"id": "c1"}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "a bird"}]},
    ]
    (answer,) = json.loads(attributes[names.OUTPUT_MESSAGES])
    assert (answer["role"], answer["parts"]) == ("assistant", [OWL_CALL | {"id": "call-0"}])
    sampled = len(text_to_ids(calls_to_text([("look_up", {"word": "owl"})])))
    expected = {
        names.OPERATION: "chat",
        names.PROVIDER: "openai",
        names.REQUEST_MODEL: "base",
        names.RESPONSE_MODEL: "base",
        names.RESPONSE_ID: "chatcmpl-1",
        names.REQUEST_TEMPERATURE: 0.5,
        names.REQUEST_TOP_P: 0.9,
        names.REQUEST_SEED: 3,
        names.REQUEST_MAX_TOKENS: 77,
        names.REQUEST_STOP: ["zzz"],
        names.FINISH_REASONS: ["tool_calls"],
        names.USAGE_INPUT_TOKENS: len(json.dumps(earlier).encode()),
        names.USAGE_OUTPUT_TOKENS: sampled,
        names.NODE: "writer",
        names.STEP: 1,
        names.FORMAT_VALID: True,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert (span.name, span.status) == ("chat base", "ok")
    assert set(trajectory.episode.lineage) == {"tools/writer", "tool/writer/look_up"}


def test_a_stream_of_chunks_is_recorded_as_the_answer_that_it_makes(rig: ClientRig) -> None:
    text = {"type": "text", "content": "one two three four"}
    for tools, parts in ([], [text]), ([TOOL], [OWL_CALL | {"id": "call-0"}]):
        options: Any = {"tools": tools} if tools else {}
        node = lambda _, options=options: {  # noqa: E731
            "out": len(
                list(client_of(rig).chat.completions.create(model="base", messages=HELLO, stream=True, **options))
            )
        }
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
        (span,) = rig.chat_spans()
        assert json.loads(span.attributes[names.OUTPUT_MESSAGES])[0]["parts"] == parts
        assert span.attributes[names.REQUEST_STREAM] is True


OPEN_TEXT = "one" + "".join(
    chr(point)
    for point in (*range(0x20, 0x300), 0x1680, *range(0x2000, 0x2070), 0x3000, 0xFEFF, 0x1F989)
    if chr(point) not in '"\\'
)
"""All that JSON may hold as it is and that is anywhere taken for space or the end of a line."""


@pytest.mark.parametrize("redirected", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_is_recorded_as_the_client_reads_it_whatever_characters_it_has(
    rig: ClientRig, is_async: bool, redirected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = functools.partial(json.dumps, ensure_ascii=False)
    monkeypatch.setattr(fake_vllm, "json", SimpleNamespace(dumps=dumps, loads=json.loads))
    rig.ours.answer = rig.hosted.answer = lambda _: OPEN_TEXT
    rig.routes = {"writer": replace(WRITER, max_tokens=5000)}
    fields: Any = {"model": "base", "messages": HELLO, "stream": True, "max_tokens": 5000}

    def node(_: Any) -> Any:
        stream = client_of(rig).chat.completions.create(**fields)
        return {"out": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)}

    async def anode(_: Any) -> Any:
        async with async_client_of(rig) as client:
            chunks = await _all(client.chat.completions.create(**fields))
        return {"out": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)}

    result, (action,) = rig.recorded(
        rig.run_async if is_async else lambda app: app.invoke({}),
        graph_of(writer=anode if is_async else node),
        redirected=redirected,
    )
    assert result["out"] == OPEN_TEXT
    assert action.completion == OPEN_TEXT
    assert action.trainable is redirected


def test_a_langchain_call_and_ours_of_the_same_have_the_same_attributes(rig: ClientRig) -> None:
    langchain = ChatOpenAI(model="base", base_url=f"{rig.hosted.url}/v1", api_key="k", temperature=0.5, max_retries=0)
    asks = {
        "langchain": lambda _: {"out": langchain.invoke([("system", "be short"), ("user", "hello")]).text},
        "direct": lambda _: {
            "out": client_of(rig).chat.completions.create(
                model="base",
                temperature=0.5,
                messages=[{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}],
            ).id
        },
    }  # fmt: skip
    attributes = {}
    for how, node in asks.items():
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
        (span,) = rig.chat_spans()
        attributes[how] = {name: value for name, value in span.attributes.items() if name != names.CHECKPOINT_NS}
    for each in attributes.values():  # LangChain's own ids and the like
        for message in each[names.INPUT_MESSAGES] if isinstance(each[names.INPUT_MESSAGES], list) else ():
            message.pop("id", None)
    assert attributes["direct"] == attributes["langchain"]


# Once, and whose


def test_a_call_of_langchain_is_one_span(rig: ClientRig) -> None:
    model = ChatOpenAI(model="base", base_url=f"{rig.hosted.url}/v1", api_key="k", max_retries=0)

    async def node(_: Any) -> Any:
        chunks = [chunk.text async for chunk in model.astream("hello")]
        return {"out": [model.invoke("hello").text, "".join(chunks), *[m.text for m in model.batch(["a", "b"])]]}

    async def close() -> None:
        await model.root_async_client.close()

    for redirected in False, True:
        _, actions = rig.recorded(lambda app: rig.run_async(app, close), graph_of(writer=node), redirected=redirected)
        assert len(actions) == 4
        assert [action.trainable for action in actions] == [redirected] * 4


class OwnModel(BaseChatModel):
    """A chat model of the app's own that uses the package beneath."""

    client: Any

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        answer = self.client.chat.completions.create(model="base", messages=HELLO)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer.choices[0].message.content))])


def test_a_chat_model_of_the_apps_own_is_one_span(rig: ClientRig) -> None:
    model = OwnModel(client=client_of(rig))
    for redirected in False, True:
        _, actions = rig.recorded(
            lambda app: app.invoke({}),
            graph_of(writer=lambda _: {"out": model.invoke("x").text}),
            redirected=redirected,
        )
        assert len(actions) == 1
    assert len(rig.ours.asked) == 1


def test_a_call_between_the_chunks_of_a_langchain_stream_is_a_span_of_its_own(rig: ClientRig) -> None:
    model = ChatOpenAI(model="base", base_url=f"{rig.hosted.url}/v1", api_key="k", max_retries=0)

    def node(_: Any) -> Any:
        chunks = model.stream("hello")
        next(chunks)
        between = client_of(rig).chat.completions.create(model="base", messages=HELLO)
        return {"out": [between.id, len(list(chunks))]}

    _, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
    assert len(actions) == 2


def test_a_call_outside_of_any_graph_run_is_no_action(rig: ClientRig) -> None:
    client = client_of(rig)

    def run(app: Any) -> Any:
        client.chat.completions.create(model="base", messages=HELLO)
        return app.invoke({})

    _, actions = rig.recorded(run, graph_of(writer=lambda _: {"out": 1}))
    assert actions == []


def test_calls_side_by_side_keep_their_nodes(rig: ClientRig) -> None:
    """Two agents in two nodes and several calls of each at once; each call's text names its node."""
    rig.routes = {"writer": WRITER, "judge": replace(WRITER, model="writer@3", adapter="judge@3")}

    def ask(name: str) -> Callable[..., Any]:
        async def node(_: Any) -> Any:
            async with async_client_of(rig) as client:
                prompts = [[{"role": "user", "content": f"{name} {n}"}] for n in range(4)]
                asks = [client.chat.completions.create(model="base", messages=prompt) for prompt in prompts]  # type: ignore[call-overload]
                return {"out": len(await asyncio.gather(*asks))}

        return node

    for redirected in False, True:
        rig.recorded(
            rig.run_async,
            graph_of(writer=ask("writer"), judge=ask("judge")),
            redirected=redirected,
        )
        spans = rig.chat_spans()
        assert len(spans) == 8
        for span in spans:
            text = json.loads(span.attributes[names.INPUT_MESSAGES])[0]["parts"][0]["content"]
            assert text.split()[0] == span.attributes[names.NODE]


def test_two_agents_that_one_node_runs_are_two(rig: ClientRig) -> None:
    def agent(word: str) -> Any:
        def say(_: Any) -> Any:
            answer = client_of(rig).chat.completions.create(model="base", messages=[{"role": "user", "content": word}])
            return {"out": answer.id}

        return graph_of(**{word: say})

    first, second = agent("first"), agent("second")
    _, actions = rig.recorded(
        lambda app: app.invoke({}),
        graph_of(team=lambda _: {"out": [first.invoke({})["out"], second.invoke({})["out"]]}),
    )
    assert [action.node for action in actions] == ["team/first", "team/second"]


def test_a_node_without_a_route_keeps_its_own_model(rig: ClientRig) -> None:
    rig.routes = {"judge": WRITER}
    node = lambda _: {"out": client_of(rig).chat.completions.create(model="base", messages=HELLO).id}  # noqa: E731
    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert (action.model, action.adapter, len(rig.hosted.asked), rig.ours.asked) == ("base", None, 1, [])
    assert rig.routing is not None
    assert rig.routing.unrouted_calls == {"writer": 1}


def test_turned_off_nothing_is_recorded_or_redirected(rig: ClientRig) -> None:
    rig.options = RecordOptions(other_clients=False)
    node = lambda _: {"out": client_of(rig).chat.completions.create(model="base", messages=HELLO).id}  # noqa: E731
    for redirected in False, True:
        _, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
        assert actions == []
    assert (len(rig.hosted.asked), rig.ours.asked) == (2, [])


def methods_of_the_package() -> list[Any]:
    return [
        method
        for client in (OpenAI, AsyncOpenAI)
        for each in client.__mro__
        for name, method in vars(each).items()
        if name in ("request", "_process_response")
    ]


def test_clients_made_before_are_recorded_and_methods_restored(rig: ClientRig) -> None:
    client = client_of(rig)
    create, raw = client.chat.completions.create, client.chat.completions.with_raw_response.create

    def node(_: Any) -> Any:
        assert methods_of_the_package() != before
        return {"out": [create(model="base", messages=HELLO).id, raw(model="base", messages=HELLO).parse().id]}

    with without_other_recorders():
        before = methods_of_the_package()
        _, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
        assert methods_of_the_package() == before
    assert len(actions) == 2
    assert len(before) == 4


@pytest.mark.slow
def test_a_package_that_is_imported_later_is_told_of(tmp_path: Path) -> None:
    program = """
import sys
import marft_bridge
from langgraph.graph import START, MessagesState, StateGraph
from marft_bridge.model_calls.clients import import_hook
seen = []
import_hook.call_when_imported("anthropic", lambda module: seen.append(module.Anthropic))
assert "anthropic" not in sys.modules and seen == []
import anthropic
assert seen == [anthropic.Anthropic], seen
assert import_hook._finder.calls == {}
assert type(anthropic.__loader__).__name__ == "SourceFileLoader" and anthropic.__spec__.loader is anthropic.__loader__
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# What goes wrong


@pytest.mark.parametrize("redirected", [False, True])
def test_a_failed_request_raises_the_packages_error_and_is_no_action_to_train_on(
    rig: ClientRig, redirected: bool
) -> None:
    rig.ours.fail_next = rig.hosted.fail_next = 1

    def node(_: Any) -> Any:
        with pytest.raises(openai.InternalServerError, match="engine error"):
            client_of(rig).chat.completions.create(model="base", messages=HELLO)
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
    assert not action.trainable
    assert (action.untrainable_reason or "").startswith("the call failed: InternalServerError")


@pytest.mark.parametrize("redirected", [False, True])
def test_a_retry_of_the_client_is_one_call(rig: ClientRig, redirected: bool) -> None:
    rig.ours.fail_next = rig.hosted.fail_next = 1
    client = client_of(rig, max_retries=2)
    _, (action,) = rig.recorded(
        lambda app: app.invoke({}),
        graph_of(writer=lambda _: {"out": client.chat.completions.create(model="base", messages=HELLO).id}),
        redirected=redirected,
    )
    assert action.trainable is redirected
    assert len(rig.ours.asked if redirected else rig.hosted.asked) == 2


@pytest.mark.parametrize("redirected", [False, True])
def test_a_stream_that_is_left_early_is_no_action_to_train_on(rig: ClientRig, redirected: bool) -> None:
    rig.ours.answer = rig.hosted.answer = lambda _: "long " * 500  # more than is read from a connection at once

    def node(_: Any) -> Any:
        completions = client_of(rig).chat.completions
        stream = completions.create(model="base", messages=HELLO, stream=True, max_tokens=5000)
        next(iter(stream))
        stream.close()
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
    assert not action.trainable
    (span,) = rig.chat_spans()
    assert (span.status, span.status_message) == ("error", "StreamClosedError: the stream was closed before its end")


def test_a_time_limit_of_the_call_holds_for_the_served_model(rig: ClientRig) -> None:
    release = threading.Event()

    def answer(_: Any) -> Answer:
        release.wait(5)
        return "late"

    rig.ours.answer = answer

    def node(_: Any) -> Any:
        with pytest.raises(openai.APITimeoutError):
            client_of(rig).chat.completions.create(model="base", messages=HELLO, timeout=0.05)
        release.set()
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert "APITimeoutError" in (action.untrainable_reason or "")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_without_usable_tokens_fails_the_call_of_a_trained_node(
    rig: ClientRig, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = fake_vllm._choice
    monkeypatch.setattr(fake_vllm, "_choice", lambda *parts: choice(*parts) | {"token_ids": None})

    def node(_: Any) -> Any:
        answer: Any = client_of(rig, max_retries=2).chat.completions.create(
            model="base", messages=HELLO, stream=streamed
        )
        return {"out": len(list(answer))}

    with pytest.raises(ServingError, match="malformed answer of the model server to node 'writer'"):
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert len(rig.ours.asked) == 1


def test_a_fixed_text_answers_without_a_server(rig: ClientRig) -> None:
    rig.routes = {"writer": text_to_route("always this")}

    def node(_: Any) -> Any:
        client = client_of(rig)
        whole = client.chat.completions.create(model="base", messages=HELLO)
        chunks = client.chat.completions.create(model="base", messages=HELLO, stream=True)
        return {"out": [whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in chunks)]}

    result, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert result["out"] == ["always this"] * 2
    assert (rig.ours.asked, rig.hosted.asked) == ([], [])
    assert [action.untrainable_reason for action in actions] == [
        "node writer was answered by a fixed text, and no model was asked"
    ] * 2


PICTURE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"messages": PICTURE}, "a message with 'image_url'"),
    "sound": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "a message with 'input_audio'"),
    "files": ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "a message with 'file'"),
    "several answers": ({"n": 2}, "n=2 answers of one call"),
    "web search": ({"web_search_options": {}}, "'web_search_options'"),
    "spoken answers": ({"modalities": ["text", "audio"]}, "'modalities'"),
    "functions": ({"functions": [{"name": "f"}]}, "'functions'"),
    "hosted tools": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "binds 'custom'"),
    "predictions": ({"prediction": {"type": "content", "content": "x"}}, "'prediction'"),
    "function messages": ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "of the role 'function'"),
    "unknown": ({"extra_body": {"magic": 1}}, "'magic'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_served_model_cannot_do_is_refused_by_name(rig: ClientRig, what: str) -> None:
    fields, wish = REFUSED[what]
    node = lambda _: client_of(rig).chat.completions.create(**({"model": "base", "messages": HELLO} | fields))  # noqa: E731
    with pytest.raises(GraphError, match="node 'writer'") as caught:
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert wish in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rig.ours.asked == rig.hosted.asked == []


def test_what_has_no_effect_is_said_once(rig: ClientRig, caplog: pytest.LogCaptureFixture) -> None:
    def node(_: Any) -> Any:
        for _ in range(2):
            client_of(rig).chat.completions.create(model="base", messages=HELLO, temperature=0.1, user="me")
        return {}

    rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert [r.message for r in caplog.records if "no effect" in r.message] == [
        "node 'writer': in training its model's temperature, user has no effect; [sampling] decides"
    ]


def test_types_are_the_packages_own(rig: ClientRig) -> None:
    def node(_: Any) -> Any:
        completions = client_of(rig).chat.completions
        whole = completions.create(model="base", messages=HELLO)
        stream = completions.create(model="base", messages=HELLO, stream=True)
        assert type(whole) is ChatCompletion
        assert type(stream) is openai.Stream
        assert {type(chunk) for chunk in stream} == {ChatCompletionChunk}
        return {}

    for redirected in False, True:
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
