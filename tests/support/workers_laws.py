"""What the processes of tests/trainers/test_workers.py run, one function per law; see workers_rig.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from trainers.common.workers import Workers
from trainers.errors import TrainError


def identity(workers: Workers, argument: Any) -> list[Any]:
    return [workers.rank, workers.count, workers.is_main, workers.device.type]


def shares(workers: Workers, argument: Any) -> list[list[str]]:
    return [workers.mine("abcde"[:count]) for count in range(6)]


def numbers(workers: Workers, argument: Any) -> dict[str, Any]:
    me = float(workers.rank + 1)
    return {
        "add": workers.add([me, 2.0**53 * me, 0.1]),  # 2^53 + 1 would be lost in float32
        "add_nothing": workers.add([]),
        "max": [workers.max(-me), workers.max(-float("inf") if workers.rank == 0 else -5.0)],
    }


def gradients(workers: Workers, argument: Any) -> dict[str, Any]:
    """Shapes differ; `lone` has a gradient on the last process only, `none` on no process."""
    both, lone, none = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (2,), (4,)))
    both.grad = torch.arange(6.0).view(2, 3) + 100 * workers.rank
    if workers.rank == workers.count - 1:
        lone.grad = torch.tensor([7.0, -8.0])
    workers.add_gradients([both, lone, none])
    return {name: None if p.grad is None else p.grad.tolist() for name, p in vars_of(both, lone, none).items()}


def vars_of(both: Any, lone: Any, none: Any) -> dict[str, torch.nn.Parameter]:
    return {"both": both, "lone": lone, "none": none}


def one_microbatch(workers: Workers, argument: Any) -> list[float]:
    """A sum of squares over fewer rows than processes: the second process computes nothing."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    for row in workers.mine([torch.tensor([3.0, 5.0])]):
        (weight * row).sum().backward()
    workers.add_gradients([weight])
    assert weight.grad is not None
    return weight.grad.tolist()


LENGTHS = (3, 1, 0, 5, 2)


def vectors() -> list[torch.Tensor]:
    """Ragged, one of them empty, with numbers that need all of a float32's digits."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator) / 3 for n in LENGTHS]


def gathered(workers: Workers, argument: Any) -> list[list[float]]:
    mine = workers.mine(list(enumerate(vectors())))
    return [v.tolist() for v in workers.gather(mine, LENGTHS, torch.device("cpu"))]


def gathered_from_one(workers: Workers, argument: Any) -> list[list[float]]:
    mine = list(enumerate(vectors())) if workers.rank == 0 else []
    return [v.tolist() for v in workers.gather(mine, LENGTHS, torch.device("cpu"))]


def gathered_in_messages(workers: Workers, argument: Any) -> list[list[float]]:
    """As `gathered`, in messages of at most four numbers, or of one vector."""
    mine, device = workers.mine(list(enumerate(vectors()))), torch.device("cpu")
    with mock.patch("trainers.common.workers.MESSAGE_NUMBERS", 4):
        return [v.tolist() for v in workers.gather(mine, LENGTHS, device, kept_on=device)]


def refusals(workers: Workers, argument: Any) -> list[str]:
    """What each process is told when shares or inputs do not fit together."""

    def said(action: Any) -> str:
        try:
            action()
        except (TrainError, ValueError) as error:
            return str(error)
        return "nothing"

    cpu, one = torch.device("cpu"), torch.ones(1)
    return [
        said(lambda: workers.gather([(0, one)], [1], cpu)),  # both have it
        said(lambda: workers.gather([], [1], cpu)),  # none has it
        said(lambda: workers.check_same("the round", [1.0, 2.0])),
        said(lambda: workers.check_same("the round", [1.0, float(workers.rank)])),
        said(lambda: workers.check_same("the round", [1.0] * (1 + workers.rank))),
    ]
