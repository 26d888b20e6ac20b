"""Owns: `system.shard_base`: a base dealt out over processes computes what a whole one does, bit for bit, in its part.

Three processes, so that rounds do not divide evenly and weights of 32 rows neither; every way to update, and one round
that most of the processes have no part in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.sharded_laws import NAME as LAWS
from support.sharded_laws import UNPACKED, save_falcon
from support.shared_update import NAME, UPDATES
from support.tiny_policy import AGENTS, save_tiny_llama
from support.trainer_options import trainer_options
from support.workers_rig import in_processes

from trainers.checks.memory_plan import _WHOLE_LAYERS
from trainers.common.workers import losses_told
from trainers.config import TrainerOptions
from trainers.errors import LostProcessError, TrainError
from trainers.marft import MarftTrainer

COUNT, LAYERS = 3, 8
_FIXED = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.02, "threads": 1, "kl_stop": None}
_WAYS = UPDATES | {
    "stopped": ("update", {"lr": 0.5, "epochs": 3, "kl_stop": 1e-4}),
    "one episode": ("update", {"minibatch_actions": 1000, "normalize": "none"}),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, list[Any]]]:
    """What each process ended with, by whether the base was dealt out."""
    folder = tmp_path_factory.mktemp("sharded")
    model = save_tiny_llama(folder / "model")
    deep = save_tiny_llama(folder / "deep", layers=LAYERS, hidden=96)
    falcon = save_falcon(folder / "falcon")
    save_tiny_llama(folder / "teacher", seed=7)
    results = {}
    for is_sharded in (False, True):
        fixed = _FIXED | {"shard_base": is_sharded}
        options = {kind: (what, 1 if kind == "one episode" else 7, fixed | own) for kind, (what, own) in _WAYS.items()}
        (folder / str(is_sharded)).mkdir()
        argument = {"model": str(model), "deep": str(deep), "falcon": str(falcon), "options": options}
        results[is_sharded] = in_processes(COUNT, [NAME], folder / str(is_sharded), argument)
    (folder / "laws").mkdir()  # in processes of their own, in which nothing else comes and goes
    results[True] |= in_processes(COUNT, [LAWS, UNPACKED], folder / "laws", argument)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(_WAYS))
def test_every_way_to_update_has_the_bits_of_a_whole_base(ended: dict[bool, dict[str, list[Any]]], kind: str) -> None:
    whole, sharded = ([of_process[kind] for of_process in ended[is_sharded][NAME]] for is_sharded in (False, True))
    assert sharded == whole
    assert all(of_process == whole[0] for of_process in whole)


@pytest.mark.slow
def test_each_process_keeps_its_part_of_every_layer_and_passes_leave_no_more(
    ended: dict[bool, dict[str, list[Any]]],
) -> None:
    parts = ended[True][LAWS]
    for held in zip(*(part["held"] for part in parts), strict=True):  # one weight, by process
        rows = held[0][1]
        assert sum(own for own, _ in held) == rows
        assert max(own for own, _ in held) == -(-rows // COUNT)
    for part in parts:
        whole, sharded = part["built"]
        assert whole - sharded == pytest.approx(part["layer"] * LAYERS * (1 - 1 / COUNT), rel=0.05)  # a layer is 12 %
        assert part["left"] == 0
        assert part["looks"] == 4  # three ways forward and one back
        assert part["layer"] < part["inside"] < _WHOLE_LAYERS * part["layer"]


@pytest.mark.slow
def test_log_probs_gradients_and_features_are_those_of_whole_layers(ended: dict[bool, dict[str, list[Any]]]) -> None:
    assert [part["differing"] for part in ended[True][LAWS]] == [[], [], []]


@pytest.mark.slow
def test_rows_that_begin_alike_are_one_pass_where_layers_are_dealt_out(ended: dict[bool, dict[str, list[Any]]]) -> None:
    """A whole base that packs no rows makes two of them, and no other process would know."""
    (whole_shares, sharded_shares, *same), *others = ended[True][UNPACKED]
    assert whole_shares
    assert not sharded_shares
    assert same
    assert all(same)
    assert others == [[True, False], [True, False]]


@pytest.mark.slow
def test_a_part_that_changes_is_noticed_by_the_process_that_has_it(ended: dict[bool, dict[str, list[Any]]]) -> None:
    none, change, nor = (part["change"] for part in ended[True][LAWS])
    assert none is nor is None
    assert change.startswith("the frozen weight ")


def test_one_process_has_nobody_to_deal_out_to(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="one process trains"):
        MarftTrainer(trainer_options(device="cpu", shard_base=True), save_tiny_llama(tmp_path), AGENTS, seed=0)


def test_weights_in_four_bits_are_not_dealt_out() -> None:
    with pytest.raises(ValidationError, match=r"does not go with system\.load_in_4bit"):
        TrainerOptions.model_validate({"system": {"shard_base": True, "load_in_4bit": True}})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"
        ),
        torch.distributed.DistBackendError("NCCL error: remote process exited"),
    ],
)
def test_a_lost_process_is_told_from_other_errors_of_a_pass(error: RuntimeError) -> None:
    with pytest.raises(LostProcessError, match=r"^another of the processes that train together"), losses_told():
        raise error
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), losses_told():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")
