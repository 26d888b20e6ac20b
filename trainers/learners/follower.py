"""The leader's calls -> the same calls of this process's own trainer, one after another until the leader lets go.

Invariant: it writes no file and decides nothing; held-out episodes were refused by the leader before they were sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers import checkpoint
from trainers.common.card_order import refuse_other_order
from trainers.common.free_memory import give_back_card_memory
from trainers.common.workers import losses_told
from trainers.config import TrainerOptions
from trainers.learners.calls import END, Calls, value_to_part
from trainers.learners.group import workers_on
from trainers.learners.leader import BUILD, IDLE
from trainers.marft import MarftTrainer


def follow() -> None:
    """Follows the leader of the process group that was joined; returns when it lets go.

    Raises:
        TrainError: what stops a trainer; LostProcessError where the leader has ended.
    """
    calls = Calls()
    name, values = calls.receive()
    if name == END:  # the leader ended before there was a trainer
        return
    assert name == BUILD
    trainer = _build(values)
    _finish(trainer)
    while True:
        name, values = calls.receive()
        if name == END:
            return
        _CALLS[name](trainer, **{part: value_to_part(value) for part, value in values.items()})
        _finish(trainer)


def _idle(trainer: MarftTrainer, base: int, passes: int) -> None:
    """Goes through a base's layers as often as the leader, which computes something for itself."""
    model = list(trainer.policies.models.values())[base]
    with losses_told(), torch.no_grad():
        for _ in range(passes):
            model.idle_pass(None)


_CALLS: dict[str, Any] = {
    IDLE: _idle,
    "warm_up": MarftTrainer.warm_up,
    "replay": MarftTrainer.replay,
    "distil": MarftTrainer.distil,
    "distil_on_policy": MarftTrainer.distil_on_policy,
    "update": MarftTrainer.update,
}


def _finish(trainer: MarftTrainer) -> None:
    """Leaves what is not needed between two calls to a model server on the same card, and tells the leader so."""
    give_back_card_memory()
    trainer.wait()


def _build(values: dict[str, Any]) -> MarftTrainer:
    device = values["devices"][dist.get_rank()]
    if device != "cpu":
        refuse_other_order(values["card_order"], torch.cuda.device_count())
    options = TrainerOptions.model_validate(values["options"])
    trainer = MarftTrainer(
        options.model_copy(update={"system": options.system.model_copy(update={"device": device})}),
        {agent: Path(folder) for agent, folder in values["model_dirs"].items()},
        values["agents"],
        seed=values["seed"],
        lineage=values["lineage"],
        workers=workers_on(device, values["sharers"]),
    )
    start = {agent: Path(folder) for agent, folder in values["start"].items()}
    trainer.begin_from(start, values["learned_tasks"])
    if values["checkpoint"] is not None:
        checkpoint.load(trainer, Path(values["checkpoint"]))
    return trainer
