"""Owns: `kl_target`, how far one round moves the team.

- What is left of a step lies on its line, and each policy is within its part by a measurement from outside.
- How far that is depends on what the round says: worked by hand.
- A step within the limit is not touched, bit for bit; a limit changes nothing else of a round.
- Where the KL grows with the square of the step, two tries find the share; where no share will do, nothing moves.
- Rates a hundred times apart come to move the policy alike; they are kept by checkpoints.
- A team that a round at a high rate tears apart keeps what it knows, and learns.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.toys import CHAIN, OPTIONS, chain, learn, mean_reward, save_toy_model
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers import checkpoint
from trainers.common.spread import spread_rows
from trainers.marft import MarftTrainer
from trainers.objective.adapter_round import AdapterRound
from trainers.objective.improve import measure
from trainers.objective.trust_region import SLACK, Backtracked, backtrack, information, next_rate

TARGET = 0.2  # of what the rounds below say


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer_of(model_dir: Path, **options: Any) -> MarftTrainer:
    fields: dict[str, Any] = {"device": "cpu", "lr": 0.05, "engine_tolerance": 9.0, "kl_target": None} | options
    return MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed=0)


def weights(trainer: MarftTrainer, agent: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.policies.parameters(agent).values()])


def games_of(trainer: MarftTrainer) -> list[Trajectory]:
    return play(trainer, 12, torch.Generator().manual_seed(0), both_low)


def moves_from_outside(trainer: MarftTrainer, games: list[Trajectory], agent: str) -> list[list[float]]:
    """Log-ratio of each token of each call: the policy of today against the log-probs of the one that played."""
    actions = [action for game in games for action in game.actions if action.node == agent]
    return [
        [new - old for old, new in zip(action.logprobs or (), logprobs, strict=True)]
        for action, logprobs in zip(actions, trainer.policies.logprobs_of(agent, actions), strict=True)
    ]


def kl_from_outside(trainer: MarftTrainer, games: list[Trajectory], agent: str) -> float:
    """k2 of a call: half of its tokens' squared log-ratios, added up; the mean over the calls."""
    moves = moves_from_outside(trainer, games, agent)
    return sum(sum(x * x for x in call) / 2 for call in moves) / len(moves)


@pytest.mark.parametrize("update", ["sequential", "simultaneous"])
def test_a_round_moves_each_policy_by_its_part_at_most_and_along_its_own_step(model_dir: Path, update: str) -> None:
    found = {}
    for target in (None, TARGET):
        trainer = trainer_of(model_dir, update=update, kl_target=target)
        before = {agent: weights(trainer, agent) for agent in AGENTS}
        games = games_of(trainer)
        metrics = trainer.update(games)["agents"]
        kl = {agent: kl_from_outside(trainer, games, agent) for agent in AGENTS}
        found[target] = (metrics, kl, {agent: weights(trainer, agent) - before[agent] for agent in AGENTS})
    (unbound, far, whole), (metrics, near, step) = found[None], found[TARGET]
    for agent in AGENTS:
        limit = SLACK * metrics[agent]["kl_target"]
        assert unbound[agent]["kl_target"] is None
        assert far[agent] > 2 * limit, "a step that needs no shortening shows nothing"
        assert 0.2 * limit < near[agent] <= limit + 1e-6
        assert metrics[agent]["kl_of_call"] == pytest.approx(near[agent], abs=1e-6)
    first = AGENTS[0]  # before it the two rounds are the same; in a sequential one the later agents are weighted by it
    share = metrics[first]["step_share"]
    assert 0 < share < 1
    torch.testing.assert_close(step[first], share * whole[first], atol=1e-6, rtol=1e-4)


def test_a_step_within_the_limit_is_not_touched(model_dir: Path) -> None:
    moved = {}
    for target in (None, 1000.0):
        trainer = trainer_of(model_dir, kl_target=target)
        metrics = trainer.update(games_of(trainer))["agents"]
        moved[target] = [weights(trainer, agent) for agent in AGENTS]
        if target is not None:
            assert {metrics[agent]["step_share"] for agent in AGENTS} == {1.0}
    assert all(torch.equal(a, b) for a, b in zip(moved[None], moved[1000.0], strict=True))


