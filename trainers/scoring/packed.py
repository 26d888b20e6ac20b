"""A tree of token rows to hidden states, every distinct beginning computed once and nothing padded.

Only attention looks across positions: there each row's new positions attend to its whole path from the root. All else
sees one long row of distinct positions.

Invariant: hidden states and gradients are those of the plain pass up to rounding. It knows nothing of agents, adapters
or log-probs.

Shapes: N distinct positions; for a group of B rows, Q new positions of the longest, K positions of the longest path;
h heads, g of them for keys and values, D entries each.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainers.scoring.prefix_tree import Group, Layout, rows_to_layout

_NAME = "marft_packed"
_TOLERANCE = 1e-2  # relative; bfloat16 rounding is below it, a wrong mask or position far above
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # with the log-sum-exp that backward needs
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some architectures add to attention, and we do not


def _to_mask(layout: Layout, group: Group, window: int | None, like: Tensor) -> Tensor:
    """What each query may see, as [B, 1, Q, K] of 0 and minus infinity; made once for all layers of a pass."""
    mask_key = id(group), window
    if mask_key not in layout.masks:
        column_K = torch.arange(group.key_BK.shape[1], device=like.device)
        sees_BQK = column_K <= group.depth_BQ1
        if window is not None:
            sees_BQK &= column_K > group.depth_BQ1 - window
        mask_BQK = torch.zeros(sees_BQK.shape, dtype=like.dtype, device=like.device)
        layout.masks[mask_key] = mask_BQK.masked_fill_(~sees_BQK, -torch.inf)[:, None]
    return layout.masks[mask_key]


class _PackedAttention(torch.autograd.Function):
    """What is gathered for attention is gathered again for its gradient, so that none of it is kept.

    On a CPU the outputs and log-sum-exps are kept, which are small, and backward is the kernel's own; elsewhere
    backward attends once more, as the kernels of GPUs each keep something else.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_NhD: Tensor,
        key_NgD: Tensor,
        value_NgD: Tensor,
        layout: Layout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        output_NhD = torch.empty_like(query_NhD)
        sums = []
        for group in layout.groups:
            parts = _gathered(group, query_NhD, key_NgD, value_NgD=value_NgD)
            mask = _to_mask(layout, group, window, like=query_NhD)
            if _keeps_sums(query_NhD, value_NgD):
                output_BhQD, sum_BhQ = _FLASH(*parts, attn_mask=mask, scale=scale)
                sums.append(sum_BhQ)
            else:
                output_BhQD = _attend(parts, mask, scale)
            output_NhD[group.query_BQ[group.real_BQ]] = output_BhQD.transpose(1, 2)[group.real_BQ]
        kernel_state = (output_NhD, *sums) if sums else ()
        ctx.save_for_backward(query_NhD, key_NgD, value_NgD, *kernel_state)
        ctx.settings = layout, scale, window
        return output_NhD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: a layer that is computed again gives each tensor once
        sources, kernel_state = saved[:3], saved[3:]
        layout, scale, window = ctx.settings
        totals = [torch.zeros_like(source) for source in sources]
        for i, group in enumerate(layout.groups):
            parts = _gathered(group, *sources)
            mask = _to_mask(layout, group, window, like=sources[0])
            gradient_BhQD = (gradients[0][group.query_BQ] * group.real_BQ[..., None, None]).transpose(1, 2)
            if kernel_state:
                output_BhQD = kernel_state[0][group.query_BQ].transpose(1, 2)
                slopes = _FLASH_BACKWARD(
                    gradient_BhQD, *parts, output_BhQD, kernel_state[1 + i], 0.0, False, attn_mask=mask, scale=scale
                )
            else:
                parts = [part.detach().requires_grad_() for part in parts]
                with torch.enable_grad():
                    recomputed_BhQD = _attend(parts, mask, scale)
                slopes = torch.autograd.grad(recomputed_BhQD, parts, gradient_BhQD)
            indices = group.query_BQ, group.key_BK, group.key_BK
            for total, index, slope in zip(totals, indices, slopes, strict=True):
                total.index_add_(0, index.flatten(), slope.transpose(1, 2).flatten(0, 1))
        return *totals, None, None, None


def _keeps_sums(query_NhD: Tensor, value_NgD: Tensor) -> bool:
    """Whether the CPU's kernel fits, which wants heads of one width."""
    return query_NhD.device.type == "cpu" and query_NhD.shape[-1] == value_NgD.shape[-1]


def _gathered(group: Group, query_NhD: Tensor, key_NgD: Tensor, value_NgD: Tensor) -> list[Tensor]:
    """[B, h, Q, D], [B, g, K, D] and [B, g, K, D]."""
    parts = query_NhD[group.query_BQ], key_NgD[group.key_BK], value_NgD[group.key_BK]
    return [part.transpose(1, 2) for part in parts]


def _attend(parts: Sequence[Tensor], mask: Tensor, scale: float) -> Tensor:
    """To [B, h, Q, D]."""
    query, key, value = parts
    output_BhQD: Tensor = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output_BhQD


def _packed_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form in which transformers calls it: [1, h, N, D] to [1, N, h, D]."""
    if packed_layout is None or any(kwargs.get(name) is not None for name in _UNKNOWN):
        raise NotImplementedError("this architecture's attention is not one that rows can be packed for")
    parts = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _PackedAttention.apply(*parts, packed_layout, scale, sliding_window)  # type: ignore[no-untyped-call]
    return output.unsqueeze(0), None


AttentionInterface.register(_NAME, _packed_attention)


@contextmanager
def _packed(backbone: Any) -> Iterator[None]:
    config = backbone.config
    previous_implementation = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = previous_implementation


def layout_to_hidden(backbone: Any, layout: Layout) -> Tensor:
    """Last hidden states of all distinct positions, shape [N, H]."""
    with _packed(backbone):
        hidden_1NH: Tensor = backbone(
            input_ids=layout.ids_N[None],
            position_ids=layout.depth_N[None],
            use_cache=False,
            packed_layout=layout,
        )[0]
    return hidden_1NH.squeeze(0)


@torch.no_grad()
def can_pack(backbone: Any, device: torch.device) -> bool:
    """Whether this architecture gives the same hidden states both ways, tried on three rows.

    Models whose positions meet elsewhere than in attention (recurrent ones), or whose attention is of another kind,
    do not.
    """
    rows = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 5, 4, 3), (1, 2, 0)]
    try:
        layout = rows_to_layout(rows, device)
        hidden_NH = layout_to_hidden(backbone, layout).float()
    except (TypeError, ValueError, KeyError, AttributeError, NotImplementedError, RuntimeError):
        return False
    if hidden_NH.shape[0] != len(layout.ids_N):
        return False
    for row, nodes in zip(rows, layout.node_of, strict=True):
        plain = backbone(input_ids=torch.tensor([row], device=device), use_cache=False)[0][0].float()
        if float((plain - hidden_NH[nodes]).abs().max()) > _TOLERANCE * float(plain.abs().max()):
            return False
    return True
