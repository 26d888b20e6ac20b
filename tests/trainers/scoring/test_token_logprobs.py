"""Owns: log-probs and entropy from hidden states, chunk by chunk, forward and backward.

The independent implementation is torch's own log_softmax over all logits at once; float64.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainers.scoring.token_logprobs import hidden_to_logprobs, hidden_to_logprobs_and_entropy

VOCABULARY, WIDTH, ROWS = 37, 5, 7
TOKENS = torch.tensor([0, 36, 7, 7, 20, 1, 35])
TEMPERATURES = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.3, 0.2], dtype=torch.float64)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HIDDEN = drawn(3, ROWS, WIDTH).requires_grad_()
WEIGHT = drawn(4, VOCABULARY, WIDTH)
BIASES = {"bias": drawn(5, VOCABULARY), "no bias": None}


def plain(hidden_TH: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = hidden_TH @ WEIGHT.T
    if bias_V is not None:
        logits = logits + bias_V
    logp = (logits / TEMPERATURES[:, None]).log_softmax(-1)
    return logp[torch.arange(ROWS), TOKENS], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, ROWS, 99])
@pytest.mark.parametrize("bias", list(BIASES))
def test_chunked_equals_a_full_softmax_forward_and_backward(
    rows: int, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.scoring.token_logprobs.CHUNK_ELEMENTS", rows * VOCABULARY + 2)
    up_logp, up_entropy = drawn(6, ROWS), drawn(7, ROWS)
    expected_logp, expected_entropy = plain(HIDDEN, BIASES[bias])
    logp, entropy = hidden_to_logprobs_and_entropy(HIDDEN, WEIGHT, BIASES[bias], TOKENS, TEMPERATURES)
    torch.testing.assert_close(logp, expected_logp)
    torch.testing.assert_close(entropy, expected_entropy)
    (expected,) = torch.autograd.grad((expected_logp * up_logp + expected_entropy * up_entropy).sum(), HIDDEN)
    (ours,) = torch.autograd.grad((logp * up_logp + entropy * up_entropy).sum(), HIDDEN)
    torch.testing.assert_close(ours, expected)
    alone = hidden_to_logprobs(HIDDEN, WEIGHT, BIASES[bias], TOKENS, TEMPERATURES)
    (expected,) = torch.autograd.grad((plain(HIDDEN, BIASES[bias])[0] * up_logp).sum(), HIDDEN)
    (ours,) = torch.autograd.grad((alone * up_logp).sum(), HIDDEN)
    torch.testing.assert_close(alone, expected_logp)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("bias", list(BIASES))
def test_gradients_equal_finite_differences(bias: str) -> None:
    def both(hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_to_logprobs_and_entropy(hidden_TH, WEIGHT, BIASES[bias], TOKENS, TEMPERATURES)

    assert torch.autograd.gradcheck(both, HIDDEN)
    assert torch.autograd.gradcheck(lambda h: hidden_to_logprobs(h, WEIGHT, BIASES[bias], TOKENS, TEMPERATURES), HIDDEN)


def test_entropy_by_hand() -> None:
    # logits 0, 0, log 2 at T = 1: p = 1/4, 1/4, 1/2, H = 2 * log 4 / 4 + log 2 / 2 = 1.5 log 2. All logits 0: log 3.
    weight = torch.tensor([[0.0], [0.0], [math.log(2)]], dtype=torch.float64)
    hidden = torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64)
    temperature = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)  # the third: log 4 / 2 is the first again
    token = torch.tensor([2, 0, 0])
    logp, entropy = hidden_to_logprobs_and_entropy(hidden, weight, None, token, temperature)
    expected = torch.tensor([1.5 * math.log(2), math.log(3), 1.5 * math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(entropy, expected)
    torch.testing.assert_close(logp.exp(), torch.tensor([1 / 2, 1 / 3, 1 / 4], dtype=torch.float64))


def test_an_impossible_token_adds_no_entropy_and_no_nan() -> None:
    hidden = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [5.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    logp, entropy = hidden_to_logprobs_and_entropy(hidden, weight, bias, torch.tensor([0]), ones)
    assert entropy.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(logp.sum() + entropy.sum(), hidden)
    assert gradient.item() == pytest.approx(1.0)  # of log p: w_0 - (w_0 + w_1) / 2 = 1; of H at its maximum: 0


def test_entropy_that_is_only_reported_has_the_same_value_and_no_gradient() -> None:
    arguments = HIDDEN, WEIGHT, BIASES["bias"], TOKENS, TEMPERATURES
    logp, entropy = hidden_to_logprobs_and_entropy(*arguments, entropy_gradient=False)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, plain(HIDDEN, BIASES["bias"])[1])
    (ours,) = torch.autograd.grad(logp.sum(), HIDDEN)
    (expected,) = torch.autograd.grad(hidden_to_logprobs(*arguments).sum(), HIDDEN)
    assert torch.equal(ours, expected)


def test_output_layer_and_temperature_are_constants() -> None:
    weight, bias = WEIGHT.clone().requires_grad_(), drawn(5, VOCABULARY).requires_grad_()
    temperature = TEMPERATURES.clone().requires_grad_()
    logp, entropy = hidden_to_logprobs_and_entropy(HIDDEN, weight, bias, TOKENS, temperature)
    leaves = (HIDDEN, weight, bias, temperature)
    reached = torch.autograd.grad(logp.sum() + entropy.sum(), leaves, allow_unused=True)
    assert [g is not None for g in reached] == [True, False, False, False]


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    logp = hidden_to_logprobs(HIDDEN, WEIGHT, None, TOKENS, TEMPERATURES)
    (first,) = torch.autograd.grad(logp.square().sum(), HIDDEN, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(first.sum())


def test_bfloat16_gives_float32_close_to_the_exact_one() -> None:
    hidden = HIDDEN.detach().bfloat16().requires_grad_()
    logp, entropy = hidden_to_logprobs_and_entropy(hidden, WEIGHT.bfloat16(), None, TOKENS, TEMPERATURES.float())
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    (gradient,) = torch.autograd.grad(logp.sum() + entropy.sum(), hidden)
    expected_logp, expected_entropy = plain(HIDDEN, None)
    (expected,) = torch.autograd.grad(expected_logp.sum() + expected_entropy.sum(), HIDDEN)
    # 8 bits of mantissa: logits of about 5 / 0.2 are off by 25 / 256
    assert (logp - expected_logp).abs().max() < 0.2
    assert (entropy - expected_entropy).abs().max() < 0.1
    assert gradient.dtype == torch.bfloat16
    assert (gradient - expected).norm() < 0.05 * expected.norm()
