"""Layers of a frozen model with LoRA adapters to the same layers, computed with fewer passes over memory.

A frozen weight needs no gradient, so backward keeps nothing of a linear layer but what its adapter asks for, and of a
norm or a gated activation only its input. In float32 on a CPU the products go through oneDNN where torch has it: MKL,
which torch would call, leaves half of the vector units of some processors idle. On a GPU an adapter of float32 masters
is computed with in the type of its base, as the engine does, and a norm is one kernel.

Invariant: outputs and gradients are those of the modules that are replaced, up to rounding; a norm or a gated
block is replaced only where a trial gives the same output. Weights are those of the modules: nothing is copied.
It knows nothing of batches, attention or losses.

Shapes: N positions (all leading dimensions together), I inputs, O outputs, R rank of an adapter, H width.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor
from torch.autograd.function import once_differentiable

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative; another formula is off by far more


@cache
def _onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's matrix product for float32 on the CPU; None where this build of torch lacks it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        operator(torch.ones(1, 2), torch.ones(1, 2), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return operator


def linear(input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, without autograd."""
    fast = _onednn_linear() if input_NI.device.type == "cpu" and input_NI.dtype == torch.float32 else None
    if fast is None or weight_OI.dtype != torch.float32 or input_NI.numel() == 0:
        return torch.nn.functional.linear(input_NI, weight_OI, bias_O)
    return fast(input_NI, weight_OI, bias_O, "none", [], "")


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.weight_OI = weight_OI  # frozen: no version to check, nothing to save
        return linear(input_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return linear(gradients[0].contiguous(), ctx.weight_OI.T), None, None


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, in the type of x; A and B may be held in a wider one, which their gradients have."""

    @staticmethod
    def forward(
        ctx: Any, input_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        flat_NI = input_NI.reshape(-1, input_NI.shape[-1])
        low_NR = flat_NI @ a_RI.to(flat_NI.dtype).T
        output_NO = linear(flat_NI, weight_OI, bias_O).addmm_(low_NR, b_OR.to(low_NR.dtype).T, alpha=scale)
        ctx.save_for_backward(flat_NI, low_NR, a_RI, b_OR)
        ctx.weight_OI, ctx.scale, ctx.shape = weight_OI, scale, input_NI.shape
        adapted: Tensor = output_NO.view(*input_NI.shape[:-1], -1)
        return adapted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_NO = gradients[0].reshape(-1, gradients[0].shape[-1])
        back_NR, a_RI, *slopes = _adapter_slopes(ctx, gradient_NO)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = linear(gradient_NO, ctx.weight_OI.T).addmm_(back_NR, a_RI).view(ctx.shape)
        return input_gradient, None, None, *slopes, None


class _Adapted(torch.autograd.Function):
    """y + s (x A^T) B^T, for a layer whose own output y is computed elsewhere; types as in `_AdaptedLinear`."""

    @staticmethod
    def forward(ctx: Any, output_NO: Tensor, input_NI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
        flat_NI = input_NI.reshape(-1, input_NI.shape[-1])
        low_NR = flat_NI @ a_RI.to(flat_NI.dtype).T
        ctx.save_for_backward(flat_NI, low_NR, a_RI, b_OR)
        ctx.scale, ctx.shape = scale, input_NI.shape
        flat_NO = output_NO.reshape(-1, output_NO.shape[-1])
        adapted: Tensor = torch.addmm(flat_NO, low_NR, b_OR.to(low_NR.dtype).T, alpha=scale).view(output_NO.shape)
        return adapted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back_NR, a_RI, *slopes = _adapter_slopes(ctx, gradients[0].reshape(-1, gradients[0].shape[-1]))
        input_gradient = (back_NR @ a_RI).view(ctx.shape) if ctx.needs_input_grad[1] else None
        return gradients[0], input_gradient, *slopes, None


def _adapter_slopes(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What comes back through B, A in its type, and the gradients of A and B in theirs."""
    flat_NI, low_NR, a_RI, b_OR = ctx.saved_tensors
    back_NR = (gradient_NO @ b_OR.to(gradient_NO.dtype)).mul_(ctx.scale)
    a_gradient = (back_NR.T @ flat_NI).to(a_RI.dtype)
    b_gradient = (gradient_NO.T @ low_NR).to(b_OR.dtype).mul_(ctx.scale)
    return back_NR, a_RI.to(back_NR.dtype), a_gradient, b_gradient


class _RmsNorm(torch.autograd.Function):
    """w x / sqrt(mean(x^2) + epsilon)."""

    @staticmethod
    def forward(ctx: Any, input_NH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        width = input_NH.shape[-1]
        scale_N1 = torch.linalg.vecdot(input_NH, input_NH).div_(width).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(input_NH, scale_N1)
        ctx.weight_H = weight_H
        normal_NH: Tensor = (input_NH * scale_N1).mul_(weight_H)
        return normal_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input_NH, scale_N1 = ctx.saved_tensors
        weighted_NH = gradients[0] * ctx.weight_H
        along_N1 = torch.linalg.vecdot(weighted_NH, input_NH).unsqueeze(-1)
        along_N1 = along_N1 * scale_N1.pow(3) / -input_NH.shape[-1]
        return weighted_NH.mul_(scale_N1).addcmul_(input_NH, along_N1), None, None


class _Gated(torch.autograd.Function):
    """silu(g) u."""

    @staticmethod
    def forward(ctx: Any, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NI, up_NI)
        return torch.nn.functional.silu(gate_NI).mul_(up_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate_NI, up_NI = ctx.saved_tensors
        gate_gradient = torch.ops.aten.silu_backward(gradients[0] * up_NI, gate_NI)
        return gate_gradient, torch.nn.functional.silu(gate_NI).mul_(gradients[0])


def speed_up(model: torch.nn.Module, *, but: Iterable[torch.nn.Module] = ()) -> None:
    """Gives the layers of a frozen model and its LoRA adapters their faster forward pass, on whatever device it is.

    Args:
        but: parts of the model that are left as they are.
    """
    left_out = {module for part in but for module in part.modules()}
    for path, module in list(model.named_modules()):
        if module in left_out:
            continue
        if isinstance(module, LoraLinear) and type(module.base_layer) is torch.nn.Linear:
            _replace(module, partial(_adapted_forward, module, module.forward))
        elif _adapts_bits(module):
            _replace(module, partial(_adapted_bits_forward, module, module.forward))
        # matrices of an adapter that is not active are frozen only now
        elif type(module) is torch.nn.Linear and not module.weight.requires_grad and ".lora_" not in path:
            if module.weight.device.type == "cpu":
                _replace(module, partial(_linear_forward, module))
        elif type(module).__name__.endswith("RMSNorm"):
            _replace_if_equal(module, partial(_norm_forward, module.forward))
        elif _is_gated(module):
            on_card = next(module.parameters()).device.type == "cuda"
            if not (on_card and _replace_if_equal(module, _compiled_gated_forward)):
                _replace_if_equal(module, _gated_forward)


def _replace(module: torch.nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


@torch.no_grad()
def _replace_if_equal(module: Any, forward: Callable[[Any, Tensor], Tensor]) -> bool:
    """Replaces a forward pass by one that gives the same output on random input, which its modules' names promise.

    Returns:
        Whether it does, and can be computed here at all.
    """
    weight = next(module.parameters())
    width, dtype = weight.shape[-1], weight.dtype
    try:
        if not dtype.is_floating_point:  # a gated block in 4 bits
            width = module.gate_proj.in_features
            dtype = torch.float32 if weight.device.type == "cpu" else torch.bfloat16
        probe = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
        expected, actual = module(probe), forward(module, probe)
    except (AttributeError, TypeError, RuntimeError):  # the last one also where a compiler is missing
        return False
    allowed = _TOLERANCE.get(dtype, 1e-4) * float(expected.abs().max())
    if expected.shape != actual.shape or float((expected - actual).abs().max()) > allowed:
        return False
    _replace(module, partial(forward, module))
    return True


def _linear_forward(module: Any, input_NI: Tensor) -> Tensor:
    return _FrozenLinear.apply(input_NI, module.weight, module.bias)  # type: ignore[no-any-return,no-untyped-call]


def _adapted_forward(module: Any, plain: Callable[[Tensor], Tensor], input_NI: Tensor) -> Tensor:
    if module.disable_adapters:
        return module.base_layer(input_NI)  # type: ignore[no-any-return]
    name, base = _only_adapter(module), module.base_layer
    if name is None or input_NI.dtype != base.weight.dtype:
        return plain(input_NI)
    return _AdaptedLinear.apply(  # type: ignore[no-any-return,no-untyped-call]
        input_NI, base.weight, base.bias, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]
    )


def _adapted_bits_forward(module: Any, plain: Callable[[Tensor], Tensor], input_NI: Tensor) -> Tensor:
    output_NO = module.base_layer(input_NI)
    if module.disable_adapters:
        return output_NO  # type: ignore[no-any-return]
    name = _only_adapter(module)
    if name is None:
        return plain(input_NI)
    return _Adapted.apply(  # type: ignore[no-any-return,no-untyped-call]
        output_NO, input_NI, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]
    )


def _only_adapter(module: Any) -> str | None:
    """The adapter that is on; None where it is not one, or where it is in the weights already."""
    active = [name for name in module.active_adapters if name in module.lora_A]
    return active[0] if len(active) == 1 and not module.merged else None


def _norm_forward(plain: Callable[[Tensor], Tensor], module: Any, input_NH: Tensor) -> Tensor:
    if input_NH.device.type == "cuda":  # one kernel, which computes in float32 and keeps its input as it came
        shape, epsilon = tuple(module.weight.shape), module.variance_epsilon
        return torch.nn.functional.rms_norm(input_NH, shape, module.weight, eps=epsilon)
    if input_NH.dtype != torch.float32 or module.weight.dtype != torch.float32:
        return plain(input_NH)  # which rounds to float32 on its way
    return _RmsNorm.apply(input_NH, module.weight, module.variance_epsilon)  # type: ignore[no-any-return,no-untyped-call]


def _gated_forward(module: Any, input_NH: Tensor) -> Tensor:
    inner = _Gated.apply(module.gate_proj(input_NH), module.up_proj(input_NH))  # type: ignore[no-untyped-call]
    return module.down_proj(inner)  # type: ignore[no-any-return]


def _gate(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate_NI) * up_NI


@cache
def _compiled_gate() -> Callable[[Tensor, Tensor], Tensor]:
    """One kernel each way, which keep gate and up for backward as `_Gated` does."""
    return torch.compile(_gate, dynamic=True)


def _compiled_gated_forward(module: Any, input_NH: Tensor) -> Tensor:
    inner = _compiled_gate()(module.gate_proj(input_NH), module.up_proj(input_NH))
    return module.down_proj(inner)  # type: ignore[no-any-return]


def _adapts_bits(module: Any) -> bool:
    return isinstance(module, LoraLayer) and hasattr(module.get_base_layer().weight, "quant_state")


def _is_gated(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
