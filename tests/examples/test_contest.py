"""Owns: the contest of the small study: which rate a contender has, what the table says, what RAFT++ learns from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.study.small.contest import (
    CONTENDERS,
    DEFAULTS,
    RATES,
    SEEDS,
    SWEEP_SEEDS,
    WITHOUT_TRACES,
    best_rates,
    to_savings,
    to_table,
    tokens_to,
)
from examples.study.small.games import GAMES
from examples.study.small.raft import Raft
from trainers import TrainerOptions
from trainers.advantages.settings import EstimatorSettings

GAME_NAMES = list(GAMES)


def row(contender: str, lr: float, seed: int, final: float, game: str) -> dict[str, Any]:
    return {"contender": contender, "lr": lr, "seed": seed, "final": final, "game": game}


def sweep() -> list[dict[str, Any]]:
    """Every contender is best at its middle rate, the defaults at the highest, RAFT++ at two alike."""
    scores = dict.fromkeys(CONTENDERS, (0.1, 0.5, 0.3)) | {DEFAULTS: (0.1, 0.2, 0.9), "RAFT++": (0.4, 0.4, 0.1)}
    return [
        row(name, lr, seed, final=scores[name][i], game=game)
        for name in CONTENDERS
        for i, lr in enumerate(RATES)
        for seed in SWEEP_SEEDS
        for game in GAME_NAMES
    ]


def test_a_contenders_rate_is_the_best_of_the_sweep_and_the_lower_of_equals() -> None:
    rates = best_rates([*sweep(), *(row(DEFAULTS, RATES[0], SEEDS[0], 1.0, game=game) for game in GAME_NAMES)])
    assert rates[DEFAULTS] == RATES[2]
    assert rates["RAFT++"] == RATES[0]
    assert rates["rloo"] == RATES[1]
    assert not set(SWEEP_SEEDS) & set(SEEDS)


def test_tokens_are_those_before_the_first_round_that_earned_as_much() -> None:
    rounds = [(100, 0.1), (250, 0.5), (400, 0.4)]
    assert [tokens_to(rounds, level) for level in (0.05, 0.3, 0.5, 0.9)] == [0, 100, 100, 400]


def test_what_traces_spare_is_measured_to_nine_tenths_of_what_was_earned_without_them() -> None:
    rates = best_rates(sweep())
    rows = []
    for number, seed in enumerate(SEEDS[:3]):
        for game in GAME_NAMES:
            without = [(100, 0.2), (200 + 10 * number, 0.6), (300, 0.85), (400, 1.0)]  # 0.9 is reached in the last one
            for name, rounds in ((WITHOUT_TRACES, without), (DEFAULTS, [(100, 0.5), (200, 0.9), (300, 0.9)])):
                rows.append(row(name, rates[name], seed, 0.5, game=game) | {"rounds": rounds})
    lines = to_savings(rows, rates, GAME_NAMES).splitlines()
    assert lines[2:] == [f"| {name} | 300 | 100 | 0.67 | -200 |" for name in (*GAME_NAMES, "all")]


def test_the_table_takes_the_seeds_that_all_have_finished_and_pairs_them() -> None:
    rates = best_rates(sweep())
    rows = sweep()
    for number, seed in enumerate(SEEDS[:6]):
        for name, lr in rates.items():
            if number == 5 and name == "rloo":
                continue  # not finished
            gain = 0.2 if name == "RAFT++" else 0.0
            rows += [row(name, lr, seed, 0.5 + 0.01 * number + gain, game=game) for game in GAME_NAMES]
    lines = to_table(rows, rates, GAME_NAMES).splitlines()
    assert lines[-1] == f"5 seeds ({SEEDS[0]} to {SEEDS[4]})"
    (raft,) = (line for line in lines if line.startswith("| RAFT++"))
    assert "| 0.720 (0.700 to 0.740) | +0.200 (+0.200 to +0.200) |" in raft  # 0.72 +- t(4) 2.776 x 0.01581 / sqrt(5)
    (rloo,) = (line for line in lines if line.startswith("| rloo"))
    assert rloo.endswith("| +0.000 (+0.000 to +0.000) | 1.0000 |")


def test_every_contender_is_a_valid_configuration() -> None:
    for options in CONTENDERS.values():
        TrainerOptions.model_validate(options)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 1.0, 0.1, 0.0], [1, 1, 0, 0]),
        ([0.1, 0.0, 0.1, 0.0], [1, 0, 1, 0]),
        ([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]),  # the best of a task that nobody solved is nothing to learn
    ],
)
def test_raft_learns_from_the_best_of_each_task_alike(rewards: list[float], advantages: list[float]) -> None:
    tasks = ["t", "t", "t", "t", "other"]
    episodes = [SimpleNamespace(task_id=task) for task in tasks]
    data: Any = SimpleNamespace(episodes=episodes, episode_A=[0, 1, 2, 3, 4])
    returns = np.array([*rewards, 0.3])
    estimator = Raft(EstimatorSettings.__new__(EstimatorSettings))
    np.testing.assert_allclose(estimator.baseline(returns, data).advantages(returns), [*advantages, 1])
