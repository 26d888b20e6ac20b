"""A recorded run -> what the signals count: tool calls and who asked for them, handoffs, tokens.

Invariant: what the record does not say is None or raises `Absent`; nothing is filled in. Span text is data: a message
that is no JSON asks for no tool. Options and rewards are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.rewards.contract import Absent, Earned, RunView
from trace_store import conventions as names
from trace_store.records import Action, Edge, RewardScope, SpanRow


@dataclass(frozen=True, slots=True)
class Part:
    """One number of a run, and whose it is."""

    value: float
    action_id: str | None
    node: str | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool that ran, and the action that asked for it; None where no recorded one did."""

    name: str
    ok: bool
    asked_by: Action | None

    @property
    def agent(self) -> str | None:
        """The node that asked."""
        return self.asked_by.node if self.asked_by is not None else None


def parts_to_earned(
    level: RewardScope, parts: Sequence[Part], combine: Callable[[Sequence[float]], float]
) -> list[Earned]:
    """The parts of all, of each action, or of each agent, combined; nothing where there is none."""
    if level == "episode":
        return [Earned(combine([part.value for part in parts]))] if parts else []
    groups: dict[str, list[float]] = {}
    for part in parts:
        owner = part.action_id if level == "step" else part.node
        if owner:
            groups.setdefault(owner, []).append(part.value)
    if level == "step":
        return [Earned(combine(values), "step", action_id=owner) for owner, values in groups.items()]
    return [Earned(combine(values), "agent", node=owner) for owner, values in groups.items()]


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def run_to_spans(run: RunView) -> Sequence[SpanRow]:
    """The spans. Raises Absent where there are none: they were not recorded, or are no longer kept."""
    if not run.spans:
        raise Absent("its spans are not there")
    return run.spans


def run_to_tool_calls(run: RunView) -> list[ToolCall]:
    """Every tool that ran, in the order of their starts, each try of a node for itself.

    The asker is the latest action before it whose answer holds the tool call's id; where no id tells, the latest
    action of the same node.
    """
    spans = sorted(run_to_spans(run), key=lambda span: (span.start_ns, span.span_id))
    actions = {action.action_id: action for action in run.game().actions}
    asked = [
        (actions[span.span_id], _asked_ids(span))
        for span in sorted(spans, key=lambda span: (span.end_ns, span.span_id))
        if span.span_id in actions
    ]
    return [
        ToolCall(str(span.attributes.get(names.TOOL_NAME) or "tool"), span.status == "ok", _asker(span, asked))
        for span in spans
        if span.operation == names.EXECUTE_TOOL
    ]


def _asker(tool: SpanRow, asked: Sequence[tuple[Action, frozenset[str]]]) -> Action | None:
    call, node = tool.attributes.get(names.TOOL_CALL_ID), tool.attributes.get(names.NODE)
    before = [(action, ids) for action, ids in reversed(asked) if action.ended_ns <= tool.start_ns]
    by_id = next((action for action, ids in before if call in ids), None)
    return by_id or next((action for action, _ in before if action.node == node), None)


def _asked_ids(chat: SpanRow) -> frozenset[str]:
    """Ids of the tool calls in an answer, as this recorder or the GenAI conventions (parts) write them."""
    try:
        messages = json.loads(chat.attributes.get(names.OUTPUT_MESSAGES) or "[]")
    except (TypeError, ValueError, RecursionError):
        return frozenset()
    return frozenset(_ids(messages))


def _ids(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            parts = [part for part in _listed(message, "parts") if part.get("type") == "tool_call"]
            yield from (str(c["id"]) for c in (*_listed(message, "tool_calls"), *parts) if c.get("id") is not None)


def _listed(message: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = message.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def prompt_tokens(action: Action) -> int | None:
    """Tokens that the engine read."""
    return action.prompt_tokens if action.prompt_ids is None else len(action.prompt_ids)


def sampled_tokens(action: Action) -> int | None:
    """Tokens that the engine wrote."""
    return action.sampled_tokens if action.sampled_ids is None else len(action.sampled_ids)


def longest_exchange(actions: Sequence[Action], edges: Sequence[Edge]) -> int:
    """Handoffs in the longest chain of D in which control goes to and fro between two agents only.

    Calls of one agent after another are one turn; branches that do not depend on each other are no handoff.
    """
    node = {action.action_id: action.node for action in actions}
    before: dict[str, list[str]] = {action.action_id: [] for action in actions}
    for edge in edges:
        before[edge.dst].append(edge.src)
    # For each action: the other agent -> handoffs of the longest exchange with it that ends here.
    longest: dict[str, dict[str, int]] = {}
    for action in actions:  # in a topological order of D
        here: dict[str, int] = {}
        for earlier in before[action.action_id]:
            if node[earlier] == action.node:
                found = dict(longest[earlier])
            else:
                found = {node[earlier]: longest[earlier].get(action.node, 0) + 1}
            for other, handoffs in found.items():
                here[other] = max(here.get(other, 0), handoffs)
        longest[action.action_id] = here
    return max((handoffs for here in longest.values() for handoffs in here.values()), default=0)


def faults(action: Action, span: SpanRow | None, earlier: Sequence[Action], calls: Sequence[ToolCall]) -> list[str]:
    """What is wrong with one action, in words: it failed, was cut off, repeats itself, or its tool failed."""
    found = []
    if span is not None and span.status == "error":
        found.append("the call failed")
    if action.finish_reason == "length":
        found.append("cut off at its token limit")
    if _says(action) and any(a.node == action.node and _says(a) == _says(action) for a in earlier):
        found.append("repeats an earlier answer of the same agent")
    if any(call.asked_by is action and not call.ok for call in calls):
        found.append("a tool that it asked for failed")
    return found


def _says(action: Action) -> Any:
    """What an action wrote: the exact tokens where they are known, which hold its tool calls too."""
    return action.sampled_ids or action.completion
