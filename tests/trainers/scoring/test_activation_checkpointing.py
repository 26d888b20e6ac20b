"""Owns: decoder layers that are computed again in backward change memory and time, and not one bit of what is learned.

- Log-probs, entropies and gradients are those of the plain pass, bit for bit, packed or padded, also where a graph is
  kept for several gradients.
- A layer is computed twice where a gradient is asked for, and once where none is.
- A whole run is the same bits, and one that was interrupted goes on the same with the option on or off.
- What cannot be computed again is refused by name; a gradient through another adapter's layers is never given.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, make_action, play, save_tiny_llama
from support.trainer_options import trainer_options
from torch import Tensor
from transformers import CTRLConfig, CTRLLMHeadModel, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from trainers import checkpoint
from trainers.batch import ActionItem
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.scoring.activation_checkpointing import decoder_layers
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches
from trainers.scoring.model import PolicyModel

EVERYWHERE = LoraOptions(rank=3, target_modules=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))


def make_items() -> list[ActionItem]:
    """Calls that share beginnings, of several lengths."""
    profile, other = (7, 3, 9, 1, 4, 4, 2, 8, 6, 6, 1), (5, 5, 6, 1)
    tails = [(1, 2), (1, 2, 3, 3), (2, 2, 9, 8, 7, 6, 5)]
    prompts = [*(profile + tail for tail in tails), (*other, 1, 2), other]
    actions = [make_action("a", prompt, sampled) for prompt in prompts for sampled in ((2, 3), (2, 4, 1), (7,))]
    return [ActionItem("a", a.prompt_ids or (), a.sampled_ids or (), a.logprobs or (), 0.7) for a in actions]


def make_model(folder: Path, again: bool, lora: LoraOptions = EVERYWHERE) -> PolicyModel:
    """With adapters `a` and `b` whose matrices are not zero."""
    model = PolicyModel(folder, ["a", "b"], lora, "cpu", seed=0, checkpointing=again)
    for number, adapter in enumerate(model.adapters):
        generator = torch.Generator().manual_seed(number)
        for name, weight in model.parameters(adapter).items():
            if "lora_B" in name:
                weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return model


def measured(model: PolicyModel, batches: Sequence[MicroBatch]) -> list[Tensor]:
    """Log-probs, entropies and gradients, two of them from one graph."""
    weights = list(model.parameters("a").values())
    found = []
    for batch in batches:
        logp_T, entropy_T = model.logprobs_and_entropy("a", batch)
        found += [logp_T.detach(), entropy_T.detach()]
        found += torch.autograd.grad(logp_T.square().sum(), weights, retain_graph=True)
        found += torch.autograd.grad((logp_T * entropy_T).sum(), weights)
    return found


def assert_same_bits(model_dir: Path, packs: bool) -> None:
    plain, again = make_model(model_dir, False), make_model(model_dir, True)
    for model in (plain, again):
        model.packing = model.packing if packs else None
        model._shares_prefixes = False
    batches = items_to_microbatches(make_items(), 20, None, plain.rows_to_groups)
    assert len(batches) > 1
    expected, found = measured(plain, batches), measured(again, batches)
    assert all(float(tensor.abs().max()) > 0 for tensor in expected)
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("packs", [True, False])
def test_log_probs_entropies_and_gradients_are_the_same_bits(tmp_path: Path, packs: bool) -> None:
    assert_same_bits(save_tiny_llama(tmp_path), packs)


def test_they_are_for_another_family_with_norms_over_heads(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    assert_same_bits(tmp_path, True)


def test_rows_that_share_their_beginning_by_a_cache_are_computed_whole(tmp_path: Path) -> None:
    """A layer that is computed again would add its keys to the cache a second time."""
    model_dir = save_tiny_llama(tmp_path)
    plain, again = make_model(model_dir, False), make_model(model_dir, True)
    plain.packing = again.packing = None
    assert plain._shares_prefixes
    assert not again._shares_prefixes
    (batch,) = items_to_microbatches(make_items()[:6], 4096)
    for expected, found in zip(measured(plain, [batch]), measured(again, [batch]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_a_layer_is_computed_twice_for_a_gradient_and_once_without(tmp_path: Path) -> None:
    model = make_model(save_tiny_llama(tmp_path), True)
    (batch,) = items_to_microbatches(make_items(), 4096, None, model.rows_to_groups)
    layers = decoder_layers(model._backbone)
    assert len(layers) == 2
    counts = [0] * len(layers)

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            counts[number] += 1

        return hook

    for number, layer in enumerate(layers):
        layer.self_attn.register_forward_hook(count(number))
    with torch.no_grad():
        model.logprobs("a", batch)
    assert counts == [1, 1]
    model.logprobs("a", batch).sum().backward()  # type: ignore[no-untyped-call]
    assert counts == [3, 3]


def everything(trainer: MarftTrainer) -> dict[str, Tensor]:
    return {f"{a}/{n}": p.detach().clone() for a in AGENTS for n, p in trainer.policies.parameters(a).items()}


def make_trainer(model_dir: Path, again: bool, seed: int) -> MarftTrainer:
    options = trainer_options(device="cpu", lr=0.02, epochs=2, kl_coef=0.1, activation_checkpointing=again)
    return MarftTrainer(options, model_dir, AGENTS, seed)


def run_rounds(trainer: MarftTrainer, numbers: range) -> None:
    for number in numbers:
        trainer.update(play(trainer, 8, torch.Generator().manual_seed(number), both_low))


def test_a_run_is_the_same_bits_and_goes_on_the_same_with_the_option_on_or_off(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path / "model")
    plain, again = make_trainer(model_dir, False, 0), make_trainer(model_dir, True, 0)
    run_rounds(plain, range(2))
    run_rounds(again, range(1))
    checkpoint.save(again, tmp_path / "checkpoint")
    expected = everything(plain)
    for on in (True, False):
        resumed = make_trainer(model_dir, on, 999)
        checkpoint.load(resumed, tmp_path / "checkpoint")
        run_rounds(resumed, range(1, 2))
        found = everything(resumed)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_layers_that_cannot_be_computed_again_are_refused_by_name(tmp_path: Path) -> None:
    config = CTRLConfig(vocab_size=32, n_positions=64, n_embd=16, dff=32, n_layer=2, n_head=2)
    CTRLLMHeadModel(config).save_pretrained(tmp_path)
    lora = LoraOptions(rank=2, target_modules=("Wq", "Wv"))
    assert PolicyModel(tmp_path, ["a"], lora, "cpu", seed=0).adapters == ("a",)
    with pytest.raises(
        TrainError, match=r"trainer\.system\.activation_checkpointing: the layers of .* cannot be computed"
    ):
        PolicyModel(tmp_path, ["a"], lora, "cpu", seed=0, checkpointing=True)


def test_layers_whose_gradient_changes_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is another one each time it is computed."""
    from transformers.models.llama import modeling_llama

    class Forgetful(modeling_llama.LlamaDecoderLayer):
        def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.seen = 0

        def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
            if torch.is_grad_enabled():
                self.seen += 1
            return super().forward(hidden_states * (1 + self.seen), **others)

    model_dir = save_tiny_llama(tmp_path)
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Forgetful)
    with pytest.raises(TrainError, match=r"give other gradients when they are computed again; leave it out"):
        PolicyModel(model_dir, ["a"], LoraOptions(rank=2), "cpu", seed=0, checkpointing=True)


def test_a_gradient_through_another_adapters_layers_is_never_given(tmp_path: Path) -> None:
    model = make_model(save_tiny_llama(tmp_path), True)
    (batch,) = items_to_microbatches(make_items(), 4096, None, model.rows_to_groups)
    loss = model.logprobs("a", batch).sum()
    model.use("b")
    with pytest.raises(RuntimeError, match="computed again with adapter 'b', not 'a'"):
        loss.backward()  # type: ignore[no-untyped-call]
