"""Owns: the zoo's iterated dilemma: D of simultaneous moves, payoffs of each move by hand, and its training.

Moves of one round never depend on each other. A reply that is no move costs its own side only and never ends a run.
Advantage Alignment keeps what cooperation there is, and plain training loses it: on tables, with the estimators and the
sizes of the two configurations.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.zoo_rig import ZOO, train_zoo

from graphs import social_dilemma
from graphs.social_dilemma import PLAYERS, ROUNDS
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from trace_store.journal import Journal
from trainers.advantages.estimator import EstimatorInput

TASKS = list(social_dilemma.tasks())
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
    result, policy = run(recorder, ["yes", "no", "yes"], ["No!", "yes", "yes"])
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
        "keeps.\nRound 2: you keep, your partner shares.\nRound 3 of 3. Do you share?\nai: "
    )
    assert "Round 1: you keep, your partner shares.\nRound 2 of 3." in right[1]


def test_a_player_is_told_of_the_last_rounds_only(recorder: Recorder) -> None:
    _, policy = run(recorder, ["yes"] * ROUNDS, ["no"] * ROUNDS)
    asked = [call.prompt.split("One keeps: 10")[1] for call in policy.asked if call.node == "left"]
    assert [prompt.count("your partner keeps") for prompt in asked] == [0, 1, *[2] * (ROUNDS - 2)]
    assert "Round 1:" not in asked[3]


@pytest.mark.parametrize(
    ("left", "right", "payoff", "measures"),
    [
        (["yes", "yes"], ["yes", "yes"], {"l0": 0.6, "r0": 0.6, "l1": 0.6, "r1": 0.6}, (1.0, 1.0, 1.0)),
        # 10 and 0, then 2 and 2: 14 of the 24 that sharing would have had
        (["no", "no"], ["yes", "no"], {"l0": 1.0, "r0": 0.0, "l1": 0.2, "r1": 0.2}, (0.0, 14 / 24, 1.0)),
        # What is no move counts as sharing, so the other one gets what sharing gives it; its own side pays 1. Nobody
        # has cooperated who said nothing.
        (["no", "none"], ["what", "yes"], {"l0": 1.0, "r0": -1.0, "l1": -0.4, "r1": 0.6}, (0.0, 22 / 24, 0.5)),
        ([""], ["x" * 5000], {"l0": -0.4, "r0": -0.4}, (0.0, 1.0, 0.0)),
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
    result, _ = run(recorder, ["yes"], ["yes"])
    assert earned(result, 2)["payoff"] is None


def test_every_task_is_a_dilemma_of_its_own() -> None:
    tasks = TASKS
    assert tasks == list(social_dilemma.tasks())
    assert len(tasks) == len({task["id"] for task in tasks}) == 160
    for task in tasks:
        p = task["payoffs"]
        assert p["temptation"] > p["share"] > p["keep"] > p["sucker"] >= 0
        assert 2 * p["share"] > p["temptation"] + p["sucker"]


# -- what is to be expected: tables in place of the model, the configurations' own estimators ------------------------

AT_FIRST = (0.93, 0.067, 0.003)  # share, keep, no move: the replies of the 135M model to the first round


@dataclass
class Table:
    """Logits of share, keep and no move: common to all situations, of each round, and of the two rounds before."""

    common: Any
    by_round: Any
    by_past: Any

    def chances(self, number: Any, past: Any) -> Any:
        """[..., 3]"""
        logits = self.common + self.by_round[number] + self.by_past[past]
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)


def played(tables: list[Table], payoffs: Any, chance: np.random.Generator) -> tuple[Any, Any, Any]:
    """Replies, what was seen and payoffs as shares of the temptation; [game, round, player]."""
    games = len(payoffs)
    replies, seen = np.zeros((games, ROUNDS, 2), int), np.zeros((games, ROUNDS, 2), int)
    paid, past = np.zeros((games, ROUNDS, 2)), np.zeros((games, 2), int)
    for number in range(ROUNDS):
        seen[:, number] = past
        for player, table in enumerate(tables):
            edges = table.chances(number, past[:, player]).cumsum(axis=1)
            replies[:, number, player] = (chance.random(games)[:, None] > edges[:, :2]).sum(axis=1)
        keeps = replies[:, number] == 1
        for player in (0, 1):
            own, other = keeps[:, player], keeps[:, 1 - player]
            kind = np.where(own, np.where(other, 1, 2), np.where(other, 3, 0))  # keep, temptation; sucker, share
            cost = replies[:, number, player] == 2
            paid[:, number, player] = payoffs[np.arange(games), kind] / payoffs[:, 2] - cost
            past[:, player] = past[:, player] % 5 * 5 + 1 + 2 * own + other  # 0: before the first round
    return replies, seen, paid


def cooperation_by_round(name: str, seed: int, beta: float | None = None) -> list[float]:
    """Mutual cooperation of the tables, round by round of training as the configuration says, and after it.

    Args:
        beta: in the place of the configuration's `alignment_beta`.
    """
    config = toml_to_config(ZOO / f"{name}.toml")
    trainer, samples = config.train.trainer, config.train.samples_per_task
    if beta is not None:
        options = trainer.experimental.model_copy(update={"alignment_beta": beta})
        trainer = trainer.model_copy(update={"experimental": options})
    estimator = trainer.advantage.estimator_class(trainer.estimator_settings)
    chance = np.random.default_rng(seed)
    kinds = np.array([[task["payoffs"][kind] for kind in ("share", "keep", "temptation", "sucker")] for task in TASKS])
    count = config.train.episodes_per_round
    places = [(game, number, player) for game in range(count) for number in range(ROUNDS) for player in (0, 1)]
    episodes = [SimpleNamespace(task_id=game // samples) for game in range(count)]
    rows = tuple(game for game, *_ in places)
    items = tuple(SimpleNamespace(agent=PLAYERS[player], turn=number) for _, number, player in places)
    data = SimpleNamespace(items=items, episode_A=rows, tree_A=rows, episodes=episodes, forest=None)
    tables = [Table(np.log(AT_FIRST), np.zeros((ROUNDS, 3)), np.zeros((25, 3))) for _ in PLAYERS]
    cooperation = []
    for _ in range(config.train.rounds + 1):
        payoffs = kinds[chance.choice(len(kinds), count // samples, replace=False)].repeat(samples, axis=0)
        replies, seen, paid = played(tables, payoffs, chance)
        cooperation.append(float((replies == 0).all(axis=2).mean()))
        returns = np.zeros_like(paid)
        for number in reversed(range(ROUNDS)):
            later = returns[:, number + 1] if number + 1 < ROUNDS else 0.0
            returns[:, number] = paid[:, number] + trainer.advantage.gamma * later
        flat_returns = returns.ravel()
        shown = SimpleNamespace(
            data=data,
            side_of=trainer.side_of,
            least_deviation=0.0,
            returns_by_source=lambda *_, paid_back=flat_returns: {"payoff": paid_back},
            over_units=lambda part_A, gamma_token: part_A,
        )
        advantages = estimator.estimate(cast("EstimatorInput", shown)).estimate.advantage_U.reshape(paid.shape)
        for player, table in enumerate(tables):
            learn(table, replies[:, :, player], seen[:, :, player], advantages[:, :, player])
    return cooperation


def learn(table: Table, reply: Any, past: Any, advantage: Any) -> None:
    """Three steps of a clipped policy gradient, whose size Adam would make the same for any scale of advantages."""
    scaled, numbers = advantage / (advantage.std() + 1e-9), np.arange(ROUNDS)[None]
    chosen = np.eye(3)[reply]
    old = (table.chances(numbers, past) * chosen).sum(axis=2)
    for _ in range(3):
        chances = table.chances(numbers, past)
        ratio = (chances * chosen).sum(axis=2) / old
        is_clipped = (scaled > 0) & (ratio > 1.28) | (scaled < 0) & (ratio < 0.8)
        step = (chosen - chances) * np.where(is_clipped, 0.0, scaled)[:, :, None] * 4 / scaled.size
        table.common = table.common + step.sum(axis=(0, 1))
        table.by_round = table.by_round + step.sum(axis=0)
        np.add.at(table.by_past, past, step)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_tables_that_begin_like_the_model_keep_sharing_by_advantage_alignment_and_stop_it_without(seed: int) -> None:
    aligned, plain = (cooperation_by_round(name, seed) for name in ("social_dilemma", "social_dilemma-plain"))
    assert aligned[0] == plain[0] == pytest.approx(AT_FIRST[0] ** 2, abs=0.12)  # three deviations of 128 rounds
    assert aligned[-1] > 0.8
    assert plain[-1] < 0.1


@pytest.mark.slow
def test_with_the_default_beta_tables_lose_some_of_what_they_shared() -> None:
    """Between what plain training leaves and what the beta of the configuration keeps; the page has both ends."""
    ends = [cooperation_by_round("social_dilemma", seed, beta=1.0)[-1] for seed in range(6)]
    assert (min(ends), max(ends)) == pytest.approx((0.10, 0.58), abs=0.02)


def test_the_two_configurations_differ_in_their_estimator_alone() -> None:
    aligned, plain = (toml_to_config(ZOO / f"social_dilemma{end}.toml").recorded() for end in ("", "-plain"))
    trainers = [content["train"]["trainer"] for content in (aligned, plain)]
    assert [trainer["advantage"].pop("estimator") for trainer in trainers] == ["advantage_alignment", "at_grpo"]
    assert [trainer["experimental"].pop("alignment_beta") for trainer in trainers] == [8.0, 1.0]  # read by one alone
    assert (aligned.pop("name"), plain.pop("name")) == ("social_dilemma", "social_dilemma-plain")
    assert aligned == plain


def moves(node: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
    """Shares or keeps by the toss of a coin, and now and then says nothing of use."""
    return chance.choice(["yes", "no", "zzzz zzzz"])


@pytest.mark.slow
def test_both_sides_learn_from_their_own_moves(tmp_path: Path) -> None:
    trained = train_zoo(ZOO / "social_dilemma.toml", moves, tmp_path, rounds=2, episodes=8)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        paid = [reward for reward in trajectory.rewards if reward.name == "payoff"]
        assert {reward.scope for reward in paid} == {"step"}
        assert len(paid) == len(trajectory.actions) == 2 * ROUNDS
    assert min(trained.pull_to(node, "payoff") for node in PLAYERS) > 0.2
