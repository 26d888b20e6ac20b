"""Owns: what successes of earlier rounds are worth beside a round's fresh episodes; worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options

from trainers.advantages.estimate import Estimate
from trainers.advantages.settings import Normalization
from trainers.credit.action_credits import ActionCredit
from trainers.credit.successes import append_successes
from trainers.credit.units import Units
from trainers.marft import MarftTrainer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def whole_round(fresh: int, replayed: int, tokens: int = 1) -> Any:
    """A round of one agent: so many fresh and older episodes of one action."""
    episodes = [SimpleNamespace(replayed=i >= fresh) for i in range(fresh + replayed)]
    items = [SimpleNamespace(agent="a", decided=tuple(range(tokens))) for _ in episodes]
    return SimpleNamespace(episodes=episodes, items=items, episode_A=tuple(range(len(episodes))))


def appended(
    data: Any,
    fresh: list[float],
    returns: list[float],
    mode: Normalization = "agent",
    by_token: bool = False,
    in_deviations: bool = False,
    least: float = 0.0,
) -> tuple[Estimate, Estimate]:
    given = Estimate(np.array(fresh), {"reward": np.array(fresh) + 0.5, "baseline": np.full(len(fresh), -0.5)})
    units = Units(data, "token" if by_token else "action")
    return append_successes(
        *(given, given, data),
        units=units,
        return_A=np.array(returns),
        place_A=None,
        reward="reward",
        mode=mode,
        least_of=lambda agents: least * len(agents),
        in_deviations=in_deviations,
    )


def test_a_success_is_worth_its_excess_over_the_fresh_mean_in_their_deviations() -> None:
    """Fresh returns 0, 0, 0, 1: mean 1/4, deviation sqrt(3)/4. A success of 1 is 3/4 above: sqrt(3) deviations."""
    plain, normal = appended(whole_round(4, 2), [0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1, 1.0, 0.5])
    assert plain.advantage_U.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.75, 0.25])
    assert normal.advantage_U.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 3**0.5, 1 / 3**0.5])


def test_without_normalisation_it_is_the_excess_itself() -> None:
    _, normal = appended(whole_round(4, 1), [0.0] * 4, [0, 0, 0, 1, 1.0], mode="none")
    assert normal.advantage_U[4] == pytest.approx(0.75)


def test_where_the_estimator_divides_by_a_deviation_a_success_does_too_before_and_after_normalisation() -> None:
    for unit in (1.0, 100.0):
        returns = [unit * earned for earned in (0, 0, 0, 1, 1.0)]
        for estimate in appended(whole_round(4, 1), [0.0] * 4, returns, mode="none", in_deviations=True):
            assert estimate.advantage_U[4] == pytest.approx(3**0.5)


@pytest.mark.parametrize("name", ["grpo", "dr_mas", "at_grpo", "hrpo", "mars2"])
def test_a_success_is_worth_the_same_in_every_unit_of_the_reward(model_dir: Path, name: str) -> None:
    """Beside estimators that divide by a deviation: of 16 fresh runs 2 earned 1, a deviation of sqrt(7)/8."""
    options: dict[str, Any] = {"estimator": name}
    if name == "mars2":  # is refused without a reward of single calls; none arrived here
        options["shaping"] = [{"reward": "own", "level": "step", "weight": 1.0}]
    for unit in (1.0, 100.0):
        assert worth(model_dir, unit, **options) == pytest.approx(7**0.5, rel=1e-5)
    plain = worth(model_dir, 100.0, **options, group_std=False)
    assert plain == pytest.approx(87.5)  # as the fresh ones, in units of the reward


def worth(model_dir: Path, unit: float, **options: Any) -> float:
    """The advantage of a success of 1 beside 16 runs of two tasks, of each of which one of eight earned 1."""
    fields = {"device": "cpu", "replay": {"successes": 0.3}, **options}
    trainer = MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed=0)
    runs = play(trainer, 17, torch.Generator().manual_seed(1), both_low)
    earned = [float(i % 8 == 0) for i in range(17)]
    played = []
    for i, (run, reward) in enumerate(zip(runs, earned, strict=True)):
        rewards = tuple(replace(each, value=unit * reward, episode_id=f"e{i}") for each in run.rewards)
        episode = replace(run.episode, episode_id=f"e{i}", task_id=str(i // 8))
        played.append(replace(run, episode=episode, rewards=rewards))
    credited: list[ActionCredit] = []
    trainer.update(played[:16], played[16:], credited.extend)
    (value,) = {float(each.normalised_U[0]) for each in credited if each.episode_id == "e16"}
    return value


def test_what_the_policy_earns_by_now_anyway_is_worth_nothing() -> None:
    plain, normal = appended(whole_round(2, 2), [0.0, 0.0], [1, 1, 1.0, 0.5])
    assert plain.advantage_U.tolist() == normal.advantage_U.tolist() == [0, 0, 0, 0]


def test_where_all_fresh_runs_failed_the_best_success_is_worth_one() -> None:
    _, normal = appended(whole_round(2, 2), [0.0, 0.0], [0, 0, 2.0, 1.0])
    assert normal.advantage_U.tolist() == [0, 0, 1, 0.5]


@pytest.mark.parametrize("earned", [0.1, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("fresh", [3, 6, 7, 24])
def test_where_all_fresh_runs_earned_alike_the_best_success_is_worth_one(fresh: int, earned: float) -> None:
    """The deviation of equal numbers is rounding, and no unit to measure by."""
    _, normal = appended(whole_round(fresh, 2), [0.0] * fresh, [earned] * fresh + [1.0, (1 + earned) / 2])
    assert normal.advantage_U[fresh:].tolist() == pytest.approx([1, 0.5])


def test_where_fresh_runs_differ_by_less_than_counts_the_best_success_is_worth_one() -> None:
    _, normal = appended(whole_round(4, 2), [0.0] * 4, [0, 0.001, 0, 0.001, 0.5005, 1.0005], least=0.01)
    assert normal.advantage_U[4:].tolist() == pytest.approx([0.5, 1])


def test_a_success_that_is_better_by_less_than_counts_is_worth_nothing() -> None:
    _, normal = appended(whole_round(4, 2), [0.0] * 4, [0.999] * 4 + [1.0, 1.01], least=0.005)
    assert normal.advantage_U[4:].tolist() == pytest.approx([0, 1])


def test_with_a_discount_a_success_where_no_fresh_call_stands_is_held_against_its_agent() -> None:
    """Fresh chains of one that earned 9 and 10; a success of 10 has a second call, where none of them stands."""
    episodes = [SimpleNamespace(replayed=i == 2) for i in range(3)]
    items = [SimpleNamespace(agent="a", decided=(0,)) for _ in range(4)]
    estimate = Estimate(np.zeros(2), {"reward": np.zeros(2)})
    plain, _ = append_successes(
        *(estimate, estimate, SimpleNamespace(episodes=episodes, items=items, episode_A=(0, 1, 2, 2))),  # type: ignore[arg-type]
        units=Units(SimpleNamespace(episodes=episodes, items=items, episode_A=(0, 1, 2, 2)), "action"),  # type: ignore[arg-type]
        return_A=np.array([9.0, 10.0, 9.6, 10.0]),
        place_A=[("a", 0), ("a", 0), ("a", 0), ("a", 1)],
        reward="reward",
        mode="none",
        least_of=lambda _: 0.0,
    )
    assert plain.advantage_U[2:].tolist() == pytest.approx([0.1, 0.5])


@pytest.mark.parametrize("mode", ["batch", "agent"])
def test_with_a_discount_a_success_is_held_against_the_fresh_calls_at_its_place(mode: Normalization) -> None:
    """Chains of two at gamma 1/2; fresh runs earned 0 and 0.9, a success of before 1: its calls are 1/2 and 1 above
    the means of 0.225 and 0.45. The fresh ones deviate from these by 0.225 and 0.45, in all by their square mean."""
    episodes = [SimpleNamespace(replayed=i == 2) for i in range(3)]
    items = [SimpleNamespace(agent="a", decided=(0,)) for _ in range(6)]
    data: Any = SimpleNamespace(episodes=episodes, items=items, episode_A=(0, 0, 1, 1, 2, 2))
    given = Estimate(np.zeros(4), {"reward": np.zeros(4)})
    plain, normal = append_successes(
        *(given, given, data),
        units=Units(data, "action"),
        return_A=np.array([0, 0, 0.45, 0.9, 0.5, 1.0]),
        place_A=[("a", 0), ("a", 1)] * 3,
        reward="reward",
        mode=mode,
        least_of=lambda _: 0.0,
    )
    assert plain.advantage_U[4:].tolist() == pytest.approx([0.275, 0.55])
    deviation = ((0.225**2 + 0.45**2) / 2) ** 0.5
    assert normal.advantage_U[4:].tolist() == pytest.approx([0.275 / deviation, 0.55 / deviation])


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
