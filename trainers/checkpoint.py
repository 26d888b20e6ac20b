"""A trainer to a folder and back: adapters, critics, optimisers, baselines, random generators, counters.

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

from trainers.common.files import finish_replacing, whole_folder
from trainers.errors import TrainError
from trainers.marft import MarftTrainer

_FORMAT = 2  # 1 had one critic and one adapter per agent
STATE_FILE = "trainer.json"
_TENSORS = "trainer.safetensors"


def save(trainer: MarftTrainer, folder: Path) -> None:
    """Writes the trainer's state to `folder`, replacing an earlier checkpoint there; of several processes one writes.

    Returns on all of them once it is written.
    """
    if trainer.policies.workers.is_main:
        _write(trainer, folder)
    trainer.wait()


def _write(trainer: MarftTrainer, folder: Path) -> None:
    kl_rates = {name: learner.kl_rate for name, learner in trainer.learners.items()}
    state = {
        **_identity(trainer),
        "rounds": trainer.rounds,
        "baselines": trainer.credit.estimator.state,
        "kl_rates": kl_rates,
        "imitated_tasks": {name: sorted(learner.imitated_tasks) for name, learner in trainer.learners.items()},
        "critic_rests": trainer.credit.rests.to_state(),
        "spreads": trainer.credit.spreads.to_state(),
    }
    with whole_folder(folder) as fresh:
        (fresh / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        save_file({name: t.detach().cpu().contiguous() for name, t in _tensors(trainer).items()}, fresh / _TENSORS)


def is_saved(folder: Path) -> bool:
    """Whether there is a checkpoint. One whose replacement was interrupted gets its name back first."""
    finish_replacing(folder)
    return (folder / STATE_FILE).exists()


def load(trainer: MarftTrainer, folder: Path) -> None:
    """Puts the state in `folder` into a trainer made with the same models, agents and adapters.

    Raises:
        TrainError: no checkpoint, or one of another base model, other agents or other shapes. The trainer is
            unchanged then.
    """
    finish_replacing(folder)
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        with safe_open(folder / _TENSORS, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainError(f"{folder} is not a trainer checkpoint: {error}") from None
    for field, value in _identity(trainer).items():
        if state.get(field) != value:
            raise TrainError(f"checkpoint {folder} has {field} {state.get(field)!r}, this trainer has {value!r}")
    weights = _weights(trainer)
    for name, weight in weights.items():
        if name not in tensors or tensors[name].shape != weight.shape:
            raise TrainError(
                f"checkpoint {folder} does not fit at {name}: train.trainer.lora or train.trainer.advantage.critic "
                "changed"
            )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    trainer.policies.note_frozen()
    for name, optimizer in _optimizers(trainer).items():
        _restore(optimizer, f"{name}/", tensors)
    for name, generator in _generators(trainer).items():
        generator.set_state(tensors[name])
    for i, critic in enumerate(trainer.credit.critics.values()):
        prefix = f"critic/{i}/statistics/"
        critic.statistics = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    trainer.credit.estimator.state = dict(state["baselines"])
    for name, learner in trainer.learners.items():
        learner.kl_rate = state.get("kl_rates", {}).get(name, 1.0)  # checkpoints of before it have none
        learner.imitated_tasks = set(state.get("imitated_tasks", {}).get(name, ()))  # likewise
    trainer.credit.rests.load_state(state.get("critic_rests", {}))
    trainer.credit.spreads.load_state(state.get("spreads", {}))
    trainer.rounds = state["rounds"]


def _identity(trainer: MarftTrainer) -> dict[str, Any]:
    """What a checkpoint must share with its reader; the order of adapters and critics names their tensors."""
    plans = trainer.policies.adapters.values()
    return {
        "format": _FORMAT,
        "agents": {agent: trainer.policies.adapter_of(agent) for agent in trainer.policies.agents},
        "adapters": [plan.name for plan in plans],
        "trained": list(trainer.learners),
        "critics": list(trainer.credit.critics),
        "bases": [trainer.policies.models[plan.model_dir].base_sha256 for plan in plans],
    }


def _tensors(trainer: MarftTrainer) -> dict[str, Tensor]:
    tensors = {
        **_weights(trainer),
        **{name: generator.get_state() for name, generator in _generators(trainer).items()},
    }
    for i, critic in enumerate(trainer.credit.critics.values()):
        tensors.update({f"critic/{i}/statistics/{name}": t for name, t in critic.statistics.items()})
    for name, optimizer in _optimizers(trainer).items():
        for index, fields in optimizer.state_dict()["state"].items():
            tensors.update({f"{name}/{index}/{field}": value for field, value in fields.items()})
    return tensors


def _weights(trainer: MarftTrainer) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for i, critic in enumerate(trainer.credit.critics.values()):
        weights.update({f"critic/{i}/weights/{name}": p for name, p in critic.parameters.items()})
    for i, plan in enumerate(trainer.policies.adapters.values()):
        matrices = trainer.policies.models[plan.model_dir].parameters(plan.name)
        weights.update({f"adapter/{i}/{name}": p for name, p in matrices.items()})
    return weights


def _optimizers(trainer: MarftTrainer) -> dict[str, torch.optim.Optimizer]:
    critics = {f"critic/{i}/optimizer": c.optimizer for i, c in enumerate(trainer.credit.critics.values())}
    return {**critics, **{f"optimizer/{i}": learner.optimizer for i, learner in enumerate(trainer.learners.values())}}


def _generators(trainer: MarftTrainer) -> dict[str, torch.Generator]:
    critics = {f"generator/critic/{i}": c.generator for i, c in enumerate(trainer.credit.critics.values())}
    return {"generator/order": trainer.generator, "generator/replay": trainer.replay_generator, **critics}


def _restore(optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Moments and step counts; learning rate and the like stay those of the trainer's options."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            index, _, field = name.removeprefix(prefix).partition("/")
            state.setdefault(int(index), {})[field] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
