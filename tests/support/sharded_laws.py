"""What each process of `test_sharded_base.py` says of a base that is dealt out, beside a whole one of its own."""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainers.batch import ActionItem
from trainers.checks.reality import base_fingerprint, check_frozen
from trainers.common.workers import Workers
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel

NAME = "support.sharded_laws:parts"
_COLUMNS = ((2, 3), (1,))


def parts(workers: Workers, argument: dict[str, Any]) -> dict[str, Any]:
    """What is held here of every layer's weights, and which passes differ from those of the whole base."""
    whole, sharded = (
        PolicyModel(Path(argument["model"]), ["a"], LoraOptions(rank=4), "cpu", seed=0, is_sharded=is_sharded)
        for is_sharded in (False, True)
    )
    for model in (whole, sharded):
        _move(model)
    dealt_out = [weight for weight in sharded.peft.parameters() if isinstance(weight, DTensor)]
    before = _held_bytes(sharded)
    differing = [name for name, tensors in _passes(whole).items() if not _same(tensors, _passes(sharded)[name])]
    held = [(len(weight.to_local()), len(weight)) for weight in dealt_out]
    after, fingerprint = _held_bytes(sharded), base_fingerprint(sharded.peft)
    if workers.rank == 1:
        with torch.no_grad():
            dealt_out[0].to_local().view(-1)[0] += 1
    try:
        check_frozen(fingerprint, base_fingerprint(sharded.peft))
        change = None
    except TrainError as error:
        change = str(error)
    return {"held": held, "bytes": [before, after, _held_bytes(whole)], "differing": differing, "change": change}


def _move(model: PolicyModel) -> None:
    """Gives the adapter weights that do something."""
    with torch.no_grad():
        for number, weight in enumerate(model.parameters("a").values()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))


def _passes(model: PolicyModel) -> dict[str, list[torch.Tensor]]:
    items = [ActionItem("a", (1, 2, 3), (4, 5), None, 1.0), ActionItem("a", (1, 2), (7, 8, 9), None, 0.7)]
    (batch,) = items_to_microbatches(items, 1000, rows_to_groups=model.rows_to_groups)
    logp_T = model.logprobs("a", batch)
    gradients = torch.autograd.grad(logp_T.square().sum(), list(model.parameters("a").values()))
    sequences = [item.input_ids for item in items]
    return {
        "log-probs": [logp_T.detach()],
        "gradients": list(gradients),
        "reference": [model.logprobs(None, batch).detach()],
        "features": model.features_at(sequences, _COLUMNS, 1000),
    }


def _same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(bool(tensor.any()) for tensor in expected) and all(map(torch.equal, ours, expected))


def _held_bytes(model: PolicyModel) -> int:
    """Of the memory behind the layers' weights."""
    weights = (weight for name, weight in model.peft.named_parameters() if ".layers." in name and "lora_" not in name)
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in local}.values())
