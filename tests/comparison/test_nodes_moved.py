"""Owns: stored episodes become figures of what each node did, by variant.

- Lengths, stops, log-probs, tools, tool errors and format validity are the hand-worked ones.
- What the record does not hold is None; a node that a variant does not have is absent.
- An answer is judged against the form that its own request declared, and only against that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import SecretStr
from support.fake_vllm import Answer, FakeVllm, running
from support.reward_rig import example_spans
from support.tiny_trajectory import action, trajectory

from marft_bridge.comparison.nodes import episodes_to_nodes
from marft_bridge.recording.format_check import answer_fits, request_to_format
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import SpanRow, Trajectory
from trace_store.store import TraceStore

ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "op": {"enum": ["+", "-"]}},
    "required": ["x"],
    "additionalProperties": False,
}


def test_the_figures_of_a_node_are_the_hand_worked_ones() -> None:
    """reward_rig's run: planner asks 3 times (4, 2, 5 tokens; search works), worker twice (6, 8; calc fails once)."""
    spans = example_spans()
    game = spans_to_trajectory(spans)
    found = episodes_to_nodes(
        {"after": [game]}, ["planner", "worker", "critic"], {("planner", "after"): (0.25, 3)}, lambda _: spans
    )
    assert set(found) == {"planner", "worker"}
    planner, worker = found["planner"]["after"], found["worker"]["after"]
    assert [planner.calls_per_episode, planner.tokens_mean] == pytest.approx([3.0, 11 / 3])
    assert planner.stop_share == pytest.approx(2 / 3)  # the last one was cut off
    assert (planner.logprob_mean, planner.kl_to_base, planner.kl_actions) == (-0.5, 0.25, 3)
    assert (planner.tools, planner.tool_error_share) == ({"search": 1}, 0.0)
    assert (worker.calls_per_episode, worker.tokens_mean, worker.stop_share) == (2.0, 7.0, 1.0)
    assert (worker.tools, worker.tool_error_share) == ({"calc": 2}, 0.5)
    assert (worker.kl_to_base, worker.kl_actions, worker.format_valid) == (None, 0, None)


def with_attributes(spans: list[SpanRow], **by_span: dict[str, Any]) -> list[SpanRow]:
    return [replace(s, attributes=s.attributes | by_span.get(s.span_id, {})) for s in spans]


