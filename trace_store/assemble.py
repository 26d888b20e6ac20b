"""The spans of one trace -> a Flex-MG trajectory without rewards, which are stored apart.

Pure, and the same for any order of the spans. Invariants: an action is trainable only when the engine's token
ids and log-probs are complete, parallel and plausible, and otherwise carries the reason in words; an attempt at a
node that was superseded gives actions but no edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import cast, get_args

from trace_store import conventions as c
from trace_store.attributes import Malformed, SpanAttributes
from trace_store.dependencies import Call, DependencyCycleError, Execution, executions_to_edges, topological_order
from trace_store.records import FROM_ENGINE, NO_LOGPROBS, REPLAYED, Action, Episode, Outcome, SpanRow, Trajectory

__all__ = ["Incomplete", "Malformed", "spans_to_trajectory"]

_BOUND_READS_CONVENTION = "genai-1.44/marft-1"  # in it, reads_from held all that may have been read
_FAILED = "attempt failed"
LOGPROB_TOLERANCE = 1e-4  # engines in low precision report log-probs a little above 0


class Incomplete(Exception):  # noqa: N818 - a state to wait in, not an error
    """The trace may still become a trajectory; the message says what is missing."""


def spans_to_trajectory(spans: Sequence[SpanRow]) -> Trajectory:
    """Assemble one trace. Raises Incomplete while spans are missing and Malformed when more would not help."""
    try:
        return _assemble(spans)
    except (Incomplete, Malformed, MemoryError):
        raise
    except Exception as error:  # whatever this trace holds, the others do not wait for it
        raise Malformed(f"cannot be assembled: {type(error).__name__}: {error}") from error


def _assemble(spans: Sequence[SpanRow]) -> Trajectory:
    trace = _Trace(spans)
    try:
        edges = executions_to_edges(trace.root.trace_id, trace.executions())
        starts = {s.span_id: (s.start_ns, s.span_id) for s in trace.spans.values() if s.operation == c.CHAT}
        order = topological_order(starts, edges)
    except DependencyCycleError as error:
        raise Malformed(str(error)) from None
    position = {action_id: index for index, action_id in enumerate(order)}
    return Trajectory(
        episode=_root_to_episode(trace.root, len(trace.spans)),
        actions=tuple(_span_to_action(trace, trace.spans[action_id], index) for action_id, index in position.items()),
        edges=tuple(sorted(edges, key=lambda edge: (position[edge.dst], position[edge.src]))),
        rewards=(),
    )


class _Trace:
    """The spans of one complete trace as a tree, with the attempt of each node execution that counts."""

    def __init__(self, spans: Sequence[SpanRow]) -> None:
        self.spans: dict[str, SpanRow] = {}
        for span in spans:
            if self.spans.setdefault(span.span_id, span) != span:
                raise Malformed(f"two different spans have the id {span.span_id}")
        if len({span.trace_id for span in spans}) > 1:
            raise Malformed("spans of several traces")
        self.root = self._find_root()
        self._refuse_broken_tree()

    def _find_root(self) -> SpanRow:
        roots = sorted(span_id for span_id, span in self.spans.items() if span.parent_span_id is None)
        if len(roots) > 1:
            raise Malformed(f"several spans have no parent: {', '.join(roots[:5])}")
        if not roots:
            raise Incomplete("the root span has not arrived")
        root = self.spans[roots[0]]
        if root.operation != c.INVOKE_WORKFLOW:
            raise Malformed(f"the root span is {root.operation}, not {c.INVOKE_WORKFLOW}")
        count = SpanAttributes(root).int32(c.SPAN_COUNT)
        if count is None:
            raise Malformed(f"the root span lacks {c.SPAN_COUNT}")
        if len(self.spans) < count:
            raise Incomplete(f"{len(self.spans)} of {count} spans have arrived")
        if len(self.spans) > count:
            raise Malformed(f"the trace has {len(self.spans)} spans, its root says {count}")
        return root

    def _refuse_broken_tree(self) -> None:
        rooted_ids = {self.root.span_id}
        for span in self.spans.values():
            ancestors: list[str] = []
            while span.span_id not in rooted_ids:
                ancestors.append(span.span_id)
                parent = self.spans.get(cast(str, span.parent_span_id))
                if parent is None:
                    raise Malformed(f"the parent {span.parent_span_id} of span {span.span_id} is not in the trace")
                if len(ancestors) > len(self.spans):
                    raise Malformed(f"span {min(ancestors)} is its own ancestor")
                span = parent
            rooted_ids.update(ancestors)

    def execution_span(self, span: SpanRow) -> SpanRow | None:
        """The span of the nearest node execution that encloses a span; None outside any node."""
        return self.enclosing_spans(span)[0]

    def enclosing_spans(self, span: SpanRow) -> tuple[SpanRow | None, tuple[str, ...]]:
        """The nearest node execution that encloses a span, and the tool runs in between, outermost first."""
        tools: list[str] = []
        while span.parent_span_id is not None:
            span = self.spans[span.parent_span_id]
            if span.operation == c.INVOKE_AGENT:
                return span, tuple(reversed(tools))
            if span.operation == c.EXECUTE_TOOL:
                tools.append(span.span_id)
        return None, ()

    def surroundings(self, attempt: SpanRow) -> tuple[SpanRow | None, tuple[str, ...]]:
        """As `enclosing_spans`, for a node execution. A router's span lies inside its node's, but it acts beside it."""
        enclosing_execution, tools = self.enclosing_spans(attempt)
        if enclosing_execution is not None and SpanAttributes(attempt).text(c.ROUTES_AFTER) is not None:
            return self.enclosing_spans(enclosing_execution)
        return enclosing_execution, tools

    @cached_property
    def _attempts(self) -> dict[str, list[SpanRow]]:
        """Checkpoint namespace -> its attempts in time; a retry or a resume repeats the namespace."""
        attempts: dict[str, list[SpanRow]] = {}
        for span in sorted(self.spans.values(), key=lambda span: (span.start_ns, span.span_id)):
            if span.operation == c.INVOKE_AGENT:
                attempts.setdefault(_namespace(span), []).append(span)
        return attempts

    @cached_property
    def dropped_attempts(self) -> dict[str, str]:
        """Span id of each attempt that does not count -> the reason, for training.

        What runs inside a node runs again with it, so an attempt counts only where all those around it do: from the
        outermost namespace inwards, one is chosen among these, and among all where there are none.
        """
        reasons: dict[str, str] = {}
        repeated_attempts = []
        for attempts in self._attempts.values():
            if len(attempts) > 1:
                repeated_attempts.append(attempts)
            elif attempts[0].status != "ok":
                reasons[attempts[0].span_id] = _FAILED
        for attempts in sorted(repeated_attempts, key=lambda attempts: max(map(self._depth, attempts))):
            candidates = [span for span in attempts if not self._is_lost_by(reasons, span)] or attempts
            reasons |= _attempts_to_reasons(attempts, candidates)
        return reasons

    def _depth(self, span: SpanRow) -> int:
        """The number of node executions around a span."""
        depth, execution = 0, self.execution_span(span)
        while execution is not None:
            depth, execution = depth + 1, self.execution_span(execution)
        return depth

    def drop_reason(self, span: SpanRow) -> str | None:
        """Why a call is not used for training: an attempt that encloses it does not count. None when all of them do."""
        execution = self.execution_span(span)
        while execution is not None:
            if execution.span_id in self.dropped_attempts:
                return self.dropped_attempts[execution.span_id]
            execution = self.execution_span(execution)
        return None

    @cached_property
    def _handled_namespaces(self) -> set[str]:
        """Of the executions whose error handlers ran: where all attempts failed, the game went on from the last one."""
        handlers = (SpanAttributes(span) for attempts in self._attempts.values() for span in attempts)
        return {ns for handler in handlers if (ns := handler.text(c.HANDLES)) is not None}

    def _is_handled(self, attempt: SpanRow) -> bool:
        return _namespace(attempt) in self._handled_namespaces

    def _is_lost(self, span: SpanRow) -> bool:
        """Whether nothing later depends on a call or a tool: an attempt around it does not count."""
        return self._is_lost_by(self.dropped_attempts, span)

    def _is_lost_by(self, reasons: Mapping[str, str], span: SpanRow) -> bool:
        """As `_is_lost`, of any span, by the reasons of the attempts around it.

        A failure counts where the game went on from it: its error handler ran, or that of a node around it; or the
        execution around it ended well, and so has caught it.
        """
        failed, execution = False, self.execution_span(span)
        while execution is not None:
            reason = reasons.get(execution.span_id)
            if reason is not None and reason != _FAILED:
                return True
            failed = reason is not None and not self._is_handled(execution)
            execution = self.execution_span(execution)
        return failed

    def executions(self) -> dict[str, Execution]:
        """Checkpoint namespace -> execution, with the calls of the attempt that counts."""
        executions: dict[str, Execution] = {}
        for ns, attempts in self._attempts.items():
            reasons = [self.dropped_attempts.get(span.span_id) for span in attempts]
            attempt = attempts[reasons.index(None if None in reasons else _FAILED)]
            attributes, (outer_execution, tools) = SpanAttributes(attempt), self.surroundings(attempt)
            reads, may_read = _read_namespaces(attributes)
            is_called = attributes.text(c.CALLED_BY) is not None
            is_caught_failure = (
                self.dropped_attempts.get(attempt.span_id) == _FAILED
                and not self._is_handled(attempt)
                and outer_execution is not None
                and outer_execution.span_id not in self.dropped_attempts
            )
            runs_after_a_node = attributes.is_set(c.ROUTES_AFTER) or attributes.is_set(c.HANDLES)
            executions[ns] = Execution(
                ns=ns,
                step=None if is_called or runs_after_a_node else attributes.int32(c.STEP),
                parent=None if outer_execution is None else _namespace(outer_execution),
                start=attempt.start_ns,
                end=max(attempt.start_ns, attempt.end_ns),
                # The result of a function that failed is an error, and nobody sees where its text goes.
                is_called=is_called and not is_caught_failure,
                is_caught_failure=is_caught_failure,
                tools=tools,
                runs_side_by_side=attributes.is_true(c.SIDE_BY_SIDE),
                triggered_by=attributes.texts(c.TRIGGERED_BY),
                sent_by=attributes.texts(c.SENT_BY),
                reads_from=reads or (),
                may_read_from=may_read or (),
            )
        for span in self.spans.values():
            if span.operation not in (c.CHAT, c.EXECUTE_TOOL):
                continue
            execution, tools = self.enclosing_spans(span)
            if execution is None or self._is_lost(span):
                continue
            if span.operation == c.CHAT:
                executions[_namespace(execution)].calls.append(_span_to_call(span, tools))
            else:
                times = (span.start_ns, max(span.start_ns, span.end_ns))
                executions[_namespace(execution)].tool_times[span.span_id] = times
        return executions


def _attempts_to_reasons(attempts: Sequence[SpanRow], candidates: Sequence[SpanRow]) -> dict[str, str]:
    """Attempts at one execution, and those of them that may count -> why each does not: all but the last success."""
    successes = [span.span_id for span in candidates if span.status == "ok"]
    last_id = candidates[-1].span_id
    reasons: dict[str, str] = {}
    is_after = False
    for span in attempts:
        if span.span_id in successes[-1:]:
            pass
        elif span.status != "ok" and span.span_id == last_id:
            reasons[span.span_id] = _FAILED
        elif is_after:
            reasons[span.span_id] = "attempt lies in one that does not count"
        elif span.status == "ok":
            reasons[span.span_id] = "attempt was superseded by a later one"
        else:
            reasons[span.span_id] = "attempt failed and was retried"
        is_after = is_after or span.span_id == last_id
    return reasons


def _span_to_call(span: SpanRow, tools: tuple[str, ...]) -> Call:
    attributes = SpanAttributes(span)
    reads, may_read = _read_namespaces(attributes)
    return Call(
        action_id=span.span_id,
        start=span.start_ns,
        end=max(span.start_ns, span.end_ns),
        reads_from=reads,
        may_read_from=may_read,
        saw_answers=attributes.texts(c.SAW_ANSWERS),
        saw_tool_results=attributes.texts(c.SAW_TOOL_RESULTS),
        tools=tools,
    )


def _read_namespaces(attributes: SpanAttributes) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Namespaces that were read, and those that may have been; None for both when the span names neither."""
    if not (attributes.is_set(c.READS_FROM) or attributes.is_set(c.MAY_READ_FROM)):
        return None, None
    reads, may_read = attributes.texts(c.READS_FROM), attributes.texts(c.MAY_READ_FROM)
    if attributes.convention == _BOUND_READS_CONVENTION:
        return (), (*reads, *may_read)
    return reads, may_read


