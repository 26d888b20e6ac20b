"""Owns: which tasks a round takes follows from what is known of them, and from nothing else.

- A task's weight is the expected variance of its rewards: E[p(1-p)] under a Beta posterior where they are 0 or 1, with
  a prior pooled over tasks; what is known is forgotten. A task whose runs seldom come to a result weighs less.
- Draws are without replacement, with chances in proportion to the weights; every task keeps some.
- A task rests for a round while others of like weight wait, and no round's tasks come back as a block.
- An order depends on the seed, the round and the rounds that are over in every execution, never on the order of rows.
- A round is refilled up to its budget.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from marft_bridge.training import task_draw
from marft_bridge.training.task_draw import (
    FLOOR,
    LIKE_WEIGHT,
    MEMORY,
    DrawRule,
    LostRun,
    TaskReward,
    TaskRun,
    groups_to_add,
    order_tasks,
    round_to_task_order,
    runs_to_weights,
)

DRAWS = 4000


def rewards_of(round_number: int = 0, **values_by_task: list[float]) -> list[TaskReward]:
    return [TaskReward(task, round_number, value) for task, values in values_by_task.items() for value in values]


def beta_spread(a: float, b: float) -> float:
    """E[p(1-p)] under Beta(a, b), by the textbook's moments: E[p] - Var(p) - E[p]^2."""
    mean, variance = a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))
    return mean - variance - mean**2


# -- weights ------------------------------------------------------------------------------------------------------


def test_weights_of_right_and_wrong_are_those_of_beta_posteriors_worked_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tasks of four episodes: 2 of 4 right, 0 of 4. The mean over tasks is 1/4, the variance 3/16.

    Within tasks lie 1 + 0 squares with 3 + 3 degrees of freedom; the guess says 2/3 of the variance, with 2 degrees:
    (1 / (3/16) + 2 * 2/3) / (6 + 2) = 5/6, so k = (5/6) / (1/6) = 5, and the prior is Beta(5/4, 15/4).
    """
    monkeypatch.setattr(task_draw, "MEMORY", 1.0)
    weights = runs_to_weights(rewards_of(half=[1, 0, 1, 0], hopeless=[0] * 4), ["half", "hopeless", "new"], 1, 0)
    assert weights == {
        "half": pytest.approx(3.25 * 5.75 / (9 * 10)),
        "hopeless": pytest.approx(1.25 * 7.75 / (9 * 10)),
        "new": pytest.approx(1.25 * 3.75 / (5 * 6)),
    }
    assert weights["half"] == pytest.approx(beta_spread(3.25, 5.75))
    assert weights["new"] == pytest.approx(beta_spread(1.25, 3.75))


def test_an_episode_counts_less_with_every_round_since() -> None:
    """The same, two rounds ago: every episode counts c = MEMORY^2, so squares and counts shrink, and k with them."""
    rewards = rewards_of(half=[1, 0, 1, 0], hopeless=[0] * 4)
    weights = runs_to_weights(rewards, ["half", "hopeless", "new"], 2, last_known=1)
    c = MEMORY**2
    share = (c * 1 / (3 / 16) + 4 / 3) / (c * (3 + 3) + 2)
    k = share / (1 - share)
    assert weights["half"] == pytest.approx(beta_spread(k / 4 + 2 * c, k * 3 / 4 + 2 * c))
    assert weights["hopeless"] == pytest.approx(beta_spread(k / 4, k * 3 / 4 + 4 * c))


def test_a_newer_round_says_more_than_an_older_one() -> None:
    rewards = rewards_of(1, spent=[0, 1, 0, 1], fresh=[0] * 4) + rewards_of(6, spent=[0] * 4, fresh=[0, 1, 0, 1])
    weights = runs_to_weights(rewards, ["spent", "fresh"], 7, last_known=6)
    assert weights["fresh"] > weights["spent"]  # though both were right twice in eight


def test_what_is_too_old_to_count_is_as_if_it_were_not_known() -> None:
    ids = ["a", "b"]
    assert runs_to_weights(rewards_of(1, a=[0, 1], b=[0, 0]), ids, 9000, last_known=8999) == {"a": 1.0, "b": 1.0}


def test_rewards_of_any_range_are_compared_by_their_spread_and_not_by_their_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One task always earns the middle, another an end; p(1-p) of the means would be the same.

    Pooled: mean 1/2, mean square (1/4 + 1/2) / 2 = 3/8, variance 1/8. (1 / (1/8) + 4/3) / (6 + 2) = 7/6 is more than
    10/11, so k = 10: mixtures of 14 have the squares (10 * 3/8 + 1) / 14 and (10 * 3/8 + 2) / 14.
    """
    monkeypatch.setattr(task_draw, "MEMORY", 1.0)
    weights = runs_to_weights(rewards_of(even=[0.5] * 4, ends=[0, 1, 0, 1]), ["even", "ends"], 1, last_known=0)
    assert weights == {
        "even": pytest.approx((4.75 / 14 - 1 / 4) * 14 / 15),
        "ends": pytest.approx((5.75 / 14 - 1 / 4) * 14 / 15),
    }
    moved = rewards_of(even=[-200.0] * 4, ends=[-300, -100, -300, -100])  # the same on another scale
    assert runs_to_weights(moved, ["even", "ends"], 1, last_known=0) == pytest.approx(weights)


