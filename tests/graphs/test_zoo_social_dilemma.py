"""Owns: the zoo's iterated dilemma: D of simultaneous moves, payoffs of each move by hand, and its training.

Moves of one round never depend on each other. A reply that is no move costs its own side only and never ends a run. A
player is moved by its own payoffs alone, on one adapter for both as on two. A tournament keeps what both sides earned.
Advantage Alignment keeps what cooperation there is, and plain training loses it: on tables, with the estimators and the
sizes of the two configurations.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.compare_rig import save_model
from support.edge_rig import recorded_edges, recorded_trajectories, run_recorded
from support.fake_vllm import FakeVllm, running
from support.tiny_policy import make_action, make_trajectory
from support.zoo_rig import ZOO, train_zoo

from examples.zoo.run import tournament_to_parts
from graphs import social_dilemma
from graphs.social_dilemma import PLAYERS, ROUNDS
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import VersionFlags, compare
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.compare import text_to_opponents
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.journal import Journal
from trace_store.records import Reward
from trace_store.store import TraceStore
from trainers.advantages.estimate import normalize_estimate
from trainers.advantages.estimator import EstimatorInput
from trainers.batch import trajectories_to_round
from trainers.common.files import weights_to_sha256
from trainers.config import AgentOptions

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


# -- one adapter for both --------------------------------------------------------------------------------------------

SHARED = ZOO / "social_dilemma-shared.toml"


def second_rounds_to_advantages(left: Sequence[float], right: Sequence[float]) -> dict[str, list[list[float]]]:
    """Samples of one dilemma, of two rounds: 0.6 each for a first round in which both share, and these payoffs for the
    second -> player -> its advantages by sample and round, as the configuration with one adapter has them."""
    trainer = toml_to_config(SHARED).train.trainer
    games = []
    for number, paid in enumerate(zip(left, right, strict=True)):
        actions = [make_action(node, [1], [2]) for node in PLAYERS * 2]
        bare = make_trajectory(actions, 0.0, edges=[(0, 2), (0, 3), (1, 2), (1, 3)])
        payoffs = [
            Reward("e", "payoff", value, "test", 1, "step", action_id=str(at))
            for at, value in enumerate((0.6, 0.6, *paid))
        ]
        episode = replace(bare.episode, episode_id=f"e{number}")
        games.append(replace(bare, episode=episode, rewards=(*bare.rewards, *payoffs)))
    vocabulary = dict.fromkeys(PLAYERS, 32)
    data = trajectories_to_round(
        games, PLAYERS, "reward", vocabulary, "on_policy", trainer.shaping, side_of=trainer.side_of
    )
    count = len(data.items)
    shown = EstimatorInput(data, (1,) * count, np.ones(count), side_of=trainer.side_of)
    estimate = trainer.advantage.estimator_class(trainer.estimator_settings).estimate(shown).estimate
    agents = [item.agent for item in data.items]
    by_action = normalize_estimate(estimate, agents, trainer.advantage.normalization).advantage_U
    return {
        player: by_action[[agent == player for agent in agents]].reshape(len(games), 2).tolist() for player in PLAYERS
    }


def test_with_one_adapter_each_players_calls_are_moved_by_its_own_payoffs_alone() -> None:
    """In the second round both share, left keeps alone, or both keep. Left's 0.6, 1.0, 0.2 lie one deviation apart.
    Right's 0.6, 0.0, 0.2 lie 5, -4 and -1 fifteenths from their mean, whose deviation is sqrt((25 + 16 + 1) / 2)
    fifteenths. A first round is worth 0.6 and 0.9 of the second, so it says the same.
    """
    agents = toml_to_config(SHARED).train.trainer.agents
    assert {agents[player].adapter for player in PLAYERS} == {"player"}
    advantages = second_rounds_to_advantages([0.6, 1.0, 0.2], [0.6, 0.0, 0.2])
    assert advantages["left"] == [pytest.approx([value] * 2, abs=1e-4) for value in (0.0, 1.0, -1.0)]
    root = 21**0.5
    assert advantages["right"] == [pytest.approx([value / root] * 2, abs=1e-4) for value in (5.0, -4.0, -1.0)]
    # Whatever the partner earns, a player's calls are praised and blamed by the same bits, on one adapter too.
    other = second_rounds_to_advantages([0.6, 1.0, 0.2], [0.0, 1.0, 1.0])
    assert other["left"] == advantages["left"]
    assert other["right"] != advantages["right"]


def test_the_configuration_with_one_adapter_differs_from_the_plain_one_in_that_alone() -> None:
    plain, shared = (toml_to_config(ZOO / f"social_dilemma-{end}.toml").recorded() for end in ("plain", "shared"))
    assert (plain.pop("name"), shared.pop("name")) == ("social_dilemma-plain", "social_dilemma-shared")
    assert plain["train"]["trainer"].pop("agents") == {}
    assert sorted(shared["train"]["trainer"].pop("agents")) == ["left", "right"]
    assert plain == shared


# -- a tournament ----------------------------------------------------------------------------------------------------

ALIKE = """
def tasks():
    payoffs = {"share": 6, "keep": 2, "temptation": 10, "sucker": 1}
    return [{"id": f"d{number}", "thing": "nuts", "payoffs": payoffs} for number in range(24)]
