"""Owns: the surrogate and its clips, the engine-mismatch weight, KL estimates, imitation and value losses.

Numbers are worked by hand; gradients are checked by finite differences in float64.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainers.losses import (
    action_ratio,
    explained_variance,
    imitation_loss,
    k3,
    kl_to_reference,
    mismatch_weight,
    policy_loss,
    value_loss,
)
from trainers.token_logprobs import hidden_to_logprobs

SEGMENTS = torch.tensor([0, 0, 1])  # two actions, of two tokens and of one
OLD = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)


def _loss(new_T: Tensor, advantage: list[float], **changes: object) -> tuple[Tensor, dict[str, float]]:
    ones = torch.ones(2, dtype=torch.float64)
    options: dict = {"norm": "sum", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": None, "total": 2.0}
    fields: dict = {"weight_A": ones, "factor_A": ones} | changes
    arrays = {k: fields.pop(k) for k in ("weight_A", "factor_A")}
    advantage_A = torch.tensor(advantage, dtype=torch.float64)
    return policy_loss(new_T, OLD, SEGMENTS, advantage_A, arrays["weight_A"], arrays["factor_A"], **(options | fields))


def test_the_ratio_of_an_action_is_over_the_sum_or_the_mean_of_its_tokens() -> None:
    new = OLD + torch.tensor([0.2, 0.4, -0.1])
    torch.testing.assert_close(
        action_ratio(new, OLD, SEGMENTS, 2, "sum"), torch.tensor([math.exp(0.6), math.exp(-0.1)], dtype=torch.float64)
    )
    torch.testing.assert_close(
        action_ratio(new, OLD, SEGMENTS, 2, "token"), torch.tensor([math.exp(0.3), math.exp(-0.1)], dtype=torch.float64)
    )


def test_a_ratio_never_overflows() -> None:
    assert torch.isfinite(action_ratio(OLD + 1e4, OLD, SEGMENTS, 2, "sum")).all()


def test_each_side_clips_at_its_own_bound() -> None:
    # ratio 2 and A = 1: 1.3.  ratio 0.5 and A = -1: clip(0.5) = 0.8 -> -0.8.  loss = -(1.3 - 0.8) / 2
    new = OLD + torch.tensor([math.log(2.0), 0.0, math.log(0.5)], dtype=torch.float64)
    loss, sums = _loss(new, [1.0, -1.0])
    assert loss.item() == pytest.approx(-0.25)
    assert sums == pytest.approx({"clipped": 2, "ratio_sum": 2.5, "ratio_max": 2.0})


def test_the_pessimistic_side_is_not_clipped() -> None:
    # ratio 2 and A = -1: min(-2, -1.3) = -2.  ratio 0.5 and A = 1: min(0.5, 0.8) = 0.5
    new = OLD + torch.tensor([math.log(2.0), 0.0, math.log(0.5)], dtype=torch.float64)
    loss, sums = _loss(new, [-1.0, 1.0])
    assert loss.item() == pytest.approx(0.75)
    assert sums["clipped"] == 0


def test_dual_clip_bounds_a_negative_surrogate_and_cuts_its_gradient() -> None:
    # ratio 5 and A = -1: -5 without, -3 with c = 3
    new = (OLD + torch.tensor([math.log(5.0), 0.0, 0.0], dtype=torch.float64)).requires_grad_()
    assert _loss(new, [-1.0, 0.0])[0].item() == pytest.approx(2.5)
    loss, sums = _loss(new, [-1.0, 0.0], dual_clip=3.0)
    assert loss.item() == pytest.approx(1.5)
    assert sums["clipped"] == 1
    loss.backward()
    assert new.grad.abs().sum().item() == 0.0


def test_weight_and_compounded_factor_multiply_once_and_get_no_gradient() -> None:
    weight = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    factor = torch.tensor([0.9, 1.1], dtype=torch.float64, requires_grad=True)
    new = OLD.clone().requires_grad_()
    loss, _ = _loss(new, [1.0, -2.0], weight_A=weight, factor_A=factor)
    assert loss.item() == pytest.approx(-(0.5 * 0.9 * 1.0 + 2.0 * 1.1 * -2.0) / 2)
    loss.backward()
    assert weight.grad is None
    assert factor.grad is None
    torch.testing.assert_close(new.grad, torch.tensor([-0.225, -0.225, 2.2], dtype=torch.float64))


def test_with_token_norm_an_action_gives_the_mean_gradient_of_its_tokens() -> None:
    new = OLD.clone().requires_grad_()
    _loss(new, [1.0, 1.0], norm="token")[0].backward()
    torch.testing.assert_close(new.grad, torch.tensor([-0.25, -0.25, -0.5], dtype=torch.float64))


def test_mismatch_weights_by_hand() -> None:
    behaviour = OLD - torch.tensor([0.5, 0.5, -1.0])  # log rho: 1.0 and -1.0
    weight = mismatch_weight(OLD, behaviour, SEGMENTS, 2, "sum", "truncate", 2.0)
    torch.testing.assert_close(weight, torch.tensor([2.0, math.exp(-1)], dtype=torch.float64))
    weight = mismatch_weight(OLD, behaviour, SEGMENTS, 2, "sum", "mask", 2.0)
    torch.testing.assert_close(weight, torch.zeros(2, dtype=torch.float64))
    weight = mismatch_weight(OLD, behaviour, SEGMENTS, 2, "token", "mask", 2.0)
    torch.testing.assert_close(weight, torch.tensor([math.exp(0.5), 0.0], dtype=torch.float64))
    weight = mismatch_weight(OLD, behaviour, SEGMENTS, 2, "sum", "none", 2.0)
    torch.testing.assert_close(weight, torch.ones(2, dtype=torch.float64))
    assert not mismatch_weight(OLD.clone().requires_grad_(), behaviour, SEGMENTS, 2, "sum", "mask", 4.0).requires_grad


def test_gradients_equal_finite_differences() -> None:
    new = (OLD + torch.tensor([0.05, -0.02, 0.4])).requires_grad_()  # one action inside the clip, one outside
    reference = OLD - 0.3
    weight = torch.tensor([0.7, 1.3], dtype=torch.float64)
    for norm in ("sum", "token"):
        assert torch.autograd.gradcheck(lambda x, n=norm: _loss(x, [1.5, -0.5], norm=n, weight_A=weight)[0], new)
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, reference, 3.0), new)
    assert torch.autograd.gradcheck(lambda x: imitation_loss(x, SEGMENTS, weight, 3.0), new)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, OLD * 3, 0.5), new)


def test_k3_by_hand_and_never_negative() -> None:
    torch.testing.assert_close(k3(torch.tensor([0.0, math.log(2.0)])), torch.tensor([0.0, 1.0 - math.log(2.0)]))
    assert (k3(torch.linspace(-5, 5, 101)) >= 0).all()


def test_k3_estimates_the_kl_of_two_distributions_without_bias() -> None:
    q, p = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = (q * (q / p).log()).sum()
    torch.testing.assert_close((q * k3((p / q).log())).sum(), exact)


def test_imitation_divides_by_the_token_count_of_the_whole_step() -> None:
    # weights 1 and 3: (1 * (1 + 2) + 3 * 0.5) / 9 = 0.5
    assert float(imitation_loss(OLD, SEGMENTS, torch.tensor([1.0, 3.0]), 9.0)) == pytest.approx(0.5)


def test_the_huber_loss_is_linear_on_both_sides() -> None:
    target = torch.zeros(1)
    assert float(value_loss(torch.tensor([3.0]), target, 1.0)) == pytest.approx(2.5)  # 1 * (3 - 0.5)
    assert float(value_loss(torch.tensor([-3.0]), target, 1.0)) == pytest.approx(2.5)
    assert float(value_loss(torch.tensor([0.5]), target, 1.0)) == pytest.approx(0.125)


def test_explained_variance_by_hand() -> None:
    target = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.full((4,), 7.0), target) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([0.0, 0.0, 3.0, 3.0]), target) == pytest.approx(1 - 0.5 / 1.25)
    assert explained_variance(target, torch.ones(4)) is None


@pytest.mark.parametrize("rows", [1, 2, 99])
def test_chunked_logprobs_equal_a_full_softmax_forward_and_backward(rows: int, monkeypatch: Any) -> None:
    vocabulary, width = 37, 5
    monkeypatch.setattr("trainers.token_logprobs._CHUNK_ELEMENTS", rows * vocabulary)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    token, temperature = torch.tensor([0, 36, 7, 7, 20]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    upstream = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    ours = hidden_to_logprobs(hidden, weight, bias, token, temperature)
    (our_gradient,) = torch.autograd.grad((ours * upstream).sum(), hidden)
    plain = ((hidden @ weight.T + bias) / temperature[:, None]).log_softmax(-1)[torch.arange(5), token]
    (gradient,) = torch.autograd.grad((plain * upstream).sum(), hidden)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_gradient, gradient)
