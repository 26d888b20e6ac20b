"""Owns: the operations that `train_flops_share` calls useful are those that torch counts; shared tokens count once."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from support.tiny_policy import save_tiny_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import benchmarks
from benchmarks.flop_count import model_to_shape, rows_to_flops
from benchmarks.train_flops import useful_flops
from benchmarks.train_work import OurUpdate, advantages
from trainers.batch import ActionItem
from trainers.config import LoraOptions
from trainers.scoring.model import PolicyModel

LENGTH = 11


def test_the_count_is_that_of_torch_but_for_what_a_mask_hides(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    shape = model_to_shape(PolicyModel(folder, ["a"], LoraOptions(rank=4), "cpu", seed=0))
    base: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    row = tuple(range(1, LENGTH + 1))
    with FlopCounterMode(display=False) as counter:
        plain(input_ids=torch.tensor([row]), use_cache=False).logits.sum().backward()
    # torch multiplies with all L x L pairs, and puts every position through the output layer
    hidden = LENGTH * LENGTH - LENGTH * (LENGTH + 1) // 2
    pair = 12 * shape.attended - 2 * shape.blind_keys
    assert rows_to_flops(shape, [row], LENGTH) + pair * hidden == counter.get_total_flops()


def test_what_rows_share_counts_once_and_sees_only_its_path(tmp_path: Path) -> None:
    shape = model_to_shape(PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(rank=4), "cpu", seed=0))
    token = rows_to_flops(shape, [(1,)], 0) - (12 * shape.attended - 2 * shape.blind_keys)
    pair = 12 * shape.attended - 2 * shape.blind_keys
    # distinct beginnings: (1), (1 2), (1 2 3), (1 2 4), which see 1 + 2 + 3 + 3 tokens
    assert rows_to_flops(shape, [(1, 2, 3), (1, 2, 4)], 2) == 4 * token + 9 * pair + 8 * shape.head


def test_a_layer_that_is_held_in_bits_counts_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    class InBits(torch.nn.Linear):
        """As bitsandbytes' layer: two numbers of a weight in one byte."""

    model = PolicyModel(save_tiny_llama(tmp_path), ["a"], LoraOptions(rank=4), "cpu", seed=0)
    expected = model_to_shape(model)
    layer = model._backbone.layers[0].mlp.gate_proj
    held = layer.weight.numel() // 2
    layer.__class__, layer.weight = InBits, torch.nn.Parameter(torch.zeros(held, 1, dtype=torch.uint8), False)
    assert model_to_shape(model) == expected


def test_the_step_that_is_measured_is_the_trainers_and_its_operations_are_counted(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    work = {a: [ActionItem(a, (1, 2, n), (4, 5), None, 0.7) for n in (3, 4, 6)] for a in ("reasoner", "actor")}
    update = OurUpdate(folder, work)
    norms = update.step()
    assert set(norms) == set(work)
    assert min(norms.values()) > 0
    assert useful_flops(update) > 0
    assert len(advantages(3)) == 3


def test_every_bench_can_be_imported() -> None:
    """They are measured by hand and seldom, so nothing else says that a name they use is gone."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__" and not module.name.startswith("test_"):
            importlib.import_module(f"benchmarks.{module.name}")
