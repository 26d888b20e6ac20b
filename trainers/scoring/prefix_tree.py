"""Token rows to a tree in which every distinct beginning is one position.

In sorted order, each row adds the positions by which it goes on from what it has in common with the row before it; its
path from the root is the row itself. Rows that share much stay together when rows are filled into passes.

Invariant: a position stands for one beginning, and every beginning of a row has one. It knows nothing of models: what
positions compute, and how they attend to their paths, is said elsewhere.

Shapes: N distinct positions; for a group of B rows, Q new positions of the longest, K positions of the longest path.
"""

# ruff: noqa: N815 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PASS = 24  # tokens: what a pass costs however short it is, mostly for reading every weight once
RECTANGLE = 8  # rows x longest row over the budget of distinct tokens: bounds what attention gathers
_STRETCH = 512  # new positions of a row that attend together; more would look at much that is masked


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose new positions attend together, padded to one rectangle."""

    query_BQ: Tensor  # which positions attend; padding repeats position 0
    key_BK: Tensor  # what they may see: the rows' paths
    depth_BQ1: Tensor  # how far from the root a query stands
    real_BQ: Tensor  # False for padding


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some of a row's new positions, and its path up to the last of them: later ones none of them may see."""

    new_Q: Tensor
    path_K: Tensor


@dataclass(frozen=True)
class Layout:
    """Rows as a tree of positions."""

    ids_N: Tensor
    depth_N: Tensor  # position ids: how many tokens stand before this one in its row
    end_N: Tensor  # the first position behind this one that does not go on from it
    node_of: tuple[Tensor, ...]  # by row: the positions of its tokens; on the CPU
    stretches: tuple[_Stretch, ...]
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)  # by group, window and type
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # by window, see `tree_mask`

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The stretches in rectangles, for attention that gathers."""
        return tuple(_to_group(part, self.ids_N.device) for part in _alike(self.stretches))


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two rows begin with alike."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    low, high = 0, shortest  # they agree on the first `low`, and not on the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def rows_to_groups(rows: Sequence[tuple[int, ...]], budget: int, rectangle: int) -> list[list[int]]:
    """Rows to groups of positions in `rows`, in sorted order, with the distinct tokens of each within `budget`.

    What two groups begin with alike is computed in both. So they part where the fewest tokens are computed in all, a
    pass by itself counting as `PASS` more: between two agents rather than between two calls of one.

    Args:
        rectangle: limit of rows x longest row in a group, which bounds what attention gathers.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    common = [0, *(common_length(rows[i], rows[j]) for i, j in pairwise(order))]
    least, begins = [0], [0]  # of the first rows, by their number: what they cost, and where their last group begins
    for end in range(1, len(order) + 1):
        cost, best, distinct, longest = math.inf, 0, 0, 0
        for begin in range(end - 1, -1, -1):
            length = len(rows[order[begin]])
            distinct += length - (common[begin + 1] if begin + 1 < end else 0)
            longest = max(longest, length)
            if begin + 1 < end and (distinct > budget or (end - begin) * longest > rectangle):
                break
            if least[begin] + distinct + PASS < cost:
                cost, best = least[begin] + distinct + PASS, begin
        least.append(int(cost))
        begins.append(best)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


def rows_to_layout(rows: Sequence[tuple[int, ...]], device: torch.device) -> Layout:
    """Rows of token ids, each with one at least, to the tree of their beginnings."""
    order = sorted(range(len(rows)), key=lambda i: rows[i])
    ids: list[int] = []
    depths: list[int] = []
    node_of: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(rows)
    stretches: list[_Stretch] = []
    previous_row: tuple[int, ...] = ()
    path = torch.empty(0, dtype=torch.long)
    ends: list[int] = []
    for i in order:
        row = rows[i]
        common = common_length(previous_row, row)
        for node in path[common:].tolist():
            ends[node] = len(ids)
        path = torch.cat([path[:common], torch.arange(len(ids), len(ids) + len(row) - common)])
        ids += row[common:]
        depths += range(common, len(row))
        ends += [0] * (len(row) - common)
        node_of[i] = path
        for start in range(common, len(row), _STRETCH):
            end = min(start + _STRETCH, len(row))
            stretches.append(_Stretch(path[start:end], path[:end]))
        previous_row = row
    for node in path.tolist():
        ends[node] = len(ids)
    return Layout(
        torch.tensor(ids, device=device),
        torch.tensor(depths, device=device),
        torch.tensor(ends, device=device),
        node_of=tuple(node_of),
        stretches=tuple(stretches),
    )


def _alike(stretches: Sequence[_Stretch]) -> list[list[_Stretch]]:
    """Stretches in groups of like sizes, of new positions and of long paths, so that little is padded."""
    parts: list[list[_Stretch]] = []
    for stretch in sorted(stretches, key=lambda stretch: (len(stretch.new_Q), len(stretch.path_K)), reverse=True):
        if not parts or not _fits(stretch, parts[-1][0]):
            parts.append([])
        parts[-1].append(stretch)
    return parts


def _fits(stretch: _Stretch, first: _Stretch) -> bool:
    shorter, longer = sorted((len(stretch.path_K), len(first.path_K)))
    return 2 * len(stretch.new_Q) >= len(first.new_Q) and (longer <= _STRETCH or 4 * shorter >= 3 * longer)


def _to_group(part: Sequence[_Stretch], device: torch.device) -> Group:
    pad = torch.nn.utils.rnn.pad_sequence
    depths = [torch.arange(len(stretch.path_K) - len(stretch.new_Q), len(stretch.path_K)) for stretch in part]
    real = [torch.ones(len(stretch.new_Q), dtype=torch.bool) for stretch in part]
    return Group(
        query_BQ=pad([stretch.new_Q for stretch in part], batch_first=True).to(device),
        key_BK=pad([stretch.path_K for stretch in part], batch_first=True).to(device),
        depth_BQ1=pad(depths, batch_first=True)[..., None].to(device),
        real_BQ=pad(real, batch_first=True).to(device),
    )
