"""Owns: which runs of a round are forked at which calls, and in which order, by hand.

- Calls are drawn by how often runs make them and by how undecided they are, runs by how undecided their task is.
- The order follows from what was known before the round: no run, call or reward of the round itself changes it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from marft_bridge.training.fork_draw import (
    CallSpot,
    ForkChoice,
    SiblingRewards,
    draw_forks,
    fill_wave,
    runs_to_reach,
    spots_to_weights,
)

PLAN, CHECK, AGAIN = CallSpot("plan", 1), CallSpot("check", 1), CallSpot("check", 2)


def test_a_call_is_reached_by_the_share_of_runs_that_make_it() -> None:
    runs = [[PLAN, CHECK], [PLAN, CHECK, AGAIN], [PLAN], [PLAN, CHECK]]
    assert runs_to_reach(runs) == {PLAN: 1.0, CHECK: 0.75, AGAIN: 0.25}
    assert runs_to_reach([]) == {}


def test_without_siblings_that_differ_calls_are_drawn_by_how_often_runs_make_them() -> None:
    reach = {PLAN: 1.0, AGAIN: 0.25}
    assert spots_to_weights(reach, []) == reach
    assert spots_to_weights(reach, [SiblingRewards(PLAN, (1.0, 1.0, 1.0))]) == reach


def test_a_call_weighs_what_its_siblings_vary_by_hand() -> None:
    groups = [
        SiblingRewards(PLAN, (0.0, 0.0, 0.0, 0.0)),  # squares 0, freedom 3
        SiblingRewards(CHECK, (0.0, 1.0, 0.0, 1.0)),  # squares 1, freedom 3
        SiblingRewards(CHECK, (1.0, 1.0, 1.0)),  # another group's level is no spread: squares 0, freedom 2
    ]
    # all groups: 1 / 8; PLAN (2/8 + 0) / (2 + 3), CHECK (2/8 + 1) / (2 + 5), AGAIN as all
    weights = spots_to_weights({PLAN: 1.0, CHECK: 0.5, AGAIN: 0.25}, groups)
    assert weights == pytest.approx({PLAN: 0.05, CHECK: 0.5 * 1.25 / 7, AGAIN: 0.25 / 8})


def test_no_call_is_given_up() -> None:
    flat = [SiblingRewards(PLAN, (0.0,) * 50)] * 9
    weights = spots_to_weights({PLAN: 1.0, CHECK: 1.0}, [*flat, SiblingRewards(CHECK, (0.0, 1.0))])
    usual = 0.5 / (9 * 49 + 1)
    assert weights[PLAN] == pytest.approx(max(0.1 * usual, 2 * usual / (2 + 9 * 49)))
    assert weights[PLAN] == pytest.approx(0.1 * usual)


RUNS = [(task, sample) for task in ("open", "shut") for sample in range(2)]
SPOTS = {PLAN: 3.0, CHECK: 1.0}


def test_every_call_of_every_run_comes_once() -> None:
    order = draw_forks(RUNS, {"open": 0.2, "shut": 0.1}, SPOTS, "7/1")
    assert len(order) == len(set(order)) == 8
    assert {(choice.task_id, choice.sample) for choice in order} == set(RUNS)


def test_the_first_draw_takes_tasks_and_calls_in_proportion_to_their_weights() -> None:
    first = Counter(draw_forks(RUNS, {"open": 0.3, "shut": 0.1}, SPOTS, str(key))[0] for key in range(4000))
    tasks, spots = Counter[str](), Counter[CallSpot]()
    for choice, count in first.items():
        tasks[choice.task_id] += count
        spots[choice.spot] += count
    assert tasks["open"] / 4000 == pytest.approx(0.75, abs=0.035)  # five standard errors
    assert spots[PLAN] / 4000 == pytest.approx(0.75, abs=0.035)


def test_a_run_of_an_undecided_task_is_forked_again_before_those_of_a_decided_one() -> None:
    seconds = 0
    for key in range(200):
        order = draw_forks([("open", 0), ("shut", 0)], {"open": 1.0, "shut": 0.01}, SPOTS, str(key))
        seconds += [choice.task_id for choice in order[:2]] == ["open", "open"]
    assert seconds > 180


def test_the_order_of_some_runs_does_not_depend_on_which_others_there_are() -> None:
    """So neither does a run's own: nothing of it is an argument but its task and its number."""
    weights = {"open": 0.2, "shut": 0.1}
    whole = draw_forks(RUNS, weights, SPOTS, "7/1")
    part = draw_forks(reversed(RUNS[1:]), weights, SPOTS, "7/1")
    assert part == [choice for choice in whole if (choice.task_id, choice.sample) != RUNS[0]]
    assert whole != draw_forks(RUNS, weights, SPOTS, "7/2")
    assert ForkChoice("open", 0, PLAN) in whole


@pytest.mark.parametrize(
    ("left", "costs", "wave"),
    [
        (100, [10, 10, 10, 10], [("a", 2), ("b", 2)]),  # 20 + 20 of 50; a third would make 60
        (30, [10, 10], [("a", 2)]),  # the first one although it is more than half
        (15, [10, 10], [("a", 2)]),  # 1.5 forks fit, and round up
        (14, [10, 1], [("a", 1)]),
        (5, [10, 1], [("a", 1)]),  # half a fork too much, and never more
        (4, [10, 1], []),
        (0, [1], []),
        (-9, [1], []),
        (9, [], []),
    ],
)
def test_a_wave_takes_half_of_what_is_left_by_hand(left: float, costs: list[int], wave: list[tuple[str, int]]) -> None:
    assert fill_wave(left, zip("abcd", costs, strict=False), samples=2) == wave
