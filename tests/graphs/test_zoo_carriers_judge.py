"""Owns: the judge of the zoo's carriers (ReAd): what a move is worth, when one is written again, D, and who pays.

- The worth is exact: it is that of a brute force which plays the house itself, move by move.
- A move in which something is lost is asked for once more, with the reason; a second line stands; no other is.
- A rejected line is an action of its carrier that moves nothing and says nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import carriers, carriers_judge
from graphs.carriers import HALL, MAX_ROUNDS, NAMES, ROOMS, TAKEN, World
from graphs.carriers_judge import LATE, LEAST_ADVANTAGE, Position, find_outlook, judge_move, world_to_position
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedCall, ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.rewards.contract import RunView
from trace_store.journal import Journal

TASK = {
    "id": "t",
    "lies_in": {"cup": "attic", "hat": "attic"},
    "starts": {"carrier_a": "attic", "carrier_b": "kitchen"},
}
MOVES = MAX_ROUNDS * len(NAMES)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, a: list[str], b: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"carrier_a": a, "carrier_b": b})
    return run_recorded(carriers_judge.build_with_judge(policy), carriers.task_to_input(TASK), recorder), policy


def asked_about(call: ScriptedCall) -> list[str]:
    """The lines of a call's last message."""
    return call.prompt.rsplit("human: ", 1)[1].splitlines()[:-1]  # the last is the model's own turn


def house(a: str, b: str, things: dict[str, str], moves: int = 0) -> World:
    """The world with the carriers in these rooms, things by where they lie, and some moves made."""
    state = carriers.task_to_input({"lies_in": things, "starts": {"carrier_a": a, "carrier_b": b}})
    return {**state["world"], "moves": moves}


def judge_text(world: World, text: str) -> carriers_judge.Judgement:
    """What the judge says of a line of the carrier whose turn it is."""
    return judge_move(world, carriers_judge.carrier_to_move(world), carriers.text_to_move(text))


def test_a_rejected_line_is_written_again_with_the_reason_and_both_are_actions_of_its_carrier(
    recorder: Recorder,
) -> None:
    a = ["GO cellar SAY cup in cellar", "TAKE cup SAY hat in attic", "GO hall", "zzz"]
    b = ["GO attic", "TAKE hat", "GO hall"]
    result, policy = run(recorder, a, b)
    assert result["world"]["delivered"] == ["cup", "hat"]
    # a's first line is the only one in which anything is lost; its last, no move, comes when b alone is awaited.
    nodes = ["carrier_a", "carrier_a", "carrier_b", "carrier_a", "carrier_b", "carrier_a", "carrier_b"]
    assert [call.node for call in policy.asked] == nodes
    assert [asked_about(call) for call in policy.asked[:3]] == [
        ["Room: attic. Here: cup, hat. You carry: nothing. Partner says: nothing.", "Move?"],
        [
            "Room: attic. Here: cup, hat. You carry: nothing. Partner says: nothing.",
            "You wrote: GO cellar SAY cup in cellar",
            "Judge: time is lost.",
            "Move?",
        ],
        # What the rejected line said reached nobody.
        ["Room: kitchen. Here: nothing. You carry: nothing. Partner says: hat in attic.", "Move?"],
    ]
    edges = recorded_edges(recorder)
    assert edges["trigger"] == (
        "carrier_a1>carrier_a2 carrier_a2>carrier_b1 carrier_a3>carrier_b2 carrier_a4>carrier_b3 "
        "carrier_b1>carrier_a3 carrier_b2>carrier_a4"
    )
    # The judge, who is no action, writes world, messages and verdicts from what it wrote before: each call depends on
    # all that came before it.
    order = ["carrier_a1", "carrier_a2", "carrier_b1", "carrier_a3", "carrier_b2", "carrier_a4", "carrier_b3"]
    assert edges["data"] == " ".join(sorted(f"{x}>{y}" for i, y in enumerate(order) for x in order[:i]))
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == nodes
    assert trajectory.episode.outcome == "terminated"


