"""Hand-made traces for the trace store's tests: node executions and calls at given times, as the recorder does."""

from __future__ import annotations

from itertools import count
from typing import Any, Literal

from trace_store import conventions as c
from trace_store.records import SpanRow

START = 1_700_000_000_000_000_000


class SampleTrace:
    """Builds the spans of one trace. Times are nanoseconds after `start`; span ids are given names, padded."""

    def __init__(self, trace: str = "a", start: int = START) -> None:
        self.trace_id = trace.rjust(32, "0")
        self.start = start
        self._spans: list[SpanRow] = []
        self._ids = count(1)

    def node(
        self,
        ns: str,
        begin: int,
        end: int,
        *,
        step: int | None = None,
        after: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
        ok: bool = True,
        inside: str = "root",
    ) -> str:
        """One attempt at a node execution; returns its span id. The node's name is that before the colon."""
        span_id = f"node{next(self._ids)}"
        attributes = {
            c.NODE: "/".join(part.split(":")[0] for part in ns.split("|")),
            c.STEP: step,
            c.CHECKPOINT_NS: ns,
            c.TRIGGERED_BY: list(after),
            c.READS_FROM: list(reads),
        }
        self._add(span_id, inside, c.INVOKE_AGENT, begin, end, attributes, "ok" if ok else "error")
        return span_id

    def call(self, name: str, inside: str, begin: int, end: int, *, ok: bool = True, **changed: Any) -> None:
        """One LLM call with two sampled tokens; `changed` replaces attributes by constant name, None removes one."""
        around = next((span for span in self._spans if span.span_id == inside), None)
        attributes = {
            c.NODE: around.attributes.get(c.NODE) if around else None,
            c.STEP: around.attributes.get(c.STEP) if around else None,
            c.PROMPT_IDS: [1, 2, 3],
            c.SAMPLED_IDS: [4, 5],
            c.LOGPROBS: [-0.1, -1 / 3],
            c.USAGE_OUTPUT_TOKENS: 2,
            c.FINISH_REASONS: ["stop"],
        }
        attributes.update({getattr(c, key): value for key, value in changed.items()})
        self._add(name, inside, c.CHAT, begin, end, attributes, "ok" if ok else "error")

    def tool(self, name: str, inside: str, begin: int, end: int, *, ok: bool = True, node: str | None = None) -> None:
        """One tool call; `node` is what the span itself says, as our recorder's does."""
        self._add(
            f"{name}{begin}",
            inside,
            c.EXECUTE_TOOL,
            begin,
            end,
            {c.TOOL_NAME: name, c.NODE: node},
            "ok" if ok else "error",
        )

    def spans(self, **changed: Any) -> list[SpanRow]:
        """All spans, the root last; `changed` replaces attributes of the root."""
        attributes = {
            c.RUN_ID: "run",
            c.TASK_ID: "task",
            c.TASK: '{"question":"1+1"}',
            c.SPLIT: "train",
            c.SAMPLE: 0,
            c.ADAPTERS: '{"a":3}',
            c.OUTCOME: "terminated",
            c.SPAN_COUNT: len(self._spans) + 1,
        }
        attributes.update({getattr(c, key): value for key, value in changed.items()})
        end = max((span.end_ns for span in self._spans), default=self.start) - self.start
        return [*self._spans, self._span("root", None, c.INVOKE_WORKFLOW, 0, end, attributes, "ok")]

    def _add(self, *span: Any) -> None:
        self._spans.append(self._span(*span))

    def _span(
        self,
        span_id: str,
        parent: str | None,
        operation: str,
        begin: int,
        end: int,
        attributes: dict[str, Any],
        status: Literal["ok", "error"],
    ) -> SpanRow:
        return SpanRow(
            trace_id=self.trace_id,
            span_id=span_id,
            parent_span_id=parent,
            name=f"{operation} {span_id}",
            operation=operation,
            start_ns=self.start + begin,
            end_ns=self.start + end,
            status=status,
            status_message=None if status == "ok" else "boom",
            convention=c.CONVENTION_VERSION,
            attributes={key: value for key, value in attributes.items() if value is not None},
        )


def chain(trace: str = "a", start: int = START) -> SampleTrace:
    """Two nodes, one call each: x, then y triggered by it."""
    sample = SampleTrace(trace, start)
    sample.call("x", sample.node("a:1", 10, 20, step=1), 11, 19)
    sample.call("y", sample.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39)
    return sample
