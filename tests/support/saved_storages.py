"""What autograd saves for backward while a block runs -> bytes, each storage once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def saved_storages(weights: Collection[Tensor]) -> Iterator[dict[int, int]]:
    """The bytes of every storage that is saved, by its address, but for those of `weights`.

    Keep the graph alive in the block, so that no storage is used twice.
    """
    left_out = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
