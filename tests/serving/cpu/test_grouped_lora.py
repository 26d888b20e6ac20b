"""Owns: the CPU engine's way to apply adapters gives each token its own adapter's B A x, and nothing of another's.

Every expectation is the sum written out token by token, as LoRA defines it (arXiv 2106.09685, section 4.1).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marft_bridge.serving.cpu.grouped_lora import GroupedLora

SLOTS, RANK, INPUTS, PARTS = 4, 3, 10, (6, 2, 2)  # parts as in a packed q, k, v projection


def slots_of_a_layer(seed: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    made = torch.Generator().manual_seed(seed)
    a = [torch.randn((SLOTS, 1, RANK, INPUTS), generator=made).to(dtype) for _ in PARTS]
    b = [torch.randn((SLOTS, 1, size, RANK), generator=made).to(dtype) for size in PARTS]
    return a, b


def one_by_one(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], slots: list[int]) -> Tensor:
    rows = []
    for token, slot in enumerate(slots):
        row = y[token].double()
        if slot >= 0:
            seen = x[token].double()
            parts = [up[slot, 0].double() @ (down[slot, 0].double() @ seen) for down, up in zip(a, b, strict=True)]
            row = row + torch.cat(parts)
        rows.append(row)
    return torch.stack(rows)


def tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(count)
    outputs = torch.randn((count, sum(PARTS)), generator=made)
    return outputs.to(dtype), torch.randn((count, INPUTS), generator=made).to(dtype)


@pytest.mark.parametrize(
    "slots",
    [[0], [3, 3, 3], [0, 1, 2, 3], [2, 0, 2, -1, 0], [-1, 3, -1], [1, 3, 1], [-1, -1]],
    ids=lambda slots: "".join("." if slot < 0 else str(slot) for slot in slots),
)
def test_every_token_gets_its_own_adapter_and_no_other(slots: list[int]) -> None:
    (y, x), (a, b) = tokens(len(slots)), slots_of_a_layer(1)
    expected = one_by_one(y, x, a, b, slots)
    lora = GroupedLora()
    lora.use(torch.tensor(slots))
    lora.add(y, x, a, b)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_layers_share_what_a_step_says_and_keep_their_own_matrices() -> None:
    slots, lora = [0, 2, -1, 2], GroupedLora()
    lora.use(torch.tensor(slots))
    for seed in (1, 2, 1):
        (y, x), (a, b) = tokens(4), slots_of_a_layer(seed)
        expected = one_by_one(y, x, a, b, slots)
        lora.add(y, x, a, b)
        torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


@torch.inference_mode()  # as the engine runs its steps and fills its slots
def test_a_slot_that_was_filled_anew_is_used_at_once() -> None:
    with torch.inference_mode(mode=False):
        a, b = slots_of_a_layer(1)  # the engine makes them before it runs
    lora, slots = GroupedLora(), [1, 0]
    for value in (None, 0.0, 2.0):  # as it was, emptied, and filled with another adapter
        if value is not None:
            for part in (*a, *b):
                part[1] = value
        y, x = tokens(2)
        expected = one_by_one(y, x, a, b, slots)
        lora.use(torch.tensor(slots))
        lora.add(y, x, a, b)
        torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_part_and_a_rank_that_an_adapter_leaves_out_add_nothing() -> None:
    a, b = slots_of_a_layer(3)
    for part in (a[1], b[1]):  # an adapter on q and v only
        part[:] = 0
    a[0][2, 0, 1:] = 0  # one of rank 1
    b[0][2, 0, :, 1:] = 0
    for part in (*a, *b):  # and one of zeros only
        part[3] = 0
    slots = [0, 2, 3, 2]
    y, x = tokens(4)
    expected = one_by_one(y, x, a, b, slots)
    lora = GroupedLora()
    lora.use(torch.tensor(slots))
    lora.add(y, x, a, b)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
    for only in (3, -1):
        y, x = tokens(1)
        before = y.clone()
        lora.use(torch.tensor([only]))
        lora.add(y, x, a, b)
        assert torch.equal(y, before)


def test_the_slots_of_a_step_may_change_under_the_engine_s_hands_afterwards() -> None:
    (y, x), (a, b) = tokens(2), slots_of_a_layer(4)
    expected = one_by_one(y, x, a, b, [0, 1])
    buffer, lora = torch.tensor([0, 1]), GroupedLora()
    lora.use(buffer)
    buffer[:] = 3
    lora.add(y, x, a, b)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_in_bfloat16_it_differs_by_roundings_only() -> None:
    slots = [0, 1, -1, 3]
    (y, x), (a, b) = tokens(4, torch.bfloat16), slots_of_a_layer(5, torch.bfloat16)
    expected = one_by_one(y, x, a, b, slots)
    lora = GroupedLora()
    lora.use(torch.tensor(slots))
    lora.add(y, x, a, b)
    # Two roundings, each by a factor of up to 1 +- 2^-8, of sums that reach some tens.
    torch.testing.assert_close(y.double(), expected, rtol=2**-6, atol=0.15)
