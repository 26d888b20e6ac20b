"""A base model whose linear layers are held in 4-bit NF4 -> the same passes as on the weights that these bits say.

bitsandbytes quantises while a model is loaded: blocks of 64 numbers with one scale each, the scales in 8 bits
themselves (double quantisation, QLoRA, arXiv:2305.14314). A pass makes a layer's weight whole again, multiplies, and
forgets it; backward does so once more. bitsandbytes' own layer is not asked: on the CPU it lays weights out anew for
inference, where no gradient goes through, and on a card its kernel for few rows rounds otherwise than the one for many.

Invariant: hidden states and gradients are those of plain layers with the dequantised weights. Embeddings, norms and
the output layer stay as they are.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainers.errors import TrainError
from trainers.scoring.fast_layers import linear

BLOCK = 64  # numbers that share a scale


def require_bitsandbytes() -> None:
    """Raises TrainError, which says what to install, where bitsandbytes is missing."""
    if find_spec("bitsandbytes") is None:
        raise TrainError(
            "train.trainer.system.load_in_4bit needs bitsandbytes: pip install 'marft-bridge[qlora]', or leave it out"
        )


def to_quantization_config(dtype: torch.dtype) -> Any:
    """What transformers is told when it loads a model: NF4, double quantisation, products in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )  # type: ignore[no-untyped-call]


def compute_by_whole_weights(base: torch.nn.Module) -> None:
    """Gives every 4-bit layer the forward and backward pass of this module.

    Raises:
        TrainError: the model has no layer in 4 bits, so it would take the memory that it was to save; or, on the CPU,
            one whose rows are cut by blocks, which bitsandbytes 0.50 makes whole with the scales of other blocks there.
    """
    layers = list(four_bit_layers(base))
    if not layers:
        raise TrainError(
            "train.trainer.system.load_in_4bit: this model has no linear layer that 4 bits hold: leave it out"
        )
    widths = sorted({layer.in_features for layer in layers if layer.in_features % BLOCK})
    if widths and layers[0].weight.device.type == "cpu":
        raise TrainError(
            f"train.trainer.system.load_in_4bit: a linear layer of this model reads {widths[0]} numbers, and on the "
            f"CPU only multiples of {BLOCK} can be held in 4 bits: leave it out"
        )
    for layer in layers:
        layer.forward = partial(_forward, layer)


def four_bit_layers(model: torch.nn.Module) -> Iterator[Any]:
    """The layers whose weights are held in 4 bits."""
    return (module for module in model.modules() if getattr(_weight_of(module), "quant_state", None) is not None)


def to_weight(layer: Any) -> Tensor:
    """The numbers that a 4-bit layer's weight stands for, [out, in], in the type that the model is computed in."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def scales(model: torch.nn.Module) -> dict[str, Tensor]:
    """What the bits of a weight are multiplied by, by name; beside the parameters, which do not hold it."""
    by_name: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        state = getattr(_weight_of(module), "quant_state", None)
        if state is not None:
            by_name |= {f"{path}.absmax": state.absmax, f"{path}.absmax.absmax": state.state2.absmax}
            by_name[f"{path}.absmax.offset"] = state.offset.reshape(1)
    return by_name


def _weight_of(module: torch.nn.Module) -> Any:
    return module._parameters.get("weight")  # not by attribute: adapters' layers hand on their base's


class _FourBitLinear(torch.autograd.Function):
    """x W^T + b, with W from its 4 bits in each direction, so that nothing of it is kept."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer  # frozen: no version to check, nothing to save
        return linear(input_NI, to_weight(layer).to(input_NI.dtype), layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_NO = gradients[0].contiguous()
        return linear(gradient_NO, to_weight(ctx.layer).to(gradient_NO.dtype).T), None


def _forward(layer: Any, input_NI: Tensor) -> Tensor:
    return _FourBitLinear.apply(input_NI, layer)  # type: ignore[no-any-return,no-untyped-call]
