"""Pairs of one candidate -> the tasks that changed most, each with one episode of both sides, step by step.

Invariant: the rewards of a task are means over its pairs; the episodes shown are those of the pair that changed most
in the same direction. Texts are those of models: data, never markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marft_bridge.comparison.outcomes import Outcome, Pair
from marft_bridge.comparison.records import MAX_CHANGED_TASKS, ChangedTasks, Step, TaskChange, Trace
from marft_bridge.rewards.facts import sampled_tokens
from trace_store import conventions as names
from trace_store.records import SpanRow
from trace_store.store import TraceStore

MAX_STEP_TEXT_LENGTH = 8_000  # characters of one step's text: a page of ten tasks stays one that a phone can open


def pairs_to_changes(
    store: TraceStore, pairs: Sequence[Pair], metric: str, base: str, candidate: str
) -> ChangedTasks | None:
    """The tasks that gained most and those that lost most, ties by id; None where no task changed."""
    by_task: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.base.task_id, []).append(pair)
    gains = {
        task: sum(_gain(pair, metric) for pair in task_pairs) / len(task_pairs) for task, task_pairs in by_task.items()
    }
    best = sorted((task for task in gains if gains[task] > 0), key=lambda task: (-gains[task], task))[
        :MAX_CHANGED_TASKS
    ]
    worst = sorted((task for task in gains if gains[task] < 0), key=lambda task: (gains[task], task))[
        :MAX_CHANGED_TASKS
    ]
    if not best and not worst:
        return None

    def change(task: str, sign: int) -> TaskChange:
        task_pairs = by_task[task]
        chosen = max(task_pairs, key=lambda pair: (sign * _gain(pair, metric), -pair.base.trajectory.episode.sample))
        fields = chosen.base.trajectory.episode.task
        return TaskChange(
            task_id=task,
            text=task_to_text(fields),
            expected=str(fields["answer"]) if "answer" in fields else None,
            reward_a=sum(pair.base.values[metric] for pair in task_pairs) / len(task_pairs),
            reward_b=sum(pair.candidate.values[metric] for pair in task_pairs) / len(task_pairs),
            a=_trace(store, chosen.base, metric, variant=base),
            b=_trace(store, chosen.candidate, metric, variant=candidate),
        )

    return ChangedTasks(
        candidate=candidate,
        improved=tuple(change(task, 1) for task in best),
        regressed=tuple(change(task, -1) for task in worst),
    )


def task_to_text(task: Mapping[str, Any]) -> str:
    """The question of a task, or all of its fields as JSON where it has none."""
    return str(task["question"]) if task.get("question") else json.dumps(dict(task), ensure_ascii=False)


def _gain(pair: Pair, metric: str) -> float:
    return pair.candidate.values[metric] - pair.base.values[metric]


def _trace(store: TraceStore, outcome: Outcome, metric: str, variant: str) -> Trace:
    return Trace(
        variant=variant,
        episode_id=outcome.episode_id,
        reward=outcome.values[metric],
        steps=tuple(_steps(store, outcome.episode_id)),
    )


def _steps(store: TraceStore, episode_id: str) -> Iterable[Step]:
    """Model calls and tool calls of an episode in the order in which they began."""
    trajectory = store.trajectory(episode_id)
    actions = {action.action_id: action for action in trajectory.actions} if trajectory is not None else {}
    for span in sorted(store.spans(episode_id), key=lambda span: (span.start_ns, span.span_id)):
        if span.operation == names.EXECUTE_TOOL:
            tool = str(span.attributes.get(names.TOOL_NAME) or "tool")
            yield Step(kind="tool", node=tool, text=_cut(_tool_text(span)))
        elif (action := actions.get(span.span_id)) is not None:
            text = action.completion or _tool_calls_to_text(span)
            yield Step(node=action.node, adapter=action.adapter, text=_cut(text), tokens=sampled_tokens(action))


def _tool_text(span: SpanRow) -> str:
    """The arguments and the result of a tool call, and its error where it failed."""
    arguments, result = (_text(span.attributes.get(name)) for name in (names.TOOL_ARGUMENTS, names.TOOL_RESULT))
    failure = f"failed: {span.status_message or 'no message'}" if span.status == "error" else ""
    return "\n".join(part for part in (arguments, result, failure) if part)


def _tool_calls_to_text(span: SpanRow) -> str:
    """The tool calls of an answer without text, as this recorder writes and wrote them: name and arguments."""
    try:
        messages = json.loads(span.attributes.get(names.OUTPUT_MESSAGES) or "[]")
        parts = [part for message in messages for part in message.get("parts") or ()]
        calls = [part for part in parts if part.get("type") == "tool_call"]
        calls += [call for message in messages for call in message.get("tool_calls") or ()]
        return "\n".join(f"{call['name']}({_text(call.get('arguments', call.get('args')))})" for call in calls)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ""


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    excess = len(text) - MAX_STEP_TEXT_LENGTH
    return text if excess <= 0 else f"{text[:MAX_STEP_TEXT_LENGTH]} [{excess} more characters]"
