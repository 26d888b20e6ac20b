"""Owns: the value function and what it reads.

Hidden states at any column are those of plain transformers; the critic's steps are those of a plain torch module with
the loss that the options name; warm-up is judged on episodes that it has not seen, and settles.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import VOCABULARY, save_tiny_llama
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainers.config import CriticOptions, ExperimentalOptions, LoraOptions
from trainers.credit.critic import Critic
from trainers.scoring.model import PolicyModel


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PolicyModel:
    """Its adapter is far from the base, and in use: features must not be those of the adapter."""
    model = PolicyModel(model_dir, ["a"], LoraOptions(rank=4, alpha=8.0), "cpu", seed=0)
    model.use("a")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.parameters("a").items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _sequences() -> list[tuple[int, ...]]:
    """Ragged, and three of them begin with the same ten tokens."""
    profile = tuple(range(10))
    shapes = [(profile, 6), (profile, 3), ((), 1), (profile, 1), ((), 9), ((), 17)]
    return [(*head, *((5 * k + 3 * i) % VOCABULARY for i in range(n))) for k, (head, n) in enumerate(shapes)]


def _critic(agents: int = 1, width: int = 3, seed: int = 0, **options: Any) -> Critic:
    experimental = {f"critic_{name}": options.pop(name) for name in ("loss", "huber_delta", "clip") if name in options}
    loss = ExperimentalOptions.model_validate(experimental)
    return Critic(width, agents, CriticOptions(**options), experimental=loss, seed=seed)


def _normal(count: int, width: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def _nobody(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


# -- what it reads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_features_are_the_hidden_states_of_plain_transformers_at_those_columns(
    model: PolicyModel, model_dir: Path, budget: int
) -> None:
    sequences = _sequences()
    columns = [range(len(s) // 2, len(s)) for s in sequences[:-1]] + [range(2, 5)]
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    ticks: list[int] = []
    found = model.features_at(sequences, columns, budget, ticks.append)
    for sequence, asked, hidden_CH in zip(sequences, columns, found, strict=True):
        with torch.no_grad():
            expected_LH = base.model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        assert hidden_CH.shape == (len(asked), model.width)
        assert hidden_CH.dtype == torch.float32
        assert not hidden_CH.requires_grad
        torch.testing.assert_close(hidden_CH, expected_LH[list(asked)], rtol=1e-4, atol=1e-5)
    assert sum(ticks) == len(sequences)


def test_the_features_of_a_sequence_are_those_at_its_last_column(model: PolicyModel) -> None:
    sequences = _sequences()
    everywhere = model.features_at(sequences, [range(len(s)) for s in sequences], 64)
    last_NH = torch.stack([hidden_LH[-1] for hidden_LH in everywhere])
    torch.testing.assert_close(model.features(sequences, 64), last_NH, rtol=1e-4, atol=1e-5)
    assert model.features([], 64).shape == (0, model.width)


def test_a_token_that_comes_later_is_not_seen(model: PolicyModel) -> None:
    first, second = (1, 2, 3, 4), (1, 2, 3, 9)
    seen = model.features_at([first, second], [range(4), range(4)], 64)
    torch.testing.assert_close(seen[0][:3], seen[1][:3], rtol=1e-4, atol=1e-5)
    assert float((seen[0][3] - seen[1][3]).abs().max()) > 0.01


# -- how it is fitted --------------------------------------------------------------------------------------------------


def test_before_any_fit_every_value_is_zero() -> None:
    critic = _critic(agents=2)
    assert critic.values(_normal(4), torch.tensor([0, 1, 1, 0])).tolist() == [0.0] * 4


def _plain_module_after_one_step(
    critic: Critic, features_NF: Tensor, targets_N: Tensor, kind: str, delta: float
) -> torch.nn.Sequential:
    """One full-batch Adam step of an ordinary module, with the loss written out from its definition."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    with torch.no_grad():
        for parameter, start in zip(module.parameters(), critic.parameters.values(), strict=True):
            parameter.copy_(start)
    standard_NF = (features_NF - features_NF.mean(0)) / features_NF.std(0, correction=0)
    error_N = module(torch.cat([standard_NF.clamp(-5, 5), torch.ones(len(targets_N), 1)], dim=1))[:, 0] - targets_N
    squared_N = error_N**2 / 2
    linear_N = delta * (error_N.abs() - delta / 2)
    loss_N = squared_N if kind == "squared" else torch.where(error_N.abs() <= delta, squared_N, linear_N)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    loss_N.mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return module