def test_rewards_are_those_of_the_house_and_the_rejected_calls_are_marked_apart(recorder: Recorder) -> None:
    result, _ = run(recorder, ["GO cellar", "TAKE cup", "GO hall", "zzz"], ["GO attic", "TAKE hat", "GO hall"])
    (trajectory,) = recorded_trajectories(recorder)
    earned = carriers_judge.reward(TASK, result, RunView(TASK, result, trajectory))
    calls = [f"step:{action.action_id}" for action in trajectory.actions]
    # Six moves were made; the line that was rejected is none of them. a's last line was no move, one of its three.
    assert earned == {
        "correct": 1.0,
        "reward": 1.0,
        "moves": 6.0,
        "messages": 0.0,
        "rejections": 1.0,
        "bad_moves": {"agent:carrier_a": pytest.approx(1 / 3), "agent:carrier_b": 0.0},
        "rejected": dict(zip(calls, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], strict=True)),
    }
    lost = replace(trajectory, actions=trajectory.actions[1:])
    assert carriers_judge.reward(TASK, result, RunView(TASK, result, lost))["rejected"] is None


def test_a_second_line_stands_and_a_line_that_is_no_move_costs_its_carrier_alone(recorder: Recorder) -> None:
    result, policy = run(recorder, ["zzz"] * 20, ["GO attic", "TAKE cup", "GO hall", "GO attic"])
    own = [call for call in policy.asked if call.node == "carrier_a"]
    # In its first two turns the hat is only brought later; in its third it can be brought no more, in its last not even
    # taken.
    assert [len(asked_about(call)) for call in own] == [2, 4] * MAX_ROUNDS
    assert [asked_about(call)[2] for call in own[1::2]] == [
        "Judge: it cannot be done, and time is lost.",
        "Judge: it cannot be done, and time is lost.",
        "Judge: it cannot be done, and less is brought in time.",
        "Judge: it cannot be done, and less is brought in time.",
    ]
    assert (result["bad"], result["world"]["delivered"]) == ({"carrier_a": MAX_ROUNDS, "carrier_b": 0}, ["cup"])


def test_best_moves_bring_everything_and_nothing_is_said_against_them_or_any_that_loses_nothing() -> None:
    """Two carriers that each time play a best move of the judge's, in every house."""
    for task in carriers.tasks():
        world = carriers.task_to_input(task)["world"]
        while not carriers.is_over(world):
            name = carriers_judge.carrier_to_move(world)
            judged = {text: judge_text(world, text) for text in lines(task)}
            best = max(judged, key=lambda text: judged[text].advantage)
            assert judged[best] == (0.0, "")
            assert all((judgement.reason == "") == (judgement.advantage == 0) for judgement in judged.values())
            world, _ = carriers.apply_move(world, name, carriers.text_to_move(best))
        assert not carriers.things_left(world)


def lines(task: dict[str, Any]) -> list[str]:
    """Every line that is a move somewhere in a house, and one that is none."""
    return [*(f"GO {room}" for room in ROOMS), *(f"TAKE {thing}" for thing in task["lies_in"]), "zzz"]


def play_all(world: World, texts: list[str]) -> float:
    """The most that any play from here earns, by playing every one of them in the house itself."""
    if carriers.is_over(world):
        return len(world["delivered"]) + TAKEN * sum(map(bool, world["carried"].values()))
    name = NAMES[world["moves"] % 2]
    worlds = [carriers.apply_move(world, name, carriers.text_to_move(text))[0] for text in texts]
    return max(play_all(after, texts) - LATE * carriers.things_left(after) for after in worlds)


