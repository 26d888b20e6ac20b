"""The spans of one trace -> a Flex-MG trajectory, its rewards still to come.

Pure, and the same for any order of the spans. Invariants: an action is trainable only when the engine's token
ids and log-probs are complete, parallel and plausible, and otherwise carries the reason in words; an attempt at a
node that was superseded gives actions but no edges. Storage is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import cast, get_args

from trace_store import conventions as c
from trace_store.attributes import Bag, Malformed
from trace_store.dependencies import Call, DependencyCycleError, Execution, executions_to_edges, topological_order
from trace_store.records import FROM_ENGINE, NO_LOGPROBS, Action, Episode, Outcome, SpanRow, Trajectory

__all__ = ["Incomplete", "Malformed", "spans_to_trajectory"]

_READS_WERE_BOUNDS = "genai-1.44/marft-1"  # under these names, reads_from held all that may have been read
LOGPROB_TOLERANCE = 1e-4  # engines in low precision report log-probs a little above 0


class Incomplete(Exception):  # noqa: N818 - a state to wait in, not an error
    """The trace may still become a trajectory; the message says what is missing."""


def spans_to_trajectory(spans: Sequence[SpanRow]) -> Trajectory:
    """Assemble one trace. Raises Incomplete while spans are missing and Malformed when more would not help."""
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
        self.root = self._root()
        self._refuse_broken_tree()

    def _root(self) -> SpanRow:
        roots = sorted(span_id for span_id, span in self.spans.items() if span.parent_span_id is None)
        if len(roots) > 1:
            raise Malformed(f"several spans have no parent: {', '.join(roots[:5])}")
        if not roots:
            raise Incomplete("the root span has not arrived")
        root = self.spans[roots[0]]
        if root.operation != c.INVOKE_WORKFLOW:
            raise Malformed(f"the root span is {root.operation}, not {c.INVOKE_WORKFLOW}")
        count = Bag(root).small(c.SPAN_COUNT)
        if count is None:
            raise Malformed(f"the root span lacks {c.SPAN_COUNT}")
        if len(self.spans) < count:
            raise Incomplete(f"{len(self.spans)} of {count} spans have arrived")
        if len(self.spans) > count:
            raise Malformed(f"the trace has {len(self.spans)} spans, its root says {count}")
        return root

    def _refuse_broken_tree(self) -> None:
        reaches_root = {self.root.span_id}
        for span in self.spans.values():
            path: list[str] = []
            while span.span_id not in reaches_root:
                path.append(span.span_id)
                parent = self.spans.get(cast(str, span.parent_span_id))
                if parent is None:
                    raise Malformed(f"the parent {span.parent_span_id} of span {span.span_id} is not in the trace")
                if len(path) > len(self.spans):
                    raise Malformed(f"span {min(path)} is its own ancestor")
                span = parent
            reaches_root.update(path)

    def execution_span(self, span: SpanRow) -> SpanRow | None:
        """The nearest node execution around a span."""
        while span.parent_span_id is not None:
            span = self.spans[span.parent_span_id]
            if span.operation == c.INVOKE_AGENT:
                return span
        return None

    @cached_property
    def _attempts(self) -> dict[str, list[SpanRow]]:
        """Checkpoint namespace -> its attempts in time; a retry or a resume repeats the namespace."""
        attempts: dict[str, list[SpanRow]] = {}
        for span in sorted(self.spans.values(), key=lambda span: (span.start_ns, span.span_id)):
            if span.operation == c.INVOKE_AGENT:
                attempts.setdefault(_namespace(span), []).append(span)
        return attempts

    @cached_property
    def lost_attempts(self) -> dict[str, str]:
        """Span id of each attempt that does not count -> the reason, for training."""
        lost: dict[str, str] = {}
        for attempts in self._attempts.values():
            succeeded = [span for span in attempts if span.status == "ok"]
            for span in attempts:
                if succeeded and span is succeeded[-1]:
                    continue
                if span.status == "ok":
                    lost[span.span_id] = "attempt was superseded by a later one"
                elif span is attempts[-1]:
                    lost[span.span_id] = "attempt failed"
                else:
                    lost[span.span_id] = "attempt failed and was retried"
        return lost

    def loss_of(self, span: SpanRow) -> str | None:
        """Why a call does not count: one of the attempts around it was lost."""
        around = self.execution_span(span)
        while around is not None:
            if around.span_id in self.lost_attempts:
                return self.lost_attempts[around.span_id]
            around = self.execution_span(around)
        return None

    def executions(self) -> dict[str, Execution]:
        """Checkpoint namespace -> execution, with the calls of the attempt that counts."""
        executions: dict[str, Execution] = {}
        for ns, attempts in self._attempts.items():
            kept = next((span for span in attempts if span.span_id not in self.lost_attempts), attempts[-1])
            bag, outer = Bag(kept), self.execution_span(kept)
            reads, maybe = _reads(bag)
            executions[ns] = Execution(
                ns=ns,
                step=bag.small(c.STEP) if bag.text(c.CALLED_BY) is None else None,
                parent=None if outer is None else _namespace(outer),
                triggered_by=bag.texts(c.TRIGGERED_BY),
                sent_by=bag.texts(c.SENT_BY),
                reads_from=reads or (),
                may_read_from=maybe or (),
            )
        for span in self.spans.values():
            around = self.execution_span(span) if span.operation == c.CHAT else None
            if around is not None and self.loss_of(span) is None:
                executions[_namespace(around)].calls.append(_span_to_call(span))
        return executions


def _span_to_call(span: SpanRow) -> Call:
    bag = Bag(span)
    reads, maybe = _reads(bag)
    return Call(
        action_id=span.span_id,
        start=span.start_ns,
        end=max(span.start_ns, span.end_ns),
        reads_from=reads,
        may_read_from=maybe,
        saw_answers=bag.texts(c.SAW_ANSWERS),
        saw_tool_results=bag.texts(c.SAW_TOOL_RESULTS),
    )


def _reads(bag: Bag) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """What was read and what may have been; None for what the span does not say."""
    if not (bag.has(c.READS_FROM) or bag.has(c.MAY_READ_FROM)):
        return None, None
    reads, maybe = bag.texts(c.READS_FROM), bag.texts(c.MAY_READ_FROM)
    if bag.convention == _READS_WERE_BOUNDS:
        return (), (*reads, *maybe)
    return reads, maybe


def _namespace(span: SpanRow) -> str:
    return Bag(span).text(c.CHECKPOINT_NS) or span.span_id


def _span_to_action(trace: _Trace, span: SpanRow, index: int) -> Action:
    bag, around = Bag(span), trace.execution_span(span)
    claimed, inside = bag.text(c.NODE), Bag(around).text(c.NODE) if around else None
    if claimed is not None and inside is not None and claimed != inside:
        raise Malformed(f"two nodes claim the call {span.span_id}: {claimed!r} and {inside!r}")
    node = claimed or inside or ""
    prompt_ids, sampled_ids = bag.token_ids(c.PROMPT_IDS), bag.token_ids(c.SAMPLED_IDS)
    logprobs = bag.numbers(c.LOGPROBS)
    if not node:
        reason: str | None = "called outside any graph node"
    elif around is None:
        reason = f"the execution of node {node} around it was not recorded"
    else:
        reason = (
            trace.loss_of(span)
            or bag.text(c.UNTRAINABLE)
            or _failure_of(span)
            or token_fault(prompt_ids, sampled_ids, logprobs, bag.integer(c.USAGE_OUTPUT_TOKENS))
        )
    return Action(
        action_id=span.span_id,
        episode_id=span.trace_id,
        node=node,
        index=index,
        step=bag.small(c.STEP),
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=logprobs,
        model=bag.text(c.RESPONSE_MODEL),
        adapter=bag.text(c.ADAPTER),
        adapter_version=bag.small(c.ADAPTER_VERSION),
        temperature=bag.number(c.REQUEST_TEMPERATURE),
        top_p=bag.number(c.REQUEST_TOP_P),
        top_k=bag.small(c.REQUEST_TOP_K),
        max_tokens=bag.small(c.REQUEST_MAX_TOKENS),
        seed=bag.integer(c.REQUEST_SEED),
        finish_reason=bag.finish_reason(),
        completion=bag.completion(),
        started_ns=span.start_ns,
        ended_ns=span.end_ns,
        trainable=reason is None,
        untrainable_reason=reason,
        prompt_tokens=bag.small(c.USAGE_INPUT_TOKENS),
        sampled_tokens=bag.small(c.USAGE_OUTPUT_TOKENS),
    )


def _failure_of(span: SpanRow) -> str | None:
    if span.status == "ok":
        return None
    return f"the call failed: {span.status_message}" if span.status_message else "the call failed"


def token_fault(
    prompt_ids: Sequence[int] | None,
    sampled_ids: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    reported: int | None,
) -> str | None:
    """Why ids and log-probs cannot be trained on; None when they can."""
    if not prompt_ids:
        return f"no prompt token ids {FROM_ENGINE}"
    if not sampled_ids:
        return f"no sampled token ids {FROM_ENGINE}"
    if logprobs is None:
        return NO_LOGPROBS
    if len(sampled_ids) != len(logprobs):
        return f"{len(sampled_ids)} sampled tokens but {len(logprobs)} log-probs"
    if reported is not None and reported != len(sampled_ids):
        return f"{len(sampled_ids)} sampled tokens but the engine counted {reported}"
    # A sum that is finite has finite terms only, and is quicker; finite terms may still add up beyond what is finite.
    if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
        return "a log-prob is not finite"
    if max(logprobs) > LOGPROB_TOLERANCE:
        return f"a log-prob is positive: {max(logprobs)}"
    return None


def _root_to_episode(root: SpanRow, span_count: int) -> Episode:
    bag = Bag(root)
    needed = {key: bag.text(key) for key in (c.RUN_ID, c.TASK_ID, c.SPLIT, c.OUTCOME)}
    sample = bag.small(c.SAMPLE)
    missing = [key for key, value in {**needed, c.SAMPLE: sample}.items() if value is None]
    if missing:
        raise Malformed(f"the root span lacks {', '.join(missing)}")
    if needed[c.OUTCOME] not in get_args(Outcome):
        raise Malformed(f"outcome {needed[c.OUTCOME]!r} is not one of {', '.join(get_args(Outcome))}")
    return Episode(
        episode_id=root.trace_id,
        run_id=cast(str, needed[c.RUN_ID]),
        task_id=cast(str, needed[c.TASK_ID]),
        split=cast(str, needed[c.SPLIT]),
        sample=cast(int, sample),
        round=bag.small(c.ROUND),
        variant=bag.text(c.VARIANT),
        seed=bag.integer(c.SEED),
        adapters=bag.adapter_versions(),
        outcome=cast(Outcome, needed[c.OUTCOME]),
        reason=bag.text(c.OUTCOME_REASON),
        started_ns=root.start_ns,
        ended_ns=root.end_ns,
        span_count=span_count,
        task=bag.mapping(c.TASK),
        tags=bag.tags(),
        subject_id=bag.text(c.SUBJECT_ID),
        parent_episode=bag.text(c.PARENT_EPISODE),
        lineage=bag.lineage(),
    )
