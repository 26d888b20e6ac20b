"""Owns: from which spread on a round's returns say what was better, by what those of this run did so far.

- The smallest deviation that counts is a thousandth of the median of those noted, by agent: worked by hand.
- A round whose runs differ by less moves nothing, in every unit of reward, whatever the estimator; one that differs by
  more is as it is without a history, bit for bit.
- Collected episodes count; a checkpoint keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import AGENTS, make_trajectory, sample_batch, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers import checkpoint
from trainers.credit.spreads import Spreads
from trainers.marft import MarftTrainer

OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize": "batch"},
    {"estimator": "rae"},
    {"estimator": "grpo"},
    {"estimator": "rloo"},
    {"estimator": "dr_mas", "group_std": False},
    {"estimator": "tree_grpo"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer_of(model_dir: Path, **options: Any) -> MarftTrainer:
    return MarftTrainer(trainer_options(device="cpu", lr=0.01, **options), model_dir, AGENTS, seed=0)


def round_of(trainer: MarftTrainer, rewards: list[float], seed: int = 0) -> list[Trajectory]:
    """Calls of the actor, two an episode's task."""
    actions = sample_batch(trainer, "actor", [[3, 1]] * len(rewards), 2, torch.Generator().manual_seed(seed))
    games = []
    for i, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
        game = make_trajectory([action], reward, task_id=str(i // 2))
        games.append(replace(game, episode=replace(game.episode, episode_id=f"e{i}")))
    return games


def moved(trainer: MarftTrainer, rewards: list[float], seed: int = 0) -> tuple[int, float]:
    figures = trainer.update(round_of(trainer, rewards, seed))["agents"]["actor"]
    return figures["steps"], figures["adapter_moved"]


def test_the_smallest_deviation_that_counts_by_hand() -> None:
    spreads = Spreads()
    assert spreads.least(["a"]) == 0.0
    spreads.note(["a", "a", "b", "b", "c"], np.array([0.0, 2.0, 5.0, 5.0, 1.0]))  # deviations 1, 0 and 0
    spreads.note(["a", "a", "a"], np.array([3.0, 3.5, np.nan]))
    # deviations 1 and 1/4, of which the upper one is the median
    assert spreads.least(["a"]) == spreads.least(["a", "b"]) == pytest.approx(0.001)
    assert spreads.least(["b"]) == 0.0
    spreads.note(["b", "b"], np.array([0.0, 8.0]))  # 4
    assert spreads.least(["b"]) == pytest.approx(0.004)
    assert spreads.least(["a", "b"]) == pytest.approx(0.001)
    spreads.note(["a", "a"], np.array([1.0, 1.5]))  # 1/4 again: the median
    assert spreads.least(["a"]) == pytest.approx(0.00025)
    spreads.note(["a", "a"], np.array([1.0, 1.0 + 1e-9]))  # counts as the least that counts
    assert sorted(spreads.to_state()["a"]) == pytest.approx([0.00025, 0.25, 0.25, 1.0])


def test_one_run_that_earned_far_less_than_all_others_silences_no_later_round() -> None:
    """-1000 among 48 runs is a deviation of 143."""
    spreads = Spreads()
    spreads.note(["a"] * 48, np.array([-1000.0, *[1.0] * 47]))
    assert spreads.least(["a"]) == pytest.approx(0.143, rel=1e-2)
    spreads.note(["a"] * 48, np.array([0.0] * 24 + [1.0] * 24))
    spreads.note(["a"] * 48, np.array([0.0] * 12 + [1.0] * 36))
    assert spreads.least(["a"]) == pytest.approx(0.0005)


def test_a_history_of_another_size_wears_off() -> None:
    spreads = Spreads()
    spreads.note(["a"] * 2, np.array([0.0, 1e6]))
    for _ in range(6):
        spreads.note(["a"] * 2, np.array([0.0, 1.0]))
    assert spreads.least(["a"]) < 0.5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_a_round_whose_runs_hardly_differ_moves_nothing_once_others_have_differed(
    model_dir: Path, options: dict[str, Any], unit: float
) -> None:
    trainer = trainer_of(model_dir, **options)
    assert moved(trainer, [unit * (i % 2) for i in range(8)])[0] > 0
    for seed, gap in enumerate((1e-9, 0.00099), start=1):  # a deviation of 1/2 was seen: 0.001 apart is a thousandth
        assert moved(trainer, [unit * (1 - gap * (i % 2)) for i in range(8)], seed) == (0, 0.0)
    assert moved(trainer, [unit * (1 - 0.00101 * (i % 2)) for i in range(8)], seed=3)[0] > 0


def test_a_group_that_hardly_differs_weighs_little_beside_others(model_dir: Path) -> None:
    """Deviations of 1/2 and less; the sample deviation of 1 and 1 - 1e-9 is no unit beside a thousandth of that."""
    trainer = trainer_of(model_dir, estimator="grpo")
    trainer.update(round_of(trainer, [0.0, 1.0] * 4))
    data = trainer._to_round(round_of(trainer, [0.0, 1.0, 1.0, 1.0 - 1e-9]), "on_policy")
    advantages = trainer.credit.estimate(data)[0].advantage_U
    np.testing.assert_allclose(advantages, [-(0.5**0.5), 0.5**0.5, 5e-10 / 0.000501, -5e-10 / 0.000501], rtol=1e-3)


def test_collected_episodes_tell_what_is_small(model_dir: Path) -> None:
    for options in ({}, {"estimator": "grpo", "offline": {"mode": "off"}}):
        trainer = trainer_of(model_dir, **options)
        trainer.warm_up(round_of(trainer, [0.0, 1.0] * 4))
        assert moved(trainer, [1.0, 1.0 - 1e-9] * 4) == (0, 0.0)


def test_a_first_round_has_only_its_own_spread(model_dir: Path) -> None:
    assert moved(trainer_of(model_dir), [1.0, 1.0 - 1e-3] * 4)[0] > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_round_of_ordinary_spread_is_as_it_is_without_a_history(model_dir: Path, options: dict[str, Any]) -> None:
    results = []
    for largest in (0.0, 200.0):  # a thousandth of which is less than the deviation of the round to come
        trainer = trainer_of(model_dir, **options)
        trainer.credit.spreads.load_state({"actor": [largest]} if largest else {})
        results.append(moved(trainer, [0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0, 0.2]))
    assert results[0] == results[1]
    assert results[0][0] > 0


def test_a_checkpoint_keeps_what_is_small(model_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model_dir)
    moved(trainer, [0.0, 1.0] * 4)
    checkpoint.save(trainer, tmp_path / "checkpoint")
    resumed = trainer_of(model_dir)
    checkpoint.load(resumed, tmp_path / "checkpoint")
    assert moved(resumed, [1.0, 1.0 - 1e-9] * 4, seed=1) == (0, 0.0)


def test_a_round_that_is_refused_leaves_no_trace(model_dir: Path) -> None:
    trainer = trainer_of(model_dir)
    data = trainer._to_round(round_of(trainer, [0.0, 1.0] * 4), "on_policy")
    trainer.credit.estimate(data)
    assert trainer.credit.spreads.to_state() == {}
