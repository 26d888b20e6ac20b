"""Owns: what a client asks of its model and what its model says are read alike, whichever form the client speaks.

- Every field of a request, of any value, reaches the served model, is decided and said, or is refused by name.
- What goes into `extra_body` means the same through the openai package as through LangChain.
- A refusal is a text, by every way to answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from support.client_rig import WRITER, ClientRig, client_rig, graph_of
from support.fake_vllm import FakeVllm

from marft_bridge.common.errors import GraphError
from marft_bridge.ingest.messages import to_message
from marft_bridge.live.wire import CHAT, Answer, body_to_engine
from marft_bridge.model_calls.clients.anthropic_messages import AnthropicMessages
from marft_bridge.model_calls.clients.openai_chat import OpenAIChat
from marft_bridge.model_calls.clients.openai_responses import OpenAIResponses
from marft_bridge.model_calls.clients.wire import Body, Wire, bytes_to_events
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import make_stand_in
from marft_bridge.model_calls.request_rules import payload_to_routed
from marft_bridge.recording.span_messages import message_to_parts, messages_to_text

HELLO: Any = [{"role": "user", "content": "hello"}]
EXTRAS = ("top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "structured_outputs", "documents", "magic")

# -- requests ------------------------------------------------------------------------------------------------------

WIRES: dict[str, tuple[Wire, Any, Body]] = {
    "chat": (OpenAIChat(), CompletionCreateParamsBase, {"model": "m", "messages": HELLO}),
    "responses": (OpenAIResponses(), ResponseCreateParamsBase, {"model": "m", "input": "hello"}),
    "messages": (AnthropicMessages(), MessageCreateParamsBase, {"model": "m", "messages": HELLO}),
}
VALUES: tuple[Any, ...] = (False, 0, -1, "", [], {}, True, 7, "x", ["x"], {"type": "x"})
# How the answer travels, and hints to the hosted service's cache; what the client itself decides.
_NOT_ASKED = {"model", "messages", "input", "stream_options", "cache_control"}
# Fields that ask for nothing where they are empty or off.
_SAY_NOTHING_WHEN_OFF = {
    *("tools", "tool_choice", "system", "instructions", "stop_sequences", "text", "output_config", "thinking"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "store", "background", "messages"),
}


def route(wire: Wire, body: Body) -> tuple[Any, Any]:
    """The request that the served model gets of a client's, and what is said of it; or how it is refused."""
    try:
        chat = wire.request_to_chat(body, "writer")
        chat.pop("stream", None)
        return payload_to_routed(chat, "writer", WRITER, seed=1, auto_tools=True)
    except (GraphError, TypeError, AttributeError) as error:  # the others: of no type that the field may have
        return None, str(error)


@pytest.mark.parametrize("form", WIRES)
def test_each_field_of_any_value_changes_the_request_or_is_said_or_refused(form: str) -> None:
    wire, parameters, body = WIRES[form]
    unchanged = route(wire, body)
    assert unchanged[0] is not None
    names = {*get_type_hints(parameters), *EXTRAS, "temperature", "top_p", "seed"} - _NOT_ASKED
    assert len(names) > 20
    silent = {
        (name, str(value))
        for name in names
        for value in VALUES
        if route(wire, body | {name: value}) == unchanged
        and not (name in _SAY_NOTHING_WHEN_OFF and (not value or value == -1))
    }
    assert silent == set()


@pytest.mark.parametrize("form", ["responses", "messages"])
@pytest.mark.parametrize("inner", ["format", "verbosity", "effort", "magic"])
def test_no_option_of_the_output_is_lost(form: str, inner: str) -> None:
    wire, _, body = WIRES[form]
    field = "text" if form == "responses" else "output_config"
    value = {"type": "json_schema", "name": "n", "schema": {}} if inner == "format" else "low"
    assert route(wire, body | {field: {inner: value}}) != route(wire, body)


