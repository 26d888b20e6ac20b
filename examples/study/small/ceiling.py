"""A writer that is right in nearly all of its runs -> what rounds of training leave of that.

    python -m examples.study.small.ceiling build/ceiling.jsonl --seeds 200 201 202

The loop's writer is taught its training tasks until it is right in 0.94 of its runs, by imitation of what it said when
it was right, and then plays eight rounds of 48. After each round it is asked every task twenty times, those it was
trained on and the others. What does a round take away from a policy that has little to learn?
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.study.small.games import GAMES, Game, Players, Task, last_number, mean, to_trajectory
from examples.study.small.model import digits
from examples.study.small.run import COMMON, merged, run_missing
from trace_store.records import Trajectory
from trainers import MarftTrainer, TrainerOptions

WRITER = "writer"
ROUNDS, EPISODES, REPEATS = 8, 48, 20
TAUGHT, MOST_LESSONS = 0.94, 150
"""The share of right runs that a writer is taught to, and after how many lessons it is given up."""
CONDITIONS: dict[str, dict[str, Any]] = {"defaults": {}, "1 pass": {"optimizer": {"epochs": 1}}}


def play_writer(players: Players, tasks: Sequence[Task]) -> list[Trajectory]:
    """One draft for each task; 1 for the right number at its end."""
    questions = [[*digits(int(a)), "-", *digits(int(b)), "?"] for a, b in tasks]
    drafts = players.ask(WRITER, [["[writer]", *question] for question in questions])
    played = []
    for i, (task, draft) in enumerate(zip(tasks, drafts, strict=True)):
        correct = last_number(draft) == int(task[0]) - int(task[1])
        played.append(to_trajectory(task, i, [draft], float(correct), correct))
    return played


def right_share(players: Players, tasks: Sequence[Task]) -> float:
    """The share of right drafts, every task asked `REPEATS` times."""
    return mean(play_writer(players, list(tasks) * REPEATS), "correct")


def teach(players: Players, tasks: Sequence[Task]) -> float:
    """Imitation of its own right drafts, until it is right in `TAUGHT` of its runs; the share that it came to.

    Raises:
        RuntimeError: it did not come to that in `MOST_LESSONS`.
    """
    for _ in range(MOST_LESSONS):
        share = right_share(players, tasks)
        if share >= TAUGHT:
            return share
        players.trainer.replay(play_writer(players, list(tasks) * 4))
    raise RuntimeError(f"the writer is right in {share:.3f} of its runs after {MOST_LESSONS} lessons")


def run(game: Game, condition: str, seed: int, model: Path) -> dict[str, Any]:
    """One writer, taught and then trained by rewards, to its figures."""
    started = time.perf_counter()
    options = TrainerOptions.model_validate(merged(COMMON, CONDITIONS[condition]))
    trainer = MarftTrainer(options, model, agents=[WRITER], seed=seed)
    players, draw = Players(trainer, 1000 + seed), random.Random(seed)
    taught = teach(players, game.tasks)
    trained, others, rewards, steps = [taught], [right_share(players, game.heldout)], list[float](), list[int]()
    for _ in range(ROUNDS):
        fresh = play_writer(players, draw.sample(game.tasks, EPISODES))
        rewards.append(mean(fresh, "reward"))
        steps.append(trainer.update(fresh)["agents"][WRITER]["steps"])
        trained.append(right_share(players, game.tasks))
        others.append(right_share(players, game.heldout))
    return {
        "game": game.name,
        "condition": condition,
        "seed": seed,
        "rewards": rewards,
        "steps": steps,
        "trained": trained,  # before, and after each round
        "others": others,
        "seconds": time.perf_counter() - started,
    }


def to_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds and rounds by condition, as Markdown."""
    lines = [
        "| condition | trained tasks | other tasks | steps a round | seeds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for condition in dict.fromkeys(row["condition"] for row in rows):
        mine = [row for row in rows if row["condition"] == condition]
        trained, others = ([statistics.mean(row[name][1:]) for row in mine] for name in ("trained", "others"))
        steps = statistics.mean(statistics.mean(row["steps"]) for row in mine)
        cells = f"{statistics.mean(trained):.3f} | {statistics.mean(others):.3f} | {steps:.0f}"
        lines.append(f"| {condition} | {cells} | {len(mine)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_missing(
        __doc__, list(CONDITIONS), [200, 201, 202], run_one=run, table_of=to_table, games={"loop": GAMES["loop"]}
    )
