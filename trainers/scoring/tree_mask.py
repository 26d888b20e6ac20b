"""A tree of positions to the blocks of pairs that attention computes, and attention over it by one kernel of a GPU.

Positions stand in the order in which the tree is walked, so one of them may see another where it stands in the
other's subtree: `k <= q < end[k]`. FlexAttention computes the blocks in which some pair is seen, forward and backward,
and gathers and repeats nothing.

Invariant: a query sees its path from the root, itself included, and of a window its last positions only.

Shapes: N distinct positions; h heads, g of them for keys and values, D entries each; Q and K positions of a stretch of
queries and keys; C and M their blocks of `BLOCK` positions.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainers.scoring.prefix_tree import Layout

BLOCK = 128  # positions; what the kernel computes or leaves out at a time
_STRETCH = 8  # blocks of queries that are looked at together when blocks are counted: bounds the memory of it
_SHAPES = 64  # kinds of calls that one kernel is compiled for: heads, windows, with a gradient and without


def layout_to_sees(layout: Layout, window: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Whether a query sees a key, by the positions of both, of shapes that broadcast."""
    end_N, depth_N = layout.end_N, layout.depth_N

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_N[key])

    if window is None:
        return sees
    last = window

    def sees_window(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_N[key]) & (depth_N[key] > depth_N[query] - last)

    return sees_window


def layout_to_block_mask(layout: Layout, window: int | None) -> BlockMask:
    """The blocks of which some pairs are seen, and those of which all are.

    Counted a stretch of queries at a time: all pairs of N positions at once would take N^2 bytes several times over.
    """
    count = len(layout.ids_N)
    blocks = -(-count // BLOCK)
    sees = layout_to_sees(layout, window)
    key_K = torch.arange(count, device=layout.ids_N.device)
    seen_CM = torch.empty(blocks, blocks, dtype=torch.long, device=key_K.device)
    for first in range(0, blocks, _STRETCH):
        query_Q1 = key_K[first * BLOCK : (first + _STRETCH) * BLOCK, None]
        sees_QK = sees(query_Q1, key_K)
        rows = -(-len(query_Q1) // BLOCK)
        padded_QK = torch.nn.functional.pad(sees_QK, (0, blocks * BLOCK - count, 0, rows * BLOCK - len(query_Q1)))
        seen_CM[first : first + rows] = padded_QK.view((rows, BLOCK, blocks, BLOCK)).sum(dim=(1, 3))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(query, key)

    partial_blocks = _ordered((seen_CM > 0) & (seen_CM < BLOCK**2))
    full_blocks = _ordered(seen_CM == BLOCK**2)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(count, count),
        compute_q_blocks=True,
    )


def _ordered(chosen_CM: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, [1, 1, C], and which, those it has first, [1, 1, C, M]."""
    order_CM = chosen_CM.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_CM.sum(dim=-1, dtype=torch.int32)[None, None], order_CM.int()[None, None].contiguous()


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention as one kernel; it is compiled at its first call of a kind, which takes some seconds."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend_on_tree(
    query_1hND: Tensor, key_1gND: Tensor, value_1gND: Tensor, *, layout: Layout, scale: float, window: int | None
) -> Tensor:
    """Attention of every position to its path, [1, h, N, D], differentiable; on a GPU only.

    Raises:
        RuntimeError, or another error of the compiler: a shape or type that the kernel does not have.
    """
    if window not in layout.block_masks:
        layout.block_masks[window] = layout_to_block_mask(layout, window)
    attended: Tensor = _compiled()(
        query_1hND,
        key_1gND,
        value_1gND,
        block_mask=layout.block_masks[window],
        scale=scale,
        enable_gqa=query_1hND.shape[1] != key_1gND.shape[1],
        kernel_options={"BACKEND": "TRITON"},
    )
    return attended


def many_kinds_of_calls() -> AbstractContextManager[None]:
    """While it lasts, a kernel may be compiled for more kinds of calls than the eight after which torch refuses.

    Entered once a pass: it takes a millisecond, which is more than a layer of a small model.
    """
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=_SHAPES)
    return patch