@pytest.mark.parametrize(("kind", "delta"), [("squared", 1.0), ("huber", 1.0), ("huber", 0.25)])
def test_a_fit_is_a_step_of_the_named_loss(kind: str, delta: float) -> None:
    options = {"loss": kind, "epochs": 1} | ({"huber_delta": delta} if kind == "huber" else {})
    critic = _critic(**options)
    with torch.no_grad():  # an output of zero would give the hidden layer no gradient
        critic.parameters["output_weight"].copy_(_normal(1, 64, seed=9) * 0.3)
    features_NF, targets_N = _normal(20), torch.linspace(-0.5, 0.5, 20)  # 1 apart: in units of the reward
    expected = _plain_module_after_one_step(critic, features_NF, targets_N, kind, delta)
    critic.fit(features_NF, _nobody(20), targets_N)
    for ours, theirs in zip(critic.parameters.values(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def _moved(**options: Any) -> float:
    """How far 100 passes move the value of a single observation from 0 towards its target of 10."""
    critic = _critic(epochs=100, **options)
    critic.fit(_normal(1), _nobody(1), torch.tensor([10.0]))
    return float(critic.values(_normal(1), _nobody(1)))


def test_a_clipped_fit_stops_pulling_once_a_value_has_moved_that_far() -> None:
    free, clipped = _moved(), _moved(clip=0.5)
    assert free > 5
    # Adam's momentum (0.9) carries a value on for some steps after its gradient has become zero
    assert 0.5 < clipped < 2
    assert _moved(clip=100.0) == free


def test_the_clip_counts_from_where_each_round_began() -> None:
    critic = _critic(epochs=100, clip=0.5)
    after = [0.0]
    for _ in range(3):
        critic.fit(_normal(1), _nobody(1), torch.tensor([10.0]))
        after.append(float(critic.values(_normal(1), _nobody(1))))
    steps = [b - a for a, b in pairwise(after)]
    assert all(step > 0.5 for step in steps)


def test_no_epochs_fit_nothing() -> None:
    critic = _critic(epochs=0)
    assert critic.fit(_normal(5), _nobody(5), torch.ones(5)) is None
    assert critic.values(_normal(5), _nobody(5)).tolist() == [0.0] * 5


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (64, 1), (130, 3), (4096, 64), (10_000, 64)])
def test_a_pass_takes_64_observations_a_step_and_at_most_64_steps(count: int, steps: int) -> None:
    critic = _critic(epochs=1)
    critic.fit(_normal(count), _nobody(count), torch.ones(count))
    assert critic.optimizer.state[critic.parameters["output_bias"]]["step"] == steps


def test_values_do_not_depend_on_what_else_is_asked_for() -> None:
    critic = _critic()
    features_NF = _normal(10_000)
    critic.fit(features_NF[:100], _nobody(100), features_NF[:100, 0])
    together_N = critic.values(features_NF, _nobody(10_000))
    assert together_N.shape == (10_000,)
    torch.testing.assert_close(critic.values(features_NF[9000:9010], _nobody(10)), together_N[9000:9010])


def test_agents_that_share_a_critic_are_told_apart_where_their_features_cannot_tell() -> None:
    critic = _critic(agents=2, epochs=300)
    features_NF, agent_N = torch.ones(8, 3), torch.tensor([0, 1] * 4)
    critic.fit(features_NF, agent_N, agent_N.float())
    torch.testing.assert_close(critic.values(features_NF, agent_N), agent_N.float(), rtol=0, atol=0.1)


# -- warm-up -----------------------------------------------------------------------------------------------------------


def _episodes(episodes: int, each: int = 2) -> Tensor:
    return torch.repeat_interleave(torch.arange(episodes), each)


def test_whole_episodes_are_held_out_a_fifth_of_them() -> None:
    critic = _critic()
    episode_N = torch.tensor([3, 3, 7, 1, 1, 1, 9, 2, 2, 2, 2, 5, 4, 6, 8, 0])  # ten episodes
    held_N = critic.held_out(episode_N)
    held, others = set(episode_N[held_N].tolist()), set(episode_N[~held_N].tolist())
    assert len(held) == 2
    assert not held & others
    again = {tuple(critic.held_out(episode_N).tolist()) for _ in range(10)}
    assert len(again) > 1  # which ones is drawn
    assert not critic.held_out(torch.tensor([0, 1, 2, 3])).any()  # four episodes have no whole fifth


