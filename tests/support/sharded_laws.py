"""What each process of `test_sharded_base.py` says of a base that is dealt out, beside a whole one of its own."""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import FalconConfig, FalconForCausalLM

from trainers.batch import ActionItem
from trainers.checks.reality import base_fingerprint, check_frozen
from trainers.common.workers import Workers
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.scoring.activation_checkpointing import decoder_layers
from trainers.scoring.microbatch import items_to_microbatches
from trainers.scoring.model import PolicyModel

NAME = "support.sharded_laws:parts"
UNPACKED = "support.sharded_laws:unpacked"
_COLUMNS = ((2, 3), (1,))


def parts(workers: Workers, argument: dict[str, Any]) -> dict[str, Any]:
    """What is held here of the layers, how many bytes that takes, and which passes differ from the whole base's.

    Of bytes: `built` by the whole model and by the other one, `left` behind by passes, `inside` of a layer at most.
    """
    sizes = [_alive_bytes()]
    models = []
    for is_sharded in (False, True):
        models.append(
            PolicyModel(Path(argument["deep"]), ["a"], LoraOptions(rank=4), "cpu", seed=0, is_sharded=is_sharded)
        )
        sizes.append(_alive_bytes())
    for model in models:
        _move(model)
    whole, sharded = models
    layers = decoder_layers(sharded.peft)
    dealt_out = [weight for weight in sharded.peft.parameters() if isinstance(weight, DTensor)]
    expected, before = _passes(whole), _alive_bytes()
    inside: list[int] = []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: inside.append(_alive_bytes()))
        layer.mlp.register_full_backward_pre_hook(lambda *_: inside.append(_alive_bytes()))
    ours = _passes(sharded)
    differing = [name for name, tensors in expected.items() if not _same(tensors, ours[name])]
    del ours
    after, fingerprint = _alive_bytes(), base_fingerprint(sharded.peft)
    if workers.rank == 1:
        with torch.no_grad():
            dealt_out[0].to_local().view(-1)[0] += 1
    try:
        check_frozen(fingerprint, base_fingerprint(sharded.peft))
        change = None
    except TrainError as error:
        change = str(error)
    return {
        "held": [(len(weight.to_local()), len(weight)) for weight in dealt_out],
        "layer": sum(4 * weight.numel() for weight in layers[0].parameters() if isinstance(weight, DTensor)),
        "built": [later - earlier for earlier, later in itertools.pairwise(sizes)],
        "left": after - before,
        "inside": max(inside) - before,
        "looks": len(inside) / len(layers),
        "differing": differing,
        "change": change,
    }


def unpacked(workers: Workers, argument: dict[str, Any]) -> list[bool]:
    """Of an architecture that packs no rows: may it share beginnings, whole and dealt out; is the gradient the same?

    The first process alone has rows, which begin alike, so that a whole base goes through its layers twice for them.
    """
    whole, sharded = (
        PolicyModel(
            Path(argument["falcon"]), ["a"], LoraOptions(rank=4, target_modules=("query_key_value",)), "cpu", seed=0,
            is_sharded=is_sharded,
        )
        for is_sharded in (False, True)
    )  # fmt: skip
    for model in (whole, sharded):
        _move(model)
    shared = tuple(range(1, 11))
    items = [ActionItem("a", (*shared, 11), (4, 5), None, 1.0), ActionItem("a", (*shared, 12, 13), (7,), None, 1.0)]
    (batch,) = items_to_microbatches(items, 1000, rows_to_groups=whole.rows_to_groups)
    if workers.rank > 0:
        sharded.idle_pass("a", backwards=1)
        return [whole._shares_prefixes, sharded._shares_prefixes]
    gradients = [
        torch.autograd.grad(model.logprobs("a", batch).sum(), list(model.parameters("a").values()))
        for model in (whole, sharded)
    ]
    close = [bool(torch.allclose(mine, expected, atol=1e-5)) for expected, mine in zip(*gradients, strict=True)]
    return [whole._shares_prefixes, sharded._shares_prefixes, *close]


def save_falcon(folder: Path) -> Path:
    config = FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        FalconForCausalLM(config).save_pretrained(folder)
    return folder


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


def _alive_bytes() -> int:
    """Of the memory behind all tensors of this process; what FSDP2 has let go has none."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
