"""Conditions of the trainer x games x seeds -> one line of figures each, appended to a file; what is there is skipped.

    python -m examples.study.small.run build/small.jsonl --seeds 0 1 2 3

Each run collects 192 episodes of the untrained model, learns from them offline, and then plays eight rounds of 64
episodes, four samples of sixteen tasks. The end is measured on tasks that were never trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.study.small.games import GAMES, Game, Players, Task, mean
from examples.study.small.model import ensure_model
from marft_bridge.training.success_draw import rewards_to_draw_weights
from marft_bridge.training.task_draw import TaskReward
from trace_store.records import Trajectory
from trainers import MarftTrainer, TrainerOptions

COLLECTED, ROUNDS, EPISODES, SAMPLES = 192, 8, 64, 4

COMMON: dict[str, Any] = {
    "system": {"threads": 1, "device": "cpu"},
    "importance": {"proximal": "engine", "mismatch": "none"},
    "offline": {"mode": "filtered"},
}

_PUBLISHED: dict[str, Any] = {
    "optimizer": {"epochs": 1, "minibatch_actions": 21},
    "objective": {"negative_weight": 1.0, "kl_stop": 0.1},
    "advantage": {"critic": {"shrink": False}},
}
_RLOO: dict[str, Any] = {"advantage": {"estimator": "rloo"}}
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "published update": _PUBLISHED,
    "successes": {"replay": {"successes": 0.3}},
    "without traces": {"offline": {"mode": "off"}},
    "both signs": {"objective": {"negative_weight": 1.0}},
    "clip by length": {"experimental": {"clip_by_length": True}},
    "KL target": {"objective": {"kl_target": 1.0}},
    "KL target, rate / 3": {"objective": {"kl_target": 1.0}, "optimizer": {"lr": 3.3e-4}},
    "KL target, rate x 3": {"objective": {"kl_target": 1.0}, "optimizer": {"lr": 3e-3}},
    "4 passes of 4": {"optimizer": {"epochs": 4, "minibatch_actions": 4}},
    "1 pass of 1": {"optimizer": {"epochs": 1, "minibatch_actions": 1}},
    "16 actions a step": {"optimizer": {"epochs": 4, "minibatch_actions": 16}},
    "plain critic": {"advantage": {"critic": {"shrink": False}}},
    "rloo": _RLOO,
    "rloo, successes": _RLOO | {"replay": {"successes": 0.3}},
    "rloo, success groups": _RLOO | {"replay": {"successes": 0.3}, "experimental": {"success_groups": True}},
    "rloo, LUFFY": _RLOO
    | {"replay": {"successes": 0.3}, "experimental": {"success_groups": True, "success_shaping": 0.1}},
    "token": {"granularity": "token"},
    "rate / 3": {"optimizer": {"lr": 3.3e-4}},
    "rate x 3": {"optimizer": {"lr": 3e-3}},
}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested tables as one; the second wins."""
    result = dict(first)
    for name, value in second.items():
        result[name] = merged(result.get(name, {}), value) if isinstance(value, Mapping) else value
    return result


def run(game: Game, condition: str, seed: int, model: Path) -> dict[str, Any]:
    """One training run to its figures."""
    started = time.perf_counter()
    options = TrainerOptions.model_validate(merged(COMMON, CONDITIONS[condition]))
    trainer = MarftTrainer(options, model, agents=list(game.agents), seed=seed)
    players, draw = Players(trainer, 1000 + seed), random.Random(seed)
    stored = game.play(players, [game.tasks[i % len(game.tasks)] for i in range(COLLECTED)])
    players.learn_offline(stored)
    rewards: list[float] = []
    pool = [(0, episode) for episode in stored]
    for _ in range(ROUNDS):
        tasks: list[Task] = [t for t in draw.sample(game.tasks, EPISODES // SAMPLES) for _ in range(SAMPLES)]
        fresh = game.play(players, tasks)
        rewards.append(mean(fresh, "reward"))
        trainer.update(fresh, draw_older(trainer, pool, len(rewards), fresh))
        pool += [(len(rewards), episode) for episode in fresh]
    final = game.play(players, [*game.heldout, *game.heldout])
    return {
        "game": game.name,
        "condition": condition,
        "seed": seed,
        "before": mean(stored, "correct"),
        "rewards": rewards,
        "final": mean(final, "correct"),
        "seconds": time.perf_counter() - started,
    }


def draw_older(
    trainer: MarftTrainer, pool: Sequence[tuple[int, Trajectory]], number: int, fresh: Sequence[Trajectory]
) -> list[Trajectory]:
    """The older episodes that join round `number`, as `marft-bridge train` draws them; none unless the options ask."""
    if not trainer.options.replay.successes:
        return []
    known = [TaskReward(t.episode.task_id, played, t.team_reward("reward") or 0.0) for played, t in pool]
    drawn = trainer.draw_successes(
        rewards_to_draw_weights(known, number),
        len(fresh),
        tasks=[reward.task_id for reward in known],
        round_tasks={t.episode.task_id for t in fresh},
    )
    return [pool[i][1] for i in drawn]


def to_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Final shares of right answers by condition and game, mean and standard error, as Markdown."""
    finals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        finals[row["condition"], row["game"]].append(row["final"])
    games = [name for name in GAMES if any(game == name for _, game in finals)]
    lines = [f"| condition | {' | '.join(games)} |", f"| --- |{' ---: |' * len(games)}"]
    for condition in dict.fromkeys(condition for condition, _ in finals):
        cells = [_cell(finals[condition, game]) for game in games]
        lines.append(f"| {condition} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:.3f}" for value in values) or "-"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {error:.3f} ({len(values)})"


def run_missing(
    doc: str | None,
    conditions: Sequence[str],
    seeds: Sequence[int],
    *,
    run_one: Callable[[Game, str, int, Path], dict[str, Any]],
    table_of: Callable[[Sequence[Mapping[str, Any]]], str],
    games: Mapping[str, Game] = GAMES,
) -> None:
    """The command line of a study: runs what its file does not hold yet, and prints the table.

    Args:
        doc: what the program says of itself.
        seeds: where none are named.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--games", nargs="+", default=list(games), choices=list(games))
    parser.add_argument("--conditions", nargs="+", default=list(conditions), choices=list(conditions))
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = ensure_model(arguments.cache)
    text = arguments.out.read_text() if arguments.out.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    known = {(row["game"], row["condition"], row["seed"]) for row in rows}
    for seed in arguments.seeds:
        for name in arguments.games:
            for condition in arguments.conditions:
                if (name, condition, seed) not in known:
                    rows.append(run_one(games[name], condition, seed, model))
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(json.dumps(rows[-1]), flush=True)
    print(table_of(rows))


if __name__ == "__main__":
    run_missing(__doc__, list(CONDITIONS), [0, 1, 2], run_one=run, table_of=to_table)
