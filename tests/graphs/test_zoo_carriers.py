"""Owns: the zoo's two carriers in a small world (ReAd, LIET): D, sight, messages, moves, and whom a bad one costs.

Where messages have nodes of their own, `marft-bridge credit` tells one that helps from one that nobody heeds.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import save_model
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.fake_vllm import FakeVllm, running
from support.zoo_rig import ZOO, train_zoo

from graphs import carriers
from marft_bridge.agent_credit.command import CreditOptions, credit
from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal

TASK = {
    "id": "t",
    "lies_in": {"cup": "attic", "hat": "attic"},
    "starts": {"carrier_a": "attic", "carrier_b": "kitchen"},
}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, a: list[str], b: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"carrier_a": a, "carrier_b": b})
    graph = wrap(carriers.build(policy), recorder)
    return asyncio.run(graph.ainvoke(carriers.task_to_input(TASK))), policy


def test_a_carrier_sees_its_room_and_hears_the_last_message_and_depends_on_the_move_before(recorder: Recorder) -> None:
    a, b = ["TAKE cup SAY hat in attic", "GO hall", "GO kitchen"], ["GO attic", "TAKE hat", "GO hall"]
    result, policy = run(recorder, a, b)
    assert result["world"]["delivered"] == ["cup", "hat"]
    chain = (
        "carrier_a1>carrier_b1 carrier_a2>carrier_b2 carrier_a3>carrier_b3 carrier_b1>carrier_a2 carrier_b2>carrier_a3"
    )
    # The world and all messages are written anew with each move, so that the last writer is all that is read.
    assert recorded_edges(recorder) == {"trigger": chain, "data": chain}
    assert [call.prompt.split("human: ")[-1].splitlines()[0] for call in policy.asked] == [
        "Room: attic. Here: cup, hat. You carry: nothing. Partner says: nothing.",
        "Room: kitchen. Here: nothing. You carry: nothing. Partner says: hat in attic.",
        "Room: attic. Here: hat. You carry: cup. Partner says: nothing.",
        "Room: attic. Here: hat. You carry: nothing. Partner says: nothing.",
        "Room: hall. Here: nothing. You carry: nothing. Partner says: nothing.",
        "Room: attic. Here: nothing. You carry: hat. Partner says: nothing.",
    ]
    assert carriers.reward(TASK, result) == {"correct": 1.0, "reward": 1.0, "moves": 6.0, "messages": 1.0} | {
        "bad_moves": {"agent:carrier_a": 0.0, "agent:carrier_b": 0.0}
    }


def test_a_voice_tells_the_partner_what_its_carrier_sees_after_the_move_and_the_move_tells_nothing(
    recorder: Recorder,
) -> None:
    answers = {
        "carrier_a": ["TAKE cup SAY go home", "GO hall", "zzz"],
        "voice_a": ["hat in attic.\nand more", "", "x" * 99],
        "carrier_b": ["GO attic", "TAKE hat", "GO hall"],
        "voice_b": ["here I am", "thanks"],
    }
    policy = ScriptedPolicy(answers=answers)
    result = run_recorded(carriers.build_with_voices(policy), carriers.task_to_input(TASK), recorder)
    nodes = [call.node for call in policy.asked]
    assert nodes == [*("carrier_a", "voice_a", "carrier_b", "voice_b") * 2, "carrier_a", "voice_a", "carrier_b"]
    asked = [call.prompt.split("human: ")[-1].splitlines()[0] for call in policy.asked]
    assert asked[:5] == [
        "Room: attic. Here: cup, hat. You carry: nothing. Partner says: nothing.",
        "Room: attic. Here: hat. You carry: cup.",
        "Room: kitchen. Here: nothing. You carry: nothing. Partner says: hat in attic.",
        "Room: attic. Here: hat. You carry: nothing.",
        "Room: attic. Here: hat. You carry: cup. Partner says: here I am.",
    ]
    assert asked[-1].endswith(f"Partner says: {'x' * carriers.MESSAGE_CHARACTERS}.")
    earned = carriers.reward(TASK, result)
    assert (earned["correct"], earned["moves"], earned["messages"]) == (1.0, 6.0, 4.0)


@pytest.mark.parametrize(
    ("a", "b", "reward", "bad"),
    [
        # One thing in the hall, the other in a hand: (1 + 0.3) / 2.
        (["TAKE cup", "GO hall", "GO attic", "TAKE hat"], ["GO hall", "GO attic", "GO hall", "GO attic"], 0.65, (0, 0)),
        # No room of that name, already there, a second thing at once, not a move: none ends the run.
        (["TAKE cup", "TAKE hat", "GO attic", "GO roof"], ["zzz", "", "TAKE cup", "GO hall"], 0.15, (3 / 4, 3 / 4)),
        (["9" * 5000] * 4, ["SAY help", "GO", "TAKE", "I GO hall"], 0.0, (1, 1)),
    ],
)
def test_rewards_are_those_worked_out_by_hand_and_a_bad_move_costs_its_carrier_alone(
    a: list[str], b: list[str], reward: float, bad: tuple[float, float], recorder: Recorder
) -> None:
    result, _ = run(recorder, a, b)
    earned = carriers.reward(TASK, result)
    assert earned["reward"] == pytest.approx(reward)
    assert (earned["correct"], earned["moves"]) == (0.0, 8.0)
    assert earned["bad_moves"] == {"agent:carrier_a": bad[0], "agent:carrier_b": bad[1]}
    assert recorded_trajectories(recorder)[0].episode.outcome == "terminated"


def test_a_carrier_that_never_moved_has_no_reward_of_its_own() -> None:
    task = TASK | {"lies_in": {"cup": "attic"}}
    world = carriers.task_to_input(task)["world"]
    world, _ = carriers.apply_move(world, "carrier_a", carriers.text_to_move("TAKE cup"))
    result = {"world": world, "spoken": {"carrier_a": 0}, "bad": {"carrier_a": 0}}
    assert carriers.reward(task, result)["bad_moves"] == {"agent:carrier_a": 0.0}


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("GO attic", ("GO", "attic", "")),
        ("go to the Attic.\nTAKE cup", ("GO", "attic", "")),
        ("GO  to\tthe  attic", ("GO", "attic", "")),
        ("GO to  the", ("GO", "the", "")),  # no such room
        ("TAKE the  thermos", ("TAKE", "thermos", "")),
        ("TAKE cup SAY hat in attic.", ("TAKE", "cup", "hat in attic")),
        ("SAY hat in attic", ("NONE", "", "hat in attic")),
        ("TAKE SAY GO hall", ("NONE", "", "GO hall")),
        ("GO hall SAY " + "x" * 99, ("GO", "hall", "x" * carriers.MESSAGE_CHARACTERS)),
        ("GOING hall", ("NONE", "", "")),
        ("", ("NONE", "", "")),
    ],
)
def test_a_line_is_a_move_and_perhaps_a_message(text: str, move: tuple[str, str, str]) -> None:
    assert carriers.text_to_move(text) == move


def test_no_move_loses_or_makes_a_thing() -> None:
    chance = random.Random(0)
    for task in list(carriers.tasks())[:40]:
        world = carriers.task_to_input(task)["world"]
        for number in range(60):
            verb, target = chance.choice(["GO", "TAKE", "X"]), chance.choice([*carriers.ROOMS, *task["lies_in"]])
            world, _ = carriers.apply_move(world, carriers.NAMES[number % 2], carriers.text_to_move(f"{verb} {target}"))
            everything = [*world["delivered"], *filter(None, world["carried"].values())]
            everything += [thing for things in world["lying"].values() for thing in things]
            assert sorted(everything) == sorted(task["lies_in"])
            assert carriers.things_left(world) == len(everything) - len(world["delivered"])


def test_tasks_differ_by_more_than_names_and_can_be_done_in_time() -> None:
    tasks = list(carriers.tasks())
    assert tasks == list(carriers.tasks())
    assert len({task["id"] for task in tasks}) == len(tasks) == 132
    houses = {(*sorted(task["lies_in"].values()), *(task["starts"][name] for name in carriers.NAMES)) for task in tasks}
    assert len(houses) == len(tasks)
    for task in tasks:
        moves = []
        for name, thing in zip(carriers.NAMES, task["lies_in"], strict=True):
            room = task["lies_in"][thing]
            moves.append([*([f"GO {room}"] if task["starts"][name] != room else []), f"TAKE {thing}", "GO hall"])
        assert max(map(len, moves)) <= carriers.MAX_ROUNDS
        assert carriers.HALL not in task["lies_in"].values()
        assert {*task["lies_in"].values()} & {*task["starts"].values()}


def wanders(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """A carrier that takes what lies there and brings it, or goes on; one time in three it writes nonsense instead."""
    view = messages[-1]["content"]
    if chance.random() < 0.33:
        return "zzzz zzzz"
    room, here, carried = re.findall(r": ([^.]+)\.", view)[:3]
    if carried != "nothing":
        return "GO hall"
    if here != "nothing" and room != carriers.HALL:
        return f"TAKE {here.split(', ')[0]} SAY {here} in {room}"
    return f"GO {chance.choice([other for other in carriers.ROOMS[1:] if other != room])}"


@pytest.mark.slow
def test_training_pulls_both_carriers_towards_what_was_brought_and_their_own_bad_moves_reach_them(
    tmp_path: Path,
) -> None:
    trained = train_zoo(ZOO / "carriers.toml", wanders, tmp_path, rounds=2, episodes=8)
    assert sorted(trained.norms) == list(carriers.NAMES)
    assert min(trained.norms.values()) > 0
    for node in carriers.NAMES:
        assert trained.pull(node) > 0
        assert trained.rounds[-1]["agents"][node]["gradient_share"]["bad_moves"] > 0


def follows(body: dict[str, Any]) -> str:
    """A carrier_a that brings what lies beside it and heeds nobody, and a carrier_b that goes where it is told."""
    node, view = body["model"].split("@")[0], body["messages"][-1]["content"]
    room, here, carried = re.findall(r": ([^.]+)\.", view)[:3]
    if node in carriers.VOICES:
        return f"{here.split(', ')[0]} in {room}"
    if carried != "nothing":
        return "GO hall"
    if here != "nothing":
        return f"TAKE {here.split(', ')[0]}"
    told = re.search(r"Partner says: (?!nothing)\w+ in (\w+)\.", view)
    return f"GO {told[1]}" if told and node == "carrier_b" else "zzz"


@pytest.mark.slow
def test_credit_tells_a_message_that_helps_from_one_that_nobody_heeds(tmp_path: Path) -> None:
    tasks = [
        {"id": f"{room}-{start}-{thing}", "lies_in": {thing: room, "rope": room}}
        | {"starts": {"carrier_a": room, "carrier_b": start}}
        for room in carriers.ROOMS[1:]
        for start in carriers.ROOMS
        if start != room
        for thing in ("cup", "hat", "pen")
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    save_model(tmp_path / "model")
    with running(FakeVllm()) as server:
        server.answer = follows
        path = tmp_path / "bridge.toml"
        path.write_text(f"""
run = "{tmp_path / "run"}"
[graph]
app = "graphs.carriers:build_with_voices"
nodes = ["carrier_a", "voice_a", "carrier_b", "voice_b"]
tasks = "{tmp_path / "tasks.jsonl"}"
task_to_input = "graphs.carriers:task_to_input"
reward = "graphs.carriers:reward"
[model]
path = "{tmp_path / "model"}"
[serve]
attach = "{server.url}"
[collect]
episodes = 24
""")
        config = toml_to_config(path)
        text = io.StringIO()
        reporter = Reporter(Console(file=text, width=300))
        collect(config, reporter, False)
        options = CreditOptions(nodes=carriers.VOICES, substitute="silent", run_of="collect", min_contribution=0.2)
        credit(config, options, reporter, False)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    findings = {row[0]: row[-1] for row in rows}
    assert [findings[voice] for voice in carriers.VOICES] == ["adds", "lazy"]
    assert {row[0]: row[2] for row in rows}["voice_a"] == "+0.500"