def _namespace(span: SpanRow) -> str:
    return SpanAttributes(span).text(c.CHECKPOINT_NS) or span.span_id


def _span_to_action(trace: _Trace, span: SpanRow, index: int) -> Action:
    attributes, execution = SpanAttributes(span), trace.execution_span(span)
    named_node, execution_node = attributes.text(c.NODE), SpanAttributes(execution).text(c.NODE) if execution else None
    if named_node is not None and execution_node is not None and named_node != execution_node:
        raise Malformed(f"two nodes claim the call {span.span_id}: {named_node!r} and {execution_node!r}")
    node = named_node or execution_node or ""
    prompt_ids, sampled_ids = attributes.token_ids(c.PROMPT_IDS), attributes.token_ids(c.SAMPLED_IDS)
    logprobs = attributes.numbers(c.LOGPROBS)
    if not node:
        reason: str | None = "called outside any graph node"
    elif execution is None:
        reason = f"the execution of node {node} around it was not recorded"
    else:
        reason = (
            trace.drop_reason(span)
            or attributes.text(c.UNTRAINABLE)
            or _failure_reason(span)
            or token_fault(prompt_ids, sampled_ids, logprobs, reported_count=attributes.integer(c.USAGE_OUTPUT_TOKENS))
            or (REPLAYED if attributes.is_set(c.REPLAYED_FROM) else None)
        )
    return Action(
        action_id=span.span_id,
        episode_id=span.trace_id,
        node=node,
        index=index,
        step=attributes.int32(c.STEP),
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=logprobs,
        model=attributes.text(c.RESPONSE_MODEL),
        adapter=attributes.text(c.ADAPTER),
        adapter_version=attributes.int32(c.ADAPTER_VERSION),
        temperature=attributes.number(c.REQUEST_TEMPERATURE),
        top_p=attributes.number(c.REQUEST_TOP_P),
        top_k=attributes.int32(c.REQUEST_TOP_K),
        max_tokens=attributes.int32(c.REQUEST_MAX_TOKENS),
        seed=attributes.integer(c.REQUEST_SEED),
        finish_reason=attributes.finish_reason(),
        completion=attributes.completion(),
        started_ns=span.start_ns,
        ended_ns=span.end_ns,
        trainable=reason is None,
        untrainable_reason=reason,
        prompt_tokens=attributes.int32(c.USAGE_INPUT_TOKENS),
        sampled_tokens=attributes.int32(c.USAGE_OUTPUT_TOKENS),
        replayed_from=attributes.text(c.REPLAYED_FROM),
    )


