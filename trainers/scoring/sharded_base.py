"""A frozen base -> the same base with its decoder layers dealt out over the processes that train together (FSDP2).

Each process keeps an equal part of every layer's weights, and has a layer whole only while it computes it, forwards and
backwards. Embeddings, norms outside of layers, the output layer and adapters stay whole on each.

Invariant: hidden states and gradients are, bit for bit, those of whole layers. A layer comes together by a message of
all processes, so that each of them must go through the layers as often as every other, and in the same order: see
`PolicyModel.idle_pass`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from trainers.errors import TrainError
from trainers.scoring.activation_checkpointing import decoder_layers


def shard_layers(base: Any, backbone: Any, device: torch.device, *, model_dir: Path) -> list[torch.nn.Module]:
    """Deals the layers of a base out over the default process group; what is left of it moves to `device`.

    Layers move one after another, so that the device never holds two whole ones.

    Args:
        base: on the CPU, frozen, without adapters.
        backbone: the part of it that has the layers.

    Returns:
        The layers.

    Raises:
        TrainError: an architecture whose layers are not known.
    """
    layers = decoder_layers(backbone)
    if not layers:
        raise TrainError(
            f"train.trainer.system.shard_base: the layers of {model_dir} cannot be told apart, so they are not dealt "
            "out; leave it out, or take another base model"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where FSDP2 puts what it deals out
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    unsharded = {weight for weight in base.parameters() if not isinstance(weight, DTensor)}
    # around all of them, so that a layer's weights come while the layer before it is computed
    fully_shard(backbone, mesh=mesh, reshard_after_forward=True, ignored_params=unsharded)
    for tensor in [*unsharded, *base.buffers()]:
        tensor.data = tensor.data.to(device)
    return layers


@contextmanager
def gathered(layer: torch.nn.Module) -> Iterator[None]:
    """The layer's weights are together while the context lasts; every process must enter it."""
    assert isinstance(layer, FSDPModule)
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a weight that is dealt out; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
