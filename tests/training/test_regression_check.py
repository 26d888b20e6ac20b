"""Owns: what `train` says where its last round earned less than an earlier one.

- It is said where the 95 % intervals of the two are apart, of the round whose interval begins highest; else nothing is.
- The means that are said are those of the stored episodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from support.school_rig import School, school_in

from marft_bridge.runs.learning_curve import LearningPoint, runs_to_points
from marft_bridge.training.regression_check import points_to_regression, run_to_regression_text
from trace_store.store import TraceStore


def points(*intervals: tuple[float, float] | None) -> list[LearningPoint]:
    """Rounds 1, 2, ... with these intervals around their means; None where the spread is unknown."""
    return [
        LearningPoint(
            round=number,
            phase="online",
            episodes=8,
            reward_mean=0.5 if bounds is None else sum(bounds) / 2,
            reward_low=None if bounds is None else bounds[0],
            reward_high=None if bounds is None else bounds[1],
        )
        for number, bounds in enumerate(intervals, start=1)
    ]


@pytest.mark.parametrize(
    ("intervals", "best"),
    [
        ([(0.5, 0.7), (0.8, 0.9), (0.2, 0.4)], 2),
        ([(0.5, 0.7), (0.6, 1.0), (0.65, 0.9), (0.2, 0.4)], 3),  # the mean of round 2 is higher, and knows less
        ([(0.8, 0.9), (0.8, 0.9), (0.2, 0.4)], 2),  # of two alike the newer
        ([(0.5, 0.7), None, (0.2, 0.4)], 1),
        ([(0.5, 0.7), (0.3, 0.5)], None),  # they touch
        ([(0.2, 0.4), (0.5, 0.7)], None),
        ([(0.5, 0.7), None], None),
        ([(0.5, 0.7)], None),
        ([], None),
    ],
)
def test_ground_is_lost_where_the_last_interval_lies_below_the_one_that_begins_highest(
    intervals: list[Any], best: int | None
) -> None:
    found = points_to_regression(points(*intervals))
    assert (None if found is None else (found[0].round, found[1].round)) == (best and (best, len(intervals)))


def test_a_round_that_solves_no_task_is_told_from_one_that_solved_most() -> None:
    """All of 12 tasks earn 0: Clopper and Pearson's upper bound is 1 - 0.025^(1 / 12) = 0.264648."""
    earned = {1: [1.0] * 11 + [0.0], 2: [0.0] * 12}

    class Rewards:
        def sql(self, _query: str, _parameters: object) -> list[tuple[int, str, float]]:
            return [(number, f"t{n}", paid) for number, row in earned.items() for n, paid in enumerate(row)]

    first, last = runs_to_points(cast("TraceStore", Rewards()), ("train",), "reward")
    assert (last.reward_low, last.reward_high) == (0.0, pytest.approx(0.264648, abs=1e-5))
    assert points_to_regression([first, last]) == (first, last)
    # with payoffs a round of draws is no share: that nobody lost in it does not say how many may
    earned[1], earned[2] = [0.0] * 12, [-1.0] * 8 + [0.0] * 4
    draws, losses = runs_to_points(cast("TraceStore", Rewards()), ("train",), "reward")
    assert (draws.reward_mean, draws.reward_low, draws.reward_high) == (0.0, None, None)
    assert points_to_regression([draws, losses]) is None


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


def right_from_version(school: School, versions: set[int]) -> None:
    """The reasoner thinks on four of five tasks, which earns 0.5; these versions of the actor earn 0.5 more."""

    def answer(body: Mapping[str, Any]) -> str:
        node, _, version = str(body["model"]).rpartition("@")
        number = int(str(body["messages"][-1]["content"]).split(" ")[0])
        if node == "reasoner":
            return "think" if number % 5 else "no"
        return "yes" if int(version) in versions or (version == "0" and number % 2) else "no"

    school.server.answer = answer


@pytest.mark.slow
def test_train_says_the_means_of_the_last_round_and_of_the_better_one(school: School) -> None:
    right_from_version(school, {2})
    school.collect()
    said = school.train(rounds=3, episodes_per_round=12)
    mean = {}
    with school.store() as store:
        for number in (2, 3):
            found = store.trajectories(run_ids=["train"], round=number)
            rewards = [paid for trajectory in found if (paid := trajectory.team_reward("reward")) is not None]
            mean[number] = f"{sum(rewards) / len(rewards):.3f}"
    told = re.search(r"the last round earned (\S+) \(95% \S+ to \S+\), less than round 2 with (\S+) ", said)
    assert told is not None, said
    assert told.groups() == (mean[3], mean[2])
    with school.store() as store:  # a round that was played ahead and never learned from is not the last one
        assert run_to_regression_text(store, "train", "reward", rounds_learned=2) is None


@pytest.mark.slow
def test_train_says_nothing_of_it_where_the_last_round_is_the_best(school: School) -> None:
    right_from_version(school, {2})
    school.collect()
    assert "the last round earned" not in school.train(rounds=2, episodes_per_round=12)
