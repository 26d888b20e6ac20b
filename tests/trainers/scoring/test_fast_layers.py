"""Owns: layers of a frozen model with adapters compute what they did before they were made faster, and slopes too."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_policy import save_tiny_llama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trainers.scoring import fast_layers
from trainers.scoring.fast_layers import linear, speed_up
from trainers.scoring.trial import relative_gap


def make_adapted(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model with a float32 adapter on layers of every kind, whose matrices are not zero."""
    base = AutoModelForCausalLM.from_pretrained(save_tiny_llama(folder), dtype=dtype)
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=modules)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return adapted


def hidden_and_slopes(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model.base_model.model.model(input_ids=ids, use_cache=False)[0]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return hidden, dict(zip(trained, torch.autograd.grad((hidden**3).sum(), list(trained.values())), strict=True))


def test_a_model_with_faster_layers_has_the_hidden_states_and_gradients_of_the_plain_one(tmp_path: Path) -> None:
    plain = make_adapted(tmp_path)
    fast = copy.deepcopy(plain)
    speed_up(fast)
    replaced = {type(module).__name__ for module in fast.modules() if "forward" in vars(module)}
    assert replaced == {"Linear", "LlamaRMSNorm", "LlamaMLP"}  # frozen layers and those with an adapter are "Linear"
    ids = torch.randint(0, 32, (3, 11), generator=torch.Generator().manual_seed(0))
    expected_hidden, expected_slopes = hidden_and_slopes(plain, ids)
    hidden, slopes = hidden_and_slopes(fast, ids)
    torch.testing.assert_close(hidden, expected_hidden, atol=1e-5, rtol=1e-4)
    for name, slope in expected_slopes.items():
        assert float(slope.abs().max()) > 0
        torch.testing.assert_close(slopes[name], slope, atol=1e-4 * float(slope.abs().max()), rtol=1e-4)


def test_an_adapter_of_a_bfloat16_base_is_computed_in_it_and_its_gradients_are_float32(tmp_path: Path) -> None:
    exact, plain = make_adapted(tmp_path), make_adapted(tmp_path, torch.bfloat16)
    fast = copy.deepcopy(plain)
    speed_up(fast)
    ids = torch.randint(0, 32, (3, 11), generator=torch.Generator().manual_seed(0))
    (expected_hidden, expected), (_, of_peft), (hidden, slopes) = (
        hidden_and_slopes(model, ids) for model in (exact, plain, fast)
    )
    assert hidden.dtype == torch.bfloat16
    assert relative_gap(hidden, expected_hidden) < 0.02

    def to_one(slopes: dict[str, Tensor]) -> Tensor:
        assert {slope.dtype for slope in slopes.values()} == {torch.float32}
        return torch.cat([slope.flatten() for slope in slopes.values()])

    gap, gap_of_peft = (relative_gap(to_one(found), to_one(expected)) for found in (slopes, of_peft))
    assert gap < max(0.05, 1.5 * gap_of_peft)  # the base's rounding, which both have


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
def test_the_compiled_gate_of_a_gpu_is_the_plain_one_and_keeps_gate_and_up_only() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, slope = (torch.randn(1, 40, 64, generator=generator) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compiled = fast_layers._compiled_gate()(gate, up)
    assert saved == [(1, 40, 64)] * 2
    expected = nn.functional.silu(gate) * up
    torch.testing.assert_close(compiled, expected)
    for found, wanted in zip(
        torch.autograd.grad(compiled, (gate, up), slope), torch.autograd.grad(expected, (gate, up), slope), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_an_adapter_that_is_switched_off_is_no_part_of_faster_layers(tmp_path: Path) -> None:
    adapted = make_adapted(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    with adapted.disable_adapter():  # type: ignore[operator]
        expected = adapted(input_ids=ids).logits
    speed_up(adapted)
    with adapted.disable_adapter():  # type: ignore[operator]
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert float((adapted(input_ids=ids).logits - expected).detach().abs().max()) > 1e-3


class ShiftedRMSNorm(nn.Module):
    """A norm that is called like Llama's and multiplies by 1 + w, as Gemma's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.5))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


class GeluBlock(nn.Module):
    """A gated block with another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


@pytest.mark.parametrize("make", [ShiftedRMSNorm, GeluBlock])
def test_a_module_of_another_formula_keeps_its_own(make: type[nn.Module]) -> None:
    module = make().requires_grad_(False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = module(x)
    speed_up(module)
    assert "forward" not in vars(module)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (0, 5)])
def test_the_product_is_that_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in (shape, (4, 5), (4,)))
    torch.testing.assert_close(linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(linear(x @ weight.T, weight.T), (x @ weight.T) @ weight)
