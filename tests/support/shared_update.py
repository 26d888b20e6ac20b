"""What each process of `test_shared_update.py`, and each device of `test_devices.py`, runs: updates on given games."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.tiny_policy import AGENTS, make_action, make_trajectory
from support.trainer_options import trainer_options
from trainers.batch import trajectories_to_round
from trainers.common.workers import Workers
from trainers.marft import MarftTrainer
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches

NAME = "support.shared_update:updates"

# Every way to update: what is called, and with which options.
UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "as it comes": ("update", {}),
    "token": ("update", {"granularity": "token", "entropy_coef": 0.01, "critic": {"sharing": "agent"}}),
    "reference": ("update", {"kl_coef": 0.1, "epochs": 2}),
    "all at once": ("update", {"update": "simultaneous", "logprob_norm": "sum"}),
    "masked": ("update", {"mismatch": "mask", "mismatch_cap": 1e9, "geometric_mask": 1e3, "veto": 1e-30}),
    "shortened": ("update", {"lr": 0.1, "kl_target": 1e-3, "agent_order": "reverse"}),
    "groups": ("update", {"estimator": "grpo", "granularity": "token", "dual_clip": 3.0}),
    "one adapter": ("update", {"agents": {"actor": {"adapter": "reasoner"}}, "nll_coef": 0.1}),
    "computed again": ("update", {"activation_checkpointing": True}),
    "filtered": ("replay", {"offline": {"mode": "filtered", "threshold": 0.5}}),
    "awr": ("replay", {"offline": {"mode": "awr"}}),
    "topr": ("replay", {"offline": {"mode": "topr"}, "replay": {"min_ess": 0.0}}),
    "distilled": ("distil_on_policy", {"epochs": 2}),
    "vtrace": ("replay", {"offline": {"mode": "vtrace"}, "replay": {"min_ess": 0.0}}),
}


def updates(workers: Workers, argument: dict[str, Any]) -> dict[str, Any]:
    """One for each of the named options: (what to do, how many games, options). A teacher lies beside the model."""
    return {kind: _update(workers, Path(argument["model"]), *asked) for kind, asked in argument["options"].items()}


def _update(workers: Workers, model: Path, what: str, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The adapters' values, the critic's, and the metrics but for the time that it took.

    The option `cut_for` has a single process cut its micro-batches as so many would.
    """
    cut_for, fields = fields.get("cut_for"), {name: value for name, value in fields.items() if name != "cut_for"}
    trainer = MarftTrainer(
        trainer_options(**({"engine_tolerance": 9.0} | fields)), model, AGENTS, seed=0, workers=workers
    )
    for learner in trainer.learners.values() if cut_for is not None else ():
        learner.microbatches = partial(_cut, learner.microbatches, cut_for)  # type: ignore[method-assign]
    games = []
    for k in range(number):
        long = [(5 * k + i) % 32 for i in range(2 + k)]
        actions = [make_action("reasoner", [1, k], long), make_action("actor", [2, k, *long], [k, (3 * k) % 32])]
        games.append(make_trajectory(actions, float((k + 1) % 3), task_id=str(k % 2)))
    batches = [
        len(
            items_to_microbatches(
                data.items, trainer.options.system.tokens_per_microbatch, data.agents_to_rows([agent])
            )
        )
        for data in [trajectories_to_round(games, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "on_policy")]
        for agent in AGENTS
    ]
    distil_on_policy = partial(trainer.distil_on_policy, teacher_dir=model.parent / "teacher")
    metrics = {"update": trainer.update, "replay": trainer.replay, "distil_on_policy": distil_on_policy}[what](games)
    del metrics["seconds"]
    values = [p.flatten().tolist() for agent in AGENTS for p in trainer.policies.parameters(agent).values()]
    critics = [p.flatten().tolist() for c in trainer.credit.critics.values() for p in c.parameters.values()]
    order = trainer.generator.get_state().tolist()
    return {
        "values": values,
        "critics": critics,
        "metrics": metrics,
        "order": order,
        "batches": batches,
    }


def _cut(microbatches: Any, cut_for: int, items: Any, chosen: Any = None, **_shares: int) -> list[MicroBatch]:
    return list(microbatches(items, chosen, shares=cut_for))


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The figures of metrics by their paths, so that two of them can be compared one by one."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in leaves(part, f"{path}/{name}").items()}
    return {path: value}
