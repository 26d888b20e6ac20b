"""A trainer to a folder and back: adapters, critic, optimisers, random generators, counters.

Invariant: tensors are in safetensors and the rest in JSON, nothing is pickled; the folder is written whole or not at
all; a loaded trainer goes on bit for bit (on the CPU) as if it had never stopped, when saved between two calls
of `update`. Options are the caller's: a resumed run may use another learning rate, but not another shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainers.errors import TrainError
from trainers.files import whole_folder
from trainers.marft import MarftTrainer

_FORMAT = 1
STATE_FILE = "trainer.json"
_TENSORS = "trainer.safetensors"


def save(trainer: MarftTrainer, folder: Path) -> None:
    """Writes the trainer's state to `folder`, replacing an earlier checkpoint there."""
    state = {
        "format": _FORMAT,
        "agents": list(trainer.agents),
        "base_sha256": trainer.model.base_sha256,
        "rounds": trainer.rounds,
    }
    with whole_folder(folder) as fresh:
        (fresh / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        save_file({name: t.detach().cpu().contiguous() for name, t in _tensors(trainer).items()}, fresh / _TENSORS)


def load(trainer: MarftTrainer, folder: Path) -> None:
    """Puts the state in `folder` into a trainer made with the same model and agents.

    Raises:
        TrainError: no checkpoint, or one of another base model, other agents or other shapes. The trainer is
            unchanged then.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        with safe_open(folder / _TENSORS, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainError(f"{folder} is not a trainer checkpoint: {error}") from None
    ours = {"format": _FORMAT, "agents": list(trainer.agents), "base_sha256": trainer.model.base_sha256}
    for field, value in ours.items():
        if state.get(field) != value:
            raise TrainError(f"checkpoint {folder} has {field} {state.get(field)!r}, this trainer has {value!r}")
    weights = _weights(trainer)
    for name, weight in weights.items():
        if name not in tensors or tensors[name].shape != weight.shape:
            raise TrainError(f"checkpoint {folder} does not fit at {name}: trainer.lora or trainer.critic changed")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    for name, optimizer in _optimizers(trainer).items():
        _restore(optimizer, f"{name}/", tensors)
    for name, generator in _generators(trainer).items():
        generator.set_state(tensors[name])
    prefix = "critic/statistics/"
    trainer.critic.statistics = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    trainer.rounds = state["rounds"]


def _tensors(trainer: MarftTrainer) -> dict[str, Tensor]:
    tensors = {
        **_weights(trainer),
        **{f"critic/statistics/{name}": t for name, t in trainer.critic.statistics.items()},
        **{name: generator.get_state() for name, generator in _generators(trainer).items()},
    }
    for name, optimizer in _optimizers(trainer).items():
        for index, fields in optimizer.state_dict()["state"].items():
            tensors.update({f"{name}/{index}/{field}": value for field, value in fields.items()})
    return tensors


def _weights(trainer: MarftTrainer) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {f"critic/weights/{name}": p for name, p in trainer.critic.parameters.items()}
    for i, agent in enumerate(trainer.agents):
        weights.update({f"adapter/{i}/{name}": p for name, p in trainer.model.parameters(agent).items()})
    return weights


def _optimizers(trainer: MarftTrainer) -> dict[str, torch.optim.Optimizer]:
    learners = {f"optimizer/{i}": trainer.learners[agent].optimizer for i, agent in enumerate(trainer.agents)}
    return {"critic/optimizer": trainer.critic.optimizer, **learners}


def _generators(trainer: MarftTrainer) -> dict[str, torch.Generator]:
    return {"generator/order": trainer.generator, "generator/critic": trainer.critic.generator}


def _restore(optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Moments and step counts; learning rate and the like stay those of the trainer's options."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            index, _, field = name.removeprefix(prefix).partition("/")
            state.setdefault(int(index), {})[field] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
