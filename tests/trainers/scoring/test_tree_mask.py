"""Owns: what attention over a tree of positions sees, and that the kernel's formula computes what gathering does.

The kernel itself is compiled on a GPU only (`make gpu-check` compares it there); here its formula runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex
from transformers import MistralConfig, MistralForCausalLM

from trainers.scoring import tree_mask
from trainers.scoring.packed import ON_TREE, layout_to_hidden
from trainers.scoring.prefix_tree import rows_to_layout
from trainers.scoring.tree_mask import BLOCK, attend_on_tree, layout_to_block_mask, layout_to_sees

CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12)
WINDOWS = st.one_of(st.none(), st.integers(1, 6))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """FlexAttention as torch computes it without a compiler, with its gradient, which it otherwise has on GPUs only."""
    with (
        mock.patch.object(tree_mask, "_compiled", return_value=flex.flex_attention),
        mock.patch.object(flex, "_validate_device"),
    ):
        yield


@given(ROWS, WINDOWS)
def test_a_position_sees_its_own_beginning_and_of_a_window_its_last_positions(
    rows: list[tuple[int, ...]], window: int | None
) -> None:
    layout = rows_to_layout(rows, CPU)
    beginning: dict[int, tuple[int, ...]] = {}
    for row, nodes in zip(rows, layout.node_of, strict=True):
        beginning |= {node: row[: end + 1] for end, node in enumerate(nodes.tolist())}
    every = torch.arange(len(beginning))
    sees = layout_to_sees(layout, window)(every[:, None], every)
    for query, own in beginning.items():
        for key, theirs in beginning.items():
            near = window is None or len(theirs) > len(own) - window
            assert bool(sees[query, key]) == (own[: len(theirs)] == theirs and near)


def long_rows() -> list[tuple[int, ...]]:
    """Rows of several blocks that part inside one, at the edge of one, and at once; 1,100 positions or so."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (2000,), generator=generator).tolist()
    shared = tuple(tokens[: 2 * BLOCK])
    return [
        (*shared, 1, *tokens[300:600]),
        (*shared, 2, *tokens[700:750]),
        (*shared[:200], 3, *tokens[900:1100]),
        (4, *tokens[1200:1400]),
        shared,
    ]


@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("stretch", [1, 3, 8])
def test_the_blocks_are_those_that_torch_finds_by_looking_at_every_pair(
    monkeypatch: pytest.MonkeyPatch, window: int | None, stretch: int
) -> None:
    monkeypatch.setattr(tree_mask, "_STRETCH", stretch)
    layout = rows_to_layout(long_rows(), CPU)
    count = len(layout.ids_N)
    assert count % BLOCK  # the last block is not whole
    found = layout_to_block_mask(layout, window)
    sees = layout_to_sees(layout, window)
    expected = flex.create_block_mask(lambda b, h, query, key: sees(query, key), None, None, count, count, device="cpu")
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    for kind in ("kv", "q"):
        for part in ("", "full_"):
            numbers = getattr(found, f"{part}{kind}_num_blocks")
            assert numbers.tolist() == getattr(expected, f"{part}{kind}_num_blocks").tolist()
            ours, theirs = (getattr(mask, f"{part}{kind}_indices")[0, 0].tolist() for mask in (found, expected))
            for row, number in enumerate(numbers[0, 0].tolist()):
                assert set(ours[row][:number]) == set(theirs[row][:number])
    assert found.seq_lengths == expected.seq_lengths


@pytest.mark.filterwarnings("ignore")  # of a kernel that is not compiled, and of what traces it
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("window", [None, 70])
def test_gradients_on_the_tree_are_those_of_each_row_alone(window: int | None) -> None:
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    backbone = MistralForCausalLM(config).eval().model
    rows = long_rows()
    layout = rows_to_layout(rows, CPU)
    weights = list(backbone.parameters())

    def slopes(states: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.cat([state**3 for state in states]).sum(), weights)

    packed = layout_to_hidden(backbone, layout, ON_TREE)
    plain = [backbone(input_ids=torch.tensor([row]), use_cache=False)[0][0] for row in rows]
    for nodes, states in zip(layout.node_of, plain, strict=True):
        torch.testing.assert_close(packed[nodes], states, atol=1e-4, rtol=1e-3)
    for found, expected in zip(slopes([packed[nodes] for nodes in layout.node_of]), slopes(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


def test_a_kernel_is_compiled_for_a_few_kinds_of_calls_and_not_for_every_tree() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=counter)

    def attend(length: int, window: int | None) -> None:
        layout = rows_to_layout([tuple(range(length)), (0, 5, *range(length // 3))], CPU)
        parts = [torch.zeros(1, 2, len(layout.ids_N), 16) for _ in range(3)]
        attend_on_tree(*parts, layout=layout, scale=1.0, window=window)

    with mock.patch.object(tree_mask, "_compiled", return_value=compiled), torch.no_grad():
        for length, window in [(300, None), (77, None), (200, 70), (90, 5)]:
            attend(length, window)
        kinds = counter.frame_count
        assert kinds <= 4
        for length, window in [(411, None), (1200, None), (50, None), (333, 90), (640, 21)]:
            attend(length, window)
    assert counter.frame_count == kinds
