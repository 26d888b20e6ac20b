"""Two learners on a core each against one learner on one core: whole updates of the demo's recorded round.

Every process is pinned to a core of its own and computes with one thread, so that the figure is what the split makes of
a second core. Both sides are started anew for each measurement, one after the other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Measurement, bench
from benchmarks.train_step import model_folder

if TYPE_CHECKING:
    from trainers.common.workers import Workers

EPISODES = 32  # half of the demo's round
UPDATES = 2  # that are timed, after a small one that is not


def update_seconds(workers: Workers, argument: dict[str, Any]) -> list[float]:
    """Runs in each process: the seconds of each timed update."""
    from support.tiny_policy import make_action, make_trajectory
    from support.trainer_options import trainer_options

    from trainers.marft import MarftTrainer

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[workers.rank]})
    options = trainer_options(device="cpu", threads=1, mismatch="none", engine_tolerance=1e3, kl_stop=None, lr=1e-5)
    trainer = MarftTrainer(options, Path(argument["model"]), argument["agents"], seed=0, workers=workers)
    episodes = []
    for number, episode in enumerate(argument["episodes"]):
        actions = [make_action(a["agent"], a["prompt_ids"], a["sampled_ids"]) for a in episode["actions"]]
        episodes.append(make_trajectory(actions, float(number % 3 == 0), task_id=str(number // 4)))
    trainer.update(episodes[:4])
    seconds = []
    for _ in range(UPDATES):
        workers.wait()
        began = time.perf_counter()
        trainer.update(episodes)
        seconds.append(time.perf_counter() - began)
    return seconds


@bench
def train_learners_speedup(folder: Path) -> Iterator[Measurement]:
    """Two learners on two cores over one on one core, on the demo's round; should be at least 1.7."""
    from support.workers_rig import in_processes

    from benchmarks.train_work import AGENTS

    recorded = json.loads((Path(__file__).parent / "duo_round.json").read_text())[:EPISODES]
    argument = {"model": str(model_folder().resolve()), "agents": list(AGENTS), "episodes": recorded}
    for number in range(1000):
        medians = []
        for count in (1, 2):
            place = folder / f"{number}-{count}"
            place.mkdir()
            name = f"{__name__}:{update_seconds.__name__}"
            ranks = in_processes(count, [name], place, argument)[name]
            medians.append(max(median(seconds) for seconds in ranks))
        one, two = medians
        yield Measurement(two, "s", one, one / two)
