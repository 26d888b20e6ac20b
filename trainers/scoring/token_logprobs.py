"""Hidden states to the log-probs of given tokens and the entropy there, without ever holding logits for all of them.

The output layer is frozen, so gradients with respect to a hidden state can be formed while the logits of a chunk are
at hand. With p = softmax((W h + b) / T) and H its entropy:

    d log p_y / dh = (w_y - sum_v p_v w_v) / T
    d H / dh       = - (1 / T) sum_v p_v (log p_v + H) w_v

Invariant: only these [T, H] tensors are kept for the backward pass, instead of [T, V] logits: no memory that grows
with T x V, and no second pass through the output layer. It knows nothing of models or batches.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainers.scoring.fast_layers import linear

CHUNK_ELEMENTS = 2**23  # logits held at a time: 32 MiB in float32, twice, or three times with entropy

_Entropy = Literal["none", "value", "gradient"]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_T: Tensor,
        temperature_T: Tensor,
        entropy: _Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        wants_slope = ctx.needs_input_grad[0]
        wants_entropy_slope = wants_slope and entropy == "gradient"
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        logp_T = torch.empty(len(hidden_TH), dtype=dtype, device=hidden_TH.device)
        entropy_T = torch.empty_like(logp_T) if entropy != "none" else None
        slope_TH = torch.empty_like(hidden_TH) if wants_slope else None
        entropy_slope_TH = torch.empty_like(hidden_TH) if wants_entropy_slope else None
        step = max(1, CHUNK_ELEMENTS // len(weight_VH))
        for start in range(0, len(hidden_TH), step):
            rows = slice(start, start + step)
            temperature_C1 = temperature_T[rows, None]
            logits_CV = linear(hidden_TH[rows], weight_VH, bias_V).to(dtype).div_(temperature_C1)
            p_CV = logits_CV.softmax(dim=-1)
            # from the likeliest token; logsumexp would form the exponentials a second time, and more slowly
            normaliser_C1 = logits_CV.amax(dim=-1, keepdim=True) - p_CV.amax(dim=-1, keepdim=True).log()
            logp_T[rows] = (logits_CV.gather(1, token_T[rows, None]) - normaliser_C1).squeeze(1)
            scale_C1 = temperature_C1.to(weight_VH.dtype)
            if slope_TH is not None:
                mean_CH = linear(p_CV.to(weight_VH.dtype), weight_VH.T)
                slope_TH[rows] = (weight_VH[token_T[rows]] - mean_CH) / scale_C1
            if entropy_T is not None:
                # p log p is 0 for a token that is impossible, also where its logit is minus infinity
                surprise_CV = (normaliser_C1 - logits_CV).mul_(p_CV).nan_to_num_(nan=0.0)
                entropy_T[rows] = surprise_CV.sum(dim=-1)
                if entropy_slope_TH is not None:
                    tilt_CV = surprise_CV.sub_(p_CV.mul_(entropy_T[rows, None]))  # - p (log p + H)
                    entropy_slope_TH[rows] = linear(tilt_CV.to(weight_VH.dtype), weight_VH.T) / scale_C1
        ctx.save_for_backward(slope_TH, entropy_slope_TH)
        if entropy == "value":
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slope_TH, entropy_slope_TH = ctx.saved_tensors
        result_TH = gradients[0][:, None].to(slope_TH.dtype) * slope_TH
        if entropy_slope_TH is not None:
            result_TH = result_TH + gradients[1][:, None].to(slope_TH.dtype) * entropy_slope_TH
        return result_TH, None, None, None, None, None


def hidden_to_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_T: Tensor, temperature_T: Tensor
) -> Tensor:
    """log softmax((W h + b) / T)[token] for every row, shape [T], in float32 at least.

    Differentiable once with respect to `hidden_TH` only; W and b are taken as constants.
    """
    logp_T: Tensor
    logp_T, _ = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, token_T, temperature_T, "none"
    )
    return logp_T


def hidden_to_logprobs_and_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    token_T: Tensor,
    temperature_T: Tensor,
    *,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `hidden_to_logprobs`, and the entropy in nats of softmax((W h + b) / T) at every row; shapes [T], [T].

    Args:
        entropy_gradient: False where entropy is only reported: it then has no gradient, and saves forming one, which
            is one more product with the output layer.
    """
    logp_T: Tensor
    entropy_T: Tensor
    logp_T, entropy_T = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, token_T, temperature_T, "gradient" if entropy_gradient else "value"
    )
    return logp_T, entropy_T


@torch.no_grad()
def hidden_to_logprobs_and_greedy(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_T: Tensor, temperature_T: Tensor
) -> tuple[Tensor, Tensor]:
    """As `hidden_to_logprobs`, without a gradient, and whether greedy decoding would take the token; shapes [T], [T].

    Of tokens with equal logits greedy decoding takes the one of the lowest id. The temperature changes no order.
    """
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    logp_T = torch.empty(len(hidden_TH), dtype=dtype, device=hidden_TH.device)
    greedy_T = torch.empty(len(hidden_TH), dtype=torch.bool, device=hidden_TH.device)
    step = max(1, CHUNK_ELEMENTS // len(weight_VH))
    for start in range(0, len(hidden_TH), step):
        rows = slice(start, start + step)
        logits_CV = linear(hidden_TH[rows], weight_VH, bias_V).to(dtype)
        greedy_T[rows] = logits_CV.argmax(dim=-1) == token_T[rows]
        logits_CV.div_(temperature_T[rows, None])
        logp_T[rows] = logits_CV.gather(1, token_T[rows, None]).squeeze(1) - logits_CV.logsumexp(dim=-1)
    return logp_T, greedy_T
