"""What each process of `test_shared_update.py` runs: one whole update on the same tiny model and games."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_policy import AGENTS, make_action, make_trajectory

from trainers.config import TrainerOptions
from trainers.marft import MarftTrainer
from trainers.workers import Workers

NAME = "shared_update:updates"


def updates(workers: Workers, argument: dict[str, Any]) -> dict[str, Any]:
    """One update for each of the named options."""
    return {kind: _update(workers, Path(argument["model"]), o) for kind, o in argument["options"].items()}


def _update(workers: Workers, model: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The adapters' values, the critic's, and the metrics but for the time that it took."""
    trainer = MarftTrainer(
        TrainerOptions.model_validate({"engine_tolerance": 9.0} | fields), model, AGENTS, seed=0, workers=workers
    )
    games = []
    for k in range(7):  # an odd number of micro-batches: one process has a turn without a batch
        long = [(5 * k + i) % 32 for i in range(2 + k)]
        actions = [make_action("reasoner", [1, k], long), make_action("actor", [2, k, *long], [k, (3 * k) % 32])]
        games.append(make_trajectory(actions, float(k % 3), task_id=str(k % 2)))
    metrics = trainer.update(games)
    del metrics["seconds"]
    values = [p.flatten().tolist() for agent in AGENTS for p in trainer.policies.parameters(agent).values()]
    critics = [p.flatten().tolist() for c in trainer.credit.critics.values() for p in c.parameters.values()]
    order = trainer.generator.get_state().tolist()
    return {
        "values": values,
        "critics": critics,
        "metrics": metrics,
        "order": order,
    }