def test_warm_up_learns_what_can_be_read_from_features_and_settles() -> None:
    critic = _critic(warmup_epochs=1000)
    features_NF, episode_N = _normal(600), _episodes(300)
    targets_N = 2 + (features_NF[:, 0] > 0).float() + 0.1 * features_NF[:, 1]
    held_N = critic.held_out(episode_N)
    result = critic.warm_up(features_NF, _nobody(600), targets_N, held_N)
    assert result["explained_variance"] > 0.85
    assert 5 < result["epochs"] < 1000
    error_M = critic.values(features_NF[held_N], _nobody(120)) - targets_N[held_N]
    spread_M = targets_N[held_N] - targets_N[held_N].mean()
    # by hand: 1 - Var(error) / Var(target), and the loss of errors below 1 is half their square
    assert result["explained_variance"] == pytest.approx(
        1 - float((error_M - error_M.mean()).square().mean() / spread_M.square().mean()), abs=1e-5
    )
    assert float(error_M.abs().max()) < 1
    assert result["value_loss"] == pytest.approx(float(error_M.square().mean()) / 2, rel=1e-4)


def test_warm_up_gives_up_on_noise_and_keeps_the_mean() -> None:
    features_NF, episode_N = _normal(200, 20), _episodes(100)
    critic = _critic(width=20, warmup_epochs=1000)
    targets_N = 5 + _normal(200, 1, seed=1)[:, 0]
    held_N = critic.held_out(episode_N)
    result = critic.warm_up(features_NF, _nobody(200), targets_N, held_N)
    assert result["epochs"] < 50
    assert result["explained_variance"] < 0.2
    values_N = critic.values(features_NF, _nobody(200))
    assert float(values_N.mean()) == pytest.approx(float(targets_N[~held_N].mean()), abs=0.5)


def test_without_held_out_episodes_the_value_is_the_mean_return() -> None:
    critic = _critic()
    targets_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    held_N = critic.held_out(_episodes(3))
    result = critic.warm_up(_normal(6), _nobody(6), targets_N, held_N)
    assert result == {"epochs": 0, "explained_variance": None, "value_loss": None}
    torch.testing.assert_close(critic.values(_normal(6), _nobody(6)), torch.full((6,), 4 / 6))


def test_what_is_held_out_never_moves_the_weights() -> None:
    """With one pass only, held-out returns can choose between two sets of weights, but not change either."""
    features_NF, episode_N = _normal(100), _episodes(50)
    targets_N = features_NF[:, 0]
    found = []
    for scale in (1.0, 3.0):
        critic = _critic(warmup_epochs=1, lr=0.01)
        held_N = critic.held_out(episode_N)
        told_N = torch.where(held_N, scale * targets_N, targets_N)
        result = critic.warm_up(features_NF, _nobody(100), told_N, held_N)
        assert result["explained_variance"] > 0
        found.append({name: p.detach().clone() for name, p in critic.parameters.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("unit", [1 / 128, 64.0])  # powers of two, so that no rounding differs
def test_what_is_learned_of_rewards_in_another_unit_is_the_same_in_that_unit(unit: float) -> None:
    features_NF = _normal(200)
    fits = []
    for scale in (1.0, unit):
        critic = _critic()
        targets_N = scale * (features_NF[:, 0] > 0).float()
        result = critic.warm_up(features_NF, _nobody(200), targets_N, critic.held_out(_episodes(100)))
        loss = critic.fit(features_NF, _nobody(200), targets_N.flip(0))
        assert loss is not None
        fits.append((result["explained_variance"], loss / scale**2, critic.values(features_NF, _nobody(200)) / scale))
    assert fits[0][0] > 0.5
    assert fits[0][:2] == pytest.approx(fits[1][:2])
    torch.testing.assert_close(fits[0][2], fits[1][2])


def test_targets_that_come_to_lie_further_apart_leave_the_values_what_they_were() -> None:
    features_NF, critic = _normal(64), _critic(epochs=8)
    critic.fit(features_NF, _nobody(64), 0.01 * features_NF[:, 0].sign())
    before_N = critic.values(features_NF, _nobody(64))
    critic.options = CriticOptions(epochs=0)
    critic.fit(features_NF, _nobody(64), features_NF[:, 0].sign())
    assert float(critic.statistics["unit"]) == 2.0
    assert float(before_N.abs().max()) > 1e-4
    torch.testing.assert_close(critic.values(features_NF, _nobody(64)), before_N)


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    def weights(seed: int) -> Tensor:
        critic = _critic(seed=seed)
        episode_N, features_NF = _episodes(100), _normal(200)
        critic.warm_up(features_NF, _nobody(200), features_NF[:, 0], critic.held_out(episode_N))
        critic.fit(features_NF, _nobody(200), features_NF[:, 1])
        return torch.cat([p.detach().flatten() for p in critic.parameters.values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