def test_who_does_not_act_takes_no_part_of_the_limit(model_dir: Path) -> None:
    """Rounds in which only the actor acts: it moves as it does where it is the only agent that is trained."""
    moved = {}
    for agents in ({}, {AGENTS[0]: {"frozen": True}}):
        trainer = trainer_of(model_dir, kl_target=TARGET, agents=agents)
        alone = [
            replace(game, actions=tuple(replace(a, trainable=a.node == AGENTS[1]) for a in game.actions))
            for game in games_of(trainer)
        ]
        metrics = trainer.update(alone)["agents"][AGENTS[1]]
        assert 0 < metrics["step_share"] < 1
        moved[len(agents)] = weights(trainer, AGENTS[1])
    torch.testing.assert_close(moved[0], moved[1])


def parts(games: list[Trajectory], of_runs: range, won: Collection[int] | None = None) -> list[Trajectory]:
    """The runs, in which the actor acts, as far as the trainer is to know, in some only. These earned 1, or those of
    them that `won`; others 0."""
    won = of_runs if won is None else won
    return [
        replace(
            game,
            actions=tuple(replace(a, trainable=a.node != AGENTS[1] or i in of_runs) for a in game.actions),
            rewards=tuple(replace(reward, value=float(i in won)) for reward in game.rewards),
        )
        for i, game in enumerate(games)
    ]


@pytest.mark.parametrize("negative_weight", [0.0, 1.0])
def test_an_agent_that_acts_in_the_better_runs_only_is_held_against_those_without_it(
    model_dir: Path, negative_weight: float
) -> None:
    trainer = trainer_of(model_dir, kl_target=TARGET, estimator="rloo", negative_weight=negative_weight)
    games = [replace(game, episode=replace(game.episode, task_id="t")) for game in games_of(trainer)]
    metrics = trainer.update(parts(games, range(0, 12, 3)))["agents"][AGENTS[1]]
    # four calls that are better alike, and eight runs without one: log 3 nats, trusted by 4 / 12; two adapters act
    assert metrics["kl_target"] == pytest.approx(TARGET * math.log(3) / 3 / 2, rel=1e-5)
    assert metrics["step_share"] > 0
    assert metrics["adapter_moved"] > 0


def test_runs_without_an_agent_do_not_inflate_what_its_own_calls_say(model_dir: Path) -> None:
    """The actor acts in four of twelve runs, two of which went well: log 2 nats, trusted by 2 / 10."""
    trainer = trainer_of(model_dir, kl_target=TARGET, estimator="rloo")
    games = [replace(game, episode=replace(game.episode, task_id="t")) for game in games_of(trainer)]
    metrics = trainer.update(parts(games, range(0, 12, 3), won=(0, 3)))["agents"][AGENTS[1]]
    assert metrics["kl_target"] == pytest.approx(TARGET * math.log(2) / 5 / 2, rel=1e-5)


def test_where_nothing_says_how_far_there_is_no_step_no_pass_and_a_warning(model_dir: Path) -> None:
    """The actor acts in the runs that went badly, and in no others: none of its calls was better than anything."""
    ticks: set[str] = set()
    trainer = trainer_of(model_dir, kl_target=TARGET, estimator="rloo", negative_weight=1.0)
    trainer.progress = lambda phase, done, _: ticks.add(phase) if done else None
    games = [replace(game, episode=replace(game.episode, task_id="t")) for game in games_of(trainer)]
    bad = [
        replace(game, rewards=tuple(replace(reward, value=1 - reward.value) for reward in game.rewards))
        for game in parts(games, range(0, 12, 3))
    ]
    result = trainer.update(bad)
    metrics = result["agents"][AGENTS[1]]
    assert (metrics["steps"], metrics["adapter_moved"], metrics["kl_target"]) == (0, 0.0, 0.0)
    assert f"old log-probs {AGENTS[1]}" in ticks
    assert not {f"update {AGENTS[1]}", f"new log-probs {AGENTS[1]}"} & ticks
    assert any("train.trainer.objective.kl_target has nothing to go by" in line for line in result["warnings"])


