"""Token rows to a backbone's last hidden states at some of their positions, in as few positions as it can compute.

What rows begin with alike goes through the model once: packed into one row where the architecture can do that, else as
a shared beginning of all rows. Invariant: hidden states and gradients are those of the plain pass, up to rounding.

Shapes: B rows, L columns, H width, N positions that are asked for.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.scoring.microbatch import lengths_to_groups
from trainers.scoring.packed import layout_to_hidden
from trainers.scoring.prefix_tree import RECTANGLE, rows_to_groups, rows_to_layout
from trainers.scoring.shared_prefix import backbone_to_hidden, shared_prefix


def hidden_at(
    backbone: Any,
    input_ids_BL: Tensor,
    row_N: Tensor,
    column_N: Tensor,
    *,
    device: torch.device,
    packing: str | None,
    shares_prefixes: bool,
) -> Tensor:
    """Last hidden states at the given positions of the rows, shape [N, H].

    Args:
        packing: the attention by which the backbone takes packed rows (`find_packing`); None: it cannot.
        shares_prefixes: whether, where it cannot, it can share a beginning (`can_share_prefixes`).
    """
    if packing:
        return _packed_hidden_at(backbone, input_ids_BL, row_N, column_N=column_N, device=device, packing=packing)
    shared = shared_prefix(input_ids_BL, int(column_N.min())) if shares_prefixes else 0
    hidden_BLH = backbone_to_hidden(backbone, input_ids_BL.to(device), shared)
    return hidden_BLH[row_N.to(device), (column_N - shared).to(device)]


def rows_to_passes(rows: Sequence[tuple[int, ...]], budget: int, *, packs: bool) -> list[list[int]]:
    """Token rows to groups of their positions that each fit into one pass of `budget` tokens.

    Distinct tokens where rows are packed; else those of the padded rectangle.
    """
    if packs:
        return rows_to_groups(rows, budget, RECTANGLE * budget)
    return lengths_to_groups([len(row) for row in rows], budget)


def _packed_hidden_at(
    backbone: Any, input_ids_BL: Tensor, row_N: Tensor, *, column_N: Tensor, device: torch.device, packing: str
) -> Tensor:
    last_B = torch.zeros(len(input_ids_BL), dtype=torch.long).scatter_reduce(0, row_N, column_N, "amax")
    rows = [ids_L[: last + 1].tolist() for ids_L, last in zip(input_ids_BL, last_B.tolist(), strict=True)]
    layout = rows_to_layout(rows, device)
    node_BL = torch.nn.utils.rnn.pad_sequence(list(layout.node_of), batch_first=True)
    node_N = node_BL[row_N, column_N].to(device)
    # not by [...]: rows may share a node, and on the CPU only this one's gradient adds up in a fixed order
    return layout_to_hidden(backbone, layout, packing).index_select(0, node_N)
