"""Pairs of one candidate -> the tasks that changed most, each with one run of both sides, step by step.

Invariant: the rewards shown of a task are means over its pairs; the run that is shown is the one that changed most in
the same direction. Texts are those of models: data, never markup. It knows nothing of statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marft_bridge.comparison.outcomes import Outcome, Pair
from marft_bridge.comparison.records import MOST_CHANGED, ChangedTasks, Step, TaskChange, Trace
from marft_bridge.rewards.facts import sampled_tokens
from trace_store import conventions as names
from trace_store.records import SpanRow
from trace_store.store import TraceStore

LONGEST = 8_000  # characters of one step's text: a page of ten tasks stays one that a phone can open


def pairs_to_changes(
    store: TraceStore, pairs: Sequence[Pair], metric: str, base: str, candidate: str
) -> ChangedTasks | None:
    """The at most five tasks that gained most and the five that lost most, ties by their ids; None where none did."""
    by_task: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.base.task_id, []).append(pair)
    gains = {task: sum(_gain(pair, metric) for pair in those) / len(those) for task, those in by_task.items()}
    best = sorted((task for task in gains if gains[task] > 0), key=lambda task: (-gains[task], task))[:MOST_CHANGED]
    worst = sorted((task for task in gains if gains[task] < 0), key=lambda task: (gains[task], task))[:MOST_CHANGED]
    if not best and not worst:
        return None

    def change(task: str, sign: int) -> TaskChange:
        those = by_task[task]
        shown = max(those, key=lambda pair: (sign * _gain(pair, metric), -pair.base.trajectory.episode.sample))
        fields = shown.base.trajectory.episode.task
        return TaskChange(
            task_id=task,
            text=task_to_text(fields),
            expected=str(fields["answer"]) if "answer" in fields else None,
            reward_a=sum(pair.base.values[metric] for pair in those) / len(those),
            reward_b=sum(pair.other.values[metric] for pair in those) / len(those),
            a=_trace(store, shown.base, metric, base),
            b=_trace(store, shown.other, metric, candidate),
        )

    return ChangedTasks(
        candidate=candidate,
        improved=tuple(change(task, 1) for task in best),
        regressed=tuple(change(task, -1) for task in worst),
    )


def task_to_text(task: Mapping[str, Any]) -> str:
    """What a task asks: its question where it has one, else all of it."""
    return str(task["question"]) if task.get("question") else json.dumps(dict(task), ensure_ascii=False)


def _gain(pair: Pair, metric: str) -> float:
    return pair.other.values[metric] - pair.base.values[metric]


def _trace(store: TraceStore, outcome: Outcome, metric: str, variant: str) -> Trace:
    return Trace(
        variant=variant,
        episode_id=outcome.episode_id,
        reward=outcome.values[metric],
        steps=tuple(_steps(store, outcome.episode_id)),
    )


def _steps(store: TraceStore, episode_id: str) -> Iterable[Step]:
    """Calls and tool runs in the order in which they began."""
    trajectory = store.trajectory(episode_id)
    actions = {action.action_id: action for action in trajectory.actions} if trajectory is not None else {}
    for span in sorted(store.spans(episode_id), key=lambda span: (span.start_ns, span.span_id)):
        if span.operation == names.EXECUTE_TOOL:
            tool = str(span.attributes.get(names.TOOL_NAME) or "tool")
            yield Step(kind="tool", node=tool, text=_cut(_tool_text(span)))
        elif (action := actions.get(span.span_id)) is not None:
            text = action.completion or _asked_tools(span)
            yield Step(node=action.node, adapter=action.adapter, text=_cut(text), tokens=sampled_tokens(action))


def _tool_text(span: SpanRow) -> str:
    """What a tool was asked and gave back; what it failed with."""
    asked, gave = (_text(span.attributes.get(name)) for name in (names.TOOL_ARGUMENTS, names.TOOL_RESULT))
    failed = f"failed: {span.status_message or 'no message'}" if span.status == "error" else ""
    return "\n".join(part for part in (asked, gave, failed) if part)


def _asked_tools(span: SpanRow) -> str:
    """The tool calls of an answer without text, as this recorder writes them: name and arguments."""
    try:
        messages = json.loads(span.attributes.get(names.OUTPUT_MESSAGES) or "[]")
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        return "\n".join(f"{call['name']}({_text(call.get('args'))})" for call in calls)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ""


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:LONGEST]} [{left_out} more characters]"
