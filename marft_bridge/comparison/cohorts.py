"""Pairs of episodes and the fields of their tasks -> how each variant did on the tasks of each cohort (stratum).

A task belongs to the cohort of its field's value; a list puts it into one cohort for each of its values, and a task
without the field is in `(none)`. Invariants: all contrasts of one call are one family, so that twenty cohorts find no
more by chance than one; a cohort of fewer than five tasks has a size and no contrast; a line is printed about what is
left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from marft_bridge.comparison.records import Cohort, Contrast
from marft_bridge.statistics import Contrast as PairedContrast
from marft_bridge.statistics import compare_family
from trace_store.records import Trajectory

NO_VALUE = "(none)"  # where a task lacks the field, or has null or an empty list there
MAX_COHORTS = 20  # per field: the values with the most tasks
MIN_TASKS = 5  # a cohort of fewer has no contrasts


@dataclass(slots=True)
class _PairedScores:
    """The scores of one variant and of the base in one cohort: parallel lists, one entry per pair."""

    base: list[float] = field(default_factory=list)
    variant: list[float] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)  # the task of each pair


def pairs_to_cohorts(
    pairs: Iterable[tuple[str, Trajectory, Trajectory]],
    fields: Sequence[str],
    metric: str,
    seed: int,
    print_line: Callable[[str], None] = lambda _: None,
) -> tuple[Cohort, ...]:
    """Pairs into the cohorts of every field, by field, the largest first.

    Args:
        pairs: (variant, the base's episode, the variant's episode) of one task and seed. One that lacks the metric on a
            side is left out. They are read once, and may be streamed.
        fields: of the tasks.
        metric: a team reward.
        seed: of bootstrap and permutations.
        print_line: gets a line about every field with cohorts that are left out or too small.
    """
    pairs_by_cohort: dict[tuple[str, str], dict[str, _PairedScores]] = {}
    tasks: dict[tuple[str, str], set[str]] = {}
    for variant, base, candidate in pairs:
        task, a, b = base.episode.task_id, base.team_reward(metric), candidate.team_reward(metric)
        for key in [(name, value) for name in fields for value in field_to_values(base.episode.task, name)]:
            tasks.setdefault(key, set()).add(task)
            if a is not None and b is not None:
                scores = pairs_by_cohort.setdefault(key, {}).setdefault(variant, _PairedScores())
                scores.base.append(a)
                scores.variant.append(b)
                scores.tasks.append(task)
    shown_keys = [key for name in fields for key in _largest_cohorts(name, tasks, print_line)]
    contrasts = _test_cohorts({key: pairs_by_cohort.get(key, {}) for key in shown_keys}, metric, seed)
    return tuple(
        Cohort(field=name, value=value, tasks=len(tasks[name, value]), contrasts=contrasts[name, value])
        for name, value in shown_keys
    )


def field_to_values(task: Mapping[str, Any], name: str) -> list[str]:
    """The cohorts that a task belongs to, by its field `name`: each once, texts as they are and others as JSON."""
    value = task.get(name)
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = [v if isinstance(v, str) else json.dumps(v, sort_keys=True) for v in values if v is not None]
    return list(dict.fromkeys(texts)) or [NO_VALUE]


def _largest_cohorts(
    name: str, tasks: Mapping[tuple[str, str], set[str]], print_line: Callable[[str], None]
) -> list[tuple[str, str]]:
    """The cohorts of one field that are shown: those with the most tasks, ties by value."""
    keys = sorted((key for key in tasks if key[0] == name), key=lambda key: (-len(tasks[key]), key[1]))
    if left_out := keys[MAX_COHORTS:]:
        lost_tasks = len(set[str]().union(*(tasks[key] for key in left_out)))
        print_line(
            f"cohorts: {name!r} has {len(keys)} values; {len(left_out)} smaller ones, of {lost_tasks} tasks, "
            "are not shown"
        )
    if small := [key for key in keys[:MAX_COHORTS] if len(tasks[key]) < MIN_TASKS]:
        print_line(
            f"cohorts: {name!r} has values with fewer than {MIN_TASKS} tasks, {len(small)}; only their size is shown"
        )
    return keys[:MAX_COHORTS]


def _test_cohorts(
    cohorts: Mapping[tuple[str, str], Mapping[str, _PairedScores]], metric: str, seed: int
) -> dict[tuple[str, str], tuple[Contrast, ...]]:
    """Cohort -> the contrast of each variant with enough tasks in it, all of them one family."""
    paired_contrasts = [
        (key, PairedContrast(variant, metric, scores.base, values=scores.variant, clusters=scores.tasks))
        for key, by_variant in cohorts.items()
        for variant, scores in by_variant.items()
        if len(set(scores.tasks)) >= MIN_TASKS
    ]
    members = compare_family([paired for _, paired in paired_contrasts], seed=seed)
    contrasts: dict[tuple[str, str], tuple[Contrast, ...]] = dict.fromkeys(cohorts, ())
    for (key, _), member in zip(paired_contrasts, members, strict=True):
        contrasts[key] += (
            Contrast(
                variant=member.variant,
                p_adjusted=member.p_adjusted,
                simultaneous=member.simultaneous,
                **{**asdict(member.result), "metric": metric},  # which there has the variant's name before it
            ),
        )
    return contrasts
