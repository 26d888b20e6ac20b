"""A step's activations and the LoRA matrices in the engine's slots -> the linear layers' outputs, two products a layer.

vLLM's own operations on a CPU copy the matrices of its adapter for every token, once for each part of a packed
layer: some fifty small operations in each layer, which cost half the throughput. Here the matrices of all slots stand
in one pair per layer; a step multiplies its tokens with all of them at once, strikes out what is not a token's own
adapter, and adds the second product to the output. Invariants: a token gets B A x of its own slot and nothing of any
other, and nothing at all without one; a pair is never older than the slots that it was made from; rows of zeros are
left out, since they add nothing. It is plain torch and does not know vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Pair:
    """The matrices of one layer's slots side by side; row k of `down` and of `up` belong to slot `columns[k]`."""

    versions: tuple[int, ...]  # of the tensors that it was made from
    sources: tuple[Tensor, ...]  # kept, so that no other tensor can take their place in memory
    columns: tuple[int, ...]  # ascending
    down: Tensor  # (rows, inputs)
    up: Tensor  # (rows, outputs)


@dataclass(slots=True)
class GroupedLora:
    """Adds what the adapters of a step's tokens contribute.

    Tell it with `use` which slot each token has, then ask it layer by layer with `add`.
    """

    _pairs: dict[int, _Pair] = field(default_factory=dict)
    _slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    _active: tuple[int, ...] = ()  # slots of this step, ascending; -1 is none
    _masks: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)

    def use(self, slots: Tensor) -> None:
        """What the tokens of the coming step use: (tokens,), the number of a slot, or -1 for none."""
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
        used = [slot for slot in self._active if slot >= 0]
        if not used:
            return
        pair = self._pair(a, b)
        first, last = _between(pair.columns, used[0], used[-1])
        if first == last:
            return
        columns = pair.columns[first:last]
        hidden = x.to(pair.down.dtype) @ pair.down[first:last].T
        if len(self._active) > 1 or set(columns) != set(used):
            hidden *= self._mask(columns, hidden.dtype)
        up = pair.up[first:last]
        y[:, : up.shape[1]].addmm_(hidden.to(y.dtype), up.to(y.dtype))

    def _mask(self, columns: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """(tokens, rows): 1 where the row is of the token's slot."""
        mask = self._masks.get((columns, dtype))
        if mask is None:
            mask = (self._slots[:, None] == torch.tensor(columns)[None, :]).to(dtype)
            self._masks[columns, dtype] = mask
        return mask

    def _pair(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> _Pair:
        """The layer's pair, made again after any slot was written to: torch counts writes."""
        versions = tuple(t._version for t in (*a, *b))
        pair = self._pairs.get(id(a[0]))
        if pair is None or pair.versions != versions:
            pair = self._pairs[id(a[0])] = _slots_to_pair(a, b, versions)
        return pair


def _slots_to_pair(a: Sequence[Tensor], b: Sequence[Tensor], versions: tuple[int, ...]) -> _Pair:
    outputs = sum(part.shape[2] for part in b)
    columns: list[int] = []
    down, up = [a[0].new_zeros((0, a[0].shape[3]))], [b[0].new_zeros((0, outputs))]
    for slot in range(a[0].shape[0]):
        at = 0
        for part_a, part_b in zip(a, b, strict=True):
            rows, wide = part_a[slot, 0], part_b[slot, 0]
            counts = rows.any(dim=1) & wide.any(dim=0)
            kept = int(counts.sum())
            padded = part_b.new_zeros((kept, outputs))
            padded[:, at : at + wide.shape[0]] = wide.T[counts]
            columns += [slot] * kept
            down.append(rows[counts])
            up.append(padded)
            at += wide.shape[0]
    return _Pair(versions, (*a, *b), tuple(columns), torch.cat(down), torch.cat(up))


def _between(columns: tuple[int, ...], low: int, high: int) -> tuple[int, int]:
    """Where the columns from slot `low` to slot `high` begin and end."""
    before = sum(slot < low for slot in columns)
    return before, before + sum(low <= slot <= high for slot in columns)