def _failure_reason(span: SpanRow) -> str | None:
    if span.status == "ok":
        return None
    return f"the call failed: {span.status_message}" if span.status_message else "the call failed"


def token_fault(
    prompt_ids: Sequence[int] | None,
    sampled_ids: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    reported_count: int | None,
) -> str | None:
    """Why ids and log-probs cannot be trained on; None when they can.

    `reported_count` is the number of sampled tokens that the engine counted.
    """
    if not prompt_ids:
        return f"no prompt token ids {FROM_ENGINE}"
    if not sampled_ids:
        return f"no sampled token ids {FROM_ENGINE}"
    if logprobs is None:
        return NO_LOGPROBS
    if len(sampled_ids) != len(logprobs):
        return f"{len(sampled_ids)} sampled tokens but {len(logprobs)} log-probs"
    if reported_count is not None and reported_count != len(sampled_ids):
        return f"{len(sampled_ids)} sampled tokens but the engine counted {reported_count}"
    # A sum that is finite has finite terms only, and is quicker; finite terms may still add up beyond what is finite.
    if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
        return "a log-prob is not finite"
    if max(logprobs) > LOGPROB_TOLERANCE:
        return f"a log-prob is positive: {max(logprobs)}"
    return None


def _root_to_episode(root: SpanRow, span_count: int) -> Episode:
    attributes = SpanAttributes(root)
    required_texts = {key: attributes.text(key) for key in (c.RUN_ID, c.TASK_ID, c.SPLIT, c.OUTCOME)}
    sample = attributes.int32(c.SAMPLE)
    missing_keys = [key for key, text in required_texts.items() if not text]  # an empty name is none
    missing_keys += [c.SAMPLE] if sample is None else []
    if missing_keys:
        raise Malformed(f"the root span lacks {', '.join(missing_keys)}")
    if required_texts[c.OUTCOME] not in get_args(Outcome):
        raise Malformed(f"outcome {required_texts[c.OUTCOME]!r} is not one of {', '.join(get_args(Outcome))}")
    return Episode(
        episode_id=root.trace_id,
        run_id=cast(str, required_texts[c.RUN_ID]),
        task_id=cast(str, required_texts[c.TASK_ID]),
        split=cast(str, required_texts[c.SPLIT]),
        sample=cast(int, sample),
        round=attributes.int32(c.ROUND),
        variant=attributes.text(c.VARIANT),
        seed=attributes.integer(c.SEED),
        adapters=attributes.adapter_versions(),
        outcome=cast(Outcome, required_texts[c.OUTCOME]),
        reason=attributes.text(c.OUTCOME_REASON),
        started_ns=root.start_ns,
        ended_ns=root.end_ns,
        span_count=span_count,
        task=attributes.mapping(c.TASK),
        tags=attributes.tags(),
        subject_id=attributes.text(c.SUBJECT_ID),
        parent_episode=attributes.text(c.PARENT_EPISODE),
        fork_action=attributes.text(c.FORK_ACTION),
        lineage=attributes.lineage(),
        thread_id=attributes.text(c.THREAD_ID),
        user_id=attributes.text(c.USER_ID),
        metadata=attributes.mapping(c.METADATA),
        begins=attributes.beginning(),
        forked=attributes.flag(c.FORKED),
        from_checkpoint=attributes.text(c.FROM_CHECKPOINT),
        checkpoints=attributes.text(c.CHECKPOINTS),
    )
