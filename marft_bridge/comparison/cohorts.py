"""Pairs of runs and fields of their tasks -> how each variant did on the tasks of one kind.

A task belongs to the cohort of its field's value; a list puts it into one cohort for each of its values, and a task
without the field stands in `(none)`. Invariants: all contrasts of one call are one family, so that what is called
higher or lower in any of twenty cohorts is not there by chance; a cohort of fewer than five tasks has a size and no
contrast; what is left out is said. It knows nothing of stores, adapters or pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from marft_bridge.comparison.records import Cohort, Contrast
from marft_bridge.statistics import compare_family
from marft_bridge.statistics import families as statistics
from trace_store.records import Trajectory

NONE = "(none)"  # where a task lacks the field, or has null or an empty list there
MOST = 20  # values of one field that are shown, by the number of their tasks
FEWEST = 5  # tasks; of fewer nothing is said but how many they are


@dataclass(slots=True)
class _Pairs:
    """One variant in one cohort: parallel lists."""

    base: list[float] = field(default_factory=list)
    variant: list[float] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)


def pairs_to_cohorts(
    pairs: Iterable[tuple[str, Trajectory, Trajectory]],
    fields: Sequence[str],
    metric: str,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Cohort, ...]:
    """Pairs into the cohorts of every field, by field, the largest first.

    Args:
        pairs: (variant, the base's episode, the variant's episode) of one task and seed. One that lacks the metric on a
            side is left out. They are read once, and may be streamed.
        fields: of the tasks.
        metric: a team reward.
        seed: of the statistics.
        say: is told what is left out.
    """
    found: dict[tuple[str, str], dict[str, _Pairs]] = {}
    tasks: dict[tuple[str, str], set[str]] = {}
    for variant, base, other in pairs:
        task, a, b = base.episode.task_id, base.team_reward(metric), other.team_reward(metric)
        for key in [(name, value) for name in fields for value in field_to_values(base.episode.task, name)]:
            tasks.setdefault(key, set()).add(task)
            if a is not None and b is not None:
                into = found.setdefault(key, {}).setdefault(variant, _Pairs())
                into.base.append(a)
                into.variant.append(b)
                into.tasks.append(task)
    shown = [key for name in fields for key in _largest(name, tasks, say)]
    contrasts = _contrasts({key: found.get(key, {}) for key in shown}, metric, seed)
    return tuple(
        Cohort(field=name, value=value, tasks=len(tasks[name, value]), contrasts=contrasts[name, value])
        for name, value in shown
    )


def field_to_values(task: Mapping[str, Any], name: str) -> list[str]:
    """The cohorts that a task belongs to, by its field `name`: each once, texts as they are and others as JSON."""
    value = task.get(name)
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = [item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in values if item is not None]
    return list(dict.fromkeys(texts)) or [NONE]


def _largest(name: str, tasks: Mapping[tuple[str, str], set[str]], say: Callable[[str], None]) -> list[tuple[str, str]]:
    """The cohorts of one field that are shown."""
    keys = sorted((key for key in tasks if key[0] == name), key=lambda key: (-len(tasks[key]), key[1]))
    if left_out := keys[MOST:]:
        lost = len(set[str]().union(*(tasks[key] for key in left_out)))
        say(f"cohorts: {name!r} has {len(keys)} values; {len(left_out)} smaller ones, of {lost} tasks, are not shown")
    if small := [key for key in keys[:MOST] if len(tasks[key]) < FEWEST]:
        say(f"cohorts: {name!r} has values with fewer than {FEWEST} tasks, {len(small)}; only their size is shown")
    return keys[:MOST]


def _contrasts(
    cohorts: Mapping[tuple[str, str], Mapping[str, _Pairs]], metric: str, seed: int
) -> dict[tuple[str, str], tuple[Contrast, ...]]:
    asked = [
        (key, statistics.Contrast(variant, metric, pairs.base, pairs.variant, pairs.tasks))
        for key, by_variant in cohorts.items()
        for variant, pairs in by_variant.items()
        if len(set(pairs.tasks)) >= FEWEST
    ]
    members = compare_family([contrast for _, contrast in asked], seed=seed)
    found: dict[tuple[str, str], tuple[Contrast, ...]] = dict.fromkeys(cohorts, ())
    for (key, _), member in zip(asked, members, strict=True):
        found[key] += (
            Contrast(
                variant=member.variant,
                p_adjusted=member.p_adjusted,
                simultaneous=member.simultaneous,
                **asdict(member.result),
            ),
        )
    return found
