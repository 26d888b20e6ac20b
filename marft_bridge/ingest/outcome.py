"""The OpenTelemetry status of a span -> the outcome of a node, a call or a whole run in the store.

LangGraph raises exceptions to route and to pause, which instrumentors record as errors; they are no failures here.
"""

from __future__ import annotations

from marft_bridge.common.run_limits import RECURSION_LIMIT
from marft_bridge.ingest import langfuse
from marft_bridge.ingest.otlp import WireSpan

_CONTROL_FLOW = ("GraphInterrupt", "NodeInterrupt", "ParentCommand", "GraphBubbleUp")


def has_failed(span: WireSpan) -> bool:
    """Whether a span failed; LangGraph's own control flow (interrupts, handoffs) is no failure."""
    kinds = ((span.exception_type or "").rpartition(".")[2], (span.status_message or "").partition("(")[0])
    failed = span.failed or span.attributes.get(langfuse.LEVEL) == "ERROR"  # whose SDK sets no status
    return failed and not any(kind in _CONTROL_FLOW for kind in kinds)


def root_to_outcome(root: WireSpan) -> tuple[str, str | None]:
    """How a run ended, and why: (terminated | truncated | failed, reason)."""
    if not has_failed(root):
        return "terminated", None
    if "GraphRecursionError" in f"{root.exception_type} {root.status_message}":
        return "truncated", RECURSION_LIMIT
    return "failed", root.status_message or root.exception_type or "the root span says error and nothing else"