def test_the_worth_of_a_house_and_of_every_move_is_that_of_playing_all_plays() -> None:
    """Random houses after four to seven random moves, with at most four left: 8 ** 4 plays each."""
    chance = random.Random(0)
    compared = 0
    for task in chance.sample(list(carriers.tasks()), 40):
        world = carriers.task_to_input(task)["world"]
        for _ in range(chance.choice([4, 5, 5, 6, 6, 7])):
            text = chance.choice([text for text in lines(task) if "TAKE" in text or chance.random() < 0.5] or ["zzz"])
            world, _ = carriers.apply_move(world, NAMES[world["moves"] % 2], carriers.text_to_move(text))
        texts = lines(task)
        base = len(world["delivered"]) + TAKEN * sum(map(bool, world["carried"].values()))
        best = play_all(world, texts)
        assert find_outlook(world_to_position(world)).value == pytest.approx(best - base)
        for text in texts if not carriers.is_over(world) else []:
            after, _ = carriers.apply_move(world, NAMES[world["moves"] % 2], carriers.text_to_move(text))
            advantage = play_all(after, texts) - LATE * carriers.things_left(after) - best
            assert judge_text(world, text).advantage == pytest.approx(advantage, abs=1e-12)
            compared += advantage < LEAST_ADVANTAGE
    assert compared > 50


@pytest.mark.parametrize(
    ("world", "text", "advantage", "reason"),
    [
        # Both things lie by a, which brings one by moves 1 and 3; b comes, takes and brings the other by move 6.
        (house("attic", "kitchen", TASK["lies_in"]), "TAKE cup", 0, ""),
        # a's thing comes by move 5 instead.
        (house("attic", "kitchen", TASK["lies_in"]), "GO cellar", -4 * LATE, "time is lost."),
        (house("attic", "kitchen", TASK["lies_in"]), "zzz", -2 * LATE, "it cannot be done, and time is lost."),
        # b has three moves left for three moves' work: after another it cannot bring the hat, only take it. The cup's
        # time is the same, the hat's is two moves more: it never comes.
        (
            house("hall", "kitchen", {"hat": "attic"}, moves=3),
            "GO garden",
            -(1 - TAKEN) - LATE,
            "less is brought in time.",
        ),
        # Two moves left, one each, a beside the hat: taking it is all that can be done, and b can do nothing.
        (house("attic", "attic", {"hat": "attic"}, moves=7), "GO hall", -TAKEN, "less is brought in time."),
        (house("attic", "hall", {"hat": "attic"}, moves=7), "zzz", 0, ""),
        (house("hall", "attic", {"hat": "attic"}, moves=7), "TAKE hat", 0, ""),
    ],
)
def test_advantages_are_those_worked_out_by_hand(world: World, text: str, advantage: float, reason: str) -> None:
    judgement = judge_text(world, text)
    assert judgement.advantage == pytest.approx(advantage)
    assert judgement.reason == reason


def test_whatever_loses_anything_is_below_the_threshold_and_a_best_play_earns_the_most_points() -> None:
    """In every position that any play of any house reaches."""
    open_positions = {world_to_position(carriers.task_to_input(task)["world"]) for task in carriers.tasks()}
    reached: set[Position] = set()
    while open_positions:
        position = open_positions.pop()
        reached.add(position)
        if not position.moves_left or not carriers_judge.count_left(position):
            continue
        best = find_outlook(position)
        following = list(carriers_judge._positions_after(position))
        outlooks = [carriers_judge._outlook_through(position, after) for after in following]
        assert max(outlook.points for outlook in outlooks) == pytest.approx(best.points)
        for outlook in outlooks:
            assert outlook.value - best.value <= 2 * LEAST_ADVANTAGE + 1e-9 or abs(outlook.value - best.value) < 1e-9
        open_positions |= set(following) - reached
    assert 1_000 < len(reached) < 1 << 16  # the cache holds all of them


def test_what_the_judge_says_names_no_room_and_no_thing() -> None:
    chance = random.Random(1)
    reasons = set()
    for task in carriers.tasks():
        world = carriers.task_to_input(task)["world"]
        while not carriers.is_over(world):
            reasons |= {judge_text(world, text).reason for text in lines(task)}
            text = carriers.text_to_move(chance.choice(lines(task)))
            world, _ = carriers.apply_move(world, NAMES[world["moves"] % 2], text)
    losses = {"time is lost.", "less is brought in time."}
    assert reasons == {"", *losses, *(f"it cannot be done, and {loss}" for loss in losses)}


