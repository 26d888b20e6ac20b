"""Pairs of a candidate -> the tasks that changed most, of all and of a cohort that lost, each with a run of both sides.

Invariant: the rewards of a task are means over its pairs; the episodes shown are those of the pair that changed most
in the same direction. Texts are those of models: data, never markup.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marft_bridge.comparison.cohorts import field_to_values
from marft_bridge.comparison.outcomes import Outcome, Pair
from marft_bridge.comparison.records import (
    MAX_CHANGED_TASKS,
    MAX_COHORT_TASKS,
    ChangedTasks,
    Cohort,
    Step,
    TaskChange,
    Trace,
)
from marft_bridge.rewards.facts import sampled_tokens
from trace_store import conventions as names
from trace_store.json_text import read_json
from trace_store.records import SpanRow
from trace_store.store import TraceStore

MAX_STEP_TEXT_LENGTH = 8_000  # characters of one step's text: a page of ten tasks stays one that a phone can open


def pairs_to_changes(
    store: TraceStore, pairs: Sequence[Pair], metric: str, base: str, candidate: str
) -> ChangedTasks | None:
    """The tasks that gained most and those that lost most, ties by id; None where no task changed."""
    by_task = _group_by_task(pairs)
    best, worst = _most_changed(by_task, metric, sign=1), _most_changed(by_task, metric, sign=-1)
    if not best and not worst:
        return None
    show = functools.partial(_show_change, store, metric=metric, base=base, candidate=candidate)
    return ChangedTasks(
        candidate=candidate,
        improved=tuple(show(by_task[task], sign=1) for task in best[:MAX_CHANGED_TASKS]),
        regressed=tuple(show(by_task[task], sign=-1) for task in worst[:MAX_CHANGED_TASKS]),
    )


def add_losses(
    store: TraceStore, cohorts: Sequence[Cohort], pairs: Mapping[str, Sequence[Pair]], metric: str, base: str
) -> tuple[Cohort, ...]:
    """The cohorts with the tasks that lost most, for each candidate whose mean is lower there than the base's.

    Args:
        pairs: of each candidate.
    """

    def losses(cohort: Cohort) -> dict[str, tuple[TaskChange, ...]]:
        lost: dict[str, tuple[TaskChange, ...]] = {}
        for candidate in (row.variant for row in cohort.contrasts if row.diff < 0):
            by_task = _group_by_task(
                pair
                for pair in pairs[candidate]
                if cohort.value in field_to_values(pair.base.trajectory.episode.task, cohort.field)
            )
            lost[candidate] = tuple(
                _show_change(store, by_task[task], metric=metric, base=base, candidate=candidate, sign=-1)
                for task in _most_changed(by_task, metric, sign=-1)[:MAX_COHORT_TASKS]
            )
        return lost

    return tuple(cohort.model_copy(update={"regressed": losses(cohort)}) for cohort in cohorts)


def _group_by_task(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    by_task: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair.base.task_id, []).append(pair)
    return by_task


def _most_changed(by_task: Mapping[str, Sequence[Pair]], metric: str, *, sign: int) -> list[str]:
    """The tasks that changed in the direction of `sign`, those that changed most first, ties by id."""
    gains = {task: sign * _mean_gain(task_pairs, metric) for task, task_pairs in by_task.items()}
    return sorted((task for task in gains if gains[task] > 0), key=lambda task: (-gains[task], task))


def _show_change(
    store: TraceStore, task_pairs: Sequence[Pair], *, metric: str, base: str, candidate: str, sign: int
) -> TaskChange:
    """One task with the pair of runs that changed most in the direction of `sign`."""
    chosen = max(task_pairs, key=lambda pair: (sign * _gain(pair, metric), -pair.base.trajectory.episode.sample))
    fields = chosen.base.trajectory.episode.task
    return TaskChange(
        task_id=chosen.base.task_id,
        text=task_to_text(fields),
        expected=str(fields["answer"]) if "answer" in fields else None,
        reward_a=sum(pair.base.values[metric] for pair in task_pairs) / len(task_pairs),
        reward_b=sum(pair.candidate.values[metric] for pair in task_pairs) / len(task_pairs),
        a=_trace(store, chosen.base, metric, variant=base),
        b=_trace(store, chosen.candidate, metric, variant=candidate),
    )


def task_to_text(task: Mapping[str, Any]) -> str:
    """The question of a task, or all of its fields as JSON where it has none."""
    return str(task["question"]) if task.get("question") else json.dumps(dict(task), ensure_ascii=False)


def _mean_gain(task_pairs: Sequence[Pair], metric: str) -> float:
    return sum(_gain(pair, metric) for pair in task_pairs) / len(task_pairs)


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
        messages = read_json(span.attributes.get(names.OUTPUT_MESSAGES) or "[]")
        parts = [part for message in messages for part in message.get("parts") or ()]
        calls = [part for part in parts if part.get("type") == "tool_call"]
        calls += [call for message in messages for call in message.get("tool_calls") or ()]
        return "\n".join(f"{call['name']}({_text(call.get('arguments', call.get('args')))})" for call in calls)
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    excess = len(text) - MAX_STEP_TEXT_LENGTH
    return text if excess <= 0 else f"{text[:MAX_STEP_TEXT_LENGTH]} [{excess} more characters]"
