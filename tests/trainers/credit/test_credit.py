"""Owns: a round of episodes to advantages: values, estimators and three kinds of reward put together.

Numbers are worked by hand, per action and per token; token level is action level where every action has one token;
critics see what is theirs and no more; the parts by reward sum to the advantage; nothing learns before it is told to.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.tiny_policy import AGENTS, make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from trace_store.records import Reward
from trainers.advantages.estimate import BASELINE, Estimate
from trainers.advantages.estimator import EstimatorInput, estimators
from trainers.advantages.returns import centred_own_returns, expected_discounts, returns_by_source
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import ActionItem, EpisodeItem, Round, episodes_to_round, trajectories_to_round
from trainers.config import LoraOptions
from trainers.credit.credit import Credit
from trainers.credit.critic import Critic
from trainers.credit.units import Units
from trainers.rewards import EpisodeRewards, StepReward
from trainers.scoring.model import PolicyModel

CHAIN = ((1,), ())
DIAMOND = ((1, 2), (3,), (3,), ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    return PolicyModel(folder, ["one"], LoraOptions(), "cpu", seed=0)


class TokenIsFeature:
    """Stands in for a base model where hidden states must be known: the hidden state is [token id / 10]."""

    width = 1
    packs = True

    def __init__(self) -> None:
        self.passes: list[tuple[int, ...]] = []

    def features_at(
        self, sequences: Sequence[tuple[int, ...]], columns: Sequence[range], budget: int, tick: Callable[[int], None]
    ) -> list[Tensor]:
        self.passes += sequences
        tick(len(sequences))
        pairs = zip(sequences, columns, strict=True)
        return [torch.tensor([[sequence[c] / 10] for c in asked]) for sequence, asked in pairs]


class FeatureIsValue:
    """Stands in for a critic whose values are known: V is the feature. Remembers what it is fitted to."""

    def __init__(self) -> None:
        self.fitted: list[list[float]] = []

    def values(self, features_NF: Tensor, agent_N: Tensor) -> Tensor:
        assert len(features_NF) == len(agent_N)
        return features_NF[:, 0]

    def fit(self, features_NF: Tensor, agent_N: Tensor, targets_N: Tensor) -> float:
        assert len(features_NF) == len(agent_N)
        self.fitted.append([features_NF[:, 0].tolist(), targets_N.tolist()])
        return 0.5


def _credit(model_of: Any, agents: Sequence[str] = AGENTS, seed: int = 0, **options: Any) -> Credit:
    models = model_of if isinstance(model_of, Mapping) else dict.fromkeys(agents, model_of)
    return Credit(trainer_options(**options), models, agents, seed, lambda phase, total: lambda count: None)


def _by_hand(**options: Any) -> tuple[Credit, FeatureIsValue]:
    """V of an observation is its last token / 10."""
    credit, critic = _credit(TokenIsFeature(), **options), FeatureIsValue()
    credit.critics["shared/0"] = cast("Critic", critic)
    return credit, critic


def _item(agent: str, prompt: Sequence[int], sampled: Sequence[int], turn: int = 0) -> ActionItem:
    return ActionItem(agent, tuple(prompt), tuple(sampled), (-1.0,) * len(sampled), 1.0, turn)


def _episode(
    actions: Sequence[ActionItem],
    reward: float = 0.0,
    successors: tuple[tuple[int, ...], ...] = CHAIN,
    task: str = "t",
    truncated: bool = False,
    **rewards: Any,
) -> EpisodeItem:
    team = {"reward": reward, **rewards.pop("team", {})}
    return EpisodeItem(task, reward, truncated, tuple(actions), successors, EpisodeRewards(team, **rewards))


def _pair(first: int = 3, second: int = 5) -> list[ActionItem]:
    """A reasoner whose prompt ends in `first` and an actor whose prompt ends in `second`; one token each."""
    return [_item("reasoner", [first], [1]), _item("actor", [second], [2])]


def _round(*episodes: EpisodeItem) -> Round:
    return episodes_to_round(episodes, {})


def _close(values: Any, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7)


# -- GAE, by hand ------------------------------------------------------------------------------------------------------


def test_actions_along_a_chain_by_hand() -> None:
    credit, critic = _by_hand(gamma=0.9, gae_lambda=0.5)
    estimate, fit = credit.estimate(_round(_episode(_pair(), reward=1)))
    # V = 0.3, 0.5. actor: 1 - 0.5 = 0.5; reasoner: 0.9 * 0.5 - 0.3 = 0.15, + 0.9 * 0.5 * 0.5 = 0.375
    _close(estimate.advantage_U, [0.375, 0.5])
    # the reward of 1 alone: 1 for the actor, 0.9 * 0.5 for the reasoner
    _close(estimate.by_source["reward"], [0.45, 1])
    _close(estimate.by_source[BASELINE], [-0.075, -0.5])
    metrics = fit()
    [[features, targets]] = critic.fitted
    _close(features, [0.3, 0.5])
    _close(targets, [0.675, 1])  # A + V
    # returns 0.9 and 1: variance 0.0025; errors 0.6 and 0.5: variance 0.0025
    assert metrics["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert metrics["value_loss"] == 0.5
    assert metrics["flat_groups"] is None


def test_a_truncated_episode_bootstraps_from_what_its_last_action_left() -> None:
    credit, _ = _by_hand(gamma=0.9, gae_lambda=0.5)
    estimate, _ = credit.estimate(_round(_episode(_pair(), reward=1, truncated=True)))
    # after the actor's token 2: V = 0.2, so actor: 1 + 0.9 * 0.2 - 0.5 = 0.68; reasoner: 0.15 + 0.45 * 0.68 = 0.456
    _close(estimate.advantage_U, [0.456, 0.68])
    _close(estimate.by_source["reward"], [0.45, 1])


def test_parallel_branches_and_a_join_by_hand() -> None:
    actions = [_item(a, [v], [1], t) for a, v, t in (("reasoner", 1, 0), ("actor", 2, 0), ("actor", 6, 1))]
    actions.append(_item("reasoner", [8], [1], 1))
    credit, critic = _by_hand(gae_lambda=0.5)
    estimate, fit = credit.estimate(_round(_episode(actions, reward=1, successors=DIAMOND)))
    # join: 1 - 0.8 = 0.2. branches: 0.8 - 0.2 + 0.5 * 0.2 = 0.7 and 0.8 - 0.6 + 0.1 = 0.3.
    # fork: mean(0.2, 0.6) - 0.1 = 0.3, + 0.5 * mean(0.7, 0.3) = 0.25
    _close(estimate.advantage_U, [0.55, 0.7, 0.3, 0.2])
    _close(estimate.by_source["reward"], [0.25, 0.5, 0.5, 1])
    fit()
    _close(critic.fitted[0][1], [0.65, 0.9, 0.9, 1])


def _token_episode(truncated: bool) -> EpisodeItem:
    return _episode([_item("reasoner", [9, 3], [1, 2]), _item("actor", [5], [4])], reward=1, truncated=truncated)


TOKENS = {"granularity": "token", "gamma": 0.5, "gae_lambda": 0.5, "gamma_token": 0.5, "token_lambda": 0.8}


def test_tokens_by_hand() -> None:
    credit, critic = _by_hand(**TOKENS)
    estimate, fit = credit.estimate(_round(_token_episode(truncated=False)))
    # V before: 0.3 (prompt), 0.1 (after token 1) | 0.5. actor: 1 - 0.5 = 0.5
    # reasoner's last token: 0.5 * 0.5 - 0.1 = 0.15, + 0.25 * 0.5 = 0.275
    # its first: 0.5 * 0.1 - 0.3 = -0.25, + 0.5 * 0.8 * 0.275 = -0.14
    _close(estimate.advantage_U, [-0.14, 0.275, 0.5])
    _close(estimate.by_source["reward"], [0.1, 0.25, 1])
    metrics = fit()
    [[features, targets]] = critic.fitted
    _close(features, [0.3, 0.1, 0.5])
    _close(targets, [0.16, 0.375, 1])
    # returns 0.25, 0.5, 1 (mean 7/12): variance 14/144; errors -0.05, 0.4, 0.5 (mean 17/60): variance 0.0572...
    variance = ((-0.05) ** 2 + 0.4**2 + 0.5**2) / 3 - (0.85 / 3) ** 2
    assert metrics["explained_variance"] == pytest.approx(1 - variance / (14 / 144), abs=1e-6)
    assert metrics["agents"]["actor"] is None  # one observation explains nothing


def test_tokens_of_a_truncated_episode_bootstrap_after_the_last_token() -> None:
    credit, critic = _by_hand(**TOKENS)
    estimate, fit = credit.estimate(_round(_token_episode(truncated=True)))
    # after token 4: V = 0.4, so actor: 1 + 0.5 * 0.4 - 0.5 = 0.7; reasoner: 0.15 + 0.175 = 0.325; -0.25 + 0.13 = -0.12
    _close(estimate.advantage_U, [-0.12, 0.325, 0.7])
    fit()
    _close(critic.fitted[0][0], [0.3, 0.1, 0.5])  # what comes after the cut is not fitted


def test_adaptive_lambda_is_that_of_each_actions_length() -> None:
    credit, _ = _by_hand(**(TOKENS | {"token_lambda": "adaptive", "adaptive_alpha": 1.0}))
    estimate, _ = credit.estimate(_round(_token_episode(truncated=False)))
    # two tokens: 1 - 1 / 2 = 0.5, so the reasoner's first: -0.25 + 0.5 * 0.5 * 0.275
    _close(estimate.advantage_U, [-0.18125, 0.275, 0.5])


# -- step and private rewards ------------------------------------------------------------------------------------------


def _shaped_round() -> Round:
    """Two runs of one task. In the first a tool call of the actor earned 1, and the reasoner 0.3 for itself; in the
    second the reasoner got 0.1, and the bonus of level `episode` was 0.5."""
    tool = {"tool": (StepReward(1.0, {0: 1, 1: 0}),)}
    return _round(
        _episode(_pair(), 1, team={"bonus": 0.0}, step=tool, private={"brief": {"reasoner": 0.3}}),
        _episode(_pair(), 0, team={"bonus": 0.5}, private={"brief": {"reasoner": 0.1}}),
    )


def test_step_and_private_rewards_are_centred_and_added_to_gae() -> None:
    credit, critic = _by_hand(gamma=0.5, gae_lambda=1.0)
    data = _shaped_round()
    estimate, fit = credit.estimate(data)
    # team: 1 and 0.5, so 0.5 R - 0.3 for the reasoner and R - 0.5 for the actor
    # tool: G = 0.5 and 1 in the first run, 0 in the second: less that of the other run, 0.5, 1, -0.5, -1
    # brief: 0.3 - 0.1 and 0.1 - 0.3 for the reasoner
    _close(estimate.by_source["reward"], [0.5, 1, 0, 0])
    _close(estimate.by_source["bonus"], [0, 0, 0.25, 0.5])
    _close(estimate.by_source["tool"], [0.5, 1, -0.5, -1])
    _close(estimate.by_source["brief"], [0.2, 0, -0.2, 0])
    _close(estimate.by_source[BASELINE], [-0.3, -0.5, -0.3, -0.5])
    _close(estimate.advantage_U, [0.9, 1.5, -0.75, -1])
    fit()
    _close(critic.fitted[0][1], [0.5, 1, 0.25, 0.5])  # the critic is fitted to the team reward only
    # whole returns: 0.5 R + tool + brief
    _close(credit.returns(data), [0.5 + 0.5 + 0.3, 1 + 1, 0.25 + 0.1, 0.5])
    _close(credit.replay_advantages(data), [0.9, 1.5, -0.75, -1])


def test_gae_weighs_the_teams_part_by_contribution_and_fits_the_critic_to_all_of_it() -> None:
    own = ({"reward": "brief", "level": "agent", "weight": 1.0},)
    credit, critic = _by_hand(gae_lambda=1.0, shaping=own, contribution="rank_consistency")
    briefs = [{"reasoner": 0.3, "actor": 0.2}, {"reasoner": 0.1, "actor": 0.2}]
    runs = [_episode(_pair(), reward, private={"brief": brief}) for reward, brief in zip((1, 0), briefs, strict=True)]
    estimate, fit = credit.estimate(_round(*runs))
    # The reasoner's brief ranks the two runs as the team does: 1. The actor's is tied: 1/2. Weights 4/3 and 2/3.
    assert fit()["contribution"] == pytest.approx({"reasoner": 4 / 3, "actor": 2 / 3})
    # R - V is 0.7 and 0.5 in the first run, -0.3 and -0.5 in the second; brief is centred, not weighed
    _close(estimate.by_source["reward"], [4 / 3, 2 / 3, 0, 0])
    _close(estimate.by_source["brief"], [0.2, 0, -0.2, 0])
    _close(estimate.advantage_U, [0.7 * 4 / 3 + 0.2, 0.5 * 2 / 3, -0.3 * 4 / 3 - 0.2, -0.5 * 2 / 3])
    _close(critic.fitted[0][1], [1, 1, 0, 0])


def test_own_rewards_of_one_run_alone_say_nothing() -> None:
    credit, _ = _by_hand()
    data = _round(_shaped_round().episodes[0])
    estimate, _ = credit.estimate(data)
    _close(estimate.by_source["tool"], [0, 0])
    _close(estimate.by_source["brief"], [0, 0])


def test_own_rewards_are_repeated_over_tokens_and_discounted_within_the_action() -> None:
    credit, _ = _by_hand(**TOKENS)
    plain = _token_episode(truncated=False)
    runs = [replace(plain, rewards=replace(plain.rewards, private={"brief": {"reasoner": r}})) for r in (0.0, 0.4)]
    estimate, _ = credit.estimate(_round(*runs))
    _close(estimate.by_source["brief"], [-0.2, -0.4, 0, 0.2, 0.4, 0])
    _close(estimate.advantage_U, [-0.34, -0.125, 0.5, 0.06, 0.675, 0.5])


def test_recorded_shaping_reaches_the_advantage() -> None:
    """From records of the store: two runs that differ in the private reward of the actor only."""
    options = trainer_options(shaping=({"reward": "brief", "level": "agent", "weight": -2.0},), gae_lambda=1.0)
    trajectories = []
    for brief in (0.5, 0.0):
        trajectory = make_trajectory([make_action("reasoner", [3], [1]), make_action("actor", [5], [2])], 1.0)
        extra = Reward("e", "brief", brief, "test", 2, scope="agent", node="actor")
        trajectories.append(replace(trajectory, rewards=(*trajectory.rewards, extra)))
    vocabulary = dict.fromkeys(AGENTS, 32)
    data = trajectories_to_round(trajectories, AGENTS, "reward", vocabulary, "on_policy", options.shaping)
    credit = _credit(TokenIsFeature(), shaping=options.shaping, gae_lambda=1.0)
    estimate, _ = credit.estimate(data)
    _close(estimate.by_source["brief"], [0, -1, 0, 1])
    _close(estimate.advantage_U, [1, 0, 1, 2])  # before any fit V = 0


# -- group estimators --------------------------------------------------------------------------------------------------


def _three_runs() -> Round:
    """One task, rewards 0, 1 and 2; the actor acts once, twice and not at all. And a task whose runs earned alike."""
    one = [_item("reasoner", [3], [1])]
    ragged = [
        _episode([*one, _item("actor", [5], [2, 2])], 0),
        _episode([*one, _item("actor", [5], [2]), _item("actor", [6], [2], 1)], 1, ((1,), (2,), ())),
        _episode(one, 2, ((),)),
    ]
    flat = [_episode(_pair(), 1, task="flat"), _episode(_pair(), 1, task="flat")]
    return _round(*ragged, *flat)


@pytest.mark.parametrize(
    ("options", "expected", "flat"),
    [
        # each run once: mean 1, deviation sqrt((1 + 0 + 1) / 2) = 1
        ({"estimator": "grpo"}, [-1, -1, 0, 0, 0, 1, 0, 0, 0, 0], 1 / 2),
        ({"estimator": "grpo", "group_std": False}, [-1, -1, 0, 0, 0, 1, 0, 0, 0, 0], 1 / 2),
        # less the mean of the other runs: 1.5, 1, 0.5
        ({"estimator": "rloo"}, [-1.5, -1.5, 0, 0, 0, 1.5, 0, 0, 0, 0], 1 / 2),
        # each agent for itself, without deviation: reasoner 0, 1, 2 against 1; actor 0, 1, 1 against 2/3
        ({"estimator": "dr_mas", "group_std": False}, [-1, -2 / 3, 0, 1 / 3, 1 / 3, 1, 0, 0, 0, 0], 2 / 4),
        # and per turn: the actor's first turns 0 and 1 against 0.5, its second turn has nobody beside it
        ({"estimator": "at_grpo", "group_std": False}, [-1, -0.5, 0, 0.5, 0, 1, 0, 0, 0, 0], 3 / 5),
    ],
)
def test_group_estimators_by_hand(
    model: PolicyModel, options: dict[str, Any], expected: Sequence[float], flat: float
) -> None:
    credit = _credit(model, **options)
    estimate, fit = credit.estimate(_three_runs())
    np.testing.assert_allclose(estimate.advantage_U, expected, atol=1e-5)
    np.testing.assert_allclose(estimate.by_source["reward"], expected, atol=1e-5)  # nothing else is at work
    np.testing.assert_allclose(estimate.by_source[BASELINE], 0, atol=1e-12)
    assert fit() == {
        "value_loss": None,
        "explained_variance": None,
        "critics": {},
        "agents": {},
        "value_weights": None,
        "resting": None,
        "flat_groups": pytest.approx(flat),
        "contribution": None,
    }


def test_a_group_estimate_is_repeated_over_tokens(model: PolicyModel) -> None:
    estimate, _ = _credit(model, estimator="rloo", granularity="token").estimate(_three_runs())
    _close(estimate.advantage_U, [-1.5, -1.5, -1.5, 0, 0, 0, 1.5, 0, 0, 0, 0])  # the second action has two tokens


def test_group_estimators_take_the_whole_discounted_return(model: PolicyModel) -> None:
    estimate, _ = _credit(model, estimator="at_grpo", group_std=False, gamma=0.5).estimate(_shaped_round())
    # returns 1.3, 2 and 0.35, 0.5 (worked above): means 0.825 of the reasoner and 1.25 of the actor
    _close(estimate.advantage_U, [0.475, 0.75, -0.475, -0.75])
    # the tool's share: 0.5 and 1 in the first run, means 0.25 and 0.5
    _close(estimate.by_source["tool"], [0.25, 0.5, -0.25, -0.5])


@pytest.mark.parametrize("name", sorted(set(estimators()) - {"gae", "c3"}))
@pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
def test_every_call_of_the_better_run_is_better_than_its_baseline_whatever_its_depth(name: str, gamma: float) -> None:
    """Chains of three that earned 1 and 0.9, by agents of their own or by one; or the discount is refused."""
    for agents in (("a", "b", "c"), ("a", "a", "a")):
        items = [_item(agent, [k], [1], agents[:k].count(agent)) for k, agent in enumerate(agents)]
        data = _round(*(_episode(items, reward, ((1,), (2,), ())) for reward in (1.0, 0.9)))
        if gamma < 1 and estimators()[name].compares_depths:
            with pytest.raises(ValidationError, match="compares calls that lie at different depths of a run"):
                trainer_options(estimator=name, gamma=gamma)
            continue
        estimator = estimators()[name](EstimatorSettings(gamma=gamma))
        counts = tuple(1 for _ in data.items)
        shown = EstimatorInput(data, counts, np.ones(6), side_of=dict.fromkeys("abc", "all"))
        if name == "rae":  # a running mean that starts at 0 has heard of no run
            estimator.commit(estimator.estimate(shown).state)
        advantage_U = estimator.estimate(shown).estimate.advantage_U
        assert (advantage_U[:3] > advantage_U[3:]).all()
        if name != "rae":
            assert (advantage_U[:3] > 0).all()
            assert (advantage_U[3:] < 0).all()


def _chains(orders: Sequence[str], rewards: Sequence[float]) -> Round:
    """A chain of calls for each order of agents, each a task of its own; an agent's prompt says which turn it is."""
    episodes = []
    for number, (order, reward) in enumerate(zip(orders, rewards, strict=True)):
        turns = [order[:k].count(agent) for k, agent in enumerate(order)]
        items = [_item(agent, [turn], [1], turn) for agent, turn in zip(order, turns, strict=True)]
        successors = tuple((k + 1,) if k + 1 < len(order) else () for k in range(len(order)))
        episodes.append(_episode(items, reward, successors, f"t{number}"))
    return _round(*episodes)


