"""Owns: the learning rate's factor over on-policy rounds, against values worked by hand."""

from __future__ import annotations

import math

import pytest

from trainers.config import ScheduleOptions
from trainers.objective.schedule import rate_factor


def factors(count: int, **options: object) -> list[float]:
    """The factors of the first `count` rounds."""
    schedule = ScheduleOptions.model_validate(options)
    return [rate_factor(schedule, done) for done in range(count)]


def test_without_options_every_round_learns_at_the_whole_rate() -> None:
    assert factors(4) == [1.0, 1.0, 1.0, 1.0]


def test_a_warm_up_rises_in_equal_steps_and_never_starts_at_zero() -> None:
    # Three rounds of warm-up: 1/4, 2/4, 3/4, then 1.
    assert factors(6, warmup_rounds=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_comes_down_in_equal_steps_and_stays_at_its_floor() -> None:
    # n = 4, floor 0: 1 - 0/4, 1 - 1/4, 1 - 2/4, 1 - 3/4, then 0 for good. The fourth and last round still learns.
    assert factors(7, kind="linear", rounds=4) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]


def test_linear_after_a_warm_up_counts_from_its_end() -> None:
    # w = 1: 1/2, then 1 at round 1; n - w = 4 steps down to 0.2: 0.2 + 0.8 x (1, 3/4, 2/4, 1/4, 0, 0).
    expected = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert factors(7, kind="linear", rounds=5, warmup_rounds=1, floor=0.2) == pytest.approx(expected, abs=1e-12)


def test_cosine_comes_down_slowly_at_both_ends() -> None:
    # t = 0, 1/4, 2/4, 3/4, 1: (1 + cos(pi t)) / 2 = 1, (1 + 1/sqrt 2) / 2, 1/2, (1 - 1/sqrt 2) / 2, 0; floor 0.1.
    half = 1 / math.sqrt(2)
    shape = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0]
    expected = [0.1 + 0.9 * s for s in shape]
    assert factors(6, kind="cosine", rounds=4, floor=0.1) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decay_of_a_single_round_after_the_warm_up_is_whole_once_then_at_its_floor(kind: str) -> None:
    # w = 2, n = 3: 1/3, 2/3, 1, then the floor.
    found = factors(5, kind=kind, rounds=3, warmup_rounds=2, floor=0.5)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.5], abs=1e-12)