def test_a_move_out_of_turn_or_after_the_end_is_no_move_to_be_judged() -> None:
    move = carriers.text_to_move("GO hall")
    with pytest.raises(ValueError, match="carrier_b cannot move now: 0 moves are made, carrier_a is next"):
        judge_move(house("attic", "kitchen", {"cup": "attic"}), "carrier_b", move)
    with pytest.raises(ValueError, match="carrier_a cannot move now"):
        judge_move(house("attic", "kitchen", {"cup": "attic"}, moves=MOVES), "carrier_a", move)


def errs_first(node: str, prompt: str, _: random.Random) -> str:
    """A carrier that walks on at first, and does what it can see once it is told that this was no good."""
    view, chance = prompt.rsplit("human: ", 1)[1], random.Random(f"{node}{prompt}")
    room, here, carried, told = re.findall(r": ([^.]+)\.", view)[:4]
    others = [other for other in ROOMS if other != room]
    if "Judge:" not in view:
        return f"GO {chance.choice(others)}"
    if carried != "nothing":
        return f"GO {HALL}"
    if here != "nothing":
        return f"TAKE {here.split(', ')[0]} SAY {here.split(', ')[-1]} in {room}"
    return f"GO {told.split()[-1]}" if told.split()[-1] in others else f"GO {chance.choice(others)}"


def test_who_errs_and_then_heeds_the_judge_brings_more_than_without_and_only_bad_first_lines_are_asked_for_again(
    tmp_path: Path,
) -> None:
    brought = {}
    for name, build in (("with", carriers_judge.build_with_judge), ("without", carriers.build)):
        recorder = Recorder(Journal(tmp_path / name))
        policy = ScriptedPolicy(script=errs_first)
        results = [
            run_recorded(build(policy), carriers.task_to_input(task), recorder) for task in list(carriers.tasks())[:12]
        ]
        brought[name] = sum(len(result["world"]["delivered"]) for result in results)
        is_asked_again = any("Judge:" in call.prompt.rsplit("human: ", 1)[1] for call in policy.asked)
        assert is_asked_again == (name == "with")
        for verdicts in (result.get("verdicts", []) for result in results):
            for before, verdict in pairwise([None, *verdicts]):
                is_second = before is not None and before.is_rejected
                assert verdict.is_rejected == (verdict.advantage < LEAST_ADVANTAGE and not is_second)
                assert not is_second or verdict.carrier == before.carrier
    assert brought["without"] == 0
    assert brought["with"] >= 20  # of 24


def heeds(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """The same before the model server of the rig, one time in four with nonsense instead."""
    prompt = "human: " + messages[-1]["content"]
    return "zzzz zzzz" if chance.random() < 0.25 else errs_first(node, f"{chance.random()}{prompt}", chance)


@pytest.mark.slow
def test_training_pulls_both_carriers_towards_what_was_brought_and_makes_rejected_calls_pay(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "carriers-judge.toml", heeds, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == list(NAMES)
    assert min(trained.norms.values()) > 0
    for node in NAMES:
        assert trained.pull(node) > 0
        assert trained.rounds[-1]["agents"][node]["gradient_share"]["rejected"] > 0


def test_a_rejected_line_costs_its_call_in_the_configuration() -> None:
    terms = toml_to_config(ZOO / "carriers-judge.toml").train.trainer.shaping
    assert [term.weight for term in terms if (term.reward, term.level) == ("rejected", "step")] == [-0.1]


@pytest.mark.slow
def test_where_a_configuration_pays_for_rejected_calls_training_pulls_away_from_them(tmp_path: Path) -> None:
    # as much as all things in the hall, so that what else was earned does not hide it in two rounds
    shaping = [{"reward": "rejected", "level": "step", "weight": -1.0}]
    changes = {"train.trainer.shaping": shaping}
    trained = train_zoo(ZOO / "carriers-judge.toml", heeds, tmp_path, rounds=2, episodes=8, changes=changes)
    for node in NAMES:
        assert trained.rounds[-1]["agents"][node]["gradient_share"]["rejected"] > 0
        assert trained.pull_to(node, "rejected") < 0
