"""Owns: rows packed as a tree of their beginnings hold every token once, and give the numbers of the plain pass."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_policy import make_action, save_tiny_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trainers.scoring.packed
import trainers.scoring.prefix_tree
from trainers.batch import ActionItem
from trainers.config import LoraOptions
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches
from trainers.scoring.model import PolicyModel
from trainers.scoring.packed import GATHERED, ON_TREE, find_packing, gap_to_plain, layout_to_hidden
from trainers.scoring.prefix_tree import PASS, Group, common_length, rows_to_groups, rows_to_layout

CPU = torch.device("cpu")
BACKWARD = trainers.scoring.packed._FLASH_BACKWARD
FEW_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12)


@given(ROWS)
def test_every_distinct_beginning_is_one_position(rows: list[tuple[int, ...]]) -> None:
    layout = rows_to_layout(rows, CPU)
    beginnings = {row[: end + 1] for row in rows for end in range(len(row))}
    assert len(layout.ids_N) == len(layout.depth_N) == len(beginnings)
    of_beginning: dict[tuple[int, ...], int] = {}
    for row, nodes in zip(rows, layout.node_of, strict=True):
        assert tuple(layout.ids_N[nodes].tolist()) == row
        assert layout.depth_N[nodes].tolist() == list(range(len(row)))
        for end, node in enumerate(nodes.tolist()):
            assert of_beginning.setdefault(row[: end + 1], node) == node
    attending = torch.cat([group.query_BQ[group.real_BQ] for group in layout.groups])
    assert sorted(attending.tolist()) == list(range(len(beginnings)))


@given(ROWS, st.integers(1, 30), st.integers(1, 60))
def test_groups_hold_each_row_once_and_no_more_than_is_allowed(
    rows: list[tuple[int, ...]], budget: int, rectangle: int
) -> None:
    groups = rows_to_groups(rows, budget, rectangle)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        distinct = {rows[i][: end + 1] for i in group for end in range(len(rows[i]))}
        if len(group) > 1:
            assert len(distinct) <= budget
            assert len(group) * max(len(rows[i]) for i in group) <= rectangle


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=7), st.integers(1, 20)
)
def test_no_other_way_to_cut_sorted_rows_computes_less(rows: list[tuple[int, ...]], budget: int) -> None:
    def cost(groups: list[list[tuple[int, ...]]]) -> float:
        total = 0.0
        for group in groups:
            distinct = len({row[: end + 1] for row in group for end in range(len(row))})
            total += PASS + (distinct if len(group) == 1 or distinct <= budget else float("inf"))
        return total

    ordered = sorted(rows)
    ways = []
    for cuts in product([False, True], repeat=len(rows) - 1):
        groups = [[ordered[0]]]
        for cut, row in zip(cuts, ordered[1:], strict=True):
            if cut:
                groups.append([])
            groups[-1].append(row)
        ways.append(cost(groups))
    found = rows_to_groups(rows, budget, 10**9)
    assert cost([[rows[i] for i in group] for group in found]) == min(ways)


def test_two_agents_are_not_torn_where_each_fits_into_a_pass() -> None:
    """Greedily the first pass would take a row of the second profile, and the other four would compute it again."""
    profiles = [tuple(range(10 * k, 10 * k + 10)) for k in range(2)]
    rows = [(*profile, 90 + k) for profile in profiles for k in range(5)]
    assert rows_to_groups(rows, 26, 10**9) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@given(*[st.lists(st.integers(0, 1), max_size=12).map(tuple)] * 2)
def test_the_common_length_is_that_of_the_longest_common_beginning(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    expected = max(n for n in range(min(len(left), len(right)) + 1) if left[:n] == right[:n])
    assert common_length(left, right) == expected


def tree_rows() -> list[tuple[int, ...]]:
    """Two profiles; under the first, rows that part early and late, one within another, one twice, one much longer."""
    profile, other = (7, 3, 9, 1, 4, 4, 2, 8), (5, 5, 6, 1)
    tails = [(1, 2), (1, 2, 3, 3), (1, 2, 3, 3), (2, 2, 9, 8, 7, 6, 5, 4, 3, 2, 1), ()]
    return [*(profile + tail for tail in tails), *(other + tail for tail in tails)]


def test_hidden_states_are_those_of_each_row_alone(tmp_path: Path) -> None:
    backbone = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path)).model
    rows = tree_rows()
    layout = rows_to_layout(rows, CPU)
    assert len(layout.groups) > 1  # lengths differ by more than a factor of two, so that several rectangles are tried
    with torch.no_grad():
        packed = layout_to_hidden(backbone, layout)
        for row, nodes in zip(rows, layout.node_of, strict=True):
            plain = backbone(input_ids=torch.tensor([row]), use_cache=False)[0][0]
            torch.testing.assert_close(packed[nodes], plain, atol=1e-5, rtol=1e-4)


def test_a_stretch_of_a_long_row_looks_at_no_more_than_its_own_path() -> None:
    layout = rows_to_layout([tuple(range(1400)), (0, 1, 2)], CPU)
    sizes = sorted((group.query_BQ.shape[1], group.key_BK.shape[1]) for group in layout.groups)
    assert sizes == [(3, 3), (373, 1400), (512, 3 + 512), (512, 3 + 1024)]  # the short row is where the long one begins


@pytest.mark.parametrize("stretch", [512, 3])
def test_a_sliding_window_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    monkeypatch.setattr(trainers.scoring.prefix_tree, "_STRETCH", stretch)
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    backbone = MistralForCausalLM(config).eval().model
    assert find_packing(backbone, CPU) == GATHERED
    rows = tree_rows()
    layout = rows_to_layout(rows, CPU)
    with torch.no_grad():
        packed = layout_to_hidden(backbone, layout)
        for row, nodes in zip(rows, layout.node_of, strict=True):
            plain = backbone(input_ids=torch.tensor([row]), use_cache=False)[0][0]
            torch.testing.assert_close(packed[nodes], plain, atol=1e-5, rtol=1e-4)


def test_the_trial_of_attention_tells_a_wrong_one_by_states_and_by_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(rank=4), "cpu", seed=0)
    backbone = model.peft.base_model.model.model
    rows = [(*range(1, 9), *range(150)), (*range(1, 9), 3, 5), (2, 4)]
    rows = [tuple(token % 32 for token in row) for row in rows]

    def gaps() -> tuple[float, float]:
        with torch.no_grad():
            states = gap_to_plain(backbone, rows, GATHERED, device=CPU)
        both = gap_to_plain(backbone, rows, GATHERED, device=CPU)
        assert states is not None
        assert both is not None
        return states, both

    assert max(gaps()) < 1e-5
    gathered = trainers.scoring.packed._gathered

    def lose_first_values(group: Group, *sources: torch.Tensor, **named: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = gathered(group, *sources, **named)
        return [query, key, torch.cat([0 * value[:, :, :64], value[:, :, 64:]], dim=2)]

    with monkeypatch.context() as patch:
        patch.setattr(trainers.scoring.packed, "_gathered", lose_first_values)
        assert min(gaps()) > 0.2
        assert find_packing(backbone, CPU) is None
    with monkeypatch.context() as patch:  # forward right, backward wrong
        patch.setattr(trainers.scoring.packed, "_FLASH_BACKWARD", lambda *a, **k: [2 * s for s in BACKWARD(*a, **k)])
        states, both = gaps()
        assert states < 1e-5
        assert both > 0.2


def test_a_layout_serves_two_types_of_numbers() -> None:
    """cuDNN takes a float32 mask for one of bfloat16."""
    layout = rows_to_layout(tree_rows(), CPU)
    attend = ALL_ATTENTION_FUNCTIONS[GATHERED]
    parts = torch.randn(3, 1, 2, len(layout.ids_N), 8, generator=torch.Generator().manual_seed(0))
    exact, _ = attend(None, *parts, None, packed_layout=layout)
    rounded, _ = attend(None, *parts.bfloat16(), None, packed_layout=layout)
    assert {mask.dtype for mask in layout.masks.values()} == {torch.float32, torch.bfloat16}
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.03)


def test_attention_that_a_card_computes_slowly_is_said(tmp_path: Path) -> None:
    model = PolicyModel(save_tiny_llama(tmp_path / "tiny"), ["a"], LoraOptions(rank=4), "cpu", seed=0)
    assert model.slow_attention() is None
    model.device = torch.device("cuda")
    line = "attention of tiny {}: no kernel could be compiled for it on this card"
    assert model.slow_attention() == line.format("gathers the beginning of every row")
    model.packing = None
    assert model.slow_attention() == line.format("computes every row whole")
    model.packing = ON_TREE
    assert model.slow_attention() is None


class MeanOfAllBefore(torch.nn.Module):
    """A backbone whose positions meet in a running mean instead of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPT2Config()
        self.embedding = torch.nn.Embedding(16, 8)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        embedded = self.embedding(input_ids)
        return (embedded.cumsum(dim=1) / torch.arange(1, embedded.shape[1] + 1)[:, None],)