def _shrunk(gamma: float, **options: Any) -> Credit:
    return _credit(TokenIsFeature(), "abc", gamma=gamma, critic={"shrink": True}, **options)


SHAPES = {"chain": ["abc"], "loop": ["aaa"], "any order": ["abc", "cab", "bca"], "router": ["abaca", "acaba"]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("is_resting", [False, True])
@pytest.mark.parametrize("mode", ["agent", "batch", "none"])
def test_with_a_critic_every_call_of_a_better_run_is_better_whatever_its_depth(
    shape: str, gamma: float, is_resting: bool, mode: str
) -> None:
    """Runs that earned 1 and 0.9, in equal number in every fifth of the tasks and every order of the agents."""
    orders = [order for order in SHAPES[shape] for _ in range(20)]
    rewards = [1.0 if number // 5 % 2 else 0.9 for number in range(len(orders))]
    data = _chains(orders, rewards)
    credit = _shrunk(gamma, normalize=mode)
    if is_resting:
        credit.rests.end_warm_up({"shared/0": 0.0})
    estimate, _ = credit.estimate(data)
    earned_A = np.array([rewards[e] for e in data.episode_A])
    normal = credit.normalise(estimate, data, Units(data, "action"))
    for advantage_A in (estimate.advantage_U, normal.advantage_U):
        assert (advantage_A[earned_A == 1.0] > 0).all()
        assert (advantage_A[earned_A == 0.9] < 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_with_a_discount_runs_that_all_earned_the_same_say_nothing(shape: str) -> None:
    data = _chains([order for order in SHAPES[shape] for _ in range(12)], [0.7] * 12 * len(SHAPES[shape]))
    credit = _shrunk(0.9)
    credit.critics["shared/0"] = cast("Critic", FeatureIsValue())  # its values differ, by the turn
    estimate, _ = credit.estimate(data)
    normal = credit.normalise(estimate, data, Units(data, "action"))
    assert not normal.advantage_U.any()


def test_with_a_discount_the_shorter_of_two_runs_that_earned_alike_is_the_better_one() -> None:
    """Twelve runs of one call and twelve of two, all earn 1. The first call is worth 0.95 at gamma 0.9."""
    data = _chains(["a", "aa"] * 12, [1.0] * 24)
    estimate, _ = _shrunk(0.9, gae_lambda=1.0).estimate(data)
    firsts = [i for i, item in enumerate(data.items) if item.turn == 0]
    ends = {i for i in firsts if len(data.episodes[data.episode_A[i]].actions) == 1}
    assert all((estimate.advantage_U[i] > 0) == (i in ends) for i in firsts)
    # what a reward is worth to the other runs' first calls: 11 x 1 and 12 x 0.9 of 23, or 12 and 11
    discounts = expected_discounts(data, [1] * len(data.items), gamma=0.9, gamma_token=1.0)
    assert discounts is not None
    assert {round(float(discounts[i][0]), 9) for i in firsts} == {round(x / 23, 9) for x in (11 + 10.8, 12 + 9.9)}


@pytest.mark.parametrize("gamma_token", [0.9, 1.0])
def test_the_tokens_of_a_better_call_are_better_whatever_follows_them(gamma_token: float) -> None:
    items = [[_item("a", [3], [1, 2, 3]), _item("a", [4], [1, 2], 1)] for _ in range(20)]
    rewards = [1.0 if number // 5 % 2 else 0.9 for number in range(20)]
    data = _round(*(_episode(pair, r, task=str(n)) for n, (pair, r) in enumerate(zip(items, rewards, strict=True))))
    credit = _shrunk(0.9, granularity="token", gamma_token=gamma_token)
    advantage_U = credit.estimate(data)[0].advantage_U
    earned_U = np.repeat(rewards, 5)
    assert (advantage_U[earned_U == 1.0] > 0).all()
    assert (advantage_U[earned_U == 0.9] < 0).all()


@pytest.mark.parametrize("mode", ["awr", "importance", "vtrace"])
def test_with_a_discount_stored_calls_of_the_better_runs_are_the_better_ones(mode: str) -> None:
    rewards = [1.0 if number // 5 % 2 else 0.9 for number in range(20)]
    data = _chains(["aaa"] * 20, rewards)
    credit = _shrunk(0.9, offline={"mode": mode})
    credit.warm_up(data)
    ones_A = np.ones(len(data.items))
    advantage_A = credit.vtrace(data, ones_A)[0] if mode == "vtrace" else credit.replay_advantages(data)
    earned_A = np.array([rewards[e] for e in data.episode_A])
    assert (advantage_A[earned_A == 1.0] > 0).all()
    assert (advantage_A[earned_A == 0.9] < 0).all()


def test_with_a_discount_a_step_reward_is_compared_with_those_at_its_own_place() -> None:
    """Two runs of three calls; what arrived with the last one is 1 and 0.9, at gamma 0.9 0.9 and 0.81 before it."""
    items = [_item("a", [turn], [1], turn) for turn in range(3)]
    runs = [
        _episode(items, 0.0, ((1,), (2,), ()), step={"tool": (StepReward(value, {0: 2, 1: 1, 2: 0}),)})
        for value in (1.0, 0.9)
    ]
    _close(centred_own_returns(_round(*runs), 0.9)["tool"], [0.081, 0.09, 0.1, -0.081, -0.09, -0.1])


def test_a_truncated_episode_is_not_bootstrapped_without_a_critic(model: PolicyModel) -> None:
    runs = [_episode(_pair(), 1, truncated=True), _episode(_pair(), 0)]
    estimate, _ = _credit(model, estimator="rloo").estimate(_round(*runs))
    _close(estimate.advantage_U, [1, 1, -1, -1])


def test_a_reward_that_is_always_the_same_contributes_nothing(model: PolicyModel) -> None:
    runs = [_episode(_pair(), r, team={"bonus": 100.0}) for r in (0, 1, 2)]
    for estimator in ("grpo", "rloo", "dr_mas", "at_grpo", "hrpo"):
        estimate, _ = _credit(model, estimator=estimator).estimate(_round(*runs))
        np.testing.assert_allclose(estimate.by_source["bonus"], 0, atol=1e-9)


def test_running_baselines_move_once_the_round_is_accepted(model: PolicyModel) -> None:
    credit = _credit(model, estimator="rae", rae_decay=0.5)
    data = _round(_episode(_pair(), 1), _episode(_pair(), 0))
    # b = 0, then 0.5 * 0 + 0.5 * 1 = 0.5, for both agents
    for _ in range(2):  # asked twice, nothing has moved in between
        estimate, fit = credit.estimate(data)
        _close(estimate.advantage_U, [1, 1, -0.5, -0.5])
    _close(estimate.by_source["reward"], [1, 1, 0, 0])
    _close(estimate.by_source[BASELINE], [0, 0, -0.5, -0.5])
    assert credit.estimator.state == {}
    fit()
    assert credit.estimator.state == {"reasoner": 0.25, "actor": 0.25}
    _close(credit.estimate(data)[0].advantage_U, [0.75, 0.75, -0.625, -0.625])


def test_groups_without_signal_are_left_out_and_counted(model: PolicyModel) -> None:
    data = _three_runs()
    kept = _credit(model, estimator="grpo").informative(data)
    assert [e.task_id for e in kept.episodes] == ["t", "t", "t"]
    assert kept.drops == {"group without signal": 2}
    before, _ = _credit(model, estimator="grpo").estimate(data)
    after, _ = _credit(model, estimator="grpo").estimate(kept)
    _close(after.advantage_U, before.advantage_U[:6])


def test_a_zero_sum_of_private_rewards_is_a_signal_where_agents_are_compared_with_themselves(
    model: PolicyModel,
) -> None:
    runs = [_episode(_pair(), 0, private={"win": {"reasoner": s, "actor": -s}}) for s in (1.0, -1.0)]
    assert len(_credit(model, estimator="dr_mas").informative(_round(*runs)).episodes) == 2
    assert len(_credit(model, estimator="grpo").informative(_round(*runs)).episodes) == 0


# -- replay ------------------------------------------------------------------------------------------------------------


def test_vtrace_by_hand() -> None:
    credit, critic = _by_hand(gamma=0.5, offline={"mode": "vtrace", "ratio_cap": 1.0})
    advantage_A, fit = credit.vtrace(_round(_episode(_pair(), reward=1)), np.array([0.5, 4.0]))
    # V = 0.3, 0.5; rho = 0.5, 1. actor: v = 0.5 + (1 - 0.5) = 1, A = 0.5
    # reasoner: v = 0.3 + 0.5 * (0.25 - 0.3) + 0.5 * 0.5 * (1 - 0.5) = 0.4, A = 0.5 * 1 - 0.3 = 0.2; rho is the loss's
    _close(advantage_A, [0.2, 0.5])
    fit()
    _close(critic.fitted[0][1], [0.4, 1])


def test_vtrace_at_ratios_of_one_is_the_return_minus_the_value() -> None:
    credit, critic = _by_hand(gamma=0.5, offline={"mode": "vtrace"})
    data = _shaped_round()
    advantage_A, fit = credit.vtrace(data, np.ones(4))
    _close(advantage_A, credit.replay_advantages(data).tolist())
    fit()
    _close(critic.fitted[0][1], [0.5, 1, 0.25, 0.5])


def test_vtrace_has_step_and_private_parts_too() -> None:
    credit, _ = _by_hand(gamma=0.5, offline={"mode": "vtrace"})
    data = _shaped_round()
    advantage_A, _ = credit.vtrace(data, np.array([0.5, 0.5, 2.0, 2.0]))
    # as above, and with the parts 0.7, 1, -0.7, -1 that the shaped round has beside the team reward
    _close(advantage_A, [0.5 * 0.75 - 0.3 + 0.7, 0.5 + 1, 0.25 - 0.3 - 0.7, 0 - 1])


def test_replayed_actions_of_a_token_level_run_are_credited_as_whole_actions() -> None:
    credit, _ = _by_hand(**TOKENS)
    data = _round(_token_episode(truncated=True))
    # the actor's as above; the reasoner's is half of the actor's 1 + 0.2, less 0.3
    _close(credit.replay_advantages(data), [0.3, 0.7])
    _close(credit.returns(data), [0.5, 1])


# -- both granularities ------------------------------------------------------------------------------------------------


def _game(episodes: int, tokens: int = 1, seed: int = 0, agents: Sequence[str] = AGENTS) -> Round:
    """The reward is 1 where the task is 4, which ends every prompt. Every seventh run is cut short."""
    generator = np.random.default_rng(seed)
    played = []
    for i in range(episodes):
        task = int(generator.integers(4, 8))
        actions = []
        for k, agent in enumerate(agents):
            prompt = [20 + k] * (1 + i % 3) + [task]
            actions.append(_item(agent, prompt, [int(t) for t in generator.integers(10, 13, size=tokens)]))
        successors = tuple((k + 1,) if k + 1 < len(agents) else () for k in range(len(agents)))
        played.append(_episode(actions, float(task == 4), successors, str(task), truncated=i % 7 == 6))
    return _round(*played)


@pytest.mark.parametrize("sharing", ["shared", "agent"])
def test_with_one_token_per_action_token_level_is_action_level(model: PolicyModel, sharing: str) -> None:
    data, fresh = _game(40), _game(30, seed=1)
    found = []
    for granularity in ("action", "token"):
        credit = _credit(model, granularity=granularity, critic={"sharing": sharing}, gamma=0.9)
        warm = credit.warm_up(data)
        estimate, fit = credit.estimate(fresh)
        metrics = fit()
        found.append((warm, estimate.advantage_U, metrics, credit.estimate(fresh)[0].advantage_U))
    for ours, theirs in zip(found[0], found[1], strict=True):
        _near(ours, theirs)
    assert np.std(found[0][1]) > 0.1


def _near(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _near(ours[key], theirs[key])
    elif ours is None:
        assert theirs is None
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("granularity", ["action", "token"])
@pytest.mark.parametrize("sharing", ["shared", "agent"])
def test_warm_up_explains_what_prompts_tell(model: PolicyModel, granularity: str, sharing: str) -> None:
    tokens = 1 if granularity == "action" else 3
    credit = _credit(model, granularity=granularity, critic={"sharing": sharing, "warmup_epochs": 200})
    data = _game(400, tokens).only(lambda episode: not episode.truncated, "cut")
    warm = credit.warm_up(data)
    assert set(warm["critics"]) == ({"shared/0"} if sharing == "shared" else {"agent/reasoner", "agent/actor"})
    assert warm["explained_variance"] > 0.5
    if sharing == "shared":
        assert warm["critics"]["shared/0"]["explained_variance"] == pytest.approx(warm["explained_variance"], abs=1e-5)
    _, fit = credit.estimate(_game(60, tokens, seed=1))
    assert fit()["explained_variance"] > 0.4


def test_warm_up_of_nothing_says_so(model: PolicyModel) -> None:
    nothing = {"epochs": 0, "explained_variance": None, "value_loss": None}
    assert _credit(model).warm_up(_round()) == {"critics": {"shared/0": nothing}, "explained_variance": None}


# -- whose critic ------------------------------------------------------------------------------------------------------


def _weights(critic: Critic) -> Tensor:
    return torch.cat([p.detach().flatten() for p in critic.parameters.values()])


def test_a_critic_of_one_agent_never_sees_another_agents_observations(model: PolicyModel) -> None:
    """Whatever the actor sees and says, the reasoner's critic and advantages come out the same, bit for bit."""
    found = []
    for change in (0, 1):
        data = _game(40)
        episodes = [
            _episode(
                [e.actions[0], _item("actor", [change + 3, *e.actions[1].prompt_ids], [change])],
                e.reward,
                task=e.task_id,
            )
            for e in data.episodes
        ]
        credit = _credit(model, critic={"sharing": "agent"}, gae_lambda=1.0)
        credit.warm_up(_round(*episodes))
        estimate, fit = credit.estimate(_round(*episodes))
        fit()
        critics = credit.critics
        found.append((_weights(critics["agent/reasoner"]), _weights(critics["agent/actor"]), estimate.advantage_U))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])
    # lambda = 1: the reasoner's advantage is the return minus its own value, up to what adding and taking off leaves
    np.testing.assert_allclose(found[0][2][0::2], found[1][2][0::2], rtol=0, atol=1e-12)
    assert np.abs(found[0][2][1::2] - found[1][2][1::2]).max() > 1e-4


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    """Another base model, whose hidden states are of another width."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model") / "wide"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    return PolicyModel(folder, ["two"], LoraOptions(), "cpu", seed=0)


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_agents_of_different_base_models_share_what_they_can(
    model: PolicyModel, wide_model: PolicyModel, granularity: str
) -> None:
    agents = ("first", "second", "third")
    models = {"first": model, "second": wide_model, "third": model}
    credit = _credit(models, agents, granularity=granularity, critic={"warmup_epochs": 100})
    assert {key: critic.agents for key, critic in credit.critics.items()} == {"shared/0": 2, "shared/1": 1}
    widths = {key: critic.parameters["hidden_weight"].shape[1] for key, critic in credit.critics.items()}
    assert widths == {"shared/0": 32 + 2, "shared/1": 48 + 1}
    data = _game(300, tokens=2, agents=agents)
    warm = credit.warm_up(data.only(lambda episode: not episode.truncated, "cut"))
    assert all(critic["explained_variance"] > 0.3 for critic in warm["critics"].values())
    estimate, fit = credit.estimate(data)
    metrics = fit()
    assert len(estimate.advantage_U) == len(data.items) * (2 if granularity == "token" else 1)
    assert set(metrics["critics"]) == {"shared/0", "shared/1"}
    assert all(metrics["agents"][agent] > 0.3 for agent in agents)


def test_an_agent_that_did_not_act_leaves_its_critic_alone(model: PolicyModel) -> None:
    credit = _credit(model, critic={"sharing": "agent"})
    before = _weights(credit.critics["agent/actor"]).clone()
    data = _round(_episode([_item("reasoner", [3], [1])], 1, ((),)), _episode([_item("reasoner", [4], [1])], 0, ((),)))
    _, fit = credit.estimate(data)
    metrics = fit()
    assert metrics["critics"]["agent/actor"] is None
    assert metrics["agents"]["actor"] is None
    assert metrics["critics"]["agent/reasoner"] is not None
    assert torch.equal(before, _weights(credit.critics["agent/actor"]))


def test_critics_depend_on_the_seed_and_their_own_name_only(model: PolicyModel) -> None:
    def weights(agents: Sequence[str], seed: int) -> Tensor:
        return _weights(_credit(model, agents, seed, critic={"sharing": "agent"}).critics["agent/actor"])

    assert torch.equal(weights(("actor",), 0), weights(("reasoner", "actor"), 0))
    assert not torch.equal(weights(("actor",), 0), weights(("actor",), 1))


# -- what is computed, and when ----------------------------------------------------------------------------------------


def test_the_base_model_runs_once_per_distinct_sequence() -> None:
    base = TokenIsFeature()
    credit = _credit(base)
    data = _round(*[_episode(_pair(), r, truncated=True) for r in (0, 1, 0)], _episode(_pair(7), 1))
    _, fit = credit.estimate(data)
    fit()
    credit.replay_advantages(data)
    # prompts 3, 5 and 7, and the actor's prompt with its token, after which three runs were cut
    assert sorted(base.passes) == [(3,), (5,), (5, 2), (7,)]
    credit.forget()
    credit.replay_advantages(data)
    assert len(base.passes) == 8


def test_tokens_take_one_pass_per_action_and_none_to_fit() -> None:
    base = TokenIsFeature()
    credit = _credit(base, **TOKENS)
    _, fit = credit.estimate(_round(_token_episode(truncated=True)))
    fit()
    assert sorted(base.passes) == [(5, 4), (9, 3, 1)]  # the last token only where something is asked after it


def test_an_estimate_alone_changes_nothing(model: PolicyModel) -> None:
    credit = _credit(model)
    data = _game(40)
    credit.warm_up(data.only(lambda episode: not episode.truncated, "cut"))
    before = _weights(credit.critics["shared/0"]).clone()
    state = credit.critics["shared/0"].generator.get_state().clone()
    _, fit = credit.estimate(data)
    assert torch.equal(before, _weights(credit.critics["shared/0"]))
    assert torch.equal(state, credit.critics["shared/0"].generator.get_state())
    fit()
    assert not torch.equal(before, _weights(credit.critics["shared/0"]))


# -- the sum over sources, on any round --------------------------------------------------------------------------------

_REWARD = st.sampled_from([0.0, 1.0, -2.0, 0.3])


@st.composite
def _rounds(draw: st.DrawFn) -> Round:
    episodes = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 4))
        acting = [draw(st.sampled_from(AGENTS)) for _ in range(count)]
        actions = [
            _item(agent, [draw(st.integers(0, 9))], [1] * draw(st.integers(1, 3)), acting[:k].count(agent))
            for k, agent in enumerate(acting)
        ]
        chain = tuple((k + 1,) if k + 1 < count else () for k in range(count))
        step = {"tool": (StepReward(draw(_REWARD), dict(enumerate(reversed(range(count))))),)}
        private = {"brief": {AGENTS[0]: draw(_REWARD)}}
        episodes.append(
            _episode(
                actions,
                draw(_REWARD),
                DIAMOND if count == 4 and draw(st.booleans()) else chain,
                draw(st.sampled_from(["x", "y"])),
                draw(st.booleans()),
                team={"bonus": draw(_REWARD)},
                step=step if draw(st.booleans()) else {},
                private=private if draw(st.booleans()) else {},
            )
        )
    return _round(*episodes)


@settings(max_examples=60, deadline=None)
@given(
    data=_rounds(),
    estimator=st.sampled_from(["gae", "grpo", "rloo", "dr_mas", "at_grpo", "rae", "hrpo"]),
    granularity=st.sampled_from(["action", "token"]),
)
def test_the_parts_by_reward_sum_to_the_advantage(data: Round, estimator: str, granularity: str) -> None:
    estimate = _estimate_by_hand(data, estimator, granularity)
    units = len(data.items) if granularity == "action" else sum(len(item.sampled_ids) for item in data.items)
    assert estimate.advantage_U.shape == (units,)
    earned = [episode.rewards for episode in data.episodes]
    named = {name for e in earned for name in (*e.team, *e.step, *e.private)}
    assert set(estimate.by_source) == {*named, BASELINE}
    np.testing.assert_allclose(sum(estimate.by_source.values()), estimate.advantage_U, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(data=_rounds(), granularity=st.sampled_from(["action", "token"]))
def test_what_a_team_reward_contributes_is_what_would_be_missing_without_it(data: Round, granularity: str) -> None:
    """The part of `bonus` by another way: the estimate with it less the estimate of the same round without it."""
    bare = [replace(e, rewards=replace(e.rewards, team={"reward": e.reward})) for e in data.episodes]
    whole = _estimate_by_hand(data, "gae", granularity)
    rest = _estimate_by_hand(_round(*bare), "gae", granularity)
    np.testing.assert_allclose(whole.by_source["bonus"], whole.advantage_U - rest.advantage_U, rtol=1e-9, atol=1e-9)


def _estimate_by_hand(data: Round, estimator: str, granularity: str) -> Estimate:
    gamma = 1.0 if estimators()[estimator].compares_depths else 0.9
    settings_by_hand = {"estimator": estimator, "granularity": granularity, "gamma": gamma}
    return _by_hand(**settings_by_hand)[0].estimate(data)[0]


def test_an_episode_without_a_private_reward_is_no_zero_in_the_mean_of_others() -> None:
    # the actor earned 1 and 3; a third episode has no such reward: 1 - 3 = -2, 3 - 1 = 2, and 0 where nothing is known
    episodes = []
    for value in (1.0, 3.0, None):
        own = {} if value is None else {"format": {"actor": value}}
        item = ActionItem("actor", (1,), (2,), (-1.0,), 1.0)
        episodes.append(EpisodeItem("t", 0.0, False, (item,), ((),), EpisodeRewards({"reward": 0.0}, {}, own)))
    data = episodes_to_round(episodes, {})
    np.testing.assert_allclose(centred_own_returns(data, 1.0)["format"], [-2.0, 2.0, 0.0])
    np.testing.assert_allclose(returns_by_source(data, 1.0)["format"], [1.0, 3.0, 0.0])
