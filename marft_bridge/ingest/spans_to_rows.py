"""All spans of one trace -> the rows that make it an episode, or the reason why it is none.

    our own trace     unchanged, every attribute
    any other         its root is the run; LangGraph nodes, or else agent spans, are the agents; LLM calls are the
                      actions, tool calls the transitions; every other span stays what it is

Invariants: a row keeps the sender's attributes, except those under `marft.`, and adds their meaning under our names;
it has no token id or log-prob that the trace does not hold; every action carries the reason why it cannot be trained
on. Ids of messages and tool calls that come back in a later prompt are exact edges; otherwise the trace tells only in
which superstep a node ran, and all nodes of earlier supersteps are an upper bound of what it could read. Rows of the
same spans are always the same, but for the run's id on the root.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.common.agent_names import AGENT_NAME_METADATA, Actors
from marft_bridge.common.node_names import lacks_task_id, namespace_in_task
from marft_bridge.ingest import missing
from marft_bridge.ingest.conventions import span_to_reading
from marft_bridge.ingest.messages import IdIndex, messages_to_tool_call_ids, messages_to_tool_result_ids
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.outcome import has_failed, root_to_outcome
from marft_bridge.ingest.reading import CALL_ATTRIBUTES, Reading, as_text
from marft_bridge.ingest.trace_tree import NotAnEpisode, TraceTree
from trace_store import conventions as c
from trace_store.records import SpanRow

OWN_CONVENTION = "marft"  # name of our own recorder
_OWN_PREFIX = "marft."
MAX_EARLIER_EXECUTIONS = 256  # earlier executions named as upper bounds; more would make long loops quadratic


@dataclass(frozen=True, slots=True)
class TraceRows:
    """The rows of one trace. `missing` counts, by (convention, what is missing), what our recorder would have had."""

    rows: tuple[SpanRow, ...]
    conventions: tuple[str, ...]
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)


def spans_to_rows(spans: Sequence[WireSpan], run_id: str) -> TraceRows:
    """One trace, its spans in any order. Raises NotAnEpisode."""
    tree = TraceTree(spans)
    tree.refuse_if_broken()
    root = tree.root
    if c.SPAN_COUNT in root.attributes and root.attributes.get(c.OPERATION) == c.INVOKE_WORKFLOW:
        if root.attributes[c.SPAN_COUNT] != len(tree.spans):
            raise NotAnEpisode(f"{len(tree.spans)} of {root.attributes[c.SPAN_COUNT]} spans came")
        empty_keys = [key for key in (c.RUN_ID, c.TASK_ID, c.SPLIT) if root.attributes.get(key) == ""]
        if empty_keys:
            raise NotAnEpisode(f"its root has an empty {', '.join(empty_keys)}")
        return TraceRows(tuple(_span_to_own_row(span) for span in tree.spans.values()), (OWN_CONVENTION,))
    return _ForeignTrace(tree, run_id).to_rows()


class _ForeignTrace:
    """One whole trace of other tracers, on its way to rows."""

    def __init__(self, tree: TraceTree, run_id: str) -> None:
        self._tree, self._run_id = tree, run_id
        self._readings = {
            span_id: reading for span_id, span in tree.spans.items() if (reading := span_to_reading(span)) is not None
        }
        self._complete_namespaces()
        self._refuse_if_no_run()
        self._actors = Actors()
        self._executions = self._langgraph_executions()
        self._has_langgraph = bool(self._executions)
        if not self._has_langgraph:
            self._executions = {
                span_id: reading.agent or reading.name
                for span_id, reading in self._readings.items()
                if reading.kind == "agent" and span_id != tree.root.span_id
            }

        self._actions = {
            span_id
            for span_id, reading in self._readings.items()
            if reading.kind == "llm" and not self._is_inside_call(span_id)
        }
        self._answers, self._tool_calls = IdIndex(), IdIndex()
        for span_id in self._actions:
            reading = self._readings[span_id]
            self._answers.add(reading.answer_ids, span_id)
            self._tool_calls.add(messages_to_tool_call_ids(reading.attributes.get(c.OUTPUT_MESSAGES)), span_id)

    def _refuse_if_no_run(self) -> None:
        root = self._readings.get(self._tree.root.span_id)
        if not any(reading.kind in ("llm", "agent") or reading.node for reading in self._readings.values()):
            raise NotAnEpisode("no LLM call, no agent and no graph node in it")
        if root is not None and root.kind in ("llm", "tool"):
            called = "an LLM call" if root.kind == "llm" else "a tool call"
            raise NotAnEpisode(f"its root is {called} outside any graph run")

    def _complete_namespaces(self) -> None:
        """Puts the tasks around a graph that keeps its own state into the namespaces of its tasks, as our recorder."""
        inner_ids = [
            span_id
            for span_id, reading in self._readings.items()
            if reading.checkpoint_ns is not None and lacks_task_id(reading.checkpoint_ns)
        ]
        for span_id in sorted(inner_ids, key=lambda span_id: len(list(self._tree.ancestors(span_id)))):
            reading = self._readings[span_id]
            enclosing = (self._readings.get(span.span_id) for span in self._tree.ancestors(span_id))
            outer_ns = next((r.checkpoint_ns for r in enclosing if r is not None and r.checkpoint_ns is not None), "")
            own_ns = namespace_in_task(str(reading.checkpoint_ns), outer_ns)
            self._readings[span_id] = replace(reading, checkpoint_ns=own_ns)

    def _langgraph_executions(self) -> dict[str, str]:
        """Span id -> agent, of the spans that are node executions: named like their node, in a checkpoint namespace
        other than that of the spans around them. Our recorder identifies them by the same rule."""
        namespaces: dict[str, str] = {}
        for span_id, reading in self._readings.items():
            if reading.kind in ("llm", "tool") or reading.checkpoint_ns is None or reading.name != reading.node:
                continue
            enclosing = (self._readings.get(span.span_id) for span in self._tree.ancestors(span_id))
            outer_ns = next((r.checkpoint_ns for r in enclosing if r is not None and r.checkpoint_ns is not None), None)
            if outer_ns != reading.checkpoint_ns:
                namespaces[span_id] = reading.checkpoint_ns
        for span_id, namespace in sorted(namespaces.items(), key=lambda item: item[1].count("|")):  # from outside in
            self._actors.note(namespace, {AGENT_NAME_METADATA: self._readings[span_id].declared_name})
        return {span_id: self._actors.agent_at(namespace) for span_id, namespace in namespaces.items()}

    def to_rows(self) -> TraceRows:
        missing_counts: Counter[tuple[str, str]] = Counter()
        rows = []
        for span_id, span in self._tree.spans.items():
            operation, own_attributes = self._operation_and_attributes(span)
            attributes = _foreign_attributes(span, operation) | own_attributes
            rows.append(self._row(span, operation, attributes))
            missing_counts.update(
                missing.span_to_missing(span, self._readings.get(span_id), operation, attributes=attributes)
            )
        missing_counts.update(
            missing.trace_to_missing(self._conventions(), operations := [row.operation for row in rows])
        )
        if not self._has_langgraph and c.CHAT in operations:
            missing_counts[self._conventions()[0], missing.NO_LANGGRAPH] += 1
        return TraceRows(tuple(rows), self._conventions(), missing_counts)

    def _conventions(self) -> tuple[str, ...]:
        return tuple(sorted({reading.convention for reading in self._readings.values()}))

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
            status="error" if has_failed(span) else "ok",
            status_message=span.status_message,
            convention=f"{c.CONVENTION_VERSION}+{'+'.join(self._conventions())}",
            attributes=attributes,
        )

    def _operation_and_attributes(self, span: WireSpan) -> tuple[str, dict[str, Any]]:
        """The operation of a span and its attributes under our names; operation "" for a span that stays as it is."""
        reading = self._readings.get(span.span_id)
        if span is self._tree.root:
            return c.INVOKE_WORKFLOW, self._episode_attributes(span, reading)
        if reading is None:
            return "", {}
        if span.span_id in self._executions:
            return c.INVOKE_AGENT, self._execution_attributes(span, reading)
        if reading.kind == "tool":
            return c.EXECUTE_TOOL, {c.OPERATION: c.EXECUTE_TOOL, **reading.attributes}
        if span.span_id in self._actions:
            return c.CHAT, self._call_attributes(span, reading)
        return "", {}

    def _is_inside_call(self, span_id: str) -> bool:
        """Whether two layers recorded one call: LangChain's model and the client library that it calls."""
        enclosing = (self._readings.get(span.span_id) for span in self._tree.ancestors(span_id))
        return any(reading is not None and reading.kind == "llm" for reading in enclosing)

    def _episode_attributes(self, root: WireSpan, reading: Reading | None) -> dict[str, Any]:
        readings = [reading] if reading is not None else []
        session = next((r.session for r in (*readings, *self._readings.values()) if r.session), None)
        subject = next((r.subject for r in (*readings, *self._readings.values()) if r.subject), None)
        # "dialect" is the stored name of the tag.
        tags = {"dialect": "+".join(self._conventions()), "service": root.service, "session": session}
        outcome, reason = root_to_outcome(root)
        # The task is the input of the root, or else of its only child: some tracers wrap the run in an empty root.
        children = [self._readings.get(span.span_id) for span in self._tree.children(root.span_id)]
        tasks = [r.task for r in (reading, *(children if len(children) == 1 else ())) if r is not None and r.task]
        return _without_absent(
            {
                c.OPERATION: c.INVOKE_WORKFLOW,
                c.AGENT_NAME: reading.name if reading is not None else root.name,
                c.RUN_ID: self._run_id,
                c.TASK_ID: root.trace_id,  # not the session: every turn of a conversation is another task
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

    def _execution_attributes(self, span: WireSpan, reading: Reading) -> dict[str, Any]:
        node = self._executions[span.span_id]
        return _without_absent(
            {
                c.OPERATION: c.INVOKE_AGENT,
                c.AGENT_NAME: node,
                c.NODE: node,
                c.STEP: reading.step,
                c.CHECKPOINT_NS: reading.checkpoint_ns,
                c.MAY_READ_FROM: self._may_read_from(span.span_id) if self._has_langgraph else None,
            }
        )

    def _may_read_from(self, span_id: str) -> list[str]:
        """The checkpoint namespaces that a node execution may have read from, latest first: earlier supersteps of the
        same run of the same graph, and what the graph around a subgraph had run before it."""
        namespaces: dict[str, None] = {}
        for execution in (self._tree.spans[span_id], *self._tree.ancestors(span_id)):
            if execution.span_id in self._executions:
                namespaces |= dict.fromkeys(self._earlier_executions(execution))
        return list(namespaces)[:MAX_EARLIER_EXECUTIONS]

    def _earlier_executions(self, span: WireSpan) -> list[str]:
        step = self._readings[span.span_id].step
        namespace_steps: dict[str, int] = {}
        for sibling in self._tree.children(span.parent_span_id):
            if step is None or sibling.span_id not in self._executions:
                continue
            earlier = self._readings[sibling.span_id]
            if earlier.checkpoint_ns is not None and earlier.step is not None and earlier.step < step:
                namespace_steps[earlier.checkpoint_ns] = earlier.step
        return sorted(namespace_steps, key=lambda ns: (-namespace_steps[ns], ns))

    def _call_attributes(self, span: WireSpan, reading: Reading) -> dict[str, Any]:
        execution = next((s for s in self._tree.ancestors(span.span_id) if s.span_id in self._executions), None)
        enclosing = self._readings[execution.span_id] if execution is not None else None
        if (
            enclosing is not None
            and reading.checkpoint_ns not in (None, enclosing.checkpoint_ns)
            and self._has_langgraph
        ):
            raise NotAnEpisode(
                f"call {span.span_id} says that it belongs to {reading.checkpoint_ns!r:.80}, but lies in "
                f"{enclosing.checkpoint_ns!r:.80}"
            )
        if execution is not None:
            node: str | None = self._executions[execution.span_id]
        elif reading.checkpoint_ns is not None:
            node = self._actors.agent_at(reading.checkpoint_ns)
        else:  # an agent that is itself the run has no execution of its own
            root = self._readings.get(self._tree.root.span_id)
            node = root.agent if root is not None and not self._has_langgraph else None
        location = enclosing if enclosing is not None else reading
        # Set by `SpanCleaner` where a text was redacted: log-probs of the original text must not be passed on. A sender
        # may have put anything there.
        redacted = as_text(span.attributes.get(c.UNTRAINABLE))
        call_attributes = {
            key: value for key, value in reading.attributes.items() if key != c.LOGPROBS or redacted is None
        }
        return _without_absent(
            {
                **call_attributes,
                c.OPERATION: c.CHAT,
                c.NODE: node,
                c.STEP: location.step,
                c.CHECKPOINT_NS: location.checkpoint_ns,
                c.SAW_ANSWERS: self._answers.ids_to_calls(reading.prompt_ids) or None,
                c.SAW_TOOL_RESULTS: self._tool_calls.ids_to_calls(
                    messages_to_tool_result_ids(call_attributes.get(c.INPUT_MESSAGES))
                )
                or None,
                c.UNTRAINABLE: "; ".join(
                    filter(None, (missing.untrainable_reason(call_attributes, reading.convention), redacted))
                ),
            }
        )


def _foreign_attributes(span: WireSpan, operation: str) -> dict[str, Any]:
    """The sender's attributes, without `marft.*`, which only our recorder may write, and without those of a call that
    its reading replaces."""
    decided_names = CALL_ATTRIBUTES if operation in (c.CHAT, c.EXECUTE_TOOL) else frozenset()
    return {
        key: value
        for key, value in span.attributes.items()
        if key not in decided_names and not key.startswith(_OWN_PREFIX)
    }


def _span_to_own_row(span: WireSpan) -> SpanRow:
    """A span of our own recorder -> the row that the recorder itself would have journaled."""
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


def _without_absent(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
