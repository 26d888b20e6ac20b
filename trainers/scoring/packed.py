"""A tree of token rows to hidden states, every distinct beginning computed once and nothing padded.

Only attention looks across positions: there each row's new positions attend to its whole path from the root. All else
sees one long row of distinct positions. On a GPU attention is one kernel (`tree_mask`) where it can be compiled for the
model; else paths are gathered for it.

Invariant: hidden states and gradients are those of the plain pass up to rounding. It knows nothing of agents, adapters
or log-probs.

Shapes: N distinct positions; for a group of B rows, Q new positions of the longest, K positions of the longest path;
h heads, g of them for keys and values, D entries each.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trainers.scoring.prefix_tree import Group, Layout, rows_to_layout
from trainers.scoring.tree_mask import attend_on_tree, many_kinds_of_calls
from trainers.scoring.trial import is_rounding, relative_gap, states_to_trial_loss

GATHERED, ON_TREE = "marft_gathered", "marft_on_tree"  # attention of packed rows, as transformers knows it
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # with the log-sum-exp that backward needs
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some architectures add to attention, and we do not


def _to_mask(layout: Layout, group: Group, window: int | None, like: Tensor) -> Tensor:
    """What each query may see, as [B, 1, Q, K] of 0 and minus infinity; made once for all layers of a pass.

    In the type of the query: cuDNN takes another one for it without a word, and computes nonsense (torch 2.11, H200).
    """
    mask_key = id(group), window, like.dtype
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
            # a position is new in one row alone, and is seen by many: nothing is added up for queries
            totals[0][group.query_BQ[group.real_BQ]] = slopes[0].transpose(1, 2)[group.real_BQ]
            for total, slope in zip(totals[1:], slopes[1:], strict=True):
                total.index_add_(0, group.key_BK.flatten(), slope.transpose(1, 2).flatten(0, 1))
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


def _attend_gathered(
    query_1hND: Tensor, key_1gND: Tensor, value_1gND: Tensor, *, layout: Layout, scale: float, window: int | None
) -> Tensor:
    """As `attend_on_tree`, on any device."""
    parts = (part.squeeze(0).transpose(0, 1).contiguous() for part in (query_1hND, key_1gND, value_1gND))
    output_NhD: Tensor = _PackedAttention.apply(*parts, layout, scale, window)  # type: ignore[no-untyped-call]
    return output_NhD.transpose(0, 1).unsqueeze(0)


def _register(name: str, attend: Callable[..., Tensor]) -> None:
    """Gives an attention over a layout the form in which transformers calls it: [1, h, N, D] to [1, N, h, D]."""

    def attention(
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
        if packed_layout is None or any(kwargs.get(extra) is not None for extra in _UNKNOWN):
            raise NotImplementedError("this architecture's attention is not one that rows can be packed for")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output_1hND = attend(query, key, value, layout=packed_layout, scale=scale, window=sliding_window)
        return output_1hND.transpose(1, 2), None

    AttentionInterface.register(name, attention)


_register(GATHERED, _attend_gathered)
_register(ON_TREE, attend_on_tree)


@contextmanager
def _packed(backbone: Any, packing: str) -> Iterator[None]:
    config = backbone.config
    previous_implementation = config._attn_implementation
    config._attn_implementation = packing
    try:
        with many_kinds_of_calls() if packing == ON_TREE else nullcontext():
            yield
    finally:
        config._attn_implementation = previous_implementation


def layout_to_hidden(backbone: Any, layout: Layout, packing: str = GATHERED) -> Tensor:
    """Last hidden states of all distinct positions, shape [N, H]; `packing`: the attention, `GATHERED` or `ON_TREE`."""
    with _packed(backbone, packing):
        hidden_1NH: Tensor = backbone(
            input_ids=layout.ids_N[None],
            position_ids=layout.depth_N[None],
            use_cache=False,
            packed_layout=layout,
        )[0]
    return hidden_1NH.squeeze(0)


def find_packing(backbone: Any, device: torch.device) -> str | None:
    """The attention by which this architecture takes packed rows; None where their hidden states would be others.

    Models whose positions meet elsewhere than in attention (recurrent ones), or whose attention is of another kind,
    cannot take them. On a GPU the kernel is tried on rows of hundreds of tokens, gradients included.
    """
    rows = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 5, 4, 3), (1, 2, 0)]
    try:
        with torch.no_grad():
            if not _is_plain(backbone, rows, GATHERED, device=device):
                return None
    except (TypeError, ValueError, KeyError, AttributeError, NotImplementedError, RuntimeError):
        return None
    if device.type != "cuda":
        return GATHERED
    tail = (1, 2, 3, 4, 5, 6)
    long_rows = [(*tail * 25, 3, *tail * 20), (*tail * 25, 4, *tail), (2, *tail * 3)]  # their lengths suit no kernel
    try:
        return ON_TREE if _is_plain(backbone, long_rows, ON_TREE, device=device) else GATHERED
    except Exception:  # noqa: BLE001 - no compiler, or no kernel for these heads: errors of many kinds
        return GATHERED


def _is_plain(backbone: Any, rows: Sequence[tuple[int, ...]], packing: str, *, device: torch.device) -> bool:
    gap = gap_to_plain(backbone, rows, packing, device=device)
    return gap is not None and is_rounding(gap, backbone.get_input_embeddings().weight.dtype)


def gap_to_plain(backbone: Any, rows: Sequence[tuple[int, ...]], packing: str, *, device: torch.device) -> float | None:
    """How far hidden states of packed rows are from those of each row alone, relative to these.

    Where gradients are on, and something is trained, the larger of that and the gap of all gradients together. None
    where the backbone does not give a state for each position.
    """
    layout = rows_to_layout(rows, device)
    trained = [p for p in backbone.parameters() if p.requires_grad] if torch.is_grad_enabled() else []

    def with_slopes(states: Tensor) -> list[Tensor]:
        slopes = torch.autograd.grad(states_to_trial_loss(states), trained) if trained else ()
        return [states.detach(), *([torch.cat([slope.flatten() for slope in slopes])] if slopes else [])]

    hidden_NH = layout_to_hidden(backbone, layout, packing).float()
    if hidden_NH.shape[0] != len(layout.ids_N):
        return None
    found = with_slopes(hidden_NH[torch.cat(layout.node_of).to(device)])
    alone = [backbone(input_ids=torch.tensor([row], device=device), use_cache=False)[0][0] for row in rows]
    expected = with_slopes(torch.cat(alone).float())
    return max(relative_gap(mine, plain) for mine, plain in zip(found, expected, strict=True))