def test_an_architecture_that_cannot_be_packed_is_found_out() -> None:
    assert find_packing(MeanOfAllBefore(), CPU) is None


def test_another_family_packs_or_is_found_out_and_stays_as_it_was() -> None:
    backbone = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)).eval().transformer
    before = backbone.config._attn_implementation
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = backbone(input_ids=ids)[0]
        find_packing(backbone, CPU)
        torch.testing.assert_close(backbone(input_ids=ids)[0], expected)
    assert backbone.config._attn_implementation == before


@pytest.mark.parametrize(
    ("budget", "stretch", "keeps_sums"), [(4096, 512, True), (24, 512, True), (4096, 3, True), (4096, 512, False)]
)
def test_log_probs_and_gradients_are_those_of_the_plain_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, stretch: int, keeps_sums: bool
) -> None:
    monkeypatch.setattr(trainers.scoring.prefix_tree, "_STRETCH", stretch)
    if not keeps_sums:  # as on a GPU
        monkeypatch.setattr(trainers.scoring.packed, "_keeps_sums", lambda query, value: False)
    model = PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(rank=4), "cpu", seed=0)
    assert model.packs
    for name, weight in model.parameters("a").items():
        if "lora_B" in name:  # an adapter that does something, so that what is shared depends on it
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    actions = [make_action("a", row, sampled) for row in tree_rows() for sampled in ((2, 3), (2, 4, 1), (7,))]
    items = [ActionItem("a", a.prompt_ids or (), a.sampled_ids or (), a.logprobs or (), 0.7) for a in actions]
    weights = list(model.parameters("a").values())

    def measure(batches: list[MicroBatch]) -> tuple[dict[int, list[float]], list[torch.Tensor]]:
        logps: dict[int, list[float]] = {}
        total = [torch.zeros_like(weight) for weight in weights]
        for batch in batches:
            logp = model.logprobs("a", batch)
            for item, part in zip(batch.items, logp.detach().split(list(batch.lengths)), strict=True):
                logps[item] = part.tolist()
            for so_far, slope in zip(total, torch.autograd.grad((logp**2).sum(), weights), strict=True):
                so_far += slope
        return logps, total

    packed_logps, packed_slopes = measure(items_to_microbatches(items, budget, None, model.rows_to_groups))
    model.packing, model._shares_prefixes = None, False
    plain_logps, plain_slopes = measure(items_to_microbatches(items, 4096))
    assert sorted(packed_logps) == list(range(len(items)))
    for i, expected in plain_logps.items():
        assert packed_logps[i] == pytest.approx(expected, abs=1e-5)
    for found, slope in zip(packed_slopes, plain_slopes, strict=True):
        assert float(slope.abs().max()) > 0
        torch.testing.assert_close(found, slope, atol=1e-4 * float(slope.abs().max()), rtol=1e-4)
