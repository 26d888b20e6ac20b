"""All spans of one trace -> the rows that make it an episode, or the reason why it is none.

    our own trace     unchanged, every attribute
    any other         its root is the run; LangGraph nodes, or else agent spans, are the agents; LLM calls are the
                      actions, tool calls the transitions; every other span stays what it is

Invariants: a row keeps what the sender wrote, next to it what that means under our names, and nothing under `marft.`
that the sender wrote; no token id or log-prob that the trace does not hold; every action says why it cannot be
trained on. Ids of messages and tool calls that come back in a later prompt are exact edges; else the trace says only
in which superstep a node ran, and all of an earlier one are upper bounds of what it could read. Rows of the same
spans are the same whenever they are made, but for the run's id on the root.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.ingest import missing
from marft_bridge.ingest.dialects import span_to_reading
from marft_bridge.ingest.messages import IdIndex, answered_tool_calls, asked_tool_calls
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.outcome import failed, root_to_outcome
from marft_bridge.ingest.reading import CALL_NAMES, Reading
from marft_bridge.ingest.trace_tree import NotAnEpisode, TraceTree
from marft_bridge.node_names import namespace_to_node
from trace_store import conventions as c
from trace_store.records import SpanRow

OWN = "marft"  # the dialect of our recorder
_OURS = "marft."
MOST_READ = 256  # earlier executions named as upper bounds; more would make long loops quadratic


@dataclass(frozen=True, slots=True)
class Mapped:
    """The rows of one trace. `missing` counts, by (dialect, what), what an exact record would have had."""

    rows: tuple[SpanRow, ...]
    dialects: tuple[str, ...]
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)


def spans_to_rows(spans: Sequence[WireSpan], run_id: str) -> Mapped:
    """One trace, its spans in any order. Raises NotAnEpisode."""
    tree = TraceTree(spans)
    tree.refuse_if_broken()
    root = tree.root
    if c.SPAN_COUNT in root.attributes and root.attributes.get(c.OPERATION) == c.INVOKE_WORKFLOW:
        if root.attributes[c.SPAN_COUNT] != len(tree.spans):
            raise NotAnEpisode(f"{len(tree.spans)} of {root.attributes[c.SPAN_COUNT]} spans came")
        return Mapped(tuple(_as_sent(span) for span in tree.spans.values()), (OWN,))
    return _ForeignTrace(tree, run_id).mapped()


class _ForeignTrace:
    """One whole trace in other people's dialects, while its rows are made."""

    def __init__(self, tree: TraceTree, run_id: str) -> None:
        self._tree, self._run_id = tree, run_id
        self._readings = {
            span_id: reading for span_id, span in tree.spans.items() if (reading := span_to_reading(span)) is not None
        }
        self._refuse_if_no_run()
        self._executions = self._langgraph_executions()
        self._on_langgraph = bool(self._executions)
        if not self._on_langgraph:
            self._executions = {
                span_id: reading.agent or reading.name
                for span_id, reading in self._readings.items()
                if reading.kind == "agent" and span_id != tree.root.span_id
            }

        self._actions = {
            span_id
            for span_id, reading in self._readings.items()
            if reading.kind == "llm" and not self._inside_a_call(span_id)
        }
        self._answers, self._tool_calls = IdIndex(), IdIndex()
        for span_id in self._actions:
            reading = self._readings[span_id]
            self._answers.add(reading.answer_ids, span_id)
            self._tool_calls.add(asked_tool_calls(reading.attributes.get(c.OUTPUT_MESSAGES)), span_id)

    def _refuse_if_no_run(self) -> None:
        root = self._readings.get(self._tree.root.span_id)
        if not any(reading.kind in ("llm", "agent") or reading.node for reading in self._readings.values()):
            raise NotAnEpisode("no LLM call, no agent and no graph node in it")
        if root is not None and root.kind in ("llm", "tool"):
            called = "an LLM call" if root.kind == "llm" else "a tool call"
            raise NotAnEpisode(f"its root is {called} outside any graph run")

    def _langgraph_executions(self) -> dict[str, str]:
        """Span id -> node of those spans that are node executions, as our recorder tells them: named like their
        node, in a checkpoint namespace that the spans around are not in."""
        found: dict[str, str] = {}
        for span_id, reading in self._readings.items():
            if reading.kind in ("llm", "tool") or reading.checkpoint_ns is None or reading.name != reading.node:
                continue
            around = (self._readings.get(span.span_id) for span in self._tree.above(span_id))
            outer = next((r.checkpoint_ns for r in around if r is not None and r.checkpoint_ns is not None), None)
            if outer != reading.checkpoint_ns:
                found[span_id] = namespace_to_node(reading.checkpoint_ns)
        return found

    def mapped(self) -> Mapped:
        missed: Counter[tuple[str, str]] = Counter()
        rows = []
        for span_id, span in self._tree.spans.items():
            operation, ours = self._ours(span)
            attributes = _foreign_attributes(span, operation) | ours
            rows.append(self._row(span, operation, attributes))
            missed.update(missing.of_span(span, self._readings.get(span_id), operation, attributes))
        missed.update(missing.of_trace(self._dialects(), operations := [row.operation for row in rows]))
        if not self._on_langgraph and c.CHAT in operations:
            missed[self._dialects()[0], missing.NO_LANGGRAPH] += 1
        return Mapped(tuple(rows), self._dialects(), missed)

    def _dialects(self) -> tuple[str, ...]:
        return tuple(sorted({reading.dialect for reading in self._readings.values()}))

    def _row(self, span: WireSpan, operation: str, attributes: dict[str, Any]) -> SpanRow:
        return SpanRow(
            trace_id=span.trace_id,
            span_id=span.span_id,
            # The root's own parent, if any, is in another process that sent nothing.
            parent_span_id=None if span is self._tree.root else span.parent_span_id,
            name=span.name,
            operation=operation,
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            status="error" if failed(span) else "ok",
            status_message=span.status_message,
            convention=f"{c.CONVENTION_VERSION}+{'+'.join(self._dialects())}",
            attributes=attributes,
        )

    def _ours(self, span: WireSpan) -> tuple[str, dict[str, Any]]:
        """Operation and attributes under our names that a span gains; operation "" leaves it as it is."""
        reading = self._readings.get(span.span_id)
        if span is self._tree.root:
            return c.INVOKE_WORKFLOW, self._episode(span, reading)
        if reading is None:
            return "", {}
        if span.span_id in self._executions:
            return c.INVOKE_AGENT, self._execution(span, reading)
        if reading.kind == "tool":
            return c.EXECUTE_TOOL, {c.OPERATION: c.EXECUTE_TOOL, **reading.attributes}
        if span.span_id in self._actions:
            return c.CHAT, self._call(span, reading)
        return "", {}

    def _inside_a_call(self, span_id: str) -> bool:
        """Whether two layers recorded one call: LangChain's model and the client library that it calls."""
        around = (self._readings.get(span.span_id) for span in self._tree.above(span_id))
        return any(reading is not None and reading.kind == "llm" for reading in around)

    def _episode(self, root: WireSpan, reading: Reading | None) -> dict[str, Any]:
        readings = [reading] if reading is not None else []
        session = next((r.session for r in (*readings, *self._readings.values()) if r.session), None)
        subject = next((r.subject for r in (*readings, *self._readings.values()) if r.subject), None)
        tags = {"dialect": "+".join(self._dialects()), "service": root.service, "session": session}
        outcome, reason = root_to_outcome(root)
        # The root itself, or the run right below a root that says little.
        below = [self._readings.get(span.span_id) for span in self._tree.children(root.span_id)]
        tasks = [r.task for r in (reading, *(below if len(below) == 1 else ())) if r is not None and r.task]
        return _present(
            {
                c.OPERATION: c.INVOKE_WORKFLOW,
                c.WORKFLOW_NAME: reading.name if reading is not None else root.name,
                c.RUN_ID: self._run_id,
                c.TASK_ID: root.trace_id,  # a session is not one: every turn of a conversation is another task
                c.TASK: json.dumps(tasks[0]) if tasks else None,
                c.SPLIT: "live",
                c.SAMPLE: 0,
                c.TAGS: json.dumps({key: value for key, value in tags.items() if value}),
                c.SUBJECT_ID: subject,
                c.OUTCOME: outcome,
                c.OUTCOME_REASON: reason,
                c.SPAN_COUNT: len(self._tree.spans),
            }
        )

    def _execution(self, span: WireSpan, reading: Reading) -> dict[str, Any]:
        node = self._executions[span.span_id]
        return _present(
            {
                c.OPERATION: c.INVOKE_AGENT,
                c.AGENT_NAME: node,
                c.NODE: node,
                c.STEP: reading.step,
                c.CHECKPOINT_NS: reading.checkpoint_ns,
                c.MAY_READ_FROM: self._bounds(span.span_id) if self._on_langgraph else None,
            }
        )

    def _bounds(self, span_id: str) -> list[str]:
        """The checkpoint namespaces that a node execution may have read from, latest first: earlier supersteps of the
        same run of the same graph, and whatever a subgraph was given."""
        found: dict[str, None] = {}
        for execution in (self._tree.spans[span_id], *self._tree.above(span_id)):
            if execution.span_id in self._executions:
                found |= dict.fromkeys(self._earlier(execution))
        return list(found)[:MOST_READ]

    def _earlier(self, span: WireSpan) -> list[str]:
        step = self._readings[span.span_id].step
        found: dict[str, int] = {}
        for sibling in self._tree.children(span.parent_span_id):
            if step is None or sibling.span_id not in self._executions:
                continue
            other = self._readings[sibling.span_id]
            if other.checkpoint_ns is not None and other.step is not None and other.step < step:
                found[other.checkpoint_ns] = other.step
        return sorted(found, key=lambda ns: (-found[ns], ns))

    def _call(self, span: WireSpan, reading: Reading) -> dict[str, Any]:
        around = next((s for s in self._tree.above(span.span_id) if s.span_id in self._executions), None)
        enclosing = self._readings[around.span_id] if around is not None else None
        if (
            enclosing is not None
            and reading.checkpoint_ns not in (None, enclosing.checkpoint_ns)
            and self._on_langgraph
        ):
            raise NotAnEpisode(
                f"call {span.span_id} says that it belongs to {reading.checkpoint_ns!r:.80}, but lies in "
                f"{enclosing.checkpoint_ns!r:.80}"
            )
        if around is not None:
            node: str | None = self._executions[around.span_id]
        elif reading.checkpoint_ns is not None:
            node = namespace_to_node(reading.checkpoint_ns)
        else:  # an agent that is itself the run has no execution of its own
            root = self._readings.get(self._tree.root.span_id)
            node = root.agent if root is not None and not self._on_langgraph else None
        place = enclosing if enclosing is not None else reading
        # What was redacted before the span got here said so; numbers that stand for the text go with it.
        redacted = span.attributes.get(c.UNTRAINABLE)
        said = {key: value for key, value in reading.attributes.items() if key != c.LOGPROBS or redacted is None}
        return _present(
            {
                **said,
                c.OPERATION: c.CHAT,
                c.NODE: node,
                c.STEP: place.step,
                c.CHECKPOINT_NS: place.checkpoint_ns,
                c.SAW_ANSWERS: self._answers.named(reading.prompt_ids) or None,
                c.SAW_TOOL_RESULTS: self._tool_calls.named(answered_tool_calls(said.get(c.INPUT_MESSAGES))) or None,
                c.UNTRAINABLE: "; ".join(filter(None, (missing.untrainable(said, reading.dialect), redacted))),
            }
        )


def _foreign_attributes(span: WireSpan, operation: str) -> dict[str, Any]:
    """What stays of a span as it was sent: not what only our recorder may say, nor what a call's reading decides."""
    decided = CALL_NAMES if operation in (c.CHAT, c.EXECUTE_TOOL) else frozenset()
    return {key: value for key, value in span.attributes.items() if key not in decided and not key.startswith(_OURS)}


def _as_sent(span: WireSpan) -> SpanRow:
    """A span of our own recorder as that would have journaled it."""
    return SpanRow(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        operation=str(span.attributes.get(c.OPERATION, "")),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status="error" if span.failed else "ok",
        status_message=span.status_message,
        convention=span.scope_version or c.CONVENTION_VERSION,
        attributes=span.attributes,
    )


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
