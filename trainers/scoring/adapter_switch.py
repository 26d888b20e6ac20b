"""A model with LoRA adapters -> which of them its layers compute with, or none.

peft's own switches go through all adapters of all layers, and read the state of each before they turn them off: a team
of n agents that take turns would pay n times what n turns of one cost. Here a switch touches the adapter that goes and
the one that comes, and turning off touches none.

Invariant: active adapters, outputs and which matrices want a gradient are those that peft's `set_adapter` and
`disable_adapter` leave; inside of `off` no matrix takes part in a pass, so none has to be frozen for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from trainers.errors import TrainError


class AdapterSwitch:
    """Which adapter the layers of one model compute with.

    Args:
        peft: the model with all of its adapters.
        matrices: of each adapter, by its name in peft.
    """

    def __init__(self, peft: Any, matrices: Mapping[str, Iterable[torch.nn.Parameter]]) -> None:
        self._peft = peft
        self._matrices = {slot: tuple(parameters) for slot, parameters in matrices.items()}
        self._layers: list[Any] = [module for module in peft.modules() if isinstance(module, LoraLayer)]
        self._slot: str | None = None

    def use(self, slot: str) -> None:
        """Has every layer compute with this adapter, whose matrices alone want gradients."""
        if self._slot is None:  # peft has all of them in a state of its own
            self._peft.set_adapter(slot)
        elif self._slot != slot:
            for matrix in self._matrices[self._slot]:
                matrix.requires_grad_(False)
            for matrix in self._matrices[slot]:
                matrix.requires_grad_(True)
            for layer in self._layers:
                layer._active_adapter = [slot]
            self._peft.active_adapter = self._peft.base_model.active_adapter = slot
            _require(self._layers[0].active_adapters == [slot])
        self._slot = slot

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model alone while the context lasts."""
        were_off = [layer.disable_adapters for layer in self._layers]
        try:
            for layer in self._layers:
                layer._disable_adapters = True
            _require(self._layers[0].disable_adapters)
            yield
        finally:
            for layer, was_off in zip(self._layers, were_off, strict=True):
                layer._disable_adapters = was_off


def _require(is_switched: bool) -> None:
    """Refuses a peft whose layers do not read the attributes that are written here.

    Raises:
        TrainError: they read others.
    """
    if not is_switched:
        raise TrainError(
            "this release of peft keeps active adapters in a way that is not known here: install peft 0.21"
        )
