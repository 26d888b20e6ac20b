"""Owns: a node's calls with the anthropic package are recorded as its actions, and redirected.

- Every way to call gives the caller the same: types, blocks, stop reasons, and the kinds of a stream's events.
- The span has what the call had; redirected, the action has the engine's exact tokens and is trainable.
- A request becomes the chat that it stands for; what has no counterpart is refused by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from pydantic import BaseModel
from support import fake_vllm
from support.client_rig import WRITER, ClientRig, client_rig, graph_of
from support.fake_vllm import Answer, calls_to_text, id_to_logprob, text_to_ids
from support.hosted_apis import JSON_TEXT, TEXT, HostedApis

from marft_bridge.common.errors import GraphError, ServingError
from marft_bridge.model_calls.scripted_answer import text_to_route
from trace_store import conventions as names
from trace_store.records import Action

HELLO: Any = {"model": "base", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
OWL_CALL = {"type": "tool_call", "name": "look_up", "arguments": {"word": "owl"}}
TOOL: Any = {"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}


class Verdict(BaseModel):
    grade: int
    why: str


def scripted(body: dict[str, Any]) -> Answer:
    """What the hosted stand-in says too."""
    if body.get("tools"):
        return [("look_up", {"word": "owl"})]
    return JSON_TEXT if body.get("response_format") else TEXT


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ClientRig]:
    with client_rig(tmp_path, HostedApis()) as rig:
        rig.ours.answer = scripted
        yield rig


def client_of(rig: ClientRig, **options: Any) -> Anthropic:
    return Anthropic(base_url=rig.hosted.url, api_key="hosted", **({"max_retries": 0} | options))


def plain(answer: Any) -> Any:
    """An answer as far as it may not depend on who answered."""
    if isinstance(answer, BaseModel):
        fields = answer.model_dump(mode="json", include={"type", "role", "content", "stop_reason", "stop_sequence"})
        for block in fields["content"]:
            block.pop("id", None)
        return [type(answer).__name__, fields, [type(block).__name__ for block in answer.content]]  # type: ignore[attr-defined]
    events = list(answer)
    kinds = [kind for kind, _ in itertools.groupby((type(event).__name__, event.type) for event in events)]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    text = "".join(getattr(delta, "text", "") + getattr(delta, "partial_json", "") for delta in deltas)
    return [kinds, text, [event.delta.stop_reason for event in events if event.type == "message_delta"]]


def helper(client: Anthropic) -> Any:
    with client.messages.stream(**HELLO) as stream:
        return ["".join(stream.text_stream), plain(stream.get_final_message())]


def helper_events(client: Anthropic) -> Any:
    with client.messages.stream(**HELLO, tools=[TOOL]) as stream:
        kinds = [kind for kind, _ in itertools.groupby(event.type for event in stream)]
        return [kinds, plain(stream.get_final_message())]


def streaming_response(client: Anthropic) -> Any:
    with client.messages.with_streaming_response.create(**HELLO) as response:
        return plain(response.parse())


def context_manager(client: Anthropic) -> Any:
    with client.messages.create(**HELLO, stream=True) as stream:
        return plain(stream)


def with_middleware(client: Anthropic) -> Any:
    def count(request: Any, call_next: Any) -> Any:
        counted.append(request)
        return call_next(request)

    counted: list[Any] = []
    middle = client.with_options(middleware=[count])
    return [plain(middle.messages.create(**HELLO)), len(counted)]


SYNC: dict[str, Callable[[Anthropic], Any]] = {
    "create": lambda c: plain(c.messages.create(**HELLO)),
    "tools": lambda c: plain(c.messages.create(**HELLO, tools=[TOOL])),
    "stream": lambda c: plain(c.messages.create(**HELLO, stream=True)),
    "streamed tools": lambda c: plain(c.messages.create(**HELLO, stream=True, tools=[TOOL])),
    "context manager": context_manager,
    "helper": helper,
    "helper's events": helper_events,
    "parse": lambda c: [(m := c.messages.parse(**HELLO, output_format=Verdict)).parsed_output, m.stop_reason],
    "raw": lambda c: plain(c.messages.with_raw_response.create(**HELLO).parse()),
    "streaming response": streaming_response,
    "beta": lambda c: plain(c.beta.messages.create(**HELLO)),
    "middleware": with_middleware,
}


async def _stream(client: AsyncAnthropic) -> Any:
    return plain([event async for event in await client.messages.create(**HELLO, stream=True)])


async def _create(client: AsyncAnthropic) -> Any:
    return plain(await client.messages.create(**HELLO))


async def _helper(client: AsyncAnthropic) -> Any:
    async with client.messages.stream(**HELLO) as stream:
        return ["".join([text async for text in stream.text_stream]), plain(await stream.get_final_message())]


ASYNC: dict[str, Callable[[AsyncAnthropic], Any]] = {"create": _create, "stream": _stream, "helper": _helper}


def check_tokens(action: Action, body: dict[str, Any]) -> None:
    """The action is what our server was asked and sampled, worked out from its answer."""
    answer = scripted(body)
    expected = text_to_ids(answer if isinstance(answer, str) else calls_to_text(answer))
    assert (action.node, action.trainable, action.untrainable_reason) == ("writer", True, None)
    assert action.prompt_ids == tuple(json.dumps(body["messages"]).encode())
    assert action.sampled_ids == tuple(expected)
    assert action.logprobs == tuple(id_to_logprob(token) for token in expected)
    assert (action.model, action.adapter, action.adapter_version) == ("writer@3", "writer@3", 3)
    assert (action.max_tokens, action.finish_reason) == (100, "stop" if isinstance(answer, str) else "tool_calls")


def check_ways(rig: ClientRig, run: Callable[[Any], Any], node: Callable[..., Any]) -> None:
    graph = graph_of(writer=node)
    unrecorded = run(graph)["out"]
    recorded, (action,) = rig.recorded(run, graph)
    assert recorded["out"] == unrecorded
    assert (action.node, action.model, action.trainable) == ("writer", "base", False)
    rig.hosted.asked.clear()
    redirected, (action,) = rig.recorded(run, graph, redirected=True)
    assert redirected["out"] == unrecorded
    assert rig.hosted.asked == []
    (body,) = rig.ours.asked
    check_tokens(action, body)


@pytest.mark.parametrize("how", SYNC)
def test_a_sync_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    client = client_of(rig)
    check_ways(rig, lambda app: app.invoke({}), lambda _: {"out": SYNC[how](client)})


@pytest.mark.parametrize("how", ASYNC)
def test_an_async_call_gives_the_caller_the_same_and_the_record_one_action(rig: ClientRig, how: str) -> None:
    async def node(_: Any) -> Any:
        async with AsyncAnthropic(base_url=rig.hosted.url, api_key="hosted", max_retries=0) as client:
            return {"out": await ASYNC[how](client)}

    check_ways(rig, rig.run_async, node)


EARLIER: Any = {
    "model": "base",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
    "stop_sequences": ["zzz"],
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "owl"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a bird"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}


def test_a_span_has_what_the_call_had(rig: ClientRig) -> None:
    _, trajectory = rig.trajectory(
        lambda app: app.invoke({}),
        graph_of(writer=lambda _: {"out": client_of(rig).messages.create(**EARLIER).id}),
    )
    (span,) = rig.chat_spans()
    attributes = span.attributes
    prompt = json.loads(attributes[names.INPUT_MESSAGES])
    assert [(message["role"], message["parts"]) for message in prompt] == [
        ("system", [{"type": "text", "content": "be short"}]),
        ("user", [{"type": "text", "content": "hello"}]),
        ("assistant", [{"type": "text", "content": "I look"}, OWL_CALL | {"id": "c1"}]),
        ("tool", [{"type": "tool_call_response", "id": "c1", "response": "a bird"}]),
        ("user", [{"type": "text", "content": "go on"}]),
    ]
    (answer,) = json.loads(attributes[names.OUTPUT_MESSAGES])
    assert answer["parts"] == [OWL_CALL | {"id": "toolu_1"}]
    expected = {
        names.PROVIDER: "anthropic",
        names.REQUEST_MODEL: "base",
        names.RESPONSE_MODEL: "base",
        names.RESPONSE_ID: "msg_1",
        names.REQUEST_MAX_TOKENS: 50,
        names.REQUEST_STOP: ["zzz"],
        names.FINISH_REASONS: ["tool_calls"],
        names.USAGE_INPUT_TOKENS: 7,
        names.USAGE_OUTPUT_TOKENS: 5,
        names.FORMAT_VALID: True,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert set(trajectory.episode.lineage) == {"tools/writer", "tool/writer/look_up"}


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_of_events_is_recorded_as_the_message_that_it_makes(rig: ClientRig, tools: Any) -> None:
    options: Any = {"tools": tools} if tools else {}
    node = lambda _: {"out": len(list(client_of(rig).messages.create(**HELLO, stream=True, **options)))}  # noqa: E731
    rig.recorded(lambda app: app.invoke({}), graph_of(writer=node))
    (span,) = rig.chat_spans()
    (answer,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
    assert answer["parts"] == ([OWL_CALL | {"id": "toolu_1"}] if tools else [{"type": "text", "content": TEXT}])
    assert (span.attributes[names.USAGE_INPUT_TOKENS], span.attributes[names.USAGE_OUTPUT_TOKENS]) == (7, 5)


def test_a_request_becomes_the_chat_that_it_stands_for(rig: ClientRig) -> None:
    choice = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    node = lambda _: {"out": client_of(rig).messages.create(**EARLIER, tool_choice=choice).id}  # noqa: E731
    rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    (body,) = rig.ours.asked
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "owl"}'}}
    assert body["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a bird"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look_up"}}
    assert body["parallel_tool_calls"] is False
    assert (body["stop"], body["max_tokens"], body["temperature"], body["top_p"]) == (["zzz"], 50, 0.7, 1.0)


def test_how_an_answer_ended_is_said_in_anthropics_words(rig: ClientRig) -> None:
    def node(_: Any) -> Any:
        client = client_of(rig)
        asks: Any = [HELLO | {"max_tokens": 8}, HELLO | {"stop_sequences": ["three"]}]
        answers = [client.messages.create(**fields) for fields in asks]
        for fields in asks:
            with client.messages.stream(**fields) as stream:
                answers.append(stream.get_final_message())
        return {"out": [(a.stop_reason, a.stop_sequence, a.content[0].text, a.usage.output_tokens) for a in answers]}  # type: ignore[union-attr]

    result, _ = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    cut, stopped = ("max_tokens", None, "one two ", 8), ("stop_sequence", "three", "one two ", 13)
    assert result["out"] == [cut, stopped] * 2


def test_a_tools_result_in_the_next_call_is_a_dependency(rig: ClientRig) -> None:
    def first(_: Any) -> Any:
        answer = client_of(rig).messages.create(**HELLO, tools=[TOOL])
        return {"out": [block.model_dump() for block in answer.content]}

    def second(state: Any) -> Any:
        result = {"type": "tool_result", "tool_use_id": state["out"][0]["id"], "content": "a bird"}
        messages: Any = [
            *HELLO["messages"],
            {"role": "assistant", "content": state["out"]},
            {"role": "user", "content": [result]},
        ]
        return {"out": client_of(rig).messages.create(**HELLO | {"messages": messages}).id}

    for redirected in False, True:
        rig.routes = {"writer": WRITER, "judge": WRITER}
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=first, judge=second), redirected=redirected)
        one, two = rig.chat_spans()
        assert two.attributes[names.SAW_TOOL_RESULTS] == [one.span_id]


@pytest.mark.parametrize("redirected", [False, True])
def test_a_failed_request_raises_the_packages_error_and_is_retried_by_it(rig: ClientRig, redirected: bool) -> None:
    rig.ours.fail_next = rig.hosted.fail_next = 2

    def node(_: Any) -> Any:
        with pytest.raises(anthropic.InternalServerError, match="engine error"):
            client_of(rig).messages.create(**HELLO)
        return {"out": client_of(rig, max_retries=2).messages.create(**HELLO).id}

    _, (failed, fine) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
    assert (failed.untrainable_reason or "").startswith("the call failed: InternalServerError")
    assert fine.trainable is redirected


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_without_usable_tokens_fails_the_call_and_is_not_retried(
    rig: ClientRig, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = fake_vllm._choice
    monkeypatch.setattr(fake_vllm, "_choice", lambda *parts: choice(*parts) | {"token_ids": None})

    def node(_: Any) -> Any:
        answer: Any = client_of(rig, max_retries=2).messages.create(**HELLO, stream=streamed)
        return {"out": len(list(answer))}

    with pytest.raises(ServingError, match="malformed answer of the model server to node 'writer'"):
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert len(rig.ours.asked) == 1


def test_a_stream_that_is_left_early_is_no_action_to_train_on(rig: ClientRig) -> None:
    rig.routes = {"writer": replace(WRITER, max_tokens=5000)}
    rig.ours.answer = lambda _: "long " * 500

    def node(_: Any) -> Any:
        with client_of(rig).messages.stream(**HELLO | {"max_tokens": 5000}) as stream:
            next(iter(stream.text_stream))
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert not action.trainable
    assert rig.chat_spans()[0].status_message == "StreamClosedError: the stream was closed before its end"


def test_a_fixed_text_answers_without_a_server(rig: ClientRig) -> None:
    rig.routes = {"writer": text_to_route("always this")}

    def node(_: Any) -> Any:
        client = client_of(rig)
        with client.messages.stream(**HELLO) as stream:
            return {"out": [client.messages.create(**HELLO).content[0].text, "".join(stream.text_stream)]}  # type: ignore[union-attr]

    result, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert result["out"] == ["always this"] * 2
    assert (rig.ours.asked, rig.hosted.asked) == ([], [])
    assert [action.trainable for action in actions] == [False] * 2


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": (user({"type": "image", "source": {"type": "url", "url": "http://x"}}), "a message with 'image'"),
    "documents": (user({"type": "document", "source": {"type": "text", "data": "x"}}), "a message with 'document'"),
    "images of tools": (
        user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "a message with 'image'",
    ),
    "thoughts": (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]}]},
        "a message with 'thinking'",
    ),
    "thinking budgets": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking'"),
    "web search": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "binds 'web_search_20250305', a tool that only a hosted service runs",
    ),
    "containers": ({"container": "c"}, "'container'"),
    "unknown": ({"extra_body": {"magic": 1}}, "'magic'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_served_model_cannot_do_is_refused_by_name(rig: ClientRig, what: str) -> None:
    fields, wish = REFUSED[what]
    node = lambda _: client_of(rig).messages.create(**(HELLO | fields))  # noqa: E731
    with pytest.raises(GraphError, match="node 'writer'") as caught:
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert wish in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rig.ours.asked == rig.hosted.asked == []
