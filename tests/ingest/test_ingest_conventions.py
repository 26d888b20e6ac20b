"""Owns: what traces of other projects' instrumentors become, on real traces of one real LangGraph app.

- OpenInference, OpenLLMetry and LangSmith's export come in as episodes: the nodes of LangGraph are the agents, LLM
  calls the actions, tool calls the transitions, whatever the convention, sync or async.
- Edges are those worked out by hand: exact where ids of messages or tool calls prove them, else upper bounds.
- Nothing is made up: every action says why it cannot be trained on, and the report counts what was missing.
- Taking the same traces in twice adds nothing.
- No convention's reader raises, whatever the attributes hold.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.ingest_rig import foreign_requests, framed

from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.conventions import span_to_reading
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.report import IngestReport
from trace_store import conventions as c
from trace_store.records import Trajectory
from trace_store.store import TraceStore

INSTRUMENTORS = ("openinference", "traceloop", "langsmith")
MODES = ("sync", "async")


def taken_in(folder: Path, instrumentor: str, mode: str = "sync") -> tuple[IngestReport, str]:
    """Two runs of the app into the store of a folder -> the report, and what it printed."""
    path = folder / "traces"
    path.write_bytes(framed(*foreign_requests(instrumentor, mode)))
    printed = io.StringIO()
    reporter = Reporter(Console(file=printed, width=200))
    return ingest_files([path], folder / "store.duckdb", RecordOptions(), reporter), printed.getvalue()


def trajectories(folder: Path) -> list[Trajectory]:
    with TraceStore.open(folder / "store.duckdb") as store:
        return list(store.trajectories())


def edges(trajectory: Trajectory) -> set[tuple[str, str, str, bool]]:
    nodes = {action.action_id: action.node for action in trajectory.actions}
    return {(nodes[edge.src], nodes[edge.dst], edge.kind, edge.exact) for edge in trajectory.edges}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_a_langgraph_run_is_an_episode_with_its_nodes_as_agents(tmp_path: Path, instrumentor: str, mode: str) -> None:
    report, _ = taken_in(tmp_path, instrumentor, mode)
    assert (report.traces, report.episodes, report.actions) == (2, 2, 8)
    for number, trajectory in enumerate(trajectories(tmp_path)):
        episode = trajectory.episode
        assert episode.task == {"question": f"1+1? ({number})", "messages": [], "notes": []}
        assert episode.task_id == episode.episode_id
        assert (episode.split, episode.outcome, episode.reason) == ("live", "terminated", None)
        assert episode.tags == {"dialect": instrumentor, "service": "foreign", "session": f"thread-{number}"}
        assert episode.subject_id == "ada"
        said = {(action.node, action.step, action.completion) for action in trajectory.actions}
        assert said == {
            ("plan", 1, ""),  # it only asked for a tool
            ("left", 3, "left says two"),
            ("right", 3, "right says two"),
            ("outer/polish", 1, "two"),  # a subgraph counts its own supersteps
        }


@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_edges_are_exact_where_ids_prove_them_and_bounds_elsewhere(tmp_path: Path, instrumentor: str) -> None:
    taken_in(tmp_path, instrumentor)
    # plan's answer and its tool's result are in the prompts of left and right. LangChain's message ids are in what
    # OpenInference and LangSmith record, not in OpenLLMetry's messages; ids of tool calls are in all three. What
    # polish was given are the notes of the state, which carry no ids: whoever ran before may have written them.
    answers_have_ids = instrumentor != "traceloop"
    expected = {
        ("plan", "left", "data", answers_have_ids),
        ("plan", "right", "data", answers_have_ids),
        ("plan", "left", "tool", True),
        ("plan", "right", "tool", True),
        ("plan", "outer/polish", "data", False),
        ("left", "outer/polish", "data", False),
        ("right", "outer/polish", "data", False),
    }
    for trajectory in trajectories(tmp_path):
        assert edges(trajectory) == expected


@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_no_token_is_made_up_and_every_action_says_why_it_cannot_be_trained_on(
    tmp_path: Path, instrumentor: str
) -> None:
    report, printed = taken_in(tmp_path, instrumentor)
    has_logprobs = instrumentor != "traceloop"
    for action in (action for trajectory in trajectories(tmp_path) for action in trajectory.actions):
        assert not action.trainable
        assert action.prompt_ids is None
        assert action.sampled_ids is None
        assert action.temperature is None
        # The app's model reported them, and two of the instrumentors pass on what it reported.
        assert action.logprobs == ((-0.25, -0.5) if has_logprobs else None)
        what = "log-probs without token ids" if has_logprobs else "no token ids and no log-probs"
        assert action.untrainable_reason == f"ingested from {instrumentor}: {what} from the engine"
        assert action.model == ("fake-1" if has_logprobs else None)
        reported = ("tool_calls" if action.node == "plan" else "stop") if has_logprobs else None
        assert action.finish_reason == reported
    expected = {"prompt token ids": 8, "sampled token ids": 8, "temperature": 8}
    if not has_logprobs:
        expected |= {"log-probs": 8, "finish reason": 8, "model that answered": 8}
    expected["exact trigger, send and state edges, by episode; upper bounds stand in"] = 2
    assert report.missing == {(instrumentor, what): number for what, number in expected.items()}
    for what, number in expected.items():
        assert f"  {number}  {instrumentor}  {what}\n" in printed


@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_tool_calls_are_transitions_with_their_call_id(tmp_path: Path, instrumentor: str) -> None:
    taken_in(tmp_path, instrumentor)
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        for episode in store.episodes():
            spans = store.spans(episode.episode_id)
            (tool,) = [span for span in spans if span.operation == c.EXECUTE_TOOL]
            assert (tool.attributes[c.TOOL_NAME], tool.attributes[c.TOOL_CALL_ID]) == ("add", "call_1")
            assert '"2"' in tool.attributes[c.TOOL_RESULT]
            asked = [json.loads(span.attributes[c.OUTPUT_MESSAGES]) for span in spans if span.operation == c.CHAT]
            calls = [part for message in asked for part in message[0]["parts"] if part["type"] == "tool_call"]
            assert calls == [{"type": "tool_call", "id": "call_1", "name": "add", "arguments": {"a": 1, "b": 1}}]


@pytest.mark.parametrize("instrumentor", INSTRUMENTORS)
def test_taking_the_same_traces_in_twice_adds_nothing(tmp_path: Path, instrumentor: str) -> None:
    taken_in(tmp_path, instrumentor)
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        before = store.counts()
    report, printed = taken_in(tmp_path, instrumentor)
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        assert store.counts() == before
    assert (report.traces, report.stored_before, report.episodes) == (2, 2, 0)
    assert "  2 traces were in the store already\n" in printed


def test_what_the_sender_wrote_stays_on_the_span(tmp_path: Path) -> None:
    taken_in(tmp_path, "openinference")
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        spans = store.spans(store.episodes()[0].episode_id)
    calls = [span for span in spans if span.operation == c.CHAT]
    assert len(calls) == 4
    for call in calls:
        assert call.attributes["openinference.span.kind"] == "LLM"
        assert call.attributes["llm.token_count.completion"] == call.attributes[c.USAGE_OUTPUT_TOKENS] == 2
    assert {span.convention for span in spans} == {f"{c.CONVENTION_VERSION}+openinference"}
    # A chain that is no node execution (the subgraph's own) stays a span without an operation.
    assert [span.name for span in spans if span.operation == ""] == ["LangGraph"]


FIELDS = """
role type content contents tool_calls tool_call tool_call_id id kwargs data message messages generations choices
response_metadata logprobs function text generation_info usage_metadata args arguments additional_kwargs outputs inputs
"""
FOREIGN_KEYS = """
openinference.span.kind traceloop.span.kind langsmith.span.kind llm.request.type metadata input.value output.value
llm.invocation_parameters llm.finish_reason llm.model_name tool.id llm.input_messages.0.message.role
llm.input_messages.0.message llm.output_messages.x llm.output_messages.0.message.tool_calls.0.tool_call.id session.id
llm.token_count.prompt agent.name user.id gen_ai.prompt gen_ai.completion gen_ai.prompt.0.role
gen_ai.completion.0.finish_reason gen_ai.prompt.0.content gen_ai.prompt.99999999999.content traceloop.entity.input
traceloop.entity.output traceloop.association.properties.langgraph_step langsmith.metadata.ls_provider
"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(
        st.sampled_from(FIELDS.split()),
        inner | st.lists(inner, max_size=2) | st.lists(st.lists(inner, max_size=2), max_size=2),
        max_size=4,
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        *FOREIGN_KEYS.split(),
        *(c.OPERATION, c.AGENT_NAME, c.REQUEST_TOP_K, c.REQUEST_TEMPERATURE, c.FINISH_REASONS, c.INPUT_MESSAGES),
        *(c.OUTPUT_MESSAGES, c.USAGE_INPUT_TOKENS, c.TOOL_NAME, c.RESPONSE_MODEL),
    ]
)
KINDS = st.sampled_from(["LLM", "TOOL", "AGENT", "CHAIN", "llm", "tool", "agent", "task", "chat", "execute_tool"])


@given(st.dictionaries(KEYS, KINDS | VALUES | MESSAGES | MESSAGES.map(lambda value: json.dumps(value)), max_size=8))
def test_no_reader_raises_whatever_the_attributes_hold(attributes: dict[str, Any]) -> None:
    span = WireSpan(
        trace_id="0" * 31 + "1",
        span_id="0" * 15 + "1",
        parent_span_id=None,
        parent_is_remote=False,
        name="any",
        start_ns=1,
        end_ns=2,
        failed=False,
        status_message=None,
        exception_type=None,
        scope="",
        scope_version="",
        service=None,
        attributes={key: value for key, value in attributes.items() if value is not None},
    )
    reading = span_to_reading(span)
    if reading is not None:
        assert reading.convention in (*INSTRUMENTORS, "genai")
        json.dumps(dict(reading.attributes))  # what becomes a row must be JSON
