"""Contenders of the trainer x four games -> final scores at equal sampled tokens, and which differ from the defaults.

    python -m examples.study.small.contest build/contest.jsonl                  # sweeps rates, then plays the contest
    python -m examples.study.small.contest build/contest.jsonl --table          # of what the file holds so far

Each contender's rate is the one of three that is best on seeds of their own; the contest is played on others. A run
collects 192 episodes, learns from them offline, and goes on until its rounds have sampled as many tokens as 512
episodes of the untrained model. Runs are appended to the file, seed by seed; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.study.small.games import GAMES, Players, Task, mean
from examples.study.small.model import ensure_model
from examples.study.small.run import COLLECTED, COMMON, EPISODES, ROUNDS, SAMPLES, draw_older, merged
from marft_bridge.statistics.families import holm
from marft_bridge.statistics.means import MeanInterval, mean_interval
from marft_bridge.statistics.paired import paired_difference
from trainers import MarftTrainer, TrainerOptions

RATES = (3.3e-4, 1e-3, 3e-3)
SWEEP_SEEDS = (60,)
SEEDS = tuple(range(100, 120))
MOST_ROUNDS = 3 * ROUNDS  # of a team that has learned to say next to nothing

DEFAULTS, WITHOUT_TRACES = "defaults", "offline off"
NEAR_THE_END = 0.9  # of what the last round without traces earned: the level that both are measured to
CONTENDERS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "published update": {
        "optimizer": {"epochs": 1, "minibatch_actions": 21},
        "objective": {"negative_weight": 1.0, "kl_stop": 0.1},
        "advantage": {"critic": {"shrink": False}},
    },
    "rloo": {"advantage": {"estimator": "rloo"}},
    "RAFT++": {"advantage": {"estimator": "examples.study.small.raft:Raft"}},
    "simultaneous": {"objective": {"update": "simultaneous"}},
    WITHOUT_TRACES: {"offline": {"mode": "off"}},
    "offline awr": {"offline": {"mode": "awr"}},
    "offline to 1 nat": {"offline": {"epochs": 64, "kl_budget": 1.0}},
    "offline to 2 nats": {"offline": {"epochs": 64, "kl_budget": 2.0}},
    "successes": {"replay": {"successes": 0.3}},
    "LUFFY": {"replay": {"successes": 0.3}, "experimental": {"success_shaping": 0.1}},
    "KL target": {"objective": {"kl_target": 1.0}},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run."""

    game: str
    contender: str
    lr: float
    seed: int


def play(plan: Plan, model: Path) -> dict[str, Any]:
    """One training run to its figures."""
    started = time.perf_counter()
    game = GAMES[plan.game]
    options = merged(merged(COMMON, CONTENDERS[plan.contender]), {"optimizer": {"lr": plan.lr}})
    trainer = MarftTrainer(TrainerOptions.model_validate(options), model, agents=list(game.agents), seed=plan.seed)
    players, draw = Players(trainer, 1000 + plan.seed), random.Random(plan.seed)
    stored = game.play(players, [game.tasks[i % len(game.tasks)] for i in range(COLLECTED)])
    players.learn_offline(stored)
    a_run = players.sampled_tokens / COLLECTED  # tokens
    spent, budget = 0, round(ROUNDS * EPISODES * a_run)
    pool, rounds = [(0, episode) for episode in stored], list[tuple[int, float]]()
    while budget - spent >= EPISODES * a_run / 2 and len(rounds) < MOST_ROUNDS:
        tasks = min(EPISODES // SAMPLES, round((budget - spent) / a_run / SAMPLES))
        before = players.sampled_tokens
        fresh = game.play(players, _repeated(draw.sample(game.tasks, tasks)))
        spent += players.sampled_tokens - before
        a_run = (players.sampled_tokens - before) / len(fresh)
        rounds.append((spent, mean(fresh, "reward")))
        trainer.update(fresh, draw_older(trainer, pool, len(rounds), fresh))
        pool += [(len(rounds), episode) for episode in fresh]
    final = game.play(players, [*game.heldout, *game.heldout])
    return {
        "game": plan.game,
        "contender": plan.contender,
        "lr": plan.lr,
        "seed": plan.seed,
        "before": mean(stored, "correct"),
        "budget": budget,
        "rounds": rounds,  # tokens sampled by its end, and mean reward
        "final": mean(final, "correct"),
        "seconds": time.perf_counter() - started,
    }


def _repeated(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks for _ in range(SAMPLES)]


def sweep_plans(games: Sequence[str]) -> Iterator[Plan]:
    """All rates of all contenders on the seeds of the sweep."""
    for seed in SWEEP_SEEDS:
        for contender in CONTENDERS:
            for lr in RATES:
                yield from (Plan(game, contender, lr, seed) for game in games)


def contest_plans(games: Sequence[str], rates: Mapping[str, float]) -> Iterator[Plan]:
    """All contenders at their rates, seed by seed, so that whatever is stopped early compares equals."""
    for seed in SEEDS:
        for contender, lr in rates.items():
            yield from (Plan(game, contender, lr, seed) for game in games)


def best_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of each contender with the best mean score on the sweep's seeds; the lower of equals."""
    scores: dict[tuple[str, float], list[float]] = defaultdict(list)
    for row in rows:
        if row["seed"] in SWEEP_SEEDS:
            scores[row["contender"], row["lr"]].append(row["final"])
    return {name: max(RATES, key=lambda lr: (np.mean(scores[name, lr]), -lr)) for name in CONTENDERS}


def to_table(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float], games: Sequence[str]) -> str:
    """Final scores of the contest as Markdown: mean of each game, of all with its interval, and the paired difference.

    Of the seeds that all contenders have finished. A seed's score is its mean over the games; differences are paired
    by seed, and their p-values corrected for the number of contenders (Holm).
    """
    score = {(r["contender"], r["game"], r["seed"]): r["final"] for r in rows if r["lr"] == rates[r["contender"]]}
    seeds = [s for s in SEEDS if all((c, g, s) in score for c in rates for g in games)]
    if len(seeds) < 2:
        return f"{len(seeds)} seeds are finished"
    by_seed = {c: [float(np.mean([score[c, g, s] for g in games])) for s in seeds] for c in rates}
    rivals = [c for c in rates if c != DEFAULTS]
    differences = {c: paired_difference(c, by_seed[DEFAULTS], by_seed[c], seed=0) for c in rivals}
    corrected = dict(zip(rivals, holm([differences[c].p_value for c in rivals]), strict=True))
    lines = [
        f"| contender | rate | {' | '.join(games)} | all | difference, 95 % | p (Holm) |",
        f"| --- | ---: |{' ---: |' * len(games)} ---: | ---: | ---: |",
    ]
    for contender, lr in rates.items():
        cells = [f"{np.mean([score[contender, g, s] for s in seeds]):.3f}" for g in games]
        whole = mean_interval(by_seed[contender])
        cells.append(_interval(whole, ".3f"))
        if contender == DEFAULTS:
            cells += ["", ""]
        else:
            d = differences[contender]
            cells += [f"{d.diff:+.3f} ({d.ci95[0]:+.3f} to {d.ci95[1]:+.3f})", f"{corrected[contender]:.4f}"]
        lines.append(f"| {contender} | {lr:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"])