def test_a_new_task_weighs_what_the_others_do_on_average_and_none_weighs_nothing() -> None:
    rewards = rewards_of(solved=[1] * 40, hopeless=[0] * 40, half=[0, 1] * 20)
    weights = runs_to_weights(rewards, ["solved", "hopeless", "half", "new"], 1, last_known=0)
    assert weights["solved"] == weights["hopeless"] < weights["new"] < weights["half"]
    assert min(weights.values()) == pytest.approx(FLOOR * weights["new"])


def test_nothing_that_tells_tasks_apart_gives_all_the_same_weight() -> None:
    assert runs_to_weights([], ["a", "b"], 1, last_known=0) == {"a": 1.0, "b": 1.0}
    assert runs_to_weights(rewards_of(a=[0.3, 0.3], gone=[1.0]), ["a", "b"], 1, last_known=0) == {"a": 1.0, "b": 1.0}


def test_a_task_weighs_by_the_share_of_its_runs_that_come_to_a_result_worked_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tasks of four runs: 4 of 4 come to a result, 2 of 4. The mean over tasks is 3/4, the variance 3/16.

    As above k is 5: (1 / (3/16) + 2 * 2/3) / (6 + 2) = 5/6. So the prior is Beta(15/4, 5/4).
    """
    monkeypatch.setattr(task_draw, "MEMORY", 1.0)
    ids = ["steady", "shaky", "new"]
    shares = {"steady": (15 / 4 + 4) / 9, "shaky": (15 / 4 + 2) / 9, "new": 3 / 4}
    lost = [LostRun("shaky", 0)] * 2
    alike = rewards_of(steady=[1] * 4, shaky=[1] * 2)
    assert runs_to_weights([*alike, *lost], ids, 1, last_known=0) == pytest.approx(shares)
    differing = rewards_of(steady=[1, 0, 0, 0], shaky=[0, 1])
    without_lost = runs_to_weights(differing, ids, 1, last_known=0)
    with_lost = runs_to_weights([*differing, *lost], ids, 1, last_known=0)
    assert with_lost == pytest.approx({task: without_lost[task] * shares[task] for task in ids})


def test_where_no_run_came_to_a_result_or_each_did_tasks_are_alike() -> None:
    lost = [LostRun(task, 0) for task in "aab"]
    assert runs_to_weights(lost, ["a", "b", "c"], 1, last_known=0) == {"a": 1.0, "b": 1.0, "c": 1.0}
    later: list[TaskRun] = [*rewards_of(a=[1], b=[0]), LostRun("a", 3)]
    assert runs_to_weights(later, "ab", 2, last_known=1) == runs_to_weights(later[:2], "ab", 2, last_known=1)


def test_tasks_that_never_come_to_a_result_are_given_up_as_hopeless_ones_are() -> None:
    """26 tasks are solved by now, 4 are even, and no run of 10 ever ended."""
    ids = [f"{kind}{n}" for kind, count in (("solved", 26), ("half", 4), ("never", 10)) for n in range(count)]
    runs: list[TaskRun] = []
    for number in range(9):
        for task in ids:
            first = 0.0 if number == 0 or task.startswith("half") else 1.0
            if task.startswith("never"):
                runs += [LostRun(task, number)] * 2
            else:
                runs += rewards_of(number, **{task: [first, 1.0]})
    weights = runs_to_weights(runs, ids, 9, last_known=8)
    assert weights["never0"] == min(weights.values()) < 0.2 * weights["half0"]


# -- draws --------------------------------------------------------------------------------------------------------


def chi_square(counts: Counter[str], shares: dict[str, float]) -> float:
    total = counts.total()
    return sum((counts[task] - total * share) ** 2 / (total * share) for task, share in shares.items())


def test_draws_come_as_often_as_the_weights_say_the_first_and_the_second() -> None:
    weights = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}
    orders = [order_tasks(weights, f"{seed}/1") for seed in range(DRAWS)]
    assert all(sorted(order) == sorted(weights) for order in orders)
    # the 0.999 quantiles of chi-square with 3 and 2 degrees of freedom
    assert chi_square(Counter(order[0] for order in orders), {"a": 1 / 2, "b": 1 / 4, "c": 1 / 8, "d": 1 / 8}) < 16.27
    after_a = Counter(order[1] for order in orders if order[0] == "a")
    assert chi_square(after_a, {"b": 1 / 2, "c": 1 / 4, "d": 1 / 4}) < 13.82


def test_solved_and_hopeless_tasks_are_drawn_less_and_tasks_without_episodes_are_drawn() -> None:
    ids = [f"{kind}{n}" for kind in ("solved", "hopeless", "half", "new") for n in range(10)]
    values = {"solved": [1.0] * 6, "hopeless": [0.0] * 6, "half": [0.0, 1.0] * 3, "new": []}
    rewards = [reward for task in ids for reward in rewards_of(**{task: values[task.rstrip("0123456789")]})]
    drawn: Counter[str] = Counter()
    for seed in range(300):
        order = round_to_task_order(rewards, ids, 1, DrawRule(seed, tasks_per_round=8))
        drawn.update(task.rstrip("0123456789") for task in order[:8])
    assert drawn["half"] > drawn["new"] > 1.5 * max(drawn["solved"], drawn["hopeless"])
    assert min(drawn["solved"], drawn["hopeless"]) > 0


def test_an_order_does_not_depend_on_the_order_of_rows_or_tasks() -> None:
    chance = random.Random(1)
    ids = [f"t{n}" for n in range(30)]
    rewards = [TaskReward(task, number, chance.random()) for task in ids[:20] for number in (0, 0, 1, 2)]
    rule = DrawRule(seed=3, tasks_per_round=5)
    order = round_to_task_order(rewards, ids, 3, rule)
    for _ in range(5):
        chance.shuffle(rewards)
        chance.shuffle(ids)
        assert round_to_task_order(rewards, ids, 3, rule) == order
    assert round_to_task_order(rewards, ids, 3, DrawRule(seed=4, tasks_per_round=5)) != order


def test_no_window_comes_back_and_a_task_rests_for_a_round() -> None:
    ids = [f"t{n}" for n in range(40)]
    rewards: list[TaskReward] = []
    rounds = []
    for number in range(1, 31):
        taken = round_to_task_order(rewards, ids, number, DrawRule(seed=0, tasks_per_round=10))[:10]
        rounds.append(frozenset(taken))
        rewards += [TaskReward(task, number, 0.5) for task in taken]
    assert len(set(rounds)) == 30
    assert all(not before & after for before, after in pairwise(rounds))
    assert {task for taken in rounds for task in taken} == set(ids)


def test_a_resting_task_waits_for_those_of_like_weight_and_for_no_others() -> None:
    like, light = dict.fromkeys("bcde", LIKE_WEIGHT), dict.fromkeys("bcde", 0.49)
    for seed in range(200):
        assert order_tasks({"a": 1.0, **like}, str(seed), {"a"})[-1] == "a"
        assert order_tasks({"a": 1.0, **light}, str(seed), {"a"}) == order_tasks({"a": 1.0, **light}, str(seed))
        mixed = order_tasks({"a": 1.0, "b": 0.8, "c": 0.1, "d": 0.1}, str(seed), {"a"})
        assert mixed.index("b") < mixed.index("a")
    places = {order_tasks({"a": 1.0, "b": 0.8, "c": 0.1, "d": 0.1}, str(seed), {"a"}).index("a") for seed in range(200)}
    assert places == {1, 2, 3}


def test_all_tasks_are_taken_once_where_a_round_needs_as_many_or_more() -> None:
    ids = ["a", "b", "c"]
    played = [TaskReward(task, 1, float(task == "a")) for task in ids]
    for needed in (3, 5):
        assert sorted(round_to_task_order(played, ids, 2, DrawRule(seed=0, tasks_per_round=needed))) == ids


# -- what a plan may know -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_plan_knows_only_rounds_that_are_over_in_every_execution(staleness: int) -> None:
    """Round n may be planned while the newest finished update is that of round n - staleness - 1."""
    chance = random.Random(staleness)
    ids = [f"t{n}" for n in range(24)]
    rewards = [TaskReward(task, number, chance.random()) for number in range(6) for task in ids]
    for number in (1, 2, 5, 6):
        rule = DrawRule(seed=2, tasks_per_round=4, max_staleness=staleness)
        over = max(0, number - staleness - 1)
        order = round_to_task_order(rewards, ids, number, rule)
        assert order == round_to_task_order([r for r in rewards if r.round <= over], ids, number, rule)
        assert order != round_to_task_order([r for r in rewards if r.round < over], ids, number, rule)


def test_tasks_of_a_round_that_is_only_planned_rest_too() -> None:
    ids = [f"t{n}" for n in range(20)]
    rule = DrawRule(seed=5, tasks_per_round=5, max_staleness=2)
    plans = [set(round_to_task_order([], ids, number, rule)[:5]) for number in range(1, 5)]
    assert all(not before & after for before, after in pairwise(plans))


# -- refill -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "played", "informative", "left", "count"),
    [
        (8, 8, 8, 4, 0),
        (8, 8, 6, 4, 3),  # 2 are missing, and 6 of 8 were informative: 2 * 8 / 6 = 2.7
        (8, 8, 4, 4, 4),  # 8 would be expected to do
        (8, 8, 0, 4, 4),
        (8, 11, 8, 1, 0),
        (8, 11, 7, 1, 1),
        (8, 12, 7, 0, 0),
        (8, 8, 2, 0, 0),
    ],
)
def test_a_round_is_refilled_by_what_is_missing_up_to_the_budget(
    planned: int, played: int, informative: int, left: int, count: int
) -> None:
    assert groups_to_add(planned=planned, played=played, informative=informative, left=left) == count


def test_fewer_groups_are_wasted_than_with_a_window_that_moves_on() -> None:
    """80 tasks, most of them nearly solved or hopeless; 12 rounds of 10 tasks, 4 samples each; ten seeds."""
    assert wasted_groups(drawn=True) < 0.9 * wasted_groups(drawn=False)


def wasted_groups(*, drawn: bool) -> int:
    wasted = 0
    for seed in range(10):
        chance = random.Random(seed)
        p = {f"t{n}": chance.betavariate(0.25, 0.25) for n in range(80)}
        rewards = [TaskReward(task, 0, float(chance.random() < p[task])) for task in p for _ in range(2)]
        ids = list(p)
        for number in range(1, 13):
            window = (ids * 2)[(number - 1) * 10 % 80 :]
            order = round_to_task_order(rewards, ids, number, DrawRule(seed, tasks_per_round=10)) if drawn else window
            for task in order[:10]:
                values = [float(chance.random() < p[task]) for _ in range(4)]
                wasted += len(set(values)) == 1
                rewards += [TaskReward(task, number, value) for value in values]
    return wasted
