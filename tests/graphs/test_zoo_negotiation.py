"""Owns: the zoo's negotiation: D along the turns, what a side sees, deals by hand, the best splits by enumeration.

A reply that is no line of the language costs its own side only and never ends a run.
"""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import negotiation
from graphs.negotiation import EXAMPLES, KINDS, PLAYERS, TURNS
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal

# To the first 2 * 1 + 2 + 3 * 2 = 10 in all, to the second 2 * 2 + 3 + 3 * 1 = 10.
TASK = {
    "id": "t",
    "kinds": ["books", "hats", "balls"],
    "counts": [2, 1, 3],
    "values": {"first": [1, 2, 2], "second": [2, 3, 1]},
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, first: list[str], second: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"first": first, "second": second})
    return run_recorded(negotiation.build(policy), negotiation.task_to_input(TASK), recorder), policy


def test_every_turn_depends_on_all_turns_before_it_and_a_side_sees_its_own_values_only(recorder: Recorder) -> None:
    result, policy = run(recorder, ["take 2 1 2", "Accept."], ["take 1 1 0 ."])
    assert [turn.claim for turn in result["turns"]] == [(2, 1, 2), (1, 1, 0), None]
    assert recorded_edges(recorder) == {
        "trigger": "first1>second second>first2",
        "data": "first1>first2 first1>second second>first2",
    }
    asked = [call.prompt.split("human: ")[-1].removesuffix("\nai: ") for call in policy.asked]
    own = "books 2, worth 1 each to you; hats 1, worth 2; balls 3, worth 2."
    assert asked == [
        f"{own}\nNo offer yet.\nTurn 1 of 6.",
        "books 2, worth 2 each to you; hats 1, worth 3; balls 3, worth 1.\n"
        "Your partner takes 2 1 2, which leaves you 0 0 1, worth 1 to you.\nTurn 2 of 6.",
        f"{own}\nYour partner takes 1 1 0, which leaves you 1 0 3, worth 7 to you.\nTurn 3 of 6.",
    ]
    for task in negotiation.tasks():
        state = negotiation.task_to_input(task)
        for own_side, other in (PLAYERS, PLAYERS[::-1]):
            swapped = {**task, "values": {**task["values"], other: [0, 0, 0]}}
            assert negotiation.state_to_prompt(negotiation.task_to_input(swapped), own_side) == (
                negotiation.state_to_prompt(state, own_side)
            )


# The best product: balls to the first, the rest to the second, 6 * 7 = 42. The best sum, 6 + 7 = 13, too.
@pytest.mark.parametrize(
    ("first", "second", "payoff", "measures"),
    [
        # 6 and 7 of 10: nothing is better for one and no worse for the other.
        (["take 0 0 3"], ["accept"], (0.6, 0.7), {"nash": 1, "welfare": 1, "pareto": 1, "agreed": 1, "legal": 1}),
        # The second takes a book and the hat; the first is left 1 and 6: 7 and 5.
        (
            ["take 2 1 3", "accept"],
            ["take 1 1 0"],
            (0.7, 0.5),
            {"nash": 35 / 42, "welfare": 12 / 13, "pareto": 1, "agreed": 1, "legal": 1},
        ),
        # A hat and a book for two balls: 3 and 2 + 3 = 5; the first could have 4 by two balls, and the other 8.
        (["take 1 1 0"], ["accept"], (0.3, 0.5), {"nash": 15 / 42, "welfare": 8 / 13, "pareto": 0, "agreed": 1}),
        # No deal in six turns.
        (
            ["take 2 1 3"] * 3,
            ["take 2 1 3"] * 3,
            (0, 0),
            {"nash": 0, "welfare": 0, "pareto": 0, "agreed": 0, "legal": 1},
        ),
        # More than there is, and what is no line, count as nothing said and cost 1 each; the offer stands.
        (["take 3 0 0", "take 0 0 3"], ["what?", "accept"], (0.6 - 1, 0.7 - 1), {"agreed": 1, "legal": 1 / 2}),
        # Nobody accepts where nothing is offered, nor its own offer.
        (["accept", "take 0 0 3", "accept"], ["", "x" * 5000, "accept"], (0.6 - 2, 0.7 - 2), {"legal": 2 / 6}),
        # Too few numbers, too many digits, a word before.
        (["take 1 1", "take 9999 1 1", "I take 1 1 1"], ["\x00", "take", "take1 1 1"], (-3, -3), {"legal": 0}),
        # Too many numbers, and what takes back what it says.
        (["take 1 1 1 9", "take 1 1 1.5", "take 0 0 3"], ["-", "-", "accept? no"], (-2, -3), {"legal": 1 / 6}),
        (
            ["take 1 1 1, 9 9", "take 1 1 1 or 2 2 2", "take 0 0 3"],
            ["-", "-", "accept."],
            (0.6 - 2, 0.7 - 2),
            {"agreed": 1},
        ),
        (["take 1 1 1. 5", "take 1 1 1 no", "take 1 1 1-2"], ["-", "-", "-"], (-3, -3), {"legal": 0}),
        (["TAKE 0 0 3.\nI like balls."], ["Accept."], (0.6, 0.7), {"agreed": 1, "legal": 1}),
    ],
)
def test_deals_are_those_worked_out_by_hand_and_a_bad_reply_costs_its_own_side(
    first: list[str], second: list[str], payoff: tuple[float, float], measures: dict[str, float], recorder: Recorder
) -> None:
    result, _ = run(recorder, first, second)
    assert len(result["turns"]) <= TURNS
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"
    found = negotiation.reward(TASK, result)
    assert found["payoff"] == pytest.approx({"agent:first": payoff[0], "agent:second": payoff[1]})
    assert {name: found[name] for name in measures} == pytest.approx(measures)