def _interval(interval: MeanInterval, form: str) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{form}}"
    return f"{interval.mean:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def tokens_to(rounds: Sequence[tuple[int, float]], level: float) -> int:
    """Tokens sampled before the first round that earned as much; all of them where none did.

    Args:
        rounds: tokens sampled by the end of each, and its mean reward.
    """
    ends = [0, *(tokens for tokens, _ in rounds)]
    return next((ends[number] for number, (_, reward) in enumerate(rounds) if reward >= level), ends[-1])


def to_savings(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float], games: Sequence[str]) -> str:
    """Fresh tokens to the same reward with 192 recorded episodes and without, as Markdown: by game, and in all.

    Both at their own best rate. The interval is Student's t of the differences, one a seed.
    """
    rounds = {(r["contender"], r["game"], r["seed"]): r["rounds"] for r in rows if r["lr"] == rates.get(r["contender"])}
    seeds = [s for s in SEEDS if all((c, g, s) in rounds for c in (DEFAULTS, WITHOUT_TRACES) for g in games)]
    if len(seeds) < 2:
        return f"{len(seeds)} seeds are finished"
    needed = {DEFAULTS: np.zeros((len(games), len(seeds))), WITHOUT_TRACES: np.zeros((len(games), len(seeds)))}
    for g, game in enumerate(games):
        for s, seed in enumerate(seeds):
            level = NEAR_THE_END * rounds[WITHOUT_TRACES, game, seed][-1][1]
            for contender, tokens in needed.items():
                tokens[g, s] = tokens_to(rounds[contender, game, seed], level)
    lines = ["| game | without traces | with | spared | difference, 95 % |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, which in [*((game, [g]) for g, game in enumerate(games)), ("all", list(range(len(games))))]:
        with_S, without_S = (needed[c][which].mean(axis=0) for c in (DEFAULTS, WITHOUT_TRACES))  # noqa: N806
        d = mean_interval(with_S - without_S)
        spared = f"{1 - with_S.mean() / without_S.mean():.2f}" if without_S.mean() else "–"
        lines.append(f"| {name} | {without_S.mean():.0f} | {with_S.mean():.0f} | {spared} | {_interval(d, '+.0f')} |")
    return "\n".join(lines)


def main() -> None:
    """Plays what the file does not hold yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each (default: %(default)s)")
    arguments = parser.parse_args()
    text = arguments.out.read_text() if arguments.out.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    if not arguments.table:
        model = ensure_model(arguments.cache)
        spawn = get_context("spawn")  # a fork of a process that has used torch's threads may hang
        with ProcessPoolExecutor(arguments.jobs, spawn, torch.set_num_threads, (1,)) as pool:
            _play_missing(sweep_plans(arguments.games), pool, model, rows, out=arguments.out)
            _play_missing(contest_plans(arguments.games, best_rates(rows)), pool, model, rows, out=arguments.out)
    rates = best_rates(rows)
    print(to_table(rows, rates, arguments.games))
    print(f"\nTokens that recorded traces spare:\n\n{to_savings(rows, rates, arguments.games)}")


def _play_missing(
    plans: Iterable[Plan], pool: ProcessPoolExecutor, model: Path, rows: list[dict[str, Any]], out: Path
) -> None:
    """Plays the runs that the file does not hold, and appends each to both as it ends."""
    held = {Plan(r["game"], r["contender"], r["lr"], r["seed"]) for r in rows}
    for run in as_completed([pool.submit(play, plan, model) for plan in plans if plan not in held]):
        rows.append(run.result())
        with out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")


if __name__ == "__main__":
    main()
