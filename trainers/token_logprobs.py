"""Hidden states to the log-probs of given tokens, without ever holding logits for all of them.

The output layer is frozen, so the gradient of a log-prob with respect to its hidden state,
(w_y - sum_v p_v w_v) / T, can be formed while the logits of a chunk are at hand. Only that [T, H] tensor is kept
for the backward pass, instead of [T, V] logits: no memory that grows with T x V, and no second pass through the
output layer.
It knows nothing of models or batches.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 2**23  # logits held at a time: 32 MiB in float32


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_T: Tensor, temperature_T: Tensor
    ) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        logp_T = torch.empty(
            len(hidden_TH), dtype=torch.promote_types(hidden_TH.dtype, torch.float32), device=hidden_TH.device
        )
        slope_TH = torch.empty_like(hidden_TH) if wants_gradient else None
        step = max(1, _CHUNK_ELEMENTS // len(weight_VH))
        for start in range(0, len(hidden_TH), step):
            rows = slice(start, start + step)
            temperature_C1 = temperature_T[rows, None]
            logits_CV = torch.nn.functional.linear(hidden_TH[rows], weight_VH, bias_V).to(logp_T.dtype) / temperature_C1
            normaliser_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
            token_C1 = token_T[rows, None]
            logp_T[rows] = (logits_CV.gather(1, token_C1) - normaliser_C1).squeeze(1)
            if slope_TH is not None:
                p_CV = logits_CV.sub_(normaliser_C1).exp_()
                mean_CH = p_CV.to(weight_VH.dtype) @ weight_VH
                slope_TH[rows] = (weight_VH[token_T[rows]] - mean_CH) / temperature_C1.to(weight_VH.dtype)
        if slope_TH is not None:
            ctx.save_for_backward(slope_TH)
        return logp_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slope_TH,) = ctx.saved_tensors
        return gradients[0][:, None].to(slope_TH.dtype) * slope_TH, None, None, None, None


def hidden_to_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, token_T: Tensor, temperature_T: Tensor
) -> Tensor:
    """log softmax((W h + b) / T)[token] for every row, shape [T], in float32 at least.

    Differentiable once with respect to `hidden_TH` only; W and b are taken as constants.
    """
    result: Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias_V, token_T, temperature_T
    )
    return result
