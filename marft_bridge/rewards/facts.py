"""A recorded run -> what the signals count: tool calls with the actions that requested them, handoffs, tokens, faults.

Invariant: what the record lacks is None or raises `Absent`; nothing is guessed. Span text is data: messages that are
no JSON request no tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.rewards.contract import Absent, Earned, RunView
from trace_store import conventions as names
from trace_store.json_text import read_json
from trace_store.records import Action, Edge, RewardScope, SpanRow


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number of a run, with the action and the node that it belongs to."""

    value: float
    action_id: str | None
    node: str | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool that ran."""

    name: str
    ok: bool
    requested_by: Action | None  # None where no recorded action requested it

    @property
    def agent(self) -> str | None:
        """The node whose action requested it."""
        return self.requested_by.node if self.requested_by is not None else None


def measurements_to_earned(
    level: RewardScope, measurements: Sequence[Measurement], combine: Callable[[Sequence[float]], float]
) -> list[Earned]:
    """The values combined over the episode, over each action (level `step`), or over each agent; [] where none are."""
    if level == "episode":
        return [Earned(combine([measurement.value for measurement in measurements]))] if measurements else []
    groups: dict[str, list[float]] = {}
    for measurement in measurements:
        owner = measurement.action_id if level == "step" else measurement.node
        if owner:
            groups.setdefault(owner, []).append(measurement.value)
    if level == "step":
        return [Earned(combine(values), "step", action_id=owner) for owner, values in groups.items()]
    return [Earned(combine(values), "agent", node=owner) for owner, values in groups.items()]


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def run_to_spans(run: RunView) -> Sequence[SpanRow]:
    """The spans. Raises Absent where there are none: they were not recorded, or have been deleted since."""
    if not run.spans:
        raise Absent("its spans are not there")
    return run.spans


def run_to_tool_calls(run: RunView) -> list[ToolCall]:
    """Every tool that ran, in the order of their starts; each attempt of a node that is retried counts.

    A tool is requested by the latest action before it whose answer holds the tool call's id; where no answer holds
    it, by the latest action of the same node.
    """
    spans = sorted(run_to_spans(run), key=lambda span: (span.start_ns, span.span_id))
    actions = {action.action_id: action for action in run.game().actions}
    requests = [
        (actions[span.span_id], _requested_call_ids(span))
        for span in sorted(spans, key=lambda span: (span.end_ns, span.span_id))
        if span.span_id in actions
    ]
    return [
        ToolCall(
            str(span.attributes.get(names.TOOL_NAME) or "tool"), span.status == "ok", _requesting_action(span, requests)
        )
        for span in spans
        if span.operation == names.EXECUTE_TOOL
    ]


def _requesting_action(tool: SpanRow, requests: Sequence[tuple[Action, frozenset[str]]]) -> Action | None:
    """`requests` has the actions in the order of their ends, each with the tool call ids in its answer."""
    call_id, node = tool.attributes.get(names.TOOL_CALL_ID), tool.attributes.get(names.NODE)
    earlier_requests = [(action, ids) for action, ids in reversed(requests) if action.ended_ns <= tool.start_ns]
    by_id = next((action for action, ids in earlier_requests if call_id in ids), None)
    return by_id or next((action for action, _ in earlier_requests if action.node == node), None)


def _requested_call_ids(chat: SpanRow) -> frozenset[str]:
    """Ids of the tool calls in an answer, as this recorder or the GenAI conventions (parts) write them."""
    try:
        messages = read_json(chat.attributes.get(names.OUTPUT_MESSAGES) or "[]")
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(_tool_call_ids(messages))


def _tool_call_ids(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            parts = [part for part in _dicts_at(message, "parts") if part.get("type") == "tool_call"]
            yield from (str(c["id"]) for c in (*_dicts_at(message, "tool_calls"), *parts) if c.get("id") is not None)


def _dicts_at(message: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = message.get(key)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def prompt_tokens(action: Action) -> int | None:
    """Tokens that the engine read."""
    return action.prompt_tokens if action.prompt_ids is None else len(action.prompt_ids)


def sampled_tokens(action: Action) -> int | None:
    """Tokens that the engine wrote."""
    return action.sampled_tokens if action.sampled_ids is None else len(action.sampled_ids)


def longest_exchange(actions: Sequence[Action], edges: Sequence[Edge]) -> int:
    """Handoffs in the longest chain of D (the dependency graph) in which control alternates between two agents.

    Calls of one agent after another are one turn; branches that do not depend on each other are no handoff.
    """
    node = {action.action_id: action.node for action in actions}
    predecessors: dict[str, list[str]] = {action.action_id: [] for action in actions}
    for edge in edges:
        predecessors[edge.dst].append(edge.src)
    # For each action: the other agent -> handoffs of the longest exchange with it that ends here.
    longest: dict[str, dict[str, int]] = {}
    for action in actions:  # in a topological order of D
        exchanges: dict[str, int] = {}
        for predecessor in predecessors[action.action_id]:
            if node[predecessor] == action.node:  # the same turn goes on
                extended = dict(longest[predecessor])
            else:
                extended = {node[predecessor]: longest[predecessor].get(action.node, 0) + 1}
            for partner, handoffs in extended.items():
                exchanges[partner] = max(exchanges.get(partner, 0), handoffs)
        longest[action.action_id] = exchanges
    return max((handoffs for exchanges in longest.values() for handoffs in exchanges.values()), default=0)


def find_faults(
    action: Action, span: SpanRow | None, earlier: Sequence[Action], calls: Sequence[ToolCall]
) -> list[str]:
    """The faults of one action, in words: it failed, was cut off, repeats itself, or its tool failed.

    Args:
        earlier: the actions of the episode before this one.
        calls: the tool calls of the episode.
    """
    faults = []
    if span is not None and span.status == "error":
        faults.append("the call failed")
    if action.finish_reason == "length":
        faults.append("cut off at its token limit")
    if _output(action) and any(a.node == action.node and _output(a) == _output(action) for a in earlier):
        faults.append("repeats an earlier answer of the same agent")
    if any(call.requested_by is action and not call.ok for call in calls):
        faults.append("a tool that it asked for failed")
    return faults


def _output(action: Action) -> Any:
    """What an action wrote: the exact tokens where they are known, which hold its tool calls too."""
    return action.sampled_ids or action.completion
