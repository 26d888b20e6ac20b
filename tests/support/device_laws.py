"""What the process of `test_devices.py` runs: the trainer on the CPU and on a second device, in float32 and bfloat16.

python device_laws.py FOLDER      FOLDER/asked.json -> FOLDER/said.json
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from support.second_device import There, second_device  # before any backward pass
from support.shared_update import updates
from support.tiny_policy import AGENTS, both_low, play
from support.trainer_options import trainer_options
from trace_store.records import Trajectory
from trainers import checkpoint
from trainers.checks import memory_guard
from trainers.common.workers import Workers
from trainers.credit import units
from trainers.marft import MarftTrainer
from trainers.policies import policies
from trainers.scoring import model

_FIELDS = {"device": "cpu", "lr": 0.02, "engine_tolerance": 9.0}


@contextmanager
def _on_second_device(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Trainers that are made here compute there, on a base of `dtype`; None: of the one that they choose."""

    def guard(options: Any, adapters: Any, device: torch.device, **_: Any) -> memory_guard.MemoryGuard:
        return memory_guard.MemoryGuard(options, adapters, torch.device("cpu"))  # where the memory really is

    with ExitStack() as stack:
        device = stack.enter_context(second_device())
        stack.enter_context(mock.patch.object(policies, "options_to_device", return_value=device))
        stack.enter_context(mock.patch.object(policies, "MemoryGuard", guard))
        if dtype is not None:
            stack.enter_context(mock.patch.object(model, "base_dtype", return_value=dtype))
        yield


def mixing(asked: dict[str, Any]) -> dict[str, str | None]:
    """What the second device says to operations that a GPU refuses, and to some that it allows."""
    here = torch.ones(3)
    with second_device() as device:
        there, number = torch.ones(3, device=device), torch.tensor(2.0)
        tried: dict[str, Callable[[], Any]] = {
            "add": lambda: there + here,
            "add to the CPU": lambda: here + there,
            "add in place": lambda: there.add_(here),
            "a number of the device": lambda: here * there[0],
            "matmul": lambda: there @ here,
            "cat": lambda: torch.cat([there, here]),
            "where": lambda: torch.where(torch.ones(3, dtype=torch.bool), there, there),
            "index of the device": lambda: here[torch.zeros(1, dtype=torch.long, device=device)],
            "generator": lambda: torch.randn(3, device=device, generator=torch.Generator()),
            "numpy": lambda: there.numpy(),
            "copy": lambda: there.cpu() + here,
            "copy in place": lambda: here.clone().copy_(there) + there.clone().copy_(here).cpu(),
            "a number of the CPU": lambda: there * number,
            "index of the CPU": lambda: there[torch.tensor([2, 0])],
            "item": lambda: (there.sum().item(), there.tolist(), float(there[0])),
        }
        return {name: _refusal(attempt) for name, attempt in tried.items()}


def _refusal(attempt: Callable[[], Any]) -> str | None:
    try:
        attempt()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def rounds(asked: dict[str, Any]) -> dict[str, Any]:
    """What every update does there; see `shared_update`."""
    with _on_second_device(torch.float32):
        return updates(Workers.alone(), asked)


def bfloat16(asked: dict[str, Any]) -> dict[str, Any]:
    """The types of what a trainer holds where it chooses them, and where an update takes it, in both types."""
    games = _games(asked, 0)
    said: dict[str, Any] = {}
    for name, dtype in {"bfloat16": None, "float32": torch.float32}.items():
        with _on_second_device(dtype):
            trainer = _trainer(asked)
            before = _values(trainer)
            trainer.update(games)
            after = _values(trainer)
            said[name] = [y - x for old, new in zip(before, after, strict=True) for x, y in zip(old, new, strict=True)]
            if dtype is None:
                said["types"], said["packs"] = _types(trainer), trainer.policies.model_of("actor").packs
    return said


def _types(trainer: MarftTrainer) -> dict[str, list[str]]:
    policy, states = trainer.policies.model_of("actor"), trainer.learners["actor"].optimizer.state.values()
    held = {
        "base": [p for name, p in policy.peft.named_parameters() if "lora_" not in name],
        "adapters": list(trainer.policies.parameters("actor").values()),
        "moments": [m for state in states for m in state.values() if m.dim()],
    }
    return {name: sorted({f"{type(t).__name__} {t.dtype}" for t in tensors}) for name, tensors in held.items()}


def resumed(asked: dict[str, Any]) -> list[Any]:
    """Where a trainer gets that goes on, and one that was loaded from what it saved; it saves an adapter, too."""
    folder, games = Path(asked["folder"]), [_games(asked, seed) for seed in range(2)]
    with _on_second_device():
        whole, other = _trainer(asked), _trainer(asked, seed=99)
        whole.update(games[0])
        checkpoint.save(whole, folder / "checkpoint")
        checkpoint.load(other, folder / "checkpoint")
        for trainer in (whole, other):
            trainer.update(games[1])
        whole.policies.save_adapter("actor", folder / "actor@2")
        return [_values(trainer) for trainer in (whole, other)]


def stray(asked: dict[str, Any]) -> str | None:
    """What becomes of an update whose advantages were left on the CPU."""

    def left_behind(self: units.Units, values: Any, rows: Any, device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(values[self.slices[i]]).float() for i in rows]

    games = _games(asked, 0)
    with _on_second_device(), mock.patch.object(units.Units, "split", left_behind):
        trainer = _trainer(asked)
        return _refusal(lambda: trainer.update(games))


def _trainer(asked: dict[str, Any], seed: int = 0) -> MarftTrainer:
    return MarftTrainer(trainer_options(**_FIELDS), Path(asked["model"]), AGENTS, seed)


def _games(asked: dict[str, Any], seed: int) -> list[Trajectory]:
    """Played on the CPU."""
    return play(_trainer(asked), 8, torch.Generator().manual_seed(seed), both_low)


def _values(trainer: MarftTrainer) -> list[list[float]]:
    held = [p for agent in AGENTS for p in trainer.policies.parameters(agent).values()]
    assert all(isinstance(p, There) for p in held)
    return [p.detach().flatten().tolist() for p in held]


def _main(folder: Path) -> None:
    asked = json.loads((folder / "asked.json").read_text())
    said: dict[str, Any] = {}
    for law in (mixing, rounds, bfloat16, resumed, stray):
        try:
            said[law.__name__] = law(asked)
        except Exception:  # noqa: BLE001 - it fails the tests of this law, and of no other
            said[law.__name__] = {"error": traceback.format_exc()}
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
