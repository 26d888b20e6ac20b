"""Rows of a foreign trace -> what our own recorder would have recorded and they lack, counted.

The report shows the counts by (convention, what is missing); an action carries the reason why it is not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import Reading
from trace_store import conventions as c
from trace_store.records import FROM_ENGINE

Missing = Counter[tuple[str, str]]

NO_LANGGRAPH = "episodes without LangGraph nodes: agents are agent spans, if there are any"
_ANY_CONVENTION = "any"
_CALL_LABELS = {
    c.PROMPT_IDS: "prompt token ids",
    c.SAMPLED_IDS: "sampled token ids",
    c.LOGPROBS: "log-probs",
    c.NODE: "node or agent that made the call",
    c.RESPONSE_MODEL: "model that answered",
    c.FINISH_REASONS: "finish reason",
    c.USAGE_INPUT_TOKENS: "number of prompt tokens",
    c.USAGE_OUTPUT_TOKENS: "number of sampled tokens",
    c.INPUT_MESSAGES: "prompt",
    c.OUTPUT_MESSAGES: "answer",
    c.REQUEST_TEMPERATURE: "temperature",
}


def untrainable_reason(attributes: Mapping[str, Any], convention: str) -> str:
    """Why an ingested action cannot be trained on."""
    recorded_part = "log-probs without token ids" if c.LOGPROBS in attributes else "no token ids and no log-probs"
    return f"ingested from {convention}: {recorded_part} {FROM_ENGINE}"


def span_to_missing(span: WireSpan, reading: Reading | None, operation: str, attributes: Mapping[str, Any]) -> Missing:
    """What one span lacks, given the attributes of its row."""
    counts: Missing = Counter()
    convention = reading.convention if reading is not None else _ANY_CONVENTION
    if operation == c.CHAT:
        counts.update((convention, label) for key, label in _CALL_LABELS.items() if key not in attributes)
    elif operation == c.EXECUTE_TOOL and c.TOOL_CALL_ID not in attributes:
        counts[convention, "tool call id"] += 1
    elif operation == "" and reading is not None and reading.kind == "llm":
        counts[convention, "not an action: a call inside another one, recorded by two layers"] += 1
    for key in reading.unreadable if reading is not None else ():
        counts[convention, f"readable {key}"] += 1
    counts[convention, "marft.* attributes, which only our own recorder may write"] += sum(
        key.startswith("marft.") and key != c.UNTRAINABLE for key in span.attributes
    )
    counts[convention, "attributes that the sender dropped"] += span.lost_attributes
    counts[convention, "span events, which the store does not keep"] += span.other_events
    counts[convention, "span links, which the store does not keep"] += span.links
    return +counts  # without zeros


def trace_to_missing(conventions: Sequence[str], operations: Sequence[str]) -> Missing:
    """What a whole trace lacks: supersteps are ordered, but triggers, sends and reads are not recorded."""
    if operations.count(c.CHAT) < 2:
        return Counter()
    return Counter(
        {("+".join(conventions), "exact trigger, send and state edges, by episode; upper bounds stand in"): 1}
    )
