"""Owns: computing a shared prefix once changes no hidden state, no log-prob and no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_policy import make_action, save_tiny_llama
from transformers import AutoModelForCausalLM

from trainers.batch import ActionItem
from trainers.config import LoraOptions
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel
from trainers.scoring.shared_prefix import backbone_to_hidden, can_share_prefixes, shared_prefix


@pytest.mark.parametrize(
    ("rows", "first_needed", "length"),
    [
        ([[5] * 10 + [1, 2], [5] * 10 + [2, 2]], 11, 10),
        ([[5] * 10 + [1, 2], [5] * 10 + [2, 2]], 9, 9),  # a needed position must not disappear in the prefix
        ([[5] * 10 + [1, 2], [5] * 7 + [1] * 5], 11, 0),  # shorter than what a second call costs
        ([[5] * 12], 11, 0),
        ([[1] + [5] * 11, [2] + [5] * 11], 11, 0),
    ],
    ids=["common", "needed", "short", "one-row", "differs-at-once"],
)
def test_the_prefix_is_what_all_rows_share_before_the_first_needed_column(
    rows: list[list[int]], first_needed: int, length: int
) -> None:
    assert shared_prefix(torch.tensor(rows), first_needed) == length


def test_hidden_states_after_a_shared_prefix_are_those_of_the_plain_pass(tmp_path: Path) -> None:
    backbone = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path)).model
    rows = torch.randint(0, 32, (5, 30), generator=torch.Generator().manual_seed(0))
    rows[:, :17] = rows[0, :17]
    assert can_share_prefixes(backbone, torch.device("cpu"))
    with torch.no_grad():
        plain = backbone(input_ids=rows, use_cache=False)[0]
        torch.testing.assert_close(backbone_to_hidden(backbone, rows, 17), plain[:, 17:], atol=1e-5, rtol=1e-4)


def test_log_probs_and_gradients_do_not_depend_on_sharing(tmp_path: Path) -> None:
    model = PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(rank=4), "cpu", seed=0)
    model.peft.double()  # norms still round to float32; the rest does not
    for name, weight in model.parameters("a").items():
        if "lora_B" in name:  # an adapter that does something, so that the prefix depends on it
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).double() * 0.1
    profile = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5]
    actions = [make_action("a", [*profile, *extra], sampled) for extra, sampled in (([1], [2, 3]), ([5, 6], [7]))]
    items = [ActionItem("a", a.prompt_ids or (), a.sampled_ids or (), a.logprobs or (), 1.0) for a in actions]
    results = []
    model.packing = None  # which shares more
    for shares in (True, False):
        model._shares_prefixes = shares
        gradients = {name: torch.zeros_like(weight) for name, weight in model.parameters("a").items()}
        logps = []
        for batch in items_to_microbatches(items, 4096):
            logp = model.logprobs("a", batch)
            logps.append(logp.detach())
            weights = list(model.parameters("a").values())
            for name, part in zip(gradients, torch.autograd.grad((logp**2).sum(), weights), strict=True):
                gradients[name] += part
        results.append((torch.cat(logps), gradients))
    (shared_logp, shared_grad), (plain_logp, plain_grad) = results
    torch.testing.assert_close(shared_logp, plain_logp, atol=1e-6, rtol=1e-4)
    for name, gradient in plain_grad.items():
        assert float(gradient.abs().max()) > 0
        torch.testing.assert_close(shared_grad[name], gradient, atol=1e-6, rtol=1e-4)
