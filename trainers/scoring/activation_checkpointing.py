"""A model's decoder layers to the same layers that keep their input only, and compute the rest again in backward.

Activation checkpointing: memory for one layer's activations instead of all layers', for one more forward pass of each.
Invariant: hidden states and gradients are those of the plain layers, on the CPU bit for bit; a trial says so when a
model is loaded. A layer is computed again as it was: with the attention and the adapter of its forward pass.
It knows nothing of batches, losses or optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trainers.errors import TrainError
from trainers.scoring.trial import states_to_trial_loss

_TOLERANCE = 1e-2  # relative; bfloat16 rounding is below it, a layer that was computed otherwise far above


def decoder_layers(backbone: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that transformers itself would compute again; none for architectures that it cannot do that for."""
    return [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(
    backbone: Any,
    adapter: Callable[[], str | None],
    hidden: Callable[[], Tensor],
    parameters: Sequence[torch.nn.Parameter],
    model_dir: Path,
) -> None:
    """Has every decoder layer computed again in backward, once a trial has shown that gradients stay what they were.

    transformers' own switch works on models in training mode only, and would compute a layer again with whatever
    attention is set by then.

    Args:
        adapter: which one is active now.
        hidden: a small forward pass, for the trial; it is called with the plain layers first.
        parameters: of the adapter in that pass.

    Raises:
        TrainError: an architecture without such layers, or whose gradients change.
    """
    layers = decoder_layers(backbone)
    if not layers:
        raise TrainError(
            f"train.trainer.system.activation_checkpointing: the layers of {model_dir} cannot be computed again; leave "
            "it out, and lower train.trainer.system.tokens_per_microbatch to save memory"
        )
    expected = _slopes(hidden, parameters)
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, backbone.config, adapter)
    if not all(map(_equal, _slopes(hidden, parameters), expected)):
        raise TrainError(
            f"train.trainer.system.activation_checkpointing: the layers of {model_dir} give other gradients when they "
            "are computed again; leave it out, and lower train.trainer.system.tokens_per_microbatch to save memory"
        )


def _recomputed(
    forward: Callable[..., Any], config: Any, adapter: Callable[[], str | None], *inputs: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **kwargs)
    attention, active = config._attn_implementation, adapter()

    def as_it_was(*inputs: Any, **kwargs: Any) -> Any:
        if adapter() != active:  # it would give another adapter's activations, of the same shape
            raise RuntimeError(
                f"a layer is computed again with adapter {adapter()!r}, not {active!r}: no use() between"
            )
        now, config._attn_implementation = config._attn_implementation, attention
        try:
            return forward(*inputs, **kwargs)
        finally:
            config._attn_implementation = now

    # models are in evaluation mode: nothing is drawn at random, so no state of generators need be kept
    return checkpoint(as_it_was, *inputs, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _slopes(hidden: Callable[[], Tensor], parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    with torch.enable_grad():
        return list(torch.autograd.grad(states_to_trial_loss(hidden().float()), list(parameters)))


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())
