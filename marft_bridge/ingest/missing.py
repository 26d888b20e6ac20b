"""Rows of a foreign trace -> what an exact record would have had and they have not, in words and numbers.

This is what the report shows and what an action carries as the reason why it is not trained on. Knows what training
needs; which dialect calls what how is decided before.
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
_NO_DIALECT = "any"
_OF_A_CALL = {
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


def untrainable(attributes: Mapping[str, Any], dialect: str) -> str:
    """Why an action that came from elsewhere cannot be trained on."""
    what = "log-probs without token ids" if c.LOGPROBS in attributes else "no token ids and no log-probs"
    return f"ingested from {dialect}: {what} {FROM_ENGINE}"


def of_span(span: WireSpan, reading: Reading | None, operation: str, attributes: Mapping[str, Any]) -> Missing:
    """What one span lacks, given the attributes that its row has."""
    found: Missing = Counter()
    dialect = reading.dialect if reading is not None else _NO_DIALECT
    if operation == c.CHAT:
        found.update((dialect, what) for key, what in _OF_A_CALL.items() if key not in attributes)
    elif operation == c.EXECUTE_TOOL and c.TOOL_CALL_ID not in attributes:
        found[dialect, "tool call id"] += 1
    elif operation == "" and reading is not None and reading.kind == "llm":
        found[dialect, "not an action: a call inside another one, recorded by two layers"] += 1
    for key in reading.unreadable if reading is not None else ():
        found[dialect, f"readable {key}"] += 1
    found[dialect, "marft.* attributes, which only our own recorder may write"] += sum(
        key.startswith("marft.") and key != c.UNTRAINABLE for key in span.attributes
    )
    found[dialect, "attributes that the sender dropped"] += span.lost_attributes
    found[dialect, "span events, which the store does not keep"] += span.other_events
    found[dialect, "span links, which the store does not keep"] += span.links
    return +found


def of_trace(dialects: Sequence[str], operations: Sequence[str]) -> Missing:
    """What a whole trace lacks: it shows an order of supersteps, not who made whom run and read what."""
    if operations.count(c.CHAT) < 2:
        return Counter()
    return Counter({("+".join(dialects), "exact trigger, send and state edges, by episode; upper bounds stand in"): 1})
