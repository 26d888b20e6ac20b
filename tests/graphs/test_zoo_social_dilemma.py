"""Owns: the zoo's iterated dilemma: D of simultaneous moves, payoffs of each move by hand, and its training.

Moves of one round never depend on each other. A reply that is no move costs its own side only and never ends a run.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import social_dilemma
from graphs.social_dilemma import PLAYERS, ROUNDS
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal

TASK = {"id": "t", "thing": "nuts", "payoffs": {"share": 6, "keep": 2, "temptation": 10, "sucker": 0}}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def run(recorder: Recorder, left: list[str], right: list[str]) -> tuple[dict[str, Any], ScriptedPolicy]:
    policy = ScriptedPolicy(answers={"left": left, "right": right})
    return run_recorded(social_dilemma.build(policy, len(left)), social_dilemma.task_to_input(TASK), recorder), policy


def earned(result: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The rewards, where calls are named l0, l1, ... and r0, r1, ..."""
    actions = [SimpleNamespace(node=node, action_id=f"{node[0]}{i}") for i in range(rounds) for node in PLAYERS]
    return social_dilemma.reward(TASK, result, SimpleNamespace(game=lambda: SimpleNamespace(actions=actions)))


def test_moves_of_a_round_are_side_by_side_and_depend_on_all_rounds_before(recorder: Recorder) -> None:
    result, policy = run(recorder, ["share", "keep", "share"], ["Keep!", "share", "share"])
    assert [move.word for move in result["moves"]] == ["share", "keep", "keep", "share", "share", "share"]
    pairs = [(f"{a}{m}", f"{b}{n}") for m in (1, 2) for n in range(m + 1, 4) for a in PLAYERS for b in PLAYERS]
    next_round = [(src, dst) for src, dst in pairs if int(dst[-1]) == int(src[-1]) + 1]
    assert recorded_edges(recorder) == {
        "trigger": " ".join(sorted(f"{src}>{dst}" for src, dst in next_round)),
        "data": " ".join(sorted(f"{src}>{dst}" for src, dst in pairs)),
    }
    left = [call.prompt for call in policy.asked if call.node == "left"]
    right = [call.prompt for call in policy.asked if call.node == "right"]
    assert left[2].endswith(
        "Both share: 6 nuts each. Both keep: 2 each. One keeps: 10, the other 0.\nRound 1: you share, your partner "
        "keeps.\nRound 2: you keep, your partner shares.\nRound 3 of 3. Share or keep?\nai: "
    )
    assert "Round 1: you keep, your partner shares.\nRound 2 of 3." in right[1]


def test_a_player_is_told_of_the_last_rounds_only(recorder: Recorder) -> None:
    _, policy = run(recorder, ["share"] * ROUNDS, ["keep"] * ROUNDS)
    asked = [call.prompt.split("One keeps: 10")[1] for call in policy.asked if call.node == "left"]
    assert [prompt.count("your partner keeps") for prompt in asked] == [0, 1, 2, 2]
    assert "Round 1:" not in asked[3]


@pytest.mark.parametrize(
    ("left", "right", "payoff", "measures"),
    [
        (["share", "share"], ["share", "share"], {"l0": 0.6, "r0": 0.6, "l1": 0.6, "r1": 0.6}, (1.0, 1.0, 1.0)),
        # 10 and 0, then 2 and 2: 14 of the 24 that sharing would have had
        (["keep", "keep"], ["share", "keep"], {"l0": 1.0, "r0": 0.0, "l1": 0.2, "r1": 0.2}, (0.0, 14 / 24, 1.0)),
        # What is no move counts as sharing, so the other one gets what sharing gives it; its own side pays 1.
        (["keep", "none"], ["what", "share"], {"l0": 1.0, "r0": -1.0, "l1": -0.4, "r1": 0.6}, (0.5, 22 / 24, 0.5)),
        ([""], ["x" * 5000], {"l0": -0.4, "r0": -0.4}, (1.0, 1.0, 0.0)),
    ],
)
def test_payoffs_of_moves_are_those_worked_out_by_hand_and_a_bad_reply_costs_its_own_side(
    left: list[str], right: list[str], payoff: dict[str, float], measures: tuple[float, ...], recorder: Recorder
) -> None:
    result, _ = run(recorder, left, right)
    (trajectory,) = recorded_trajectories(recorder)
    assert trajectory.episode.outcome == "terminated"
    found = earned(result, len(left))
    assert found["payoff"] == pytest.approx({f"step:{call}": value for call, value in payoff.items()})
    assert (found["cooperation"], found["welfare"], found["legal"]) == pytest.approx(measures)


def test_payoffs_are_absent_where_the_record_has_not_one_call_for_each_move(recorder: Recorder) -> None:
    result, _ = run(recorder, ["share"], ["share"])
    assert earned(result, 2)["payoff"] is None


def test_every_task_is_a_dilemma_of_its_own() -> None:
    tasks = list(social_dilemma.tasks())
    assert tasks == list(social_dilemma.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == 160
    for task in tasks:
        p = task["payoffs"]
        assert p["temptation"] > p["share"] > p["keep"] > p["sucker"] >= 0
        assert 2 * p["share"] > p["temptation"] + p["sucker"]


def moves(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Shares or keeps by the toss of a coin, and now and then says nothing of use."""
    return chance.choice(["share", "keep", "zzzz zzzz"])


@pytest.mark.slow
def test_both_sides_learn_from_their_own_moves(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "social_dilemma.toml", moves, tmp_path, rounds=2, episodes=16)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        paid = [reward for reward in trajectory.rewards if reward.name == "payoff"]
        assert {reward.scope for reward in paid} == {"step"}
        assert len(paid) == len(trajectory.actions) == 2 * ROUNDS
    assert min(trained.pull_to(node, "payoff") for node in PLAYERS) > 0.2
