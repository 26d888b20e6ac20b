"""vLLM's executor and worker on a CPU -> an executor without a second process, a worker that uses `grouped_lora`.

The server's command line names both (`cpu.plan`); they are imported in the engine's processes only. Invariant: only the
process of the worker and the way that adapters are added to linear layers differ from vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

from marft_bridge.serving.cpu.grouped_lora import GroupedLora


class GroupedPunica(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM is not installed wherever types are checked
    """Adds adapters to the outputs of linear layers; vLLM makes one of these for all layers of a model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = GroupedLora()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Passes on which slot each token of the coming step uses."""
        super().update_metadata(*args, **kwargs)
        self._grouped.use(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """As vLLM's own, which still handles the arguments that only its sharded layers pass."""
        if kwargs or scale != 1.0:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
        else:
            self._grouped.add(y, x, a=lora_a_stacked, b=lora_b_stacked)


class GroupedLoraWorker(CPUWorker):  # type: ignore[misc]  # as above
    """vLLM's worker on a CPU with `GroupedPunica` in place of vLLM's own."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Makes `GroupedPunica` the platform's wrapper before the model's layers look it up."""
        name = f"{GroupedPunica.__module__}.{GroupedPunica.__qualname__}"
        setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda _: name))  # noqa: B010 - a method
        super().load_model(*args, **kwargs)


class InEngineExecutor(UniProcExecutor):  # type: ignore[misc]  # as above
    """Runs the worker in the engine's own process.

    vLLM refuses its own executor of this kind on a CPU, because the number of threads is not set there; our server sets
    it in the environment (`CpuPlan.environment`). Two processes cost more: the engine's spins on a core while the
    worker's threads need it, and every step is sent back and forth.
    """