def every_split(task: dict[str, Any]) -> list[tuple[list[int], int, int]]:
    """(what the first takes, its worth to the first, what is left to the second): thing by thing, not by numbers."""
    things = [kind for kind, count in enumerate(task["counts"]) for _ in range(count)]
    found = []
    for chosen in range(2 ** len(things)):
        taken, own, other = [0, 0, 0], 0, 0
        for place, kind in enumerate(things):
            if chosen >> place & 1:
                taken[kind] += 1
                own += task["values"]["first"][kind]
            else:
                other += task["values"]["second"][kind]
        found.append((taken, own, other))
    return found


def test_pareto_and_nash_of_every_deal_are_those_of_an_enumeration_written_apart() -> None:
    for task in random.Random(0).sample(list(negotiation.tasks()), 12):
        found = every_split(task)
        best = max(own * other for _, own, other in found)
        marked = set()
        for taken, own, other in found:
            turns = [
                negotiation.reply_to_turn(
                    f"take {' '.join(map(str, taken))}", "first", task["counts"], may_accept=False
                ),
                negotiation.reply_to_turn("accept", "second", task["counts"], may_accept=True),
            ]
            rewards = negotiation.reward(task, {"turns": turns})
            assert rewards["payoff"] == pytest.approx({"agent:first": own / 10, "agent:second": other / 10})
            dominated = any((a > own and b >= other) or (a >= own and b > other) for _, a, b in found)
            assert rewards["pareto"] == float(not dominated)
            assert rewards["nash"] == pytest.approx(own * other / best)
            if rewards["nash"] == 1:
                marked.add(rewards["pareto"])
        assert marked == {1.0}  # a Nash point is always Pareto-optimal


def test_tasks_are_pools_as_in_deal_or_no_deal_and_none_is_another_one_in_another_order_of_kinds_or_sides() -> None:
    tasks = list(negotiation.tasks())
    assert tasks == list(negotiation.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == 160
    shown = set()
    for task in tasks:
        first, second = task["values"].values()
        same = {
            tuple((task["counts"][kind], own[kind], other[kind]) for kind in order)
            for order in itertools.permutations(range(3))
            for own, other in ((first, second), (second, first))
        }
        assert not same & shown
        shown |= same
    for task in tasks:
        assert 5 <= sum(task["counts"]) <= 7
        assert min(task["counts"]) >= 1
        pairs = list(zip(*task["values"].values(), strict=True))
        for values in task["values"].values():
            assert sum(count * value for count, value in zip(task["counts"], values, strict=True)) == 10
        assert all(any(pair) for pair in pairs)
        assert any(all(pair) for pair in pairs)
        assert len(set(task["kinds"])) == 3


def test_the_worked_examples_add_up_and_are_of_things_in_no_task() -> None:
    for question, answer in EXAMPLES:
        kinds = re.findall(r"([a-z]+) (\d+), worth (\d+)", question)
        assert not {kind for kind, _, _ in kinds} & set(KINDS)
        counts, values = ([int(row[column]) for row in kinds] for column in (1, 2))
        assert sum(count * value for count, value in zip(counts, values, strict=True)) == 10
        offers = re.findall(r"takes (\d \d \d), which leaves you (\d \d \d), worth (\d+)", question)
        for taken, rest, worth in offers:
            left = tuple(map(int, rest.split()))
            assert negotiation.rest_of(counts, tuple(map(int, taken.split()))) == left
            assert negotiation.worth_of(left, values) == int(worth)
        assert negotiation.reply_to_turn(answer, "first", counts, may_accept=bool(offers)).legal


def talks(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """An offer at random or yes, and half of the time nothing of use."""
    if chance.random() < 0.5:
        return "zzzz zzzz"
    return "accept" if "Your partner takes" in messages[-1]["content"] else "take 1 0 1"


@pytest.mark.slow
def test_the_rounds_pull_each_side_towards_its_own_payoff(tmp_path: Path) -> None:
    changes = {"train.trainer.offline.mode": "off"}
    trained = train_zoo(ZOO / "negotiation.toml", talks, tmp_path, rounds=2, episodes=16, changes=changes)
    assert set(trained.norms) == set(PLAYERS)
    assert min(trained.norms.values()) > 0
    for node in PLAYERS:
        own = {
            r.episode_id: r.value for t in trained.trained for r in t.rewards if r.name == "payoff" and r.node == node
        }
        assert trained.pull(node, lambda trajectory, own=own: own[trajectory.episode.episode_id]) > 0.2
