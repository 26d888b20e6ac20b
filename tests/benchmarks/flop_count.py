"""A model and the rows of a pass -> the operations that a step cannot do without; `train_flops` says what counts.

It imports what the trainer imports and nothing of the benches, so that it runs on a bare machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.scoring.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Shape:
    """What the operations of one token depend on: numbers of weights, heads and layers."""

    body: int  # weights of all linear layers but the output layer
    blind: int  # of these, the first layer's query, key and value projections
    head: int  # weights of the output layer
    adapter: int  # weights of one adapter
    blind_adapter: int  # of these, the A matrices of the first layer
    attended: int  # layers x heads x width of a head
    blind_keys: int  # heads x width of a head


def rows_to_flops(shape: Shape, rows: Sequence[tuple[int, ...]], sampled: int) -> int:
    """Useful operations, forward and backward, of rows in one pass with `sampled` tokens."""
    seen_by = [len(path) for path in {row[: end + 1] for row in rows for end in range(len(row))}]
    tokens = 4 * shape.body - 2 * shape.blind + 6 * shape.adapter - 2 * shape.blind_adapter
    pairs = 12 * shape.attended - 2 * shape.blind_keys
    return tokens * len(seen_by) + pairs * sum(seen_by) + 4 * shape.head * sampled


def model_to_shape(model: PolicyModel) -> Shape:
    """From the modules of a model whose adapters are on query and value projections."""
    import torch

    modules = dict(model._backbone.named_modules())
    # in 4 bits a weight has fewer numbers than it stands for
    frozen = {
        n: m.in_features * m.out_features
        for n, m in modules.items()
        if isinstance(m, torch.nn.Linear) and "lora_" not in n
    }
    first = ("q_proj", "k_proj", "v_proj")
    adapter = model.parameters(model.adapters[0])
    config = model._backbone.config
    heads = config.num_attention_heads * modules["layers.0.self_attn"].head_dim
    return Shape(
        body=sum(frozen.values()),
        blind=sum(weights for n, weights in frozen.items() if ".0.self_attn" in f".{n}" and any(f in n for f in first)),
        head=model._head.weight.numel(),
        adapter=sum(weight.numel() for weight in adapter.values()),
        blind_adapter=sum(
            weight.numel() for name, weight in adapter.items() if ".layers.0." in name and "lora_A" in name
        ),
        attended=config.num_hidden_layers * heads,
        blind_keys=heads,
    )
