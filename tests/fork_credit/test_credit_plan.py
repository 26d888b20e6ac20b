"""Owns: how many runs are measured with a number of forks.

- Not the first run alone says how many forks a run takes; a budget that does not reach two runs is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marft_bridge.common.errors import ConfigError
from marft_bridge.fork_credit.credit_plan import choose_runs

EPISODES: Any = [SimpleNamespace(task_id=f"t{n}", sample=0, started_ns=n, episode_id=str(n)) for n in range(20)]


def count_runs(*fork_counts: int, budget: int) -> int:
    """How many runs are chosen where they take so many forks each, in the order in which they are drawn."""
    counts = iter(fork_counts)
    forks_of: dict[str, int] = {}

    def to_levels(episode: Any) -> Any:
        forks_of[episode.episode_id] = next(counts)
        return SimpleNamespace(run=SimpleNamespace(trajectory=SimpleNamespace(episode=episode)))

    def forks_of_run(levels: Any) -> int:
        return forks_of[levels.run.trajectory.episode.episode_id]

    return len(choose_runs(EPISODES, to_levels, budget=budget, forks_of_run=forks_of_run, seed=0).runs)


def test_one_long_run_that_is_drawn_first_refuses_nothing() -> None:
    assert count_runs(180, *[6] * 19, budget=256) == 9  # (180 + 7 x 6) / 8 forks each
    assert count_runs(*[6] * 20, budget=60) == 10


def test_forks_that_do_not_reach_two_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="100 forks do not reach two runs, each of which takes 93"):
        count_runs(180, *[6] * 19, budget=100)
