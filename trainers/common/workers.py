"""Several processes, each with the whole round, to one update: who takes which micro-batch, and sums over all.

Data parallelism with one copy of every decision. All processes read the same trajectories with the same options and
seed, so order, groups, advantages and optimiser steps are computed everywhere alike; only forward and backward passes
of the policies are split: process k of n takes every n-th micro-batch. Sums come back bit for bit equal on all of
them, so that they also agree on what they decide by these sums. Against a single process, sums differ by the rounding
of another order of addition.

Invariant: every method but `mine` and `turns` is a meeting: all processes call the same ones in the same order, also
one whose share is empty; where one of them has ended, the others get a LostProcessError. A single process computes
what it would without this module. It knows nothing of models, rounds or losses. `accelerate launch --multi_gpu` or
`torchrun` start the processes, on machines without a GPU too (accelerate's `--cpu` starts one only, as of 1.15 and
without MPI). NCCL carries the sums between GPUs, gloo between CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.errors import LostProcessError, TrainError

X = TypeVar("X")
_GLOO = "gloo/transport"  # in what its errors say
MESSAGE_NUMBERS = 2**22  # of what is gathered at a time: 16 MiB, however large a round's vectors are together


class Workers:
    """This process among those that train together.

    Args:
        rank: which one this is, from 0.
        count: how many there are. More than one need torch's default process group.
        device: where this process computes.
        sharers: how many of them are on this one's machine, itself among them, and share its main memory.
    """

    def __init__(self, rank: int, count: int, device: torch.device, *, sharers: int = 1) -> None:
        if not 0 <= rank < count:
            raise ValueError(f"process {rank} of {count} does not exist")
        self.rank = rank
        self.count = count
        self.device = device
        self.sharers = sharers

    @classmethod
    def alone(cls, device: str = "cpu") -> Workers:
        """One process that does everything."""
        return cls(0, 1, torch.device(device))

    @classmethod
    def of_accelerate(cls, device: str = "auto") -> Workers:
        """The processes that were started together, as accelerate finds them; one where nothing started several.

        Each gets a CUDA device of its own, or the CPU.

        Args:
            device: "cpu" stays on the CPU; "auto" and "cuda" take CUDA devices where there are any.

        Raises:
            TrainError: the environment speaks of more processes than could be joined.
        """
        from accelerate import PartialState  # type: ignore[import-untyped]

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        promised = int(os.environ.get("WORLD_SIZE", "1"))
        if promised != state.num_processes:  # else each would take itself for the only one, and write checkpoints
            raise TrainError(
                f"WORLD_SIZE is {promised}, but {state.num_processes} could be joined: start the processes with "
                "`torchrun` or `accelerate launch --multi_gpu`, also on the CPU"
            )
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
        return cls(state.process_index, state.num_processes, state.device, sharers=sharers)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user; exactly one does."""
        return self.rank == 0

    def mine(self, batches: Sequence[X]) -> list[X]:
        """Every `count`-th batch, from the `rank`-th on; empty when there are fewer batches than processes."""
        return list(batches[self.rank :: self.count])

    def turns(self, batches: Sequence[X]) -> Iterator[X | None]:
        """As `mine`, in step with the others: None at the end when this process has none left and others do."""
        for first in range(0, len(batches), self.count):
            position = first + self.rank
            yield batches[position] if position < len(batches) else None

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replaces every gradient by its sum over processes, in one message.

        A missing gradient counts as zeros. One that is missing everywhere stays missing, because optimisers leave
        such a parameter alone, but move one whose gradient is zero.
        """
        if self.count == 1 or not parameters:
            return
        missing = [p.grad is None for p in parameters]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([not m for m in missing], dtype=parts[0].dtype, device=parts[0].device)
        flat = self.add_tensor(torch.cat([present, *(part.reshape(-1) for part in parts)]))
        sums = torch.split(flat[len(parts) :], [part.numel() for part in parts])
        for parameter, is_present, total in zip(parameters, (flat[: len(parts)] > 0).tolist(), sums, strict=True):
            if is_present:
                parameter.grad = total.view_as(parameter).to(parameter.dtype)

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over processes; the same shape on each. `tensor` itself is left as it is."""
        if self.count == 1:
            return tensor
        total = tensor.detach().clone()
        with meeting():
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return total

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over processes, one per value, in float64."""
        if self.count == 1:
            return list(values)
        total: list[float] = self.add_tensor(self._float64(values)).tolist()
        return total

    def max(self, value: float) -> float:
        """The largest of the processes' values."""
        if self.count == 1:
            return value
        largest = self._float64([value])
        with meeting():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def gather(
        self,
        parts: Sequence[tuple[int, Tensor]],
        lengths: Sequence[int],
        device: torch.device,
        *,
        kept_on: torch.device | None = None,
    ) -> list[Tensor]:
        """Vectors that each process has a share of -> all of them on every process, in order.

        Args:
            parts: (position, vector) of this process; over all processes every position comes exactly once.
            lengths: of the vectors, by position.
            device: where a process group's messages travel.
            kept_on: of the result, of which no more than one message is on `device` at a time; None: `device`.

        Returns:
            float32 vectors as they were, bit for bit but for the sign of a zero; a single process gets its own back.
        """
        vectors: list[Tensor | None] = [None] * len(lengths)
        for position, vector in parts:
            if vectors[position] is not None or vector.shape != (lengths[position],):
                raise ValueError(f"vector {position} has shape {tuple(vector.shape)} or comes twice")
            vectors[position] = vector
        if self.count == 1:
            return [_present(vector, position) for position, vector in enumerate(vectors)]
        if any(vector is not None and vector.dtype != torch.float32 for vector in vectors):
            raise ValueError("only float32 vectors are gathered: others would lose digits")
        gathered: list[Tensor] = []
        for begin, end in _ranges_of_messages(lengths):
            of_message = self._add_vectors(vectors[begin:end], lengths[begin:end], device)
            gathered += of_message if kept_on is None else [vector.to(kept_on) for vector in of_message]
        return gathered

    def _add_vectors(
        self, vectors: Sequence[Tensor | None], lengths: Sequence[int], device: torch.device
    ) -> list[Tensor]:
        # Where others' vectors go, this process has zeros; x + 0 is x, so a sum gathers exactly.
        held = torch.tensor([float(vector is not None) for vector in vectors], device=device)
        filled = [
            torch.zeros(length, device=device) if vector is None else vector.to(device)
            for vector, length in zip(vectors, lengths, strict=True)
        ]
        flat = self.add_tensor(torch.cat([held, *filled]))
        if not bool((flat[: len(vectors)] == 1).all()):
            raise ValueError("over all processes a vector is missing or comes twice")
        return list(torch.split(flat[len(vectors) :], list(lengths)))

    def wait(self) -> None:
        """Returns when all processes have come here: after files were written, before they are read."""
        self.add([0.0])

    def check_same(self, subject: str, values: Sequence[float]) -> None:
        """Refuses to go on where processes differ in something that must be the same everywhere.

        Raises:
            TrainError: on every process, naming `subject`.
        """
        if self.count == 1:
            return
        if self.max(len(values)) != -self.max(-len(values)):
            raise TrainError(f"the processes differ in {subject}: start all with the same configuration and run folder")
        signed_values = torch.stack([self._float64(values), -self._float64(values)])
        with meeting():
            dist.all_reduce(signed_values, op=dist.ReduceOp.MAX)
        if not torch.equal(signed_values[0], -signed_values[1]):
            raise TrainError(f"the processes differ in {subject}: start all with the same configuration and run folder")

    def close(self) -> None:
        """Leaves the process group; nothing else may be called after it."""
        if self.count > 1:
            dist.destroy_process_group()

    def _float64(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self.device)


def _ranges_of_messages(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of positions whose vectors have at most MESSAGE_NUMBERS together, or are a single one."""
    begin = numbers = 0
    for position, length in enumerate(lengths):
        if position > begin and numbers + length > MESSAGE_NUMBERS:
            yield begin, position
            begin, numbers = position, 0
        numbers += length
    if begin < len(lengths):
        yield begin, len(lengths)


def _present(vector: Tensor | None, position: int) -> Tensor:
    if vector is None:
        raise ValueError(f"vector {position} is missing")
    return vector


@contextmanager
def meeting() -> Iterator[None]:
    """What torch says where a message does not reach the others, as one line.

    Raises:
        LostProcessError: another process has ended, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        raise _to_lost_process(error) from None


@contextmanager
def losses_told() -> Iterator[None]:
    """As `meeting`, around what has errors of its own too, which stay what they are: passes of a sharded base.

    Raises:
        LostProcessError: another process has ended, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and _GLOO not in str(error):  # gloo has no class of its own
            raise
        raise _to_lost_process(error) from None


def _to_lost_process(error: RuntimeError) -> LostProcessError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return LostProcessError(
        f"another of the processes that train together has ended or does not answer ({reason}): see what it said, "
        "and start all of them again"
    )
