"""A second device for tests: the CPU's arithmetic, but tensors that keep apart from the CPU's as a GPU's do.

Inside `second_device()`, "second" names a device whose tensors refuse what CUDA tensors refuse: an operation with a
tensor of the CPU that has dimensions, a generator of the CPU, NumPy. Copies between the two are as they always are, a
number without dimensions may come from either, and indices may come from the CPU.

It shows that code brings everything to where it computes, and that the numbers are the CPU's. It knows nothing of a
GPU's kernels, streams, memory or random numbers. torch counts its devices at the first backward pass of a process, so
this is imported before, in a process of its own; see device_laws.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of a device beside tensors, where a layer is computed a second time."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """It has no random numbers of its own."""


backend_registration._setup_privateuseone_for_python_backend("second", _Backend())
SECOND = torch.device("second:0")

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class There(torch.Tensor):
    """A tensor of the second device; `raw` has its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: type[There], raw: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=SECOND,
        )
        made.raw = raw
        assert isinstance(made, There)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:  # torch has it for its own classes only
        return self.raw.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.raw})"


class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what makes tensors out of nothing, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


@contextmanager
def second_device() -> Iterator[torch.device]:
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) then copies where the mode sees it
    try:
        with _Devices():  # type: ignore[no-untyped-call]
            yield SECOND
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given, structure = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    named = next((x for x in given if isinstance(x, torch.device)), None)
    there = any(isinstance(x, There) for x in tensors) if named is None else named.type == SECOND.type
    if func is _aten.copy_.default:
        there = isinstance(args[0], There)
    elif func not in _COPIES:
        _refuse_mixed(func, tensors)
    if kwargs.get("generator") is not None and there:
        raise RuntimeError(f"{func}: expected a generator of {SECOND.type}, found one of cpu")
    raw = [x.raw if isinstance(x, There) else torch.device("cpu") if isinstance(x, torch.device) else x for x in given]
    plain_args, plain_kwargs = pytree.tree_unflatten(raw, structure)
    result = func(*plain_args, **plain_kwargs)
    if not there:
        return result
    given_as = {id(x.raw): x for x in tensors if isinstance(x, There)}

    def brought(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return given_as[id(x)] if id(x) in given_as else There(x)  # in place: the tensor that was given

    return pytree.tree_map(brought, result)


def _refuse_mixed(func: Any, tensors: list[torch.Tensor]) -> None:
    if func in _INDEXED and isinstance(tensors[0], There):  # whose indices may come from the CPU
        tensors = [tensors[0], *([] if func is _aten.index.Tensor else tensors[-1:])]
    places = {x.device.type for x in tensors if x.dim()} | {SECOND.type for x in tensors if isinstance(x, There)}
    if len(places) > 1:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {' and '.join(sorted(places))}")