def test_one_call_at_a_time_reaches_the_served_model_from_every_form() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools: dict[str, Body] = {
        "chat": {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False},
        "responses": {"tools": [{"type": "function", **function}], "parallel_tool_calls": False},
        "messages": {
            "tools": [{"name": "f", "input_schema": function["parameters"]}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    }
    for form, (wire, _, body) in WIRES.items():
        payload, said = route(wire, body | tools[form])
        assert (payload["parallel_tool_calls"], said) == (False, [])


@pytest.mark.parametrize("content", ["no such word", [{"type": "text", "text": "no such word"}], None])
def test_a_tools_result_says_that_the_tool_failed(content: Any) -> None:
    def prompt(**fields: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "t", **fields} | ({"content": content} if content else {})
        payload, _ = route(AnthropicMessages(), {"messages": [{"role": "user", "content": [block]}]})
        return payload["messages"]

    assert prompt(is_error=False) == prompt()
    (told,) = prompt(is_error=True)
    assert "Error:" in str(told["content"])
    assert content is None or "no such word" in str(told["content"])


@pytest.mark.parametrize("length", [0, -1, -2])
def test_a_length_below_one_leaves_the_routes_limit(length: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        payload, _ = payload_to_routed({"messages": HELLO, name: length}, "writer", WRITER, seed=1, auto_tools=True)
        assert payload["max_tokens"] == WRITER.max_tokens
    chat = NodeChat(model="m", base_url="http://127.0.0.1:9/v1", api_key="x")
    for model in (Ollama(responses=["a"], num_predict=length), OfOthers(responses=["a"], max_tokens=length)):
        assert make_stand_in(model, chat, "writer").max_tokens is None
    assert make_stand_in(Ollama(responses=["a"], num_predict=5), chat, "writer").max_tokens == 5


class Ollama(FakeListChatModel):
    num_predict: int | None = None


class OfOthers(FakeListChatModel):
    max_tokens: int | None = None


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ClientRig]:
    with client_rig(tmp_path, FakeVllm()) as rig:
        yield rig


def test_an_extra_body_means_the_same_through_the_package_as_through_langchain(
    rig: ClientRig, caplog: pytest.LogCaptureFixture
) -> None:
    extra_body = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"choice": ["a"]}}
    extra_body |= {"top_k": 5, "min_p": 0, "repetition_penalty": 1.1}
    address: Any = {"base_url": f"{rig.hosted.url}/v1", "api_key": "k", "max_retries": 0}
    model = ChatOpenAI(model="base", extra_body=extra_body, **address)

    def by_package(_: Any) -> Any:
        OpenAI(**address).chat.completions.create(model="base", messages=HELLO, extra_body=extra_body)
        return {}

    said: list[list[str]] = []
    for node in (lambda _: {"out": model.invoke("hello").text}, by_package):
        rig.chat._warnings.warned_settings.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "marft_bridge"):
            rig.recorded(lambda app: app.invoke({}), graph_of(writer=node), redirected=True)
        said.append([record.message for record in caplog.records])
    first, second = (
        {name: value for name, value in body.items() if name not in ("seed", "stream")} for body in rig.ours.asked
    )
    assert first == second
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert said[0] == said[1]
    assert "min_p, repetition_penalty, top_k has no effect" in said[0][0]


# -- answers -------------------------------------------------------------------------------------------------------

REFUSAL = "I cannot help with that."


def say_live(*, stream: bool, parts: list[Body]) -> str:
    answer = Answer(body_to_engine(CHAT, {"messages": HELLO, "stream": stream}, "m")[1])
    for part in parts:
        content = json.dumps({"choices": [{"index": 0, ("delta" if stream else "message"): part}]}).encode()
        assert answer.event_to_client(b"data: " + content) if stream else answer.body_to_client(content)
    return str(answer.messages[0]["content"])


def say_recorded(wire: Wire, answer: Body | None) -> str:
    assert answer is not None
    return str(wire.answer_to_result(answer).generations[0][0].text)


