"""Owns: a NodeChat asks the server for what its node's route says, and is a plain ChatOpenAI elsewhere.

- A node has one name, however often it runs a subgraph; a node without a route is refused by name.
- Only a server that may be ours is asked for tokens; several answers in a stream are no action.
- The server is started with a tool parser when the configuration names one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict
from uuid import uuid4

import pytest
from langgraph.graph import START, StateGraph

from marft_bridge.common.errors import GraphError
from marft_bridge.common.node_names import namespace_to_node
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.request_rules import payload_to_routed
from marft_bridge.model_calls.routing import Route, Routing, calling_node, current_routing
from marft_bridge.model_calls.token_capture import (
    ExactTokens,
    add_wire_answer,
    announce_call,
    announced_call,
    capture_tokens,
)
from marft_bridge.recording.span_attributes import tokens_to_attributes
from marft_bridge.serving.vllm_arguments import server_argv
from trace_store import conventions as names

ROUTE = Route("a@1", "a@1", 1, temperature=0.7, max_tokens=64)


class State(TypedDict, total=False):
    seen: list[str]


def in_node(function: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("a", lambda _: {"seen": function()})
    graph.add_edge(START, "a")
    return graph.compile().invoke({})["seen"]


@pytest.mark.parametrize(
    ("namespace", "node"),
    [("", ""), ("a:1", "a"), ("a:1|b:2", "a/b"), ("a:1|3|b:2", "a/b"), ("7:1|b:2", "7/b")],
)
def test_a_namespace_names_its_node(namespace: str, node: str) -> None:
    assert namespace_to_node(namespace) == node


def test_a_node_that_runs_a_subgraph_twice_names_its_nodes_alike() -> None:
    seen: list[str] = []

    def look(state: State) -> State:
        seen.append(calling_node())
        return state

    inner = StateGraph(State)
    inner.add_node("b", look)
    inner.add_edge(START, "b")
    compiled = inner.compile()

    def outer() -> list[str]:
        compiled.invoke({})
        compiled.invoke({})
        return [calling_node()]

    assert in_node(outer) == ["a"]
    assert seen == ["a/b", "a/b"]


@pytest.mark.parametrize(
    ("base_url", "asks"), [(None, False), ("https://api.openai.com/v1", False), ("http://127.0.0.1:1/v1", True)]
)
def test_outside_an_episode_only_a_server_that_may_be_ours_is_asked_for_tokens(base_url: str, asks: bool) -> None:
    payload = NodeChat(model="gpt-4o", base_url=base_url, api_key="k", max_tokens=9)._get_request_payload("hi")
    assert (payload["model"], payload["max_completion_tokens"]) == ("gpt-4o", 9)
    assert (payload.get("logprobs"), payload.get("extra_body")) == (
        (True, {"return_token_ids": True}) if asks else (None, None)
    )


def test_a_node_without_a_route_is_refused_before_anything_is_sent() -> None:
    chat = NodeChat(model="base", base_url="http://127.0.0.1:1/v1", api_key="k")
    token = current_routing.set(Routing({"other": ROUTE}))
    try:
        with pytest.raises(
            GraphError, match="node 'a' calls the served model but has no route; nodes that have one: other"
        ):
            in_node(lambda: chat.invoke("hi"))
    finally:
        current_routing.reset(token)


@pytest.mark.parametrize(("asked", "allowed"), [({}, 64), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 900}, 64)])
def test_a_call_may_be_as_long_as_both_allow(asked: dict[str, int], allowed: int) -> None:
    payload, _ = payload_to_routed({"messages": [], **asked}, "a", ROUTE, 5, auto_tools=True)
    assert (payload["max_tokens"], "max_completion_tokens" in payload) == (allowed, False)
    assert (payload["seed"], payload["temperature"], payload["top_p"], payload["model"]) == (5, 0.7, 1.0, "a@1")


def test_streamed_parts_add_up_and_the_engines_count_is_kept() -> None:
    call = ExactTokens()
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}
    add_wire_answer(
        call, {"id": "c", "model": "a@1", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}}]}
    )
    add_wire_answer(call, {"choices": [{"index": 0, "token_ids": [7, 8], "logprobs": logprobs, "finish_reason": None}]})
    add_wire_answer(call, {"choices": [{"index": 0, "token_ids": [9], "finish_reason": "stop"}]})
    add_wire_answer(call, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
    assert (call.prompt_ids, call.sampled_ids, call.logprobs) == ([1, 2], [7, 8, 9], [-0.5, -0.25])
    assert (call.prompt_tokens, call.completion_tokens, call.finish_reason) == (2, 3, "stop")
    assert (call.response_id, call.model, call.choices) == ("c", "a@1", 1)


def test_several_answers_in_a_stream_have_no_tokens_and_a_reason() -> None:
    call = ExactTokens()
    for index in (0, 1, 0):
        add_wire_answer(call, {"choices": [{"index": index, "token_ids": [7], "logprobs": {"content": []}}]})
    attributes = {key: value for key, value in tokens_to_attributes(call).items() if value is not None}
    assert attributes == {names.UNTRAINABLE: "n=2: one call with several answers"}


def test_the_tokens_of_each_of_several_prompts_go_to_its_own_run() -> None:
    class Listener:
        heard: dict[Any, ExactTokens] = {}  # noqa: RUF012

        def note_exact_tokens(self, run_id: Any, tokens: ExactTokens) -> None:
            self.heard[run_id] = tokens

    first, last = uuid4(), uuid4()
    announce_call(first, Listener())
    announce_call(last, Listener())
    with capture_tokens(first) as tokens:
        tokens.seed = 1
    with capture_tokens(None) as tokens:
        tokens.seed = 2
    announced_call.set(None)
    assert {run: heard.seed for run, heard in Listener.heard.items()} == {first: 1, last: 2}


def test_a_tool_parser_is_named_to_the_server_only_when_it_is_configured() -> None:
    plain = server_argv(ServeOptions(), Path("model"), 1, cpu=True)
    parsing = server_argv(ServeOptions(tool_call_parser="hermes"), Path("model"), 1, cpu=True)
    assert "--enable-auto-tool-choice" not in plain
    assert parsing[parsing.index("--enable-auto-tool-choice") :][:3] == [
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    ]
    with pytest.raises(ValueError, match="tool_call_parser cannot be set on a server that runs already"):
        ServeOptions(attach="http://127.0.0.1:1", tool_call_parser="hermes")
