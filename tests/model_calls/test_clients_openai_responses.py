"""Owns: a node's calls with the openai package's responses are recorded as its actions, and redirected.

- Every way to call gives the caller the same: types, texts, tool calls, statuses, and the kinds of a stream's events.
- The span has what the call had; redirected, the action has the engine's exact tokens and is trainable.
- An input becomes the chat that it stands for; what has no counterpart is refused by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from support.client_rig import ClientRig, client_rig, graph_of
from support.fake_vllm import Answer, calls_to_text, id_to_logprob, text_to_ids
from support.hosted_apis import JSON_TEXT, TEXT, HostedApis

from marft_bridge.common.errors import GraphError
from trace_store import conventions as names
from trace_store.records import Action

TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    "strict": False,
}


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


def client_of(rig: ClientRig) -> OpenAI:
    return OpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0)


def plain(answer: Any) -> Any:
    """An answer as far as it may not depend on who answered."""
    if isinstance(answer, Response):
        items = [
            (type(item).__name__, item.status, getattr(item, "name", None), getattr(item, "arguments", None))
            for item in answer.output
        ]
        parsed = getattr(answer, "output_parsed", None)
        return [type(answer).__name__, answer.status, answer.output_text, items, str(parsed), answer.error]
    events = list(answer)
    kinds = [kind for kind, _ in itertools.groupby((type(event).__name__, event.type) for event in events)]
    texts = "".join(event.delta for event in events if event.type.endswith(".delta"))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [kinds, texts, plain(events[-1].response)]


def helper(client: OpenAI) -> Any:
    with client.responses.stream(model="base", input="hello") as stream:
        kinds = [kind for kind, _ in itertools.groupby(event.type for event in stream)]
        return [kinds, plain(stream.get_final_response())]


SYNC: dict[str, Callable[[OpenAI], Any]] = {
    "create": lambda c: plain(c.responses.create(model="base", input="hello")),
    "tools": lambda c: plain(c.responses.create(model="base", input="hello", tools=[TOOL])),
    "stream": lambda c: plain(c.responses.create(model="base", input="hello", stream=True)),
    "streamed tools": lambda c: plain(c.responses.create(model="base", input="hello", stream=True, tools=[TOOL])),
    "parse": lambda c: plain(c.responses.parse(model="base", input="hello", text_format=Verdict)),
    "helper": helper,
    "raw": lambda c: plain(c.responses.with_raw_response.create(model="base", input="hello").parse()),
}


async def _stream(client: AsyncOpenAI) -> Any:
    return plain([event async for event in await client.responses.create(model="base", input="hello", stream=True)])


async def _create(client: AsyncOpenAI) -> Any:
    return plain(await client.responses.create(model="base", input="hello"))


async def _parse(client: AsyncOpenAI) -> Any:
    return plain(await client.responses.parse(model="base", input="hello", text_format=Verdict))


async def _helper(client: AsyncOpenAI) -> Any:
    async with client.responses.stream(model="base", input="hello") as stream:
        return plain(await stream.get_final_response())


ASYNC: dict[str, Callable[[AsyncOpenAI], Any]] = {
    "create": _create,
    "stream": _stream,
    "parse": _parse,
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
    assert action.finish_reason == ("stop" if isinstance(answer, str) else "tool_calls")


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
        async with AsyncOpenAI(base_url=f"{rig.hosted.url}/v1", api_key="hosted", max_retries=0) as client:
            return {"out": await ASYNC[how](client)}

    check_ways(rig, rig.run_async, node)


EARLIER: Any = [
    {"role": "developer", "content": "be short"},
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"word": "owl"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a bird"},
]


def test_a_span_has_what_the_call_had(rig: ClientRig) -> None:
    fields: Any = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 77, "instructions": "obey"}

    def node(_: Any) -> Any:
        client = client_of(rig)
        return {"out": client.responses.create(model="base", input=EARLIER, tools=[TOOL], **fields).id}

    _, trajectory = rig.trajectory(lambda app: app.invoke({}), graph_of(writer=node))
    (span,) = rig.chat_spans()
    attributes = span.attributes
    prompt = json.loads(attributes[names.INPUT_MESSAGES])
    call = {"type": "tool_call", "name": "look_up", "arguments": {"word": "owl"}}
    assert [(message["role"], message["parts"]) for message in prompt] == [
        ("system", [{"type": "text", "content": "obey"}]),
        ("system", [{"type": "text", "content": "be short"}]),
        ("user", [{"type": "text", "content": "hello"}]),
        ("assistant", [{"type": "text", "content": "I look"}, call | {"id": "c1"}]),
        ("tool", [{"type": "tool_call_response", "id": "c1", "response": "a bird"}]),
    ]
    (answer,) = json.loads(attributes[names.OUTPUT_MESSAGES])
    assert answer["parts"] == [call | {"id": "call_1"}]
    expected = {
        names.PROVIDER: "openai",
        names.REQUEST_MODEL: "base",
        names.RESPONSE_MODEL: "base",
        names.RESPONSE_ID: "resp_1",
        names.REQUEST_TEMPERATURE: 0.5,
        names.REQUEST_TOP_P: 0.9,
        names.REQUEST_MAX_TOKENS: 77,
        names.FINISH_REASONS: ["tool_calls"],
        names.USAGE_INPUT_TOKENS: 7,
        names.USAGE_OUTPUT_TOKENS: 5,
        names.FORMAT_VALID: True,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert set(trajectory.episode.lineage) == {"tools/writer", "tool/writer/look_up"}


def test_an_input_becomes_the_chat_that_it_stands_for(rig: ClientRig) -> None:
    schema = {"type": "object", "properties": {"grade": {"type": "integer"}}}
    text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": schema, "strict": True}}

    def node(_: Any) -> Any:
        client_of(rig).responses.create(
            model="base",
            input=EARLIER,
            instructions="obey",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "look_up"},
            text=text,
            max_output_tokens=50,
        )
        return {}

    rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    (body,) = rig.ours.asked
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "owl"}'}}
    assert body["messages"] == [
        {"role": "system", "content": "obey"},
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a bird"},
    ]
    assert body["tools"] == [
        {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}}
    ]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look_up"}}
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "schema": schema, "strict": True},
    }
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (50, 0.7, 1.0)


def test_an_answer_that_goes_into_the_next_call_is_a_dependency(rig: ClientRig) -> None:
    """By the id of the message, and by that of the tool call."""

    def first(_: Any) -> Any:
        response = client_of(rig).responses.create(model="base", input="hello")
        return {"out": [{"role": "user", "content": "hello"}, *(item.model_dump() for item in response.output)]}

    def second(state: Any) -> Any:
        return {"out": client_of(rig).responses.create(model="base", input=state["out"]).id}

    for redirected in False, True:
        rig.routes = {"writer": rig.routes["writer"], "judge": rig.routes["writer"]}
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=first, judge=second), redirected=redirected)
        one, two = rig.chat_spans()
        assert two.attributes[names.SAW_ANSWERS] == [one.span_id]


def test_an_answer_that_is_cut_says_so(rig: ClientRig) -> None:
    def node(_: Any) -> Any:
        client = client_of(rig)
        whole = client.responses.create(model="base", input="hello", max_output_tokens=8)
        *_, last = client.responses.create(model="base", input="hello", max_output_tokens=8, stream=True)
        responses: Any = [whole, getattr(last, "response", None)]
        return {"out": [(r.status, r.incomplete_details.reason, r.output_text) for r in responses]}

    result, actions = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert result["out"] == [("incomplete", "max_output_tokens", "one two ")] * 2
    assert [action.finish_reason for action in actions] == ["length"] * 2


@pytest.mark.parametrize("redirected", [False, True])
def test_a_failed_request_raises_the_packages_error(rig: ClientRig, redirected: bool) -> None:
    rig.ours.fail_next = rig.hosted.fail_next = 1

    def node(_: Any) -> Any:
        with pytest.raises(openai.InternalServerError, match="engine error"):
            client_of(rig).responses.create(model="base", input="hello")
        return {}

    _, (action,) = rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=redirected)
    assert (action.untrainable_reason or "").startswith("the call failed: InternalServerError")


PICTURE: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"input": PICTURE}, "a message with 'input_image'"),
    "files": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "a message with 'input_file'"),
    "reasoning": ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "an input of the type 'reasoning'"),
    "references": ({"input": [{"type": "item_reference", "id": "x"}]}, "an input of the type 'item_reference'"),
    "web search": ({"tools": [{"type": "web_search"}]}, "binds 'web_search', a tool that only a hosted service runs"),
    "earlier responses": ({"previous_response_id": "resp_0"}, "'previous_response_id'"),
    "conversations": ({"conversation": "conv_0"}, "'conversation'"),
    "the background": ({"background": True}, "'background'"),
    "stored prompts": ({"prompt": {"id": "p"}}, "'prompt'"),
    "limits on tools": ({"max_tool_calls": 3}, "'max_tool_calls'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_served_model_cannot_do_is_refused_by_name(rig: ClientRig, what: str) -> None:
    fields, wish = REFUSED[what]
    node = lambda _: client_of(rig).responses.create(**({"model": "base", "input": "hello"} | fields))  # noqa: E731
    with pytest.raises(GraphError, match="node 'writer'") as caught:
        rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
    assert wish in str(caught.value)
    assert "\n" not in str(caught.value)
    assert rig.ours.asked == rig.hosted.asked == []
