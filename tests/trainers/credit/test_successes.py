"""Owns: what successes of earlier rounds are worth beside a round's fresh episodes; worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainers.advantages.estimate import Estimate
from trainers.advantages.settings import Normalization
from trainers.credit.successes import append_successes
from trainers.credit.units import Units


def whole_round(fresh: int, replayed: int, tokens: int = 1) -> Any:
    """A round of one agent: so many fresh and older episodes of one action."""
    episodes = [SimpleNamespace(replayed=i >= fresh) for i in range(fresh + replayed)]
    items = [SimpleNamespace(agent="a", decided=tuple(range(tokens))) for _ in episodes]
    return SimpleNamespace(episodes=episodes, items=items, episode_A=tuple(range(len(episodes))))


def appended(
    data: Any, fresh: list[float], returns: list[float], mode: Normalization = "agent", by_token: bool = False
) -> tuple[Estimate, Estimate]:
    given = Estimate(np.array(fresh), {"reward": np.array(fresh) + 0.5, "baseline": np.full(len(fresh), -0.5)})
    units = Units(data, "token" if by_token else "action")
    return append_successes(given, given, data, units=units, return_A=np.array(returns), reward="reward", mode=mode)


def test_a_success_is_worth_its_excess_over_the_fresh_mean_in_their_deviations() -> None:
    """Fresh returns 0, 0, 0, 1: mean 1/4, deviation sqrt(3)/4. A success of 1 is 3/4 above: sqrt(3) deviations."""
    plain, normal = appended(whole_round(4, 2), [0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1, 1.0, 0.5])
    assert plain.advantage_U.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.75, 0.25])
    assert normal.advantage_U.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 3**0.5, 1 / 3**0.5])


def test_without_normalisation_it_is_the_excess_itself() -> None:
    _, normal = appended(whole_round(4, 1), [0.0] * 4, [0, 0, 0, 1, 1.0], mode="none")
    assert normal.advantage_U[4] == pytest.approx(0.75)


def test_what_the_policy_earns_by_now_anyway_is_worth_nothing() -> None:
    plain, normal = appended(whole_round(2, 2), [0.0, 0.0], [1, 1, 1.0, 0.5])
    assert plain.advantage_U.tolist() == normal.advantage_U.tolist() == [0, 0, 0, 0]


def test_where_all_fresh_runs_failed_the_best_success_is_worth_one() -> None:
    _, normal = appended(whole_round(2, 2), [0.0, 0.0], [0, 0, 2.0, 1.0])
    assert normal.advantage_U.tolist() == [0, 0, 1, 0.5]


@pytest.mark.parametrize("by_token", [False, True])
def test_parts_sum_to_the_advantage_and_fresh_ones_stay_as_they_were(by_token: bool) -> None:
    tokens = 2
    fresh = [0.1, -0.2, 0.3, 0.4] if by_token else [0.1, -0.2]
    data = whole_round(2, 1, tokens)
    for estimate in appended(data, fresh, [0.0, 0.4, 1.0], by_token=by_token):
        assert estimate.advantage_U[: len(fresh)].tolist() == fresh
        assert len(estimate.advantage_U) == len(fresh) + (tokens if by_token else 1)
        total = sum(estimate.by_source.values())
        assert np.allclose(total, estimate.advantage_U)
        assert set(estimate.by_source) == {"reward", "baseline"}