def test_what_is_not_measured_is_none(model_dir: Path) -> None:
    """A sequential round scores all but its last adapter again anyway; a simultaneous one scores none."""
    for update, measured in (("sequential", {AGENTS[0]}), ("simultaneous", set())):
        trainer = trainer_of(model_dir, update=update)
        games = games_of(trainer)
        metrics = trainer.update(games)["agents"]
        assert {agent for agent in AGENTS if metrics[agent]["kl_after"] is not None} == measured
        for agent in measured:
            moved = [x for call in moves_from_outside(trainer, games, agent) for x in call]
            k3 = sum(math.exp(x) - 1 - x for x in moved) / len(moved)
            assert metrics[agent]["kl_after"] == pytest.approx(k3, rel=1e-4)
            assert metrics[agent]["kl_of_call"] == pytest.approx(kl_from_outside(trainer, games, agent), rel=1e-4)
            assert metrics[agent]["step_share"] == 1.0


def test_how_far_a_shared_adapter_moved_is_measured_on_calls_of_every_agent(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 160 calls that alternate between two agents, 64 are measured."""
    measured = list[Counter[str]]()

    def noted(learner: Any, data: AdapterRound, *arguments: Any, **options: Any) -> Any:
        measured.append(Counter(item.agent for item in data.items))
        return measure(learner, data, *arguments, **options)

    monkeypatch.setattr("trainers.objective.update_order.measure", noted)
    together = {agent: {"adapter": "team"} for agent in AGENTS}
    trainer = trainer_of(model_dir, agents=together, kl_target=TARGET)
    trainer.update(play(trainer, 80, torch.Generator().manual_seed(0), both_low))
    assert measured == [dict.fromkeys(AGENTS, 32)]


def line(distance: Any) -> tuple[torch.Tensor, list[torch.Tensor], Any, list[float]]:
    """A weight that went from 0 to 4, and a KL that is a function of where it is; every place that is asked is kept."""
    weight, asked = torch.tensor([4.0]), list[float]()

    def kl() -> float:
        asked.append(float(weight))
        return float(distance(float(weight)))

    return weight, [torch.zeros(1)], kl, asked


def test_a_square_is_found_in_two_tries() -> None:
    weight, before, kl, asked = line(lambda at: at * at)  # 16 at the end, and 0.64 allowed: 0.9 * 0.8 is aimed at
    result = backtrack([weight], before, kl, 0.64)
    assert asked == pytest.approx([4.0, 0.72])
    assert result == Backtracked(share=pytest.approx(0.18), kl=pytest.approx(0.72**2), whole_kl=16.0)


def test_a_cliff_is_come_back_from_by_halves_at_least_and_tenths_at_most() -> None:
    weight, before, kl, asked = line(lambda at: 0.1 if at <= 1 else 0.9 if at < 3 else math.inf)
    result = backtrack([weight], before, kl, 0.5)
    assert asked == pytest.approx([4.0, 0.4])  # nothing is known of how far infinity is
    assert result == Backtracked(share=pytest.approx(0.1), kl=0.1, whole_kl=math.inf)
    weight, before, kl, asked = line(lambda at: 0.1 if at <= 1 else 0.51)
    backtrack([weight], before, kl, 0.5)
    assert asked == pytest.approx([4.0, 2.0, 1.0])


def test_where_no_part_of_a_step_stays_near_the_weights_are_what_they_were() -> None:
    for far in (9.0, math.nan):
        weight, before, kl, asked = line(lambda _, far=far: far)
        result = backtrack([weight], before, kl, 0.5)
        assert (result.share, result.kl) == (0.0, 0.0)
        assert float(weight) == 0.0
        assert len(asked) == 10


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (1.0, 0.25, 1.0),  # half of the target to twice of it: as it should be
        (1.0, 1.0, 1.0),
        (1.0, 1.01, math.sqrt(0.5 / 1.01)),
        (1.0, 50.0, 1 / 3),  # a third at a time
        (1.0, math.inf, 1 / 3),
        (1.0, math.nan, 1 / 3),
        (0.2, 0.2, 0.2 * math.sqrt(2.5)),
        (0.9, 0.001, 2.7),  # threefold at a time, above what was set as well
        (0.2, 0.0, 0.2),  # no step says nothing
    ],
)
def test_the_rate_of_the_next_round_by_hand(rate: float, kl: float, expected: float) -> None:
    assert next_rate(rate, kl, target=0.5) == pytest.approx(expected)
    assert next_rate(rate, kl, target=0.0) == rate


def test_what_a_round_says_by_hand() -> None:
    # one of ten: log 10 nats, and one example is trusted by 1 / 9; nine of ten: log(10 / 9), trusted by 9 / 17
    assert information([1.0, *[0.0] * 9]) == pytest.approx(math.log(10) / 9)
    assert information([*[0.3] * 9, -2.7]) == pytest.approx(math.log(10 / 9) * 9 / 17)
    # weights 3/4 and 1/4 of four: 3/4 log 3 + 1/4 log 1; worth 1 / (9/16 + 1/16) = 1.6 examples
    assert information([3.0, 1.0, -2.0, -2.0]) == pytest.approx(0.75 * math.log(3) * 1.6 / 9.6)
    assert information([0.0, -1.0]) == information([]) == information([2.0] * 5) == 0.0


def test_rates_that_are_a_hundred_times_apart_come_to_move_the_policy_as_far_as_a_round_says(model_dir: Path) -> None:
    last_rate = {}
    for lr in (0.05, 0.0005):
        trainer = trainer_of(model_dir, kl_target=TARGET, lr=lr)
        rates, farness = [], []
        for _ in range(8):
            metrics = trainer.update(games_of(trainer))["agents"][AGENTS[0]]
            rates.append(metrics["lr"])
            farness.append(metrics["kl_of_call"] / metrics["kl_target"])
        assert rates[0] == lr
        assert max(farness) <= SLACK + 1e-6
        assert 1 / SLACK <= statistics.median(farness[-6:]) <= SLACK
        last_rate[lr] = rates[-1]
    assert 1 / 4 < last_rate[0.05] / last_rate[0.0005] < 4


def test_a_checkpoint_keeps_the_rates(model_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_dir, kl_target=TARGET)
    trainer.update(games_of(trainer))
    checkpoint.save(trainer, tmp_path / "checkpoint")
    resumed = trainer_of(model_dir, kl_target=TARGET)
    checkpoint.load(resumed, tmp_path / "checkpoint")
    rates = {name: learner.kl_rate for name, learner in trainer.learners.items()}
    assert min(rates.values()) < 1
    assert {name: learner.kl_rate for name, learner in resumed.learners.items()} == rates


def test_a_run_that_is_resumed_without_a_target_has_the_rate_of_one_that_never_had_it(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(model_dir, kl_target=TARGET)
    trainer.update(games_of(trainer))
    assert min(learner.kl_rate for learner in trainer.learners.values()) < 1
    checkpoint.save(trainer, tmp_path / "checkpoint")
    resumed, other = trainer_of(model_dir), trainer_of(model_dir)
    checkpoint.load(resumed, tmp_path / "checkpoint")
    rates = []
    for each in (resumed, other):
        agents = each.update(games_of(trainer))["agents"]
        rates.append([agents[agent]["lr"] for agent in AGENTS])
    assert rates[0] == rates[1]


def test_what_only_the_kl_is_asked_of_is_measured_on_some_calls(model_dir: Path) -> None:
    """The last adapter of a round weighs nobody after it; its KL is told by 64 of its calls, spread over the round."""
    trainer = trainer_of(model_dir, kl_target=1000.0)
    games = play(trainer, 150, torch.Generator().manual_seed(0), both_low)
    metrics = trainer.update(games)["agents"]
    assert metrics[AGENTS[0]]["kl_of_call"] == pytest.approx(kl_from_outside(trainer, games, AGENTS[0]), rel=1e-3)
    some = [games[row] for row in spread_rows([0] * 150, 64)]
    assert metrics[AGENTS[1]]["kl_of_call"] == pytest.approx(kl_from_outside(trainer, some, AGENTS[1]), rel=1e-3)


@pytest.mark.slow
def test_eight_agents_at_a_high_rate_learn_without_losing_what_they_had(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model_dir = save_toy_model(tmp_path_factory.mktemp("toys") / "model")
    deepest: dict[float | None, list[float]] = {None: [], 1.0: []}
    for seed, target in itertools.product((0, 1, 2), deepest):
        options = trainer_options(**(OPTIONS | {"lr": 0.06, "minibatch_actions": 24, "kl_target": target}))
        played = learn(MarftTrainer(options, model_dir, CHAIN, seed), chain, 10, 48, seed)
        curve = [mean_reward(games) for games in played]
        deepest[target].append(max(a - b for a, b in itertools.pairwise(curve)))
        assert target is None or curve[-1] > 0.8  # 0.5 by chance
    # How deep one seed falls without a limit depends on the processor's arithmetic.
    assert max(deepest[None]) > 0.1, "a rate at which nothing is lost shows nothing"
    assert max(deepest[1.0]) < 0.05
