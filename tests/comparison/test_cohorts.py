"""Owns: pairs of runs become contrasts by the fields of their tasks.

- A list puts a task into several cohorts; a task without the field is counted by itself.
- The numbers are those of the cohort's own tasks; all cohorts are one family.
- Small cohorts and those beyond the twenty largest are counted and said, never judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.tiny_trajectory import trajectory

from marft_bridge.comparison.cohorts import NO_VALUE, field_to_values, pairs_to_cohorts
from marft_bridge.comparison.records import Cohort
from trace_store.records import Trajectory

Pair = tuple[str, Trajectory, Trajectory]


def pair(number: int, base: float | None, after: float | None, variant: str = "after", **task: Any) -> Pair:
    sides = [trajectory(f"t{number}", reward=reward, task={"id": f"t{number}", **task}) for reward in (base, after)]
    return variant, sides[0], sides[1]


def by_value(cohorts: tuple[Cohort, ...]) -> dict[str, Cohort]:
    return {cohort.value: cohort for cohort in cohorts}


@pytest.mark.parametrize(
    ("task", "values"),
    [
        ({"topic": "sums"}, ["sums"]),
        ({"topic": ["sums", "carry", "sums"]}, ["sums", "carry"]),
        ({"topic": 3}, ["3"]),
        ({"topic": True}, ["true"]),
        ({"topic": {"b": 1, "a": 2}}, ['{"a": 2, "b": 1}']),
        ({"topic": []}, [NO_VALUE]),
        ({"topic": None}, [NO_VALUE]),
        ({"topic": [None, "sums"]}, ["sums"]),
        ({}, [NO_VALUE]),
    ],
)
def test_a_task_belongs_to_the_cohorts_of_its_field(task: dict[str, Any], values: list[str]) -> None:
    assert field_to_values(task, "topic") == values


def test_each_cohort_is_compared_on_its_own_tasks() -> None:
    """Sums: 8 tasks, all won. Words: 8 tasks, all lost. In no cohort: 5 tasks, nothing changed."""
    pairs = [pair(n, 0.0, 1.0, topic="sums") for n in range(8)]
    pairs += [pair(n, 1.0, 0.0, topic="words") for n in range(8, 16)]
    pairs += [pair(n, 1.0, 1.0) for n in range(16, 21)]
    cohorts = pairs_to_cohorts(iter(pairs), ["topic"], "reward", seed=0)
    assert [(cohort.field, cohort.value, cohort.tasks) for cohort in cohorts] == [
        ("topic", "sums", 8),
        ("topic", "words", 8),
        ("topic", NO_VALUE, 5),
    ]
    found = {cohort.value: cohort.contrasts[0] for cohort in cohorts}
    assert [(c.diff, c.mean_a, c.mean_b, c.n, c.clusters) for c in found.values()] == [
        (1.0, 0.0, 1.0, 8, 8),
        (-1.0, 1.0, 0.0, 8, 8),
        (0.0, 1.0, 1.0, 5, 5),
    ]
    # McNemar: 2 x (1/2)^8 = 1/128 for both; three contrasts are one family, so Holm takes the smallest times 3.
    assert [found[value].p_value for value in ("sums", "words", NO_VALUE)] == pytest.approx([1 / 128, 1 / 128, 1.0])
    assert [found[value].p_adjusted for value in ("sums", "words", NO_VALUE)] == pytest.approx([3 / 128, 3 / 128, 1.0])
    assert [found[value].outcome for value in ("sums", "words", NO_VALUE)] == ["higher", "lower", "not settled"]
    assert {(contrast.variant, contrast.metric) for contrast in found.values()} == {("after", "reward")}


def test_what_one_cohort_may_claim_alone_it_may_not_among_many() -> None:
    """Six wins of six: p = 2 / 2^6 = 0.031 by itself; beside another cohort 0.0625."""
    wins = [pair(n, 0.0, 1.0, topic="sums") for n in range(6)]
    others = [pair(n, float(n % 2), float(n % 2), topic="words") for n in range(6, 12)]
    (alone,) = pairs_to_cohorts(wins, ["topic"], "reward", seed=0)
    assert alone.contrasts[0].outcome == "higher"
    among = by_value(pairs_to_cohorts(wins + others, ["topic"], "reward", seed=0))
    assert among["sums"].contrasts[0].p_adjusted == pytest.approx(2 * 2 / 64)
    assert among["sums"].contrasts[0].outcome == "not settled"


def test_a_task_of_two_cohorts_counts_in_both_and_variants_stay_apart() -> None:
    pairs = [pair(n, 0.0, 1.0, topic=["sums", "carry"] if n < 6 else "sums") for n in range(10)]
    pairs += [pair(n, 0.0, 0.5, "other", topic=["sums", "carry"] if n < 6 else "sums") for n in range(10)]
    found = by_value(pairs_to_cohorts(pairs, ["topic"], "reward", seed=0))
    assert {value: cohort.tasks for value, cohort in found.items()} == {"sums": 10, "carry": 6}
    assert [(c.variant, c.n, c.diff) for c in found["carry"].contrasts] == [("after", 6, 1.0), ("other", 6, 0.5)]


def test_samples_of_one_task_are_one_task() -> None:
    pairs = [pair(n % 4, 0.0, 1.0, topic="sums") for n in range(40)]
    (cohort,) = pairs_to_cohorts(pairs, ["topic"], "reward", seed=0)
    assert (cohort.tasks, cohort.contrasts) == (4, ())


def test_of_a_few_tasks_nothing_is_said_but_how_many_they_are() -> None:
    said: list[str] = []
    pairs = [pair(n, 0.0, 1.0, topic="rare") for n in range(4)]
    pairs += [pair(n, 0.0, None if n == 8 else 1.0, topic="gaps") for n in range(4, 9)]
    found = by_value(pairs_to_cohorts(pairs, ["topic"], "reward", 0, said.append))
    assert (found["rare"].tasks, found["rare"].contrasts) == (4, ())
    assert (found["gaps"].tasks, found["gaps"].contrasts) == (5, ())  # five tasks, of which four are pairs
    assert said == ["cohorts: 'topic' has values with fewer than 5 tasks, 1; only their size is shown"]


def test_beyond_the_twenty_largest_values_are_counted() -> None:
    def pairs() -> Iterator[Pair]:
        number = 0
        for value in range(23):
            for _ in range(5 + (value < 20)):
                yield pair(number, 0.0, 1.0, topic=f"v{value:02}", level=1)
                number += 1

    said: list[str] = []
    cohorts = pairs_to_cohorts(pairs(), ["topic", "level"], "reward", 0, said.append)
    assert [cohort.value for cohort in cohorts] == [*(f"v{value:02}" for value in range(20)), "1"]
    assert said == ["cohorts: 'topic' has 23 values; 3 smaller ones, of 15 tasks, are not shown"]


def test_no_pair_with_the_metric_makes_no_contrast() -> None:
    pairs = [pair(n, 1.0, None, topic="sums") for n in range(6)]
    (cohort,) = pairs_to_cohorts(pairs, ["topic"], "reward", seed=0)
    assert (cohort.tasks, cohort.contrasts) == (6, ())
    assert pairs_to_cohorts([], ["topic"], "reward", seed=0) == ()
    other = [(v, a, replace(b, rewards=())) for v, a, b in pairs]
    assert pairs_to_cohorts(other, ["topic"], "correct", seed=0)[0].contrasts == ()
