"""Actions to padded rectangles of tokens: what one forward and backward pass of the model takes.

Invariant: ids are those of the items, with all that a decided token has before it; no decided token is lost or doubled,
and no forced one (`ActionItem.forced`) is scored. It knows nothing of episodes,
rewards or losses.

Shapes of a `MicroBatch` (B actions, L columns, T decided tokens of all its actions laid end to end):

    input_ids_BL   prompt + sampled ids up to the last decided one, without it, padded on the right with 0
    row_T          which action of the batch a decided token belongs to, 0..B-1
    column_T       the column whose logits predict that token (one to the left of it)
    sampled_T      the token id
    temperature_T  the sampling temperature of its action

Padding on the right needs no attention mask: under a causal mask no real token sees what stands to its right.
"""

# ruff: noqa: N806, N815 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainers.batch import ActionItem

RowsToGroups = Callable[[Sequence[tuple[int, ...]], int], list[list[int]]]
"""(token rows, budget in tokens) -> groups of their positions."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Actions of one adapter, padded to one rectangle; shapes in the module's docstring."""

    items: tuple[int, ...]  # positions in the caller's list, one per row
    input_ids_BL: Tensor
    row_T: Tensor
    column_T: Tensor
    sampled_T: Tensor
    temperature_T: Tensor
    lengths: tuple[int, ...]  # decided tokens per row; they sum to T


def lengths_to_groups(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Lengths to groups of positions, longest first, with rows x longest row of each group within `budget`.

    Sorting keeps the padding small. A row longer than the budget gets a group of its own.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget:
            groups.append([])
        groups[-1].append(i)
    return groups


def padded_groups(rows: Sequence[tuple[int, ...]], budget: int) -> list[list[int]]:
    """Rows to groups of positions, with the padded rectangle of each within `budget`."""
    return lengths_to_groups([len(row) for row in rows], budget)


def rows_to_rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of several lengths to one tensor [B, L], padded on the right with 0."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)


def rows_to_even_groups(
    rows: Sequence[tuple[int, ...]], budget: int, *, shares: int, rows_to_groups: RowsToGroups
) -> list[list[int]]:
    """Rows to groups for so many processes, each of which is to have as many groups of about one size.

    As `rows_to_groups` cuts them for a smaller budget: about the smallest that makes no more groups than the next
    multiple of `shares` above what the whole budget makes. One share is cut by the whole budget.
    """
    groups = rows_to_groups(rows, budget)
    if shares == 1:
        return groups
    count = -(-len(groups) // shares) * shares
    too_small, enough = 0, budget
    while enough - too_small > 1 + enough // 32:  # a finer search would take longer than it spares
        middle = (too_small + enough) // 2
        finer_groups = rows_to_groups(rows, middle)
        if len(finer_groups) <= count:
            enough, groups = middle, finer_groups
        else:
            too_small = middle
    return groups


def items_to_microbatches(
    items: Sequence[ActionItem],
    budget: int,
    chosen: Sequence[int] | None = None,
    rows_to_groups: RowsToGroups = padded_groups,
    *,
    shares: int = 1,
) -> list[MicroBatch]:
    """Actions of one agent to micro-batches of at most `budget` tokens each (one action at least).

    Args:
        chosen: picks positions of `items`; None takes all.
        rows_to_groups: how rows are cut into passes, and so which tokens count: all of the padded rectangle, or what
            a model asks for (`PolicyModel.rows_to_groups`).
        shares: processes that they are dealt out to, see `rows_to_even_groups`.
    """
    positions = range(len(items)) if chosen is None else chosen
    rows = [items[i].input_ids for i in positions]
    groups = rows_to_even_groups(rows, budget, shares=shares, rows_to_groups=rows_to_groups)
    return [_pad(items, [positions[k] for k in group]) for group in groups]


def _pad(items: Sequence[ActionItem], positions: Sequence[int]) -> MicroBatch:
    batch = [items[i] for i in positions]
    counts = tuple(len(item.decided) for item in batch)
    row_T = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(counts))
    return MicroBatch(
        items=tuple(positions),
        input_ids_BL=rows_to_rectangle([item.input_ids for item in batch]),
        row_T=row_T,
        column_T=torch.tensor([column for item in batch for column in item.columns]),
        sampled_T=torch.tensor([token for item in batch for token in item.decided_ids]),
        temperature_T=torch.tensor([item.temperature for item in batch])[row_T],
        lengths=counts,
    )


def random_minibatches(count: int, epochs: int, minibatches: int, generator: torch.Generator) -> Iterator[list[int]]:
    """A fresh random partition of `count` actions for every epoch; no part is empty."""
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        for part in order.tensor_split(min(minibatches, count)) if count else ():
            yield part.tolist()
