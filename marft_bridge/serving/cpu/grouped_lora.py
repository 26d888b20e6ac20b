"""A step's activations and the LoRA matrices in the engine's slots -> the linear layers' outputs, two products a layer.

vLLM's own operations on a CPU copy the matrices of its adapter for every token, once for each part of a packed
layer: some fifty small operations in each layer, which cost half the throughput. Here the matrices of all slots are
stacked in one pair per layer; a step multiplies its tokens with all of them at once, masks the rows of other slots than
a token's own, and adds the second product to the output. Invariants: a token gets B A x of its own slot and of no
other, and nothing without a slot; a pair is never older than the slots that it was made from; rows of zeros are left
out, since they add nothing. Plain torch: vLLM is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _StackedPair:
    """The matrices of one layer's slots, stacked; row k of `stacked_a` and of `stacked_b` belong to `row_slots[k]`."""

    versions: tuple[int, ...]  # torch's write counters of `sources` when the pair was made
    sources: tuple[Tensor, ...]  # referenced, so that no other tensor can get the id by which the pair is found
    row_slots: tuple[int, ...]  # ascending
    stacked_a: Tensor  # (rows, inputs)
    stacked_b: Tensor  # (rows, outputs): B transposed


@dataclass(slots=True)
class GroupedLora:
    """Adds the adapters' contributions to the outputs of linear layers.

    Call `use` once per step with the slot of each token, then `add` for each layer.
    """

    _pairs: dict[int, _StackedPair] = field(default_factory=dict)
    _slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    _active: tuple[int, ...] = ()  # slots of this step, ascending; -1 is none
    _masks: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)

    def use(self, slots: Tensor) -> None:
        """Sets the slots of the coming step: (tokens,), the number of each token's slot, or -1 for none."""
        self._slots = slots.clone()
        self._active = tuple(torch.unique(slots).tolist())
        self._masks.clear()

    def add(self, y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Adds B A x to `y` in place.

        Args:
            y: (tokens, outputs).
            x: (tokens, inputs).
            a: for each part of the layer, (slots, 1, rank, inputs).
            b: for each part of the layer, (slots, 1, its outputs, rank); the parts fill the outputs from the left.
        """
        used_slots = [slot for slot in self._active if slot >= 0]
        if not used_slots:
            return
        pair = self._pair(a, b)
        start, stop = _slots_to_rows(pair.row_slots, used_slots[0], used_slots[-1])
        if start == stop:
            return
        row_slots = pair.row_slots[start:stop]
        hidden = x.to(pair.stacked_a.dtype) @ pair.stacked_a[start:stop].T
        if len(self._active) > 1 or set(row_slots) != set(used_slots):
            hidden *= self._mask(row_slots, hidden.dtype)
        b_rows = pair.stacked_b[start:stop]
        y[:, : b_rows.shape[1]].addmm_(hidden.to(y.dtype), b_rows.to(y.dtype))

    def _mask(self, row_slots: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """(tokens, rows): 1 where the row is of the token's slot, else 0."""
        mask = self._masks.get((row_slots, dtype))
        if mask is None:
            mask = (self._slots[:, None] == torch.tensor(row_slots)[None, :]).to(dtype)
            self._masks[row_slots, dtype] = mask
        return mask

    def _pair(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> _StackedPair:
        """The layer's pair, made again after a slot was written to: torch counts the writes to a tensor."""
        versions = tuple(t._version for t in (*a, *b))
        pair = self._pairs.get(id(a[0]))
        if pair is None or pair.versions != versions:
            pair = self._pairs[id(a[0])] = _slots_to_pair(a, b, versions)
        return pair


def _slots_to_pair(a: Sequence[Tensor], b: Sequence[Tensor], versions: tuple[int, ...]) -> _StackedPair:
    outputs = sum(part.shape[2] for part in b)
    row_slots: list[int] = []
    a_blocks, b_blocks = [a[0].new_zeros((0, a[0].shape[3]))], [b[0].new_zeros((0, outputs))]
    for slot in range(a[0].shape[0]):
        offset = 0  # of the part's outputs in the layer's
        for part_a, part_b in zip(a, b, strict=True):
            slot_a, slot_b = part_a[slot, 0], part_b[slot, 0]  # (rank, inputs), (part outputs, rank)
            is_nonzero = slot_a.any(dim=1) & slot_b.any(dim=0)
            row_count = int(is_nonzero.sum())
            padded = part_b.new_zeros((row_count, outputs))
            padded[:, offset : offset + slot_b.shape[0]] = slot_b.T[is_nonzero]
            row_slots += [slot] * row_count
            a_blocks.append(slot_a[is_nonzero])
            b_blocks.append(padded)
            offset += slot_b.shape[0]
    stacked_a, stacked_b = torch.cat(a_blocks), torch.cat(b_blocks)
    return _StackedPair(versions, (*a, *b), tuple(row_slots), stacked_a=stacked_a, stacked_b=stacked_b)


def _slots_to_rows(row_slots: tuple[int, ...], low: int, high: int) -> tuple[int, int]:
    """The first row of the slots from `low` to `high`, and one past the last."""
    start = sum(slot < low for slot in row_slots)
    return start, start + sum(low <= slot <= high for slot in row_slots)
