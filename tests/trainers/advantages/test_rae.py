"""Owns: whose returns RAE's running means have heard: each run of the policy once, forks and older episodes aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fork_toys import fork, run

from trace_store.records import Trajectory
from trainers.advantages.estimator import EstimatorInput
from trainers.advantages.rae import Rae
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import Round, episodes_to_round, trajectories_to_round

NODES = ("plan", "act")
CALLS: list[tuple[str, Any]] = [("plan", 1), ("act", 2)]
GOOD, BAD = run("good", CALLS, 1.0), run("bad", CALLS, 0.0)


def to_round(*trajectories: Trajectory) -> Round:
    return trajectories_to_round(trajectories, NODES, "reward", dict.fromkeys(NODES, 32), "on_policy")


def state_after(data: Round) -> Mapping[str, float]:
    """The running means after a round, from 0 on; half of what they were stays."""
    shown = EstimatorInput(data, (1,) * len(data.items), np.ones(len(data.items)))
    return Rae(EstimatorSettings(rae_decay=0.5)).estimate(shown).state


@pytest.mark.parametrize(
    ("forks_earned", "mean"),
    [
        ([], 0.25),  # 1, then 0: half of a half
        ([0.0] * 4, 0.25),  # four forks that earned the same say the same, once
        ([1.0], 0.5),  # the run and its fork count half each: the tree earned 1/2, as the mean has it
        ([1.0, 1.0, 0.0], 0.5),
    ],
)
def test_a_run_with_its_forks_counts_once(forks_earned: list[float], mean: float) -> None:
    forks = [fork(f"f{k}", BAD, 1, CALLS[1:], earned) for k, earned in enumerate(forks_earned)]
    assert state_after(to_round(GOOD, BAD, *forks)) == pytest.approx({"plan": mean, "act": mean})


def test_calls_of_forks_are_held_against_the_mean_from_before_their_tree() -> None:
    """That after the first run, 1/2. One that had heard of the run that a fork left would have heard of both."""
    data = to_round(GOOD, BAD, fork("f", BAD, 1, CALLS[1:], 1.0))
    shown = EstimatorInput(data, (1,) * len(data.items), np.ones(len(data.items)))
    found = Rae(EstimatorSettings(rae_decay=0.5)).estimate(shown).estimate.advantage_U
    # the good run's two calls, 1 - 0; the bad run's plan, 1/2 of both - 1/2; its act, and the fork's
    np.testing.assert_allclose(found, [1, 1, 0, -0.5, 0.5], atol=1e-12)


def test_older_episodes_change_no_mean_again() -> None:
    fresh, older = to_round(GOOD), to_round(BAD)
    replayed = [replace(episode, replayed=True) for episode in older.episodes]
    data = episodes_to_round([*fresh.episodes, *replayed], {})
    assert state_after(data) == state_after(fresh) == {"plan": 0.5, "act": 0.5}
