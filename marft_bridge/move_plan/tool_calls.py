"""Drawn calls -> how many of each node's answers call a tool. Invariant: a call that cannot be read is not counted."""

from __future__ import annotations

from collections.abc import Sequence

from marft_bridge.ingest.recorded_chats import UnusableChatError, span_to_answer
from marft_bridge.move_plan.drawn_calls import DrawnCall


def count_tool_calls(calls: Sequence[DrawnCall]) -> dict[str, tuple[int, int]]:
    """Node -> how many of its drawn calls can be read, and in how many of these the answer calls a tool."""
    counts: dict[str, tuple[int, int]] = {}
    for call in calls:
        readable, with_tools = counts.get(call.node, (0, 0))
        try:
            answer = span_to_answer(call.span)
        except UnusableChatError:
            counts[call.node] = (readable, with_tools)
            continue
        counts[call.node] = (readable + 1, with_tools + ("tool_calls" in answer))
    return counts
