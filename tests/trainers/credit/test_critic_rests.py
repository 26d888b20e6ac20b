"""Owns: a critic that explains nothing is not paid for, and its rest changes nothing but that."""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.trainer_options import trainer_options
from torch import Tensor

from trainers.batch import ActionItem, EpisodeItem, Round, episodes_to_round
from trainers.credit.credit import Credit
from trainers.credit.critic import Critic
from trainers.credit.critic_rests import LOOKS, WORTH, CriticRests
from trainers.rewards import EpisodeRewards


def rests_of(explained: Sequence[float | None], warm_up: float | None = None) -> list[bool]:
    """Whether one critic rests in each of some rounds, by what it would explain in those in which it is asked."""
    rests = CriticRests(["c"])
    rests.end_warm_up({"c": warm_up})
    rested = []
    for share in explained:
        rested.append(bool(rests.resting))
        rests.end_round({} if rested[-1] else {"c": share})
    return rested


def test_a_critic_that_explains_nothing_rests_longer_after_each_vain_look() -> None:
    expected = [part for rest in (2, 4, 8, 8, 8) for part in ([False] * LOOKS, [True] * rest)]
    assert rests_of([0.0] * 40) == [is_resting for part in expected for is_resting in part][:40]


def test_it_rests_at_once_where_stored_episodes_have_shown_it() -> None:
    assert rests_of([0.0] * 8, warm_up=0.0) == [True, True, False, False, True, True, True, True]
    assert rests_of([0.0] * 3, warm_up=WORTH) == rests_of([0.0] * 3, warm_up=None) == [False, False, True]


def test_a_critic_that_is_worth_its_pass_never_rests_and_one_vain_round_is_forgiven() -> None:
    assert rests_of([0.0, WORTH] * 10) == [False] * 20


def test_a_round_that_says_nothing_is_no_look() -> None:
    assert rests_of([None] * 10) == [False] * 10


def test_critics_rest_each_for_itself_and_go_on_from_a_checkpoint() -> None:
    rests = CriticRests(["a", "b"])
    for _ in range(LOOKS):
        rests.end_round({"a": 0.0, "b": 0.9})
    assert rests.resting == {"a"}
    resumed = CriticRests(["a", "b"])
    resumed.load_state(rests.to_state())
    for _ in range(30):
        assert resumed.resting == rests.resting
        for schedule in (rests, resumed):
            schedule.end_round({key: 0.0 for key in ("a", "b") if key not in schedule.resting})
    resumed.load_state({})  # a checkpoint of before it
    assert resumed.resting == frozenset()


# -- in a round --------------------------------------------------------------------------------------------------------


class CountedBase:
    """Stands in for a base model: the hidden state is [token id / 10]; remembers what it was asked."""

    width = 1
    packs = True

    def __init__(self) -> None:
        self.asked = 0

    def features_at(
        self, sequences: Sequence[tuple[int, ...]], columns: Sequence[range], budget: int, tick: Callable[[int], None]
    ) -> list[Tensor]:
        self.asked += len(sequences)
        return [torch.tensor([[s[c] / 10] for c in cs]) for s, cs in zip(sequences, columns, strict=True)]


class SaysTheSame:
    """Stands in for a critic that says the same of everything."""

    def __init__(self, value: float) -> None:
        self.value, self.fits = value, 0

    def values(self, features_NF: Tensor, agent_N: Tensor) -> Tensor:
        return torch.full((len(features_NF),), self.value)

    def fit(self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor) -> float:
        self.fits += 1
        return 0.0


def round_of(episodes: int, seed: int = 0) -> Round:
    """A chain of two agents; the middle third of the episodes was cut short."""
    rng, made = np.random.default_rng(seed), []
    for e in range(episodes):
        actions = tuple(
            ActionItem(agent, (int(rng.integers(1, 9)),), (1, 2), (-1.0, -1.0), 1.0, 0) for agent in ("a", "b")
        )
        reward = float(rng.integers(0, 2))
        made.append(EpisodeItem(f"t{e}", reward, e % 3 == 1, actions, ((1,), ()), EpisodeRewards({"reward": reward})))
    return episodes_to_round(made, {})


def credit_of(says: float = 0.5, **options: Any) -> tuple[Credit, CountedBase, SaysTheSame]:
    base, critic = CountedBase(), SaysTheSame(says)
    models = cast("Any", dict.fromkeys(("a", "b"), base))
    trainer_opts = trainer_options(**{"critic": {"shrink": True}, **options})
    credit = Credit(trainer_opts, models, ("a", "b"), seed=0, tick=lambda phase, total: lambda count: None)
    credit.critics["shared/0"] = cast("Critic", critic)
    return credit, base, critic


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_the_baseline_of_a_resting_critic_is_that_of_one_that_says_the_mean_of_all(granularity: str) -> None:
    data = round_of(30)
    mean_of_ended = float(np.mean([e.reward for e in data.episodes if not e.truncated]))
    awake, base, critic = credit_of(says=mean_of_ended, granularity=granularity, gae_lambda=0.5)
    estimate, fit = awake.estimate(data)
    figures = fit()
    assert (base.asked > 0, critic.fits, figures["resting"]) == (True, 1, 0)

    resting, base, critic = credit_of(says=9.0, granularity=granularity, gae_lambda=0.5)
    resting.rests.end_warm_up({"shared/0": 0.0})
    rested, fit = resting.estimate(data)
    figures = fit()
    assert (base.asked, critic.fits) == (0, 0)
    assert (figures["resting"], figures["explained_variance"], figures["critics"]) == (1, None, {"shared/0": None})
    assert figures["agents"] == {"a": None, "b": None}
    assert figures["value_weights"] == {"a": 0.0, "b": 0.0}
    np.testing.assert_allclose(rested.advantage_U, estimate.advantage_U, atol=1e-6)  # critics say float32
    assert np.std(rested.advantage_U) > 0.1


def test_a_critic_taken_at_its_word_never_rests() -> None:
    credit, base, _ = credit_of(critic={"shrink": False})
    for _ in range(LOOKS + 1):
        asked = base.asked
        fit = credit.estimate(round_of(12))[1]
        assert fit()["resting"] is None
        assert base.asked > asked
        credit.forget()


def test_a_refused_round_brings_no_rest_nearer() -> None:
    credit, *_ = credit_of()
    for _ in range(5):
        credit.estimate(round_of(12))  # and no fit
    assert credit.rests.resting == frozenset()