def test_a_refusal_is_the_same_text_by_every_way_to_answer() -> None:
    whole: Body = {"role": "assistant", "content": None, "refusal": REFUSAL}
    parts: list[Body] = [{"role": "assistant", "content": ""}, {"refusal": REFUSAL[:9]}, {"refusal": REFUSAL[9:]}]
    chunks: list[Body] = [{"choices": [{"index": 0, "delta": part}]} for part in parts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    item = {"type": "message", "content": [{"type": "refusal", "refusal": REFUSAL}]}
    chat, responses = OpenAIChat(), OpenAIResponses()
    of_langchain = AIMessage("", additional_kwargs={"refusal": REFUSAL})
    texts = {
        "chat": say_recorded(chat, {"choices": [{"index": 0, "finish_reason": "stop", "message": whole}]}),
        "chat stream": say_recorded(chat, chat.events_to_answer(chunks)),
        "responses": say_recorded(responses, {"status": "completed", "output": [item]}),
        "live": say_live(stream=False, parts=[whole]),
        "live stream": say_live(stream=True, parts=parts),
        "langchain": message_to_parts(of_langchain)["parts"][0]["content"],
        "langchain as text": json.loads(messages_to_text([of_langchain]))[0]["parts"][0]["content"],
        "ingested": (to_message(whole) or {})["parts"][0]["content"],
        "earlier answer": chat.request_to_messages({"messages": [whole]})[0].text,
        "earlier answer, served": chat.request_to_chat({"messages": [whole]}, "writer")["messages"][0]["content"],
        "served to responses": say_recorded(
            responses, responses.chat_to_answer({"choices": [{"message": whole, "finish_reason": "stop"}]}, {})
        ),
    }
    assert texts == dict.fromkeys(texts, REFUSAL)


def test_a_call_in_the_older_form_is_the_call_that_it_is_in_the_newer() -> None:
    function = {"name": "look_up", "arguments": '{"word": "owl"}'}
    parts: list[Body] = [{"function_call": {"name": "look_up", "arguments": ""}}]
    parts.append({"function_call": {"arguments": function["arguments"]}})
    chunks: list[Body] = [{"choices": [{"index": 0, "delta": part}]} for part in parts]
    chunks[-1]["choices"][0]["finish_reason"] = "function_call"
    whole = {"content": None, "function_call": function}
    chat = OpenAIChat()
    streamed = chat.events_to_answer(chunks)
    assert streamed is not None
    for answer in (streamed, {"choices": [{"index": 0, "message": whole, "finish_reason": "function_call"}]}):
        message: Any = chat.answer_to_result(answer).generations[0][0]
        ((name, arguments),) = [(call["name"], call["args"]) for call in message.message.tool_calls]
        assert (name, arguments) == ("look_up", {"word": "owl"})
    for stream, told in (True, parts), (False, [whole]):
        live = Answer(body_to_engine(CHAT, {"messages": HELLO, "stream": stream}, "m")[1])
        for part in told:
            content = json.dumps({"choices": [{"index": 0, ("delta" if stream else "message"): part}]}).encode()
            assert live.event_to_client(b"data: " + content) if stream else live.body_to_client(content)
        assert live.messages[0]["tool_calls"] == [{"id": None, "function": function}]
        recorded = to_message(live.messages[0])
        assert recorded is not None
        assert (recorded["parts"][0]["name"], recorded["parts"][0]["arguments"]) == ("look_up", {"word": "owl"})


def test_arguments_of_lists_in_lists_without_end_are_a_text_that_the_model_wrote() -> None:
    deep = '{"word": ' + "[" * 3_000
    function = {"name": "look_up", "arguments": deep}
    whole = {"choices": [{"index": 0, "message": {"content": None, "tool_calls": [{"id": "1", "function": function}]}}]}
    message: Any = OpenAIChat().answer_to_result(whole).generations[0][0]
    ((name, arguments),) = [(call["name"], call["args"]) for call in message.message.invalid_tool_calls]
    assert (name, arguments) == ("look_up", deep)
    told = json.dumps(AnthropicMessages().chat_to_answer(whole, {"model": "m", "messages": HELLO}))
    assert json.dumps({"arguments": deep}) in told
    assert bytes_to_events(f"data: {deep}\n\ndata: {{}}\n\n".encode()) == [{}]