"""


def test_a_tournament_rates_who_earned_more_and_keeps_what_each_side_earned(tmp_path: Path) -> None:
    """Eight rounds of 6, 2, 10 and 1, as shares of 10. Version 0 shares, the newest keeps, 1 says nothing of use, which
    counts as sharing and costs it 1 a round: 4.8 for two who share, 8.0 and 0.8 where one keeps, 8 less for version 1.
    """
    says = {"0": "yes", "1": "hm", "2": "no"}
    (tmp_path / "alike.py").write_text(ALIKE)
    model = save_model(tmp_path / "model")
    registry = AdapterRegistry(tmp_path / "run/adapters", weights_to_sha256(model))
    for node, version in itertools.product(PLAYERS, range(3)):
        write_zero_adapter(registry.new_folder(node, version), model, ("q_proj", "v_proj"))
        registry.register(node, version, None, {})
    TraceStore.open(tmp_path / "run/store.duckdb").close()
    with running(FakeVllm()) as server:
        server.answer = lambda body: says[str(body["model"]).rpartition("@")[2]]
        sizes = {
            "run": str(tmp_path / "run"),
            "graph.tasks": f"{tmp_path}/alike.py:tasks",
            "model.path": str(model),
            "serve": {"attach": server.url},
            "compare.tasks": 2,
            "compare.samples_per_task": 1,
            "compare.kl_actions": 0,
        }
        config = toml_to_config(ZOO / "social_dilemma.toml", sizes)
        flags = VersionFlags(opponents=text_to_opponents("", "1,base"))
        report = compare(config, Reporter(), resume=False, flags=flags)
    played = report.tournament
    assert played is not None
    assert played.sides == PLAYERS
    earned = {"before": {"before": 4.8, "after": 0.8, "version 1": 4.8}, "after": {"before": 8.0, "version 1": 8.0}}
    earned["version 1"] = {"before": 4.8 - 8, "after": 0.8 - 8}
    assert len(played.matches) == 3 * 2
    for match in played.matches:
        payoffs = earned[match.first][match.second], earned[match.second][match.first]
        assert (match.payoff_first, match.payoff_second) == pytest.approx(payoffs)
    rated = {row.variant: row for row in played.ratings}
    assert {name: (row.won, row.drawn, row.lost) for name, row in rated.items()} == {
        "before": (4, 0, 4),
        "after": (8, 0, 0),
        "version 1": (0, 0, 8),
    }
    assert rated["after"].elo > rated["before"].elo == 0 > rated["version 1"].elo
    assert {variant.name: variant.score and variant.score.mean for variant in report.variants} == {
        "before": 1.0,  # who shares with itself cooperates, and its Elo does not say so
        "after": 0.0,
        "version 1": 0.0,
    }
    assert tournament_to_parts(played, "before", "after")[1] == "payoff against the base +8.000, the base's +0.800"


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
    adapters = [trainer.agents.get(player, AgentOptions()).adapter or player for player in PLAYERS]
    by_adapter = {a: Table(np.log(AT_FIRST), np.zeros((ROUNDS, 3)), np.zeros((25, 3))) for a in adapters}
    tables = [by_adapter[adapter] for adapter in adapters]
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
        for adapter, table in by_adapter.items():
            own = [player for player, name in enumerate(adapters) if name == adapter]
            stacked = [np.concatenate([part[:, :, player] for player in own]) for part in (replies, seen, advantages)]
            learn(table, *stacked)
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
    names = ("social_dilemma", "social_dilemma-plain", "social_dilemma-shared")
    aligned, plain, shared = (cooperation_by_round(name, seed) for name in names)
    assert aligned[0] == plain[0] == pytest.approx(AT_FIRST[0] ** 2, abs=0.12)  # three deviations of 128 rounds
    assert aligned[-1] > 0.8
    assert max(plain[-1], shared[-1]) < 0.1  # one table for both is no help and no further harm


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
@pytest.mark.parametrize("name", ["social_dilemma", "social_dilemma-shared"])
def test_both_sides_learn_from_their_own_moves(name: str, tmp_path: Path) -> None:
    trained = train_zoo(ZOO / f"{name}.toml", moves, tmp_path, rounds=2, episodes=8)
    assert min(trained.norms.values()) > 0
    for trajectory in trained.trained:
        paid = [reward for reward in trajectory.rewards if reward.name == "payoff"]
        assert {reward.scope for reward in paid} == {"step"}
        assert len(paid) == len(trajectory.actions) == 2 * ROUNDS
    assert min(trained.pull_to(node, "payoff") for node in PLAYERS) > 0.2
