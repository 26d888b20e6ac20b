"""Owns: which traces are episodes, and what of them is understood, on hand-made traces.

- A trace without its root, with orphans, with several roots or contradicting itself is refused with the reason; so
  is one that is no run of agents. Nothing of it is stored.
- A run whose caller is in another process is an episode all the same.
- Apps that are not LangGraph's have agents by the names of their agent spans, if there are any.
- A call recorded by two layers is one action. LangGraph's control flow is no failure; a recursion limit truncates.
- Only our own recorder may write `marft.*`; and what it exported by OTLP comes in unchanged, every attribute.
- Client secrets and redacted texts are gone before anything is written; content that may not be kept is not.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from rich.console import Console
from support.ingest_rig import TRACE, hand_made, openinference, request, small_trace
from support.sample_spans import chain

from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.cleaning import SpanCleaner
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.otlp import protobuf_to_spans
from marft_bridge.ingest.report import IngestReport
from trace_store import conventions as c
from trace_store.records import SpanRow, Trajectory
from trace_store.store import TraceStore


def taken_in(
    folder: Path, *spans: Span, scope: str = "", options: RecordOptions | None = None
) -> tuple[IngestReport, list[Trajectory], list[SpanRow]]:
    """Spans of one trace, by file -> the report, the episodes and the spans of the store."""
    path = folder / "trace"
    path.write_bytes(request(*spans, scope=scope).SerializeToString())
    reporter = Reporter(Console(file=io.StringIO()))
    report = ingest_files([path], folder / "store.duckdb", options or RecordOptions(), reporter)
    with TraceStore.open(folder / "store.duckdb") as store:
        trace_id = spans[0].trace_id.hex()
        return report, list(store.trajectories()), store.spans(trace_id)


def error(kind: str, message: str) -> dict[str, Any]:
    event = Span.Event(name="exception")
    for key, value in (("exception.type", kind), ("exception.message", message)):
        event.attributes.add(key=key).value.string_value = value
    return {"status": Status(code=Status.STATUS_CODE_ERROR), "events": [event]}


ROOT, CALL = small_trace()
CHAIN, LLM = openinference("CHAIN"), openinference("LLM")
REFUSED: dict[str, tuple[list[Span], str]] = {
    "no root": ([CALL], "its root span never came"),
    "orphan": (
        [ROOT, CALL, hand_made("3", "9", "lost", attributes=LLM)],
        "the parents of 1 spans never came, first 0000000000000009 of 'lost'",
    ),
    "two roots": ([ROOT, CALL, hand_made("3", None, "other")], "2 spans have no parent: 0000000000000001, "),
    "contradiction": (
        [ROOT, CALL, hand_made("2", "1", "another name", 10, 80, attributes=LLM)],
        "two different spans have the id 0000000000000002",
    ),
    "cycle": (
        [ROOT, CALL, hand_made("3", "4", "a"), hand_made("4", "3", "b")],
        "span 0000000000000003 is its own ancestor",
    ),
    "no agents": (
        [hand_made("1", None, "GET /health"), hand_made("2", "1", "SELECT")],
        "no LLM call, no agent and no graph node in it",
    ),
    "lone call": ([hand_made("1", None, "model", attributes=LLM)], "its root is an LLM call outside any graph run"),
    "lone tool": (
        [hand_made("1", None, "tool", attributes=openinference("TOOL")), hand_made("2", "1", "model", attributes=LLM)],
        "its root is a tool call outside any graph run",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_trace_that_is_no_episode_is_refused_with_the_reason_and_not_stored(case: str, tmp_path: Path) -> None:
    spans, reason = REFUSED[case]
    report, trajectories, stored = taken_in(tmp_path, *spans)
    ((why, traces),) = report.refused.items()
    assert why.startswith(reason)
    assert traces == [TRACE]
    assert (trajectories, stored) == ([], [])


def test_spans_that_are_sent_twice_count_once(tmp_path: Path) -> None:
    report, (trajectory,), _ = taken_in(tmp_path, ROOT, CALL, CALL, ROOT)
    assert (report.spans, trajectory.episode.span_count, len(trajectory.actions)) == (4, 2, 1)


def test_a_run_whose_caller_is_in_another_process_is_an_episode(tmp_path: Path) -> None:
    remote = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    run = hand_made("1", "99", "run", attributes=CHAIN, flags=remote)
    _, (trajectory,), spans = taken_in(tmp_path, run, CALL)
    assert trajectory.episode.outcome == "terminated"
    assert {span.span_id: span.parent_span_id for span in spans} == {
        "0" * 15 + "1": None,
        "0" * 15 + "2": "0" * 15 + "1",
    }
    # The caller's span is there after all: then it is the root.
    caller = hand_made("99", None, "POST /run")
    (tmp_path / "both").mkdir()
    _, (trajectory,), spans = taken_in(tmp_path / "both", caller, run, CALL)
    assert [span.span_id for span in spans if span.parent_span_id is None] == ["0" * 14 + "99"]
    assert trajectory.episode.span_count == 3


def genai(operation: str, **attributes: Any) -> dict[str, Any]:
    return {c.OPERATION: operation, **attributes}


def test_agents_of_other_frameworks_go_by_their_agent_spans(tmp_path: Path) -> None:
    report, (trajectory,), _ = taken_in(
        tmp_path,
        hand_made("1", None, "run", 0, 100, attributes=genai("invoke_workflow")),
        hand_made(
            "2", "1", "invoke_agent writer", 10, 40, attributes=genai("invoke_agent", **{c.AGENT_NAME: "writer"})
        ),
        hand_made(
            "3", "2", "chat m", 20, 30, attributes=genai("chat", **{c.RESPONSE_MODEL: "m", c.REQUEST_TOP_K: 40.0})
        ),
        hand_made("4", "1", "chat m", 50, 60, attributes=genai("chat", **{c.FINISH_REASONS: ["stop"]})),
    )
    first, second = trajectory.actions
    assert (first.node, first.model, first.top_k, first.step) == ("writer", "m", 40, None)
    # The second call is not inside any agent, and no one claims it.
    assert (second.node, second.untrainable_reason) == ("", "called outside any graph node")
    assert second.finish_reason == "stop"
    assert trajectory.edges == ()  # nothing in the trace says that the one depended on the other
    assert report.missing["genai", "episodes without LangGraph nodes: agents are agent spans, if there are any"] == 1
    assert report.missing["genai", "node or agent that made the call"] == 1


def test_an_agent_that_is_the_whole_run_names_its_calls(tmp_path: Path) -> None:
    _, (trajectory,), _ = taken_in(
        tmp_path,
        hand_made("1", None, "solo", attributes=openinference("AGENT", **{"agent.name": "solo"})),
        hand_made("2", "1", "model", 10, 80, attributes=LLM),
    )
    (action,) = trajectory.actions
    assert action.node == "solo"
    assert not action.trainable


def test_a_call_that_two_layers_recorded_is_one_action(tmp_path: Path) -> None:
    inner = hand_made(
        "3", "2", "openai.chat", 20, 70, attributes={"llm.request.type": "chat", "gen_ai.system": "OpenAI"}
    )
    report, (trajectory,), spans = taken_in(tmp_path, ROOT, CALL, inner)
    assert [action.action_id for action in trajectory.actions] == ["0" * 15 + "2"]
    assert next(span.operation for span in spans if span.name == "openai.chat") == ""
    assert report.missing["traceloop", "not an action: a call inside another one, recorded by two layers"] == 1


def test_older_names_of_openllmetry_are_understood(tmp_path: Path) -> None:
    old = {
        "llm.request.type": "chat",
        "gen_ai.system": "OpenAI",
        "gen_ai.request.model": "unknown",
        "gen_ai.response.model": "m-1",
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "Be brief.",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "1+1?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "2",
        "gen_ai.completion.0.finish_reason": "stop",
        "gen_ai.completion.0.tool_calls.0.id": "call_9",
        "gen_ai.completion.0.tool_calls.0.name": "add",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"a": 1}',
        "gen_ai.usage.prompt_tokens": 11,
        "gen_ai.usage.completion_tokens": 1,
    }
    run = hand_made("1", None, "w.workflow", attributes={"traceloop.span.kind": "workflow"})
    _, (trajectory,), spans = taken_in(tmp_path, run, hand_made("2", "1", "openai.chat", 10, 80, attributes=old))
    (action,) = trajectory.actions
    assert (action.completion, action.finish_reason, action.model) == ("2", "stop", "m-1")
    call = next(span for span in spans if span.operation == c.CHAT).attributes
    assert c.REQUEST_MODEL not in call
    assert (call[c.PROVIDER], call[c.USAGE_INPUT_TOKENS], call[c.USAGE_OUTPUT_TOKENS]) == ("OpenAI", 11, 1)
    assert json.loads(call[c.INPUT_MESSAGES]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "1+1?"}]},
    ]
    assert json.loads(call[c.OUTPUT_MESSAGES])[0]["parts"][1] == {
        "type": "tool_call",
        "id": "call_9",
        "name": "add",
        "arguments": {"a": 1},
    }


def test_an_attribute_of_the_wrong_type_is_absent_and_counted(tmp_path: Path) -> None:
    wrong = genai("chat", **{c.REQUEST_TOP_K: 1.5, c.REQUEST_TEMPERATURE: "hot", c.USAGE_OUTPUT_TOKENS: True})
    run = hand_made("1", None, "run", attributes=genai("invoke_workflow"))
    report, (trajectory,), _ = taken_in(tmp_path, run, hand_made("2", "1", "chat", 10, 80, attributes=wrong))
    (action,) = trajectory.actions
    assert (action.top_k, action.temperature) == (None, None)
    for key in (c.REQUEST_TOP_K, c.REQUEST_TEMPERATURE, c.USAGE_OUTPUT_TOKENS):
        assert report.missing["genai", f"readable {key}"] == 1


def test_a_number_beyond_its_column_is_absent_and_counted_and_costs_no_trace(tmp_path: Path) -> None:
    beyond = genai(
        "chat",
        **{
            c.REQUEST_MAX_TOKENS: 2**40,
            c.USAGE_INPUT_TOKENS: 2**33,
            c.REQUEST_TOP_P: float("nan"),
            c.REQUEST_SEED: -(2**63),
            c.REQUEST_TEMPERATURE: "0.5",
        },
    )
    run = hand_made("1", None, "run", attributes=genai("invoke_workflow"))
    report, (trajectory,), _ = taken_in(tmp_path, run, hand_made("2", "1", "chat", 10, 80, attributes=beyond))
    (action,) = trajectory.actions
    assert (action.max_tokens, action.prompt_tokens, action.top_p) == (None, None, None)
    assert (action.seed, action.temperature) == (-(2**63), 0.5)
    for key in (c.REQUEST_MAX_TOKENS, c.USAGE_INPUT_TOKENS, c.REQUEST_TOP_P):
        assert report.missing["genai", f"readable {key}"] == 1


def test_what_the_store_has_no_place_for_is_counted(tmp_path: Path) -> None:
    run = hand_made("1", None, "run", attributes=CHAIN, dropped_attributes_count=3)
    call = hand_made("2", "1", "model", 10, 80, attributes=LLM, events=[Span.Event(name="gen_ai.choice")])
    call.links.add(trace_id=bytes.fromhex(TRACE), span_id=bytes(7) + b"1")
    report, _, _ = taken_in(tmp_path, run, call)
    assert report.missing["openinference", "attributes that the sender dropped"] == 3
    assert report.missing["openinference", "span events, which the store does not keep"] == 1
    assert report.missing["openinference", "span links, which the store does not keep"] == 1


def langgraph(kind: str, node: str, step: int, ns: str, *, agent: str | None = None) -> dict[str, Any]:
    coordinates: dict[str, Any] = {"langgraph_node": node, "langgraph_step": step, "langgraph_checkpoint_ns": ns}
    coordinates |= {"lc_agent_name": agent} if agent is not None else {}
    return openinference(kind, metadata=json.dumps(coordinates))


@pytest.mark.parametrize("keeps_state", [False, True])
def test_agents_have_the_names_that_our_recorder_gives_them(keeps_state: bool, tmp_path: Path) -> None:
    spans = []
    for number, agent in enumerate(("boss", "poet", "boss"), start=1):  # the last declares none: it is handed down
        outer = "tools" if number > 1 else None
        # LangGraph names a graph that keeps its own state without the id of the task around it.
        ns = f"tools{'' if keeps_state else f':{number}'}|model:{number}" if outer else "model:1"
        first, around = number * 10, f"{number * 10}"
        if outer:
            boss = langgraph("CHAIN", "tools", 2, f"tools:{number}", agent="boss")
            spans.append(hand_made(around, "1", "tools", first, first + 9, attributes=boss))
        node = langgraph("CHAIN", "model", 1, ns, agent=agent)
        spans.append(hand_made(f"{first + 1}", around if outer else "1", "model", first, first + 8, attributes=node))
        call = langgraph("LLM", "model", 1, ns, agent=agent)
        spans.append(hand_made(f"{first + 2}", f"{first + 1}", "llm", first + 1, first + 7, attributes=call))
    _, (trajectory,), _ = taken_in(tmp_path, ROOT, *spans)
    assert [action.node for action in trajectory.actions] == ["boss", "poet", "boss/tools/model"]


@pytest.mark.parametrize("kind", ["langgraph.errors.GraphInterrupt", "ParentCommand"])
def test_langgraphs_control_flow_is_no_failure(kind: str, tmp_path: Path) -> None:
    node = hand_made("2", "1", "ask", 10, 80, attributes=langgraph("CHAIN", "ask", 1, "ask:1"), **error(kind, "..."))
    call = hand_made("3", "2", "model", 20, 70, attributes=langgraph("LLM", "ask", 1, "ask:1"))
    _, (trajectory,), spans = taken_in(tmp_path, ROOT, node, call)
    assert {span.status for span in spans} == {"ok"}
    assert trajectory.actions[0].node == "ask"


@pytest.mark.parametrize(
    ("kind", "outcome", "reason"),
    [
        ("langgraph.errors.GraphRecursionError", "truncated", "recursion limit reached"),
        ("builtins.ValueError", "failed", "no such city"),
    ],
)
def test_a_run_that_ended_with_an_error_says_so(kind: str, outcome: str, reason: str, tmp_path: Path) -> None:
    run = hand_made("1", None, "run", attributes=CHAIN, **error(kind, "no such city"))
    _, (trajectory,), _ = taken_in(tmp_path, run, CALL)
    assert (trajectory.episode.outcome, trajectory.episode.reason) == (outcome, reason)


def test_a_call_that_lies_in_another_node_than_it_says_is_not_attributed_to_either(tmp_path: Path) -> None:
    node = hand_made("2", "1", "a", 10, 80, attributes=langgraph("CHAIN", "a", 1, "a:1"))
    call = hand_made("3", "2", "model", 20, 70, attributes=langgraph("LLM", "a", 3, "a:2"))
    report, trajectories, _ = taken_in(tmp_path, ROOT, node, call)
    assert trajectories == []
    assert list(report.refused) == ["call 0000000000000003 says that it belongs to 'a:2', but lies in 'a:1'"]


def test_a_call_whose_node_was_not_recorded_keeps_the_nodes_name(tmp_path: Path) -> None:
    call = hand_made("3", "1", "model", 20, 70, attributes=langgraph("LLM", "a", 1, "a:1"))
    _, (trajectory,), _ = taken_in(tmp_path, ROOT, call)
    (action,) = trajectory.actions
    assert (action.node, action.untrainable_reason) == ("a", "the execution of node a around it was not recorded")


def test_a_retried_node_is_one_execution_and_its_first_attempt_does_not_count(tmp_path: Path) -> None:
    attributes = langgraph("CHAIN", "a", 1, "a:1")
    call = langgraph("LLM", "a", 1, "a:1")
    _, (trajectory,), _ = taken_in(
        tmp_path,
        ROOT,
        hand_made("2", "1", "a", 10, 20, attributes=attributes, **error("ValueError", "boom")),
        hand_made("3", "2", "model", 12, 18, attributes=call),
        hand_made("4", "1", "a", 30, 40, attributes=attributes),
        hand_made("5", "4", "model", 32, 38, attributes=call),
    )
    reasons = {action.action_id[-1]: action.untrainable_reason for action in trajectory.actions}
    assert reasons["3"] == "attempt failed and was retried"
    assert reasons["5"] is not None
    assert reasons["5"].startswith("ingested from openinference")


def test_nobody_else_may_write_our_names(tmp_path: Path) -> None:
    forged = {c.PROMPT_IDS: [1, 2], c.SAMPLED_IDS: [3], c.LOGPROBS: [-0.1], c.NODE: "judge", c.SPLIT: "train"}
    run = hand_made("1", None, "run", attributes={**CHAIN, c.SPLIT: "train", c.RUN_ID: "collect"})
    call = hand_made("2", "1", "model", 10, 80, attributes={**LLM, **forged})
    report, (trajectory,), spans = taken_in(tmp_path, run, call)
    (action,) = trajectory.actions
    assert (action.prompt_ids, action.sampled_ids, action.logprobs, action.node) == (None, None, None, "")
    assert trajectory.episode.split == "live"
    assert trajectory.episode.run_id.startswith("ingest-")
    kept = {key for span in spans if span.operation == c.CHAT for key in span.attributes if key.startswith("marft.")}
    assert kept == {c.UNTRAINABLE}
    assert report.missing["openinference", "marft.* attributes, which only our own recorder may write"] == 7


@pytest.mark.parametrize("value", [1.5, True, 7, ["a"]])
def test_a_reason_that_is_no_text_is_no_reason(tmp_path: Path, value: Any) -> None:
    call = hand_made("2", "1", "model", 10, 80, attributes={**said("write to ada@example.org"), c.UNTRAINABLE: value})
    report, (trajectory,), spans = taken_in(tmp_path, ROOT, call, options=RecordOptions(redact=("email",)))
    assert trajectory.actions[0].completion == "write to [redacted:email]"
    assert report.unredactable == 0
    (reason,) = [span.attributes[c.UNTRAINABLE] for span in spans if span.operation == c.CHAT]
    assert reason.endswith("from the engine; redacted: email")


def as_otlp(row: SpanRow) -> Span:
    status = Status.STATUS_CODE_ERROR if row.status == "error" else Status.STATUS_CODE_UNSET
    parent = row.parent_span_id
    span = hand_made("1", None, row.name, trace=row.trace_id, attributes=row.attributes)
    span.span_id = row.span_id.encode().ljust(8, b"_")[:8]
    span.parent_span_id = b"" if parent is None else parent.encode().ljust(8, b"_")[:8]
    span.start_time_unix_nano, span.end_time_unix_nano = row.start_ns, row.end_ns
    span.status.code = status
    span.status.message = row.status_message or ""
    return span


@pytest.mark.parametrize("missing", [0, 1])
def test_a_trace_of_our_own_recorder_comes_in_unchanged_or_not_at_all(missing: int, tmp_path: Path) -> None:
    rows = chain().spans()
    exported = [as_otlp(row) for row in rows]
    for span, row in zip(exported, rows, strict=True):
        span.attributes.add(key=c.OPERATION).value.string_value = row.operation
    report, trajectories, stored = taken_in(tmp_path, *exported[missing:], scope="marft_bridge")
    if missing:
        assert list(report.refused) == ["the parents of 1 spans never came, first 6e6f6465315f5f5f of 'chat x'"]
        assert stored == []
        return
    (trajectory,) = trajectories
    assert all(action.trainable for action in trajectory.actions)
    assert trajectory.episode.run_id == "run"
    by_name = {row.name: row for row in stored}
    for row in rows:
        found = by_name[row.name]
        assert found.attributes == {**row.attributes, c.OPERATION: row.operation}
        assert (found.operation, found.start_ns, found.end_ns) == (row.operation, row.start_ns, row.end_ns)
        assert (found.status, found.status_message) == (row.status, row.status_message)
    assert report.missing == {}


@pytest.mark.parametrize("key", [c.RUN_ID, c.TASK_ID, c.SPLIT])
def test_a_run_task_or_split_without_a_name_makes_no_episode(key: str, tmp_path: Path) -> None:
    rows = chain().spans()
    exported = [
        as_otlp(replace(row, attributes=row.attributes | ({key: ""} if row is rows[-1] else {}))) for row in rows
    ]
    for span, row in zip(exported, rows, strict=True):
        span.attributes.add(key=c.OPERATION).value.string_value = row.operation
    report, trajectories, stored = taken_in(tmp_path, *exported, scope="marft_bridge")
    assert list(report.refused) == [f"its root has an empty {key}"]
    assert (trajectories, stored) == ([], [])


SECRET = "hunter2-hunter2"


def test_what_clients_authenticate_with_is_never_written(tmp_path: Path) -> None:
    attributes = {
        **LLM,
        "http.request.header.x-custom": SECRET,
        "langsmith.request.headers": SECRET,
        "llm.invocation_parameters": json.dumps(
            {"model": "m", "max_tokens": 5, "extra_headers": {"X-Auth": SECRET}, "openai_api_key": SECRET}
        ),
        "input.value": json.dumps({"access_token": SECRET, "refresh-token": SECRET, "id_token": SECRET, "tokens": 3}),
        "output.value": json.dumps({"auth_token": SECRET, "bearer_token": SECRET, "api-token": SECRET}),
        "metadata": json.dumps({"nested": [{"password": SECRET, "deep": json.dumps({"cookie": SECRET})}]}),
    }
    call = hand_made("2", "1", "model", 10, 80, attributes=attributes)
    report, _, spans = taken_in(tmp_path, ROOT, call)
    assert report.removed_settings == 12
    for path in tmp_path.rglob("*"):
        assert path.name == "trace" or path.is_dir() or SECRET.encode() not in path.read_bytes()
    kept = next(span for span in spans if span.operation == c.CHAT).attributes
    assert json.loads(kept["llm.invocation_parameters"]) == {"model": "m", "max_tokens": 5}
    assert (kept[c.REQUEST_MODEL], kept[c.REQUEST_MAX_TOKENS]) == ("m", 5)


SENDER = {"headers": SECRET, "said": 1}


def nested(value: Any, depth: int) -> str:
    """JSON text of a value so many lists and dicts deep."""
    return '[{"a":' * (depth // 2) + json.dumps(value) + "}]" * (depth // 2)


def deepest_read() -> int:
    """How deep a text may be that `json.loads` takes here."""
    for depth in range(50, 5000, 50):
        try:
            json.loads(nested(1, depth))
        except RecursionError:
            return depth - 50
    raise AssertionError


@pytest.mark.parametrize("inside_text", [False, True])
def test_json_text_of_any_depth_is_cleaned_and_no_credential_is_left(inside_text: bool) -> None:
    deepest = deepest_read()
    for depth in (10, 300, 600, deepest - 200, deepest - 100, deepest - 50, deepest, deepest + 50, 20_000):
        text = nested(SENDER, depth)
        text = json.dumps({"args": text}) if inside_text else text
        attributes = {**LLM, "input.value": text, "llm.input_messages.0.message.content": text, "a": "kept"}
        (span,) = protobuf_to_spans(request(hand_made("2", None, "m", attributes=attributes)).SerializeToString()).spans
        cleaner = SpanCleaner(RecordOptions())
        cleaned = cleaner.clean_span(span)
        assert SECRET not in repr(cleaned), depth
        assert cleaner.removed_settings == 2
        assert cleaned.attributes["a"] == "kept"
        if depth <= deepest - 200:  # and all the rest of it is there
            left = json.loads(cleaned.attributes["input.value"])
            assert (json.loads(left["args"]) if inside_text else left) == json.loads(nested({"said": 1}, depth))


def said(text: str) -> dict[str, Any]:
    return openinference(
        "LLM", **{"llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": text}
    )


def test_redaction_is_that_of_recorded_spans_and_says_so(tmp_path: Path) -> None:
    call = hand_made("2", "1", "model", 10, 80, attributes=said("write to ada@example.org"))
    report, (trajectory,), _ = taken_in(tmp_path, ROOT, call, options=RecordOptions(redact=("email",)))
    (action,) = trajectory.actions
    assert action.completion == "write to [redacted:email]"
    assert action.untrainable_reason == "called outside any graph node"  # an action has one reason, its span has all
    assert sum(report.redactions.values()) == 1
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        (span,) = [span for span in store.spans(TRACE) if span.operation == c.CHAT]
    assert span.attributes[c.UNTRAINABLE].endswith("from the engine; redacted: email")


def test_content_that_may_not_be_kept_is_not_kept(tmp_path: Path) -> None:
    call = hand_made("2", "1", "model", 10, 80, attributes=said("the plan is secret"))
    _, (trajectory,), _ = taken_in(tmp_path, ROOT, call, options=RecordOptions(content=False))
    (action,) = trajectory.actions
    assert action.completion is None
    for path in tmp_path.rglob("*"):
        assert path.name == "trace" or path.is_dir() or b"plan is secret" not in path.read_bytes()
