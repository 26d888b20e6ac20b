"""Token rectangles to hidden states, with what all rows have in common computed once.

The prefix that every row of a micro-batch begins with (an agent's profile, the first turns of a task) is run as one
row; the rest of each row attends to its keys and values. Invariant: hidden states and gradients are those of the
plain pass up to rounding, because attention is the only place where a row's positions meet.
It knows nothing of agents, adapters or log-probs.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trainers.scoring.trial import is_rounding, relative_gap

_SHORTEST = 8  # tokens; below this a second call costs more than it saves


def shared_prefix(input_ids_BL: Tensor, first_needed: int) -> int:
    """Length of the longest prefix that all rows share and that ends before column `first_needed`; 0 if too short."""
    if len(input_ids_BL) < 2:
        return 0
    same_L = (input_ids_BL == input_ids_BL[:1]).all(dim=0)
    common = int(same_L.long().cumprod(dim=0).sum())
    length = min(common, first_needed)
    return length if length >= _SHORTEST else 0


def backbone_to_hidden(backbone: Any, input_ids_BL: Tensor, shared: int) -> Tensor:
    """Last hidden states of the positions from `shared` on, shape [B, L - shared, H].

    The first `shared` columns are the same in every row; they are computed once. Rows are padded on the right.
    """
    if shared == 0:
        hidden_BLH: Tensor = backbone(input_ids=input_ids_BL, use_cache=False)[0]
        return hidden_BLH
    cache = DynamicCache()
    backbone(input_ids=input_ids_BL[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(input_ids_BL))
    rest_BLH: Tensor = backbone(input_ids=input_ids_BL[:, shared:], past_key_values=cache, use_cache=True)[0]
    return rest_BLH


@torch.no_grad()
def can_share_prefixes(backbone: Any, device: torch.device) -> bool:
    """Whether this architecture gives the same hidden states both ways, tried on a small rectangle.

    Models whose rows meet elsewhere than in attention (recurrent ones) or whose cache is of another kind do not.
    """
    probe_BL = torch.arange(12, device=device).repeat(2, 1) % 7
    probe_BL[1, 9:] += 1
    plain = backbone_to_hidden(backbone, probe_BL, 0)[:, 8:]
    try:
        shared = backbone_to_hidden(backbone, probe_BL, 8)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return False
    return plain.shape == shared.shape and is_rounding(relative_gap(shared, plain), plain.dtype)
