"""Owns: log-ratios per unit, the clipped surrogate, KL estimates, value losses and explained variance.

Numbers are worked by hand; gradients are checked by finite differences in float64.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from trainers.config import Granularity
from trainers.credit.value_loss import explained_variance, value_loss
from trainers.objective.losses import kl_to_reference, ppo_loss, shaped_loss
from trainers.scoring.logratios import LogprobNorm, k3, log_ratio, tokens_to_action

ROW = torch.tensor([0, 0, 1])  # two actions, of two tokens and of one


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


OLD = f64(-1.0, -2.0, -0.5)


def at_ratios(*ratios: float) -> Tensor:
    return torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)


def gradient(output: Tensor, leaf: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(output.sum(), leaf)
    return result


def test_an_action_is_the_sum_of_its_tokens_or_that_over_its_tokens_or_over_its_words() -> None:
    values = f64(0.2, 0.4, -0.1)
    torch.testing.assert_close(tokens_to_action(values, ROW, 2, "sum"), f64(0.6, -0.1))
    torch.testing.assert_close(tokens_to_action(values, ROW, 2, "token"), f64(0.3, -0.1))
    # three words and none; an action without a word counts as one
    torch.testing.assert_close(tokens_to_action(values, ROW, 2, "word", torch.tensor([3, 0])), f64(0.2, -0.1))


def test_words_are_needed_by_the_word_norm_and_refused_by_the_others() -> None:
    with pytest.raises(ValueError, match="'word' needs the words"):
        tokens_to_action(OLD, ROW, 2, "word")
    with pytest.raises(ValueError, match="'sum' does not read the words"):
        tokens_to_action(OLD, ROW, 2, "sum", torch.tensor([1, 1]))


def test_tokens_of_an_action_need_not_lie_together() -> None:
    torch.testing.assert_close(tokens_to_action(f64(1, 10, 2, 20), torch.tensor([0, 1, 0, 1]), 2, "sum"), f64(3, 30))


def test_a_unit_is_an_action_or_a_token() -> None:
    new = OLD + f64(0.2, 0.4, -0.1)
    torch.testing.assert_close(log_ratio(new, OLD, ROW, 2, "action", "sum"), f64(0.6, -0.1))
    torch.testing.assert_close(log_ratio(new, OLD, ROW, 2, "action", "token"), f64(0.3, -0.1))
    torch.testing.assert_close(log_ratio(new, OLD, ROW, 2, "token", "sum"), f64(0.2, 0.4, -0.1))


def test_a_log_ratio_is_held_within_20_nats() -> None:
    new = OLD + f64(30, 40, -70)
    assert log_ratio(new, OLD, ROW, 2, "action", "sum").tolist() == [20, -20]
    assert log_ratio(new, OLD, ROW, 2, "token", "sum").tolist() == [20, 20, -20]


def test_each_side_clips_at_its_own_bound_and_cuts_the_gradient() -> None:
    # A = 1, r = 2: min(2, 1.3) = 1.3.  A = -1, r = 0.5: min(-0.5, -0.8) = -0.8
    x = at_ratios(2, 0.5)
    loss, cut = ppo_loss(x, f64(1, -1), 0.2, 0.3, None)
    torch.testing.assert_close(loss, f64(-1.3, 0.8))
    assert cut.tolist() == [True, True]
    assert gradient(loss, x).tolist() == [0, 0]


def test_the_pessimistic_side_is_not_clipped() -> None:
    # A = -1, r = 2: min(-2, -1.3) = -2.  A = 1, r = 0.5: min(0.5, 0.8) = 0.5.  d(-r A)/dlog r = -r A
    x = at_ratios(2, 0.5)
    loss, cut = ppo_loss(x, f64(-1, 1), 0.2, 0.3, None)
    torch.testing.assert_close(loss, f64(2, -0.5))
    torch.testing.assert_close(gradient(loss, x), f64(2, -0.5))
    assert cut.tolist() == [False, False]


def test_at_a_bound_exactly_the_gradient_is_still_whole() -> None:
    # bounds are made from the ratios, so that they are equal in floating point: r - 1 is exact for r in [0.5, 2]
    x = at_ratios(1.25, 0.75, 3.0)
    high, low, dual = x.detach().exp().tolist()
    loss, cut = ppo_loss(x, f64(1, -1, -1), 1 - low, high - 1, dual)
    assert cut.tolist() == [False, False, False]
    torch.testing.assert_close(gradient(loss, x), f64(-1.25, 0.75, 3.0))
    past = (x.detach() + f64(1e-12, -1e-12, 1e-12)).requires_grad_()
    loss, cut = ppo_loss(past, f64(1, -1, -1), 1 - low, high - 1, dual)
    assert cut.tolist() == [True, True, True]
    assert gradient(loss, past).tolist() == [0, 0, 0]


def test_a_shaped_token_pulls_as_its_probability_over_that_plus_gamma() -> None:
    # p = 0.1, 0.4 of the first action, 0.9 of the second; gamma 0.1: 0.5, 0.8, 0.9; the gradient to log p is
    # -A p gamma / (p + gamma)^2: 0.25, 0.16, 0.09
    x = at_ratios(0.1, 0.4, 0.9)
    by_token = shaped_loss(x, f64(1, 2, -1), ROW, 2, granularity="token", shaping=0.1)
    torch.testing.assert_close(by_token, f64(-0.5, -1.6, 0.9))
    torch.testing.assert_close(gradient(by_token, x), f64(-0.25, -0.32, 0.09))
    by_action = shaped_loss(x, f64(2, -1), ROW, 2, granularity="action", shaping=0.1)
    torch.testing.assert_close(by_action, f64(-1.3, 0.9))
    torch.testing.assert_close(gradient(by_action, x), f64(-0.25, -0.16, 0.09))


def test_dual_clip_bounds_a_negative_surrogate_only() -> None:
    # c = 3.  A = -1, r = 5: max(-5, -3) = -3.  A = -1, r = 2: -2.  A = 1, r = 5: min(5, 1.3) = 1.3
    x = at_ratios(5, 2, 5)
    loss, cut = ppo_loss(x, f64(-1, -1, 1), 0.2, 0.3, 3.0)
    torch.testing.assert_close(loss, f64(3, 2, -1.3))
    torch.testing.assert_close(gradient(loss, x), f64(0, 2, 0))
    assert cut.tolist() == [True, False, True]


def test_an_advantage_of_zero_is_neither_loss_nor_cut() -> None:
    x = at_ratios(5, 0.1)
    loss, cut = ppo_loss(x, f64(0, 0), 0.2, 0.3, 3.0)
    assert loss.tolist() == [0, 0]
    assert gradient(loss, x).tolist() == [0, 0]
    assert cut.tolist() == [False, False]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_surrogate_is_that_of_the_papers(dual_clip: float | None) -> None:
    # PPO equation 7 and the dual clip written as there, in plain Python
    for ratio in (0.1, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 50.0):
        for advantage in (-2.0, -0.5, 0.0, 0.5, 2.0):
            expected = min(ratio * advantage, max(0.8, min(1.28, ratio)) * advantage)
            if dual_clip is not None and advantage < 0:
                expected = max(expected, dual_clip * advantage)
            loss, _ = ppo_loss(f64(math.log(ratio)), f64(advantage), 0.2, 0.28, dual_clip)
            assert loss.item() == pytest.approx(-expected)


def test_bounds_keep_the_precision_of_the_inputs() -> None:
    loss, _ = ppo_loss(at_ratios(2), f64(1), 0.2, 0.28, None)
    assert loss.item() == -1.28  # not float32's 1.27999997


@pytest.mark.parametrize("granularity", ["action", "token"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_ratios_of_e_to_the_100_are_finite_in_float32_forward_and_backward(
    granularity: Granularity, dual_clip: float | None
) -> None:
    for gap in (100.0, -100.0):
        for advantage in (1.0, -1.0):
            new = (OLD.float() + gap).requires_grad_()
            ratio_U = log_ratio(new, OLD.float(), ROW, 2, granularity, "sum")
            loss, _ = ppo_loss(ratio_U, torch.full_like(ratio_U, advantage), 0.2, 0.28, dual_clip)
            total = loss.sum() + kl_to_reference(new, OLD.float(), OLD.float()).sum()
            assert torch.isfinite(total)
            assert torch.isfinite(gradient(total, new)).all()


@pytest.mark.parametrize("norm", ["sum", "token"])
def test_at_ratio_1_the_gradient_is_that_of_reinforce(norm: LogprobNorm) -> None:
    # d(-r A)/dlog pi = -A at r = 1, and REINFORCE descends -A log pi(a)
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    logp_T = logits.log_softmax(-1)[torch.arange(3), torch.tensor([4, 0, 2])]
    advantage = f64(0.7, -1.3)
    loss, _ = ppo_loss(log_ratio(logp_T, logp_T.detach(), ROW, 2, "action", norm), advantage, 0.2, 0.28, 3.0)
    ours = gradient(loss, logits)
    logp_T = logits.log_softmax(-1)[torch.arange(3), torch.tensor([4, 0, 2])]
    tokens = 2 if norm == "token" else 1
    reinforce = -(0.7 * (logp_T[0] + logp_T[1]) / tokens - 1.3 * logp_T[2])
    torch.testing.assert_close(ours, gradient(reinforce, logits))


def test_with_the_token_norm_an_action_gives_the_mean_gradient_of_its_tokens() -> None:
    new = OLD.clone().requires_grad_()
    loss, _ = ppo_loss(log_ratio(new, OLD, ROW, 2, "action", "token"), f64(1, 1), 0.2, 0.28, None)
    torch.testing.assert_close(gradient(loss, new), f64(-0.5, -0.5, -1))


def test_for_actions_of_one_token_both_granularities_agree() -> None:
    new = OLD + f64(0.3, -0.4, 0.1)
    row = torch.arange(3)
    torch.testing.assert_close(
        log_ratio(new, OLD, row, 3, "action", "token"), log_ratio(new, OLD, row, 3, "token", "token")
    )


def test_no_gradient_reaches_advantages_references_old_policies_or_targets() -> None:
    advantage, old, other = (f64(1, -2).requires_grad_() for _ in range(3))
    new = f64(0.1, 0.05).requires_grad_()
    loss, _ = ppo_loss(new, advantage, 0.2, 0.28, 3.0)
    total = loss.sum() + kl_to_reference(new, other, old).sum() + value_loss(new, other, "huber", 1.0, old, 0.2)
    reached = torch.autograd.grad(total, (new, advantage, old, other), allow_unused=True)
    assert [g is not None for g in reached] == [True, False, False, False]


@pytest.mark.parametrize("granularity", ["action", "token"])
@pytest.mark.parametrize("norm", ["sum", "token", "word"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_surrogates_gradient_equals_finite_differences(
    granularity: Granularity, norm: LogprobNorm, dual_clip: float | None
) -> None:
    words = torch.tensor([3, 2]) if norm == "word" else None
    # the last unit is beyond a dual clip of 1.5: exp(0.9 / 2) = 1.57 or more; none is within 1e-3 of a bound
    new = (OLD + f64(0.05, -0.02, 0.9)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        ratio_U = log_ratio(x, OLD, ROW, 2, granularity, norm, words)
        return ppo_loss(ratio_U, f64(1.5, -0.5, -0.7)[-len(ratio_U) :], 0.2, 0.28, dual_clip)[0]

    assert torch.autograd.gradcheck(loss, new)


def test_the_kl_penaltys_gradient_equals_finite_differences() -> None:
    new = (OLD + f64(0.05, -0.02, 0.9)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, OLD - 0.3), new)
    # 1.1: the old policy's own place would be a ratio of 1 only by chance
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, OLD - 0.3, OLD * 1.1), new)


@pytest.mark.parametrize("kind", ["huber", "squared"])
def test_the_value_losses_gradients_equal_finite_differences(kind: Literal["huber", "squared"]) -> None:
    values = f64(0.1, 1.9, -2.0, 0.45).requires_grad_()
    targets, old = f64(0.3, 0.2, 0.1, 0.6), f64(0.0, 1.5, -1.0, 0.4)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, targets, kind, 1.0), values)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, targets, kind, 1.0, old, 0.2), values)


def test_k3_by_hand_and_never_negative() -> None:
    # x = log 2: 2 - log 2 - 1
    torch.testing.assert_close(k3(f64(0.0, math.log(2.0))), f64(0.0, 1.0 - math.log(2.0)))
    assert (k3(torch.linspace(-5, 5, 101)) >= 0).all()


def test_k3_of_a_small_log_ratio_keeps_its_digits_in_float32() -> None:
    # x^2 / 2 + x^3 / 6 = 5.0002e-7 at x = 1e-3; exp(x) - x - 1 in float32 is a multiple of 6e-8
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(5.0016667e-7, rel=2e-3)


def test_k3_estimates_the_kl_of_two_distributions_without_bias() -> None:
    q, p = f64(0.7, 0.2, 0.1), f64(0.5, 0.3, 0.2)
    torch.testing.assert_close((q * k3((p / q).log())).sum(), (q * (q / p).log()).sum())


def test_the_kl_penalty_by_hand() -> None:
    # new twice as likely as the reference: x = -log 2, k3 = 0.5 + log 2 - 1.
    # Sampled by a policy that found the token half as likely as new: twice that
    new, reference = f64(math.log(0.5)), f64(math.log(0.25))
    expected = math.log(2) - 0.5
    assert kl_to_reference(new, reference).item() == pytest.approx(expected)
    assert kl_to_reference(new, reference, reference).item() == pytest.approx(2 * expected)


def test_the_huber_loss_is_linear_on_both_sides_and_squared_is_not() -> None:
    # delta 1, error 3: 1 * (3 - 0.5).  error 0.5: 0.125.  squared: 9 / 2
    target = f64(0.0)
    assert value_loss(f64(3.0), target, "huber", 1.0).item() == pytest.approx(2.5)
    assert value_loss(f64(-3.0), target, "huber", 1.0).item() == pytest.approx(2.5)
    assert value_loss(f64(3.0), target, "squared", 1.0).item() == pytest.approx(4.5)
    # delta 2, error 3: 2 * (3 - 1)
    assert value_loss(f64(-3.0), target, "huber", 2.0).item() == pytest.approx(4.0)


def test_both_value_losses_agree_near_zero_and_are_means() -> None:
    # errors 0.5 and 0: the mean of 0.125 and 0
    for kind in ("huber", "squared"):
        assert value_loss(f64(0.5, 1.0), f64(0.0, 1.0), kind, 1.0).item() == pytest.approx(0.0625)


def test_a_value_that_moved_past_the_clip_towards_its_target_gets_no_gradient() -> None:
    # old 0, clip 0.2, target 1.  v = 0.5: max(0.5^2, 0.8^2) / 2 = 0.32, flat.  v = -0.5: max(1.5^2, 1.2^2) / 2 = 1.125.
    # v = 0.1: both 0.9^2 / 2 = 0.405.  slopes: 0, -1.5, -0.9, each a third
    values = f64(0.5, -0.5, 0.1).requires_grad_()
    loss = value_loss(values, torch.ones(3).double(), "squared", 1.0, torch.zeros(3).double(), 0.2)
    assert loss.item() == pytest.approx((0.32 + 1.125 + 0.405) / 3)
    torch.testing.assert_close(gradient(loss, values), f64(0, -0.5, -0.3))


def test_a_clipped_value_loss_needs_both_old_values_and_clip() -> None:
    with pytest.raises(ValueError, match="needs both"):
        value_loss(OLD, OLD, "huber", 1.0, OLD)
    with pytest.raises(ValueError, match="needs both"):
        value_loss(OLD, OLD, "huber", 1.0, clip=0.2)


def test_explained_variance_by_hand() -> None:
    target = f64(0, 1, 2, 3)  # variance 1.25
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.full((4,), 7.0), target) == pytest.approx(0.0)
    # errors 0, 1, -1, 0: variance 0.5
    assert explained_variance(f64(0, 0, 3, 3), target) == pytest.approx(1 - 0.5 / 1.25)
    assert explained_variance(target, torch.ones(4)) is None
    assert explained_variance(target[:1], target[:1]) is None
    assert explained_variance(target[:0], target[:0]) is None