def test_tools_are_those_that_the_answers_ask_for_where_answers_are_captured() -> None:
    """The planner asks for two tools at once, of which one never ran; the worker's text looks like a call."""
    calls = [{"name": "search", "args": {}, "id": "1"}, {"name": "delete", "args": {}, "id": "2"}]
    spans = with_attributes(
        example_spans(),
        call1={c.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": "", "tool_calls": calls}])},
        call3={c.OUTPUT_MESSAGES: json.dumps([{"parts": [{"type": "tool_call", "name": "search"}]}])},
        call2={c.OUTPUT_MESSAGES: json.dumps([{"content": '{"tool_calls": [{"name": "calc"}]}', "tool_calls": []}])},
        call4={c.OUTPUT_MESSAGES: "not JSON"},
    )
    found = episodes_to_nodes({"after": [spans_to_trajectory(spans)]}, ["planner", "worker"], {}, lambda _: spans)
    assert found["planner"]["after"].tools == {"search": 2, "delete": 1}
    assert found["worker"]["after"].tools == {}


def test_format_validity_is_the_share_of_the_calls_that_declared_a_format() -> None:
    spans = with_attributes(
        example_spans(), call1={c.FORMAT_VALID: True}, call3={c.FORMAT_VALID: False}, call5={c.FORMAT_VALID: True}
    )
    (side,) = episodes_to_nodes({"after": [spans_to_trajectory(spans)]}, ["planner"], {}, lambda _: spans)[
        "planner"
    ].values()
    assert side.format_valid == pytest.approx(2 / 3)


def test_what_the_record_does_not_hold_is_none() -> None:
    bare = action("planner", sampled_ids=None, logprobs=None, finish_reason=None, sampled_tokens=None, trainable=False)
    silent = trajectory("t2", [], adapters={"worker": 1})
    found = episodes_to_nodes({"after": [trajectory("t1", [bare]), silent]}, ["planner", "worker", "judge"], {})
    planner, worker = found["planner"]["after"], found["worker"]["after"]
    assert planner.calls_per_episode == 0.5
    for side in (planner, worker):
        assert (side.tokens_mean, side.stop_share, side.logprob_mean, side.tool_error_share) == (None,) * 4
        assert (side.kl_to_base, side.format_valid, side.tools) == (None, None, {})
    assert worker.calls_per_episode == 0.0  # it has a version to act by, and was not called
    assert "judge" not in found


def test_who_answered_is_counted_by_adapter_or_model_also_where_no_configuration_names_the_node() -> None:
    calls = [
        action("planner", model="planner@3", adapter="planner@3", adapter_version=3),
        action("planner", model="planner@4", adapter="planner@4", adapter_version=4),
        action("planner", model="planner@4", adapter="planner@4", adapter_version=4),
    ]
    runs = [trajectory("t1", calls), trajectory("t2", [action("extra", model="m1")]), trajectory("t3", [])]
    money = {("episode of t1", "planner"): 3.0}  # nothing is known of the extra call
    found = episodes_to_nodes({"after": runs}, ["planner"], {}, money={"after": money})
    planner, extra = found["planner"]["after"], found["extra"]["after"]
    assert (planner.answered_by, extra.answered_by) == ({"planner@4": 2, "planner@3": 1}, {"m1": 1})
    assert planner.cost_mean == 1.0  # 3 in one run, and 0 in two where it did not act
    assert (extra.cost_mean, extra.calls_per_episode) == (None, 1 / 3)
    (unpriced,) = episodes_to_nodes({"after": runs}, ["planner"], {})["planner"].values()
    assert unpriced.cost_mean is None


def test_every_variant_is_counted_by_itself_and_read_once() -> None:
    def streamed(length: int) -> Iterator[Trajectory]:
        yield from (trajectory(f"t{n}", [action("planner", range(1, length + 1))]) for n in range(3))

    found = episodes_to_nodes({"before": streamed(2), "after": streamed(6), "other graph": []}, ["planner"], {})
    assert {name: side.tokens_mean for name, side in found["planner"].items()} == {"before": 2.0, "after": 6.0}


def test_the_recorder_judges_answers_against_the_tools_that_a_real_call_offered(tmp_path: Path) -> None:
    """Three runs: arguments that fit, arguments that do not, and a text, which is no tool call."""

    def add(x: int, y: int) -> int:
        """x + y"""
        return x + y

    answers: list[Answer] = [[("add", {"x": 1, "y": 2})], [("add", {"x": 1, "y": "two"})], "three"]
    with running(FakeVllm()) as server:
        server.auto_tools, server.answer = True, lambda _: answers[len(server.asked) - 1]
        model = ChatOpenAI(model="base", base_url=f"{server.url}/v1", api_key=SecretStr("k")).bind_tools([add])
        graph: StateGraph[Any] = StateGraph(MessagesState)
        graph.add_node("worker", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_edge(START, "worker")
        journal = Journal(tmp_path / "store.duckdb.journal")
        recorded = wrap(graph.compile(), Recorder(journal))
        for _ in answers:
            recorded.invoke({"messages": [("user", "1 + 2?")]})
        journal.close()
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        store.take_in()
        episodes = list(store.trajectories())
        (side,) = episodes_to_nodes({"live": episodes}, ["worker"], {}, store.spans)["worker"].values()
    assert (side.format_valid, side.tools, side.calls_per_episode) == (0.5, {"add": 2}, 1.0)


# -- formats --------------------------------------------------------------------------------------------------


def fits(asked: dict[str, Any], message: AIMessage) -> bool | None:
    return answer_fits(request_to_format(asked), LLMResult(generations=[[ChatGeneration(message=message)]]))


def tool(name: str = "add", schema: Any = ADD) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def asks(name: str, arguments: dict[str, Any]) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": "1"}])


UNREADABLE = AIMessage(
    "", invalid_tool_calls=[{"name": "add", "args": "{x", "id": "1", "error": None, "type": "invalid_tool_call"}]
)
ANTHROPIC = {"name": "add", "input_schema": ADD}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": ADD}}


@pytest.mark.parametrize(
    ("asked", "message", "expected"),
    [
        ({"tools": [tool()]}, asks("add", {"x": 1}), True),
        ({"tools": [tool()]}, asks("add", {"x": 1, "op": "+"}), True),
        ({"tools": [tool()]}, asks("add", {"x": "one"}), False),
        ({"tools": [tool()]}, asks("add", {}), False),
        ({"tools": [tool()]}, asks("add", {"x": 1, "y": 2}), False),
        ({"tools": [tool()]}, asks("subtract", {"x": 1}), False),
        ({"tools": [tool()]}, UNREADABLE, False),
        ({"tools": [tool()]}, AIMessage("I need no tool"), None),
        ({"tools": [tool()], "tool_choice": "auto"}, AIMessage("I need no tool"), None),
        ({"tools": [tool()], "tool_choice": "required"}, AIMessage("I need no tool"), False),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, asks("add", {"x": 1}), True),
        ({"tools": [tool(schema=None)]}, asks("add", {"anything": 1}), True),
        ({"tools": [ANTHROPIC]}, asks("add", {"x": "one"}), False),
        ({"tools": [tool(schema={"type": 7})]}, asks("add", {"x": 1}), None),
        ({"tools": [tool(schema={"$ref": "http://127.0.0.1:9/x"})]}, asks("add", {"x": 1}), None),
        ({"response_format": FORMAT}, AIMessage('{"x": 1}'), True),
        ({"response_format": FORMAT}, AIMessage('{"x": 1'), False),
        ({"response_format": FORMAT}, AIMessage('{"x": 0.5}'), False),
        ({"response_format": FORMAT}, AIMessage("x" * 300_000), None),
        ({"response_format": {"type": "json_object"}}, AIMessage("{}"), True),
        ({"response_format": {"type": "json_object"}}, AIMessage("[]"), False),
        ({"response_format": {"type": "text"}}, AIMessage("{"), None),
        ({}, AIMessage("text"), None),
        ({}, asks("add", {"x": 1}), None),
        ({"response_format": FORMAT}, AIMessage("[" * 100_000), False),
    ],
)
def test_an_answer_is_held_against_the_form_that_its_request_declared(
    asked: dict[str, Any], message: AIMessage, expected: bool | None
) -> None:
    assert fits(asked, message) is expected


def test_a_pattern_that_text_could_make_take_for_ever_is_not_checked() -> None:
    schema = {"properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["x"]}
    assert fits({"tools": [tool(schema=schema)]}, asks("add", {"x": "a" * 64 + "!"})) is True
    assert fits({"tools": [tool(schema=schema)]}, asks("add", {"x": 1})) is False
