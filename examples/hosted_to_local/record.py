"""Runs of the desk, recorded by `marft_bridge.wrap` -> a store with their tasks and rewards.

    python -m examples.hosted_to_local.record STORE --config examples/hosted_to_local/bridge.toml --runs 240

The nodes call the app's own model: nothing is routed, so the record has texts and no token ids, as the traces of any
hosted app have. An app in production would be wrapped in the same way, and would leave task and reward out.
Invariant: only training tasks are run, so that no held-out one is ever learned from.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.hosted_to_local import app, orders
from marft_bridge import EpisodeContext, Recorder, current_episode, wrap
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.rollouts.app import load_app
from trace_store.journal import Journal
from trace_store.records import Reward
from trace_store.store import TraceStore

SOURCE = "examples.hosted_to_local.orders:reward"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded: rewards by name, of the runs that came to their end, and what the others failed with."""

    rewards: list[dict[str, float]]
    failures: list[str]

    def mean(self, name: str) -> float | None:
        """The mean of a reward; None without a run."""
        return fmean(reward[name] for reward in self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Rules:
    """How a task is run and paid. `source` says of a stored reward where it came from."""

    task_to_input: Callable[[orders.Task], Any]
    reward: Callable[[orders.Task, Mapping[str, Any]], dict[str, float]]
    source: str


DESK = Rules(orders.task_to_input, orders.reward, SOURCE)


def record(
    graph: Any,
    tasks: Sequence[orders.Task],
    store_path: Path,
    *,
    run_id: str,
    in_flight: int,
    rules: Rules = DESK,
) -> Recorded:
    """Runs the graph once on each task, `in_flight` of them side by side, and stores what each run earned."""
    store_path.parent.mkdir(parents=True, exist_ok=True)
    TraceStore.open(store_path).close()
    recorder = Recorder(Journal(Path(f"{store_path}.journal")))
    recorded = wrap(graph, recorder)

    def run(task: orders.Task) -> tuple[str | None, dict[str, float] | str]:
        episode = EpisodeContext(run_id, task["id"], "train", task=task)
        current_episode.set(episode)
        try:
            state = recorded.invoke(rules.task_to_input(task))
        except Exception as error:  # noqa: BLE001 - whatever a provider answers, the other runs go on
            return episode.episode_id, f"{type(error).__name__}: {error}"
        return episode.episode_id, rules.reward(task, state)

    with ThreadPoolExecutor(in_flight) as pool:
        results = list(pool.map(lambda task: copy_context().run(run, task), tasks))
    recorder.journal.close()
    rewards = [(episode_id, earned) for episode_id, earned in results if episode_id and isinstance(earned, dict)]
    with TraceStore.open(store_path) as store:
        store.take_in()
        now_ns = time.time_ns()
        store.put_rewards(
            [Reward(i, name, value, rules.source, now_ns) for i, earned in rewards for name, value in earned.items()]
        )
    return Recorded([earned for _, earned in rewards], [earned for _, earned in results if isinstance(earned, str)])


def main() -> None:
    """Records the app on its own models."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.record", description=__doc__)
    parser.add_argument("store", type=Path, help="the DuckDB file, which must not exist")
    parser.add_argument("--config", type=Path, required=True, help="the bridge.toml that says which tasks are held out")
    parser.add_argument("--runs", type=int, default=240, help="one of each of so many training tasks")
    parser.add_argument("--in-flight", type=int, default=16)
    given = parser.parse_args()
    if given.store.exists():
        parser.error(f"{given.store} exists; choose another name, or go on with it")
    tasks = load_app(toml_to_config(given.config)).train_tasks
    if given.runs > len(tasks):
        parser.error(f"--runs {given.runs}: there are {len(tasks)} training tasks")
    done = record(app.graph(), tasks[: given.runs], given.store, run_id="hosted", in_flight=given.in_flight)
    if done.failures:
        print(f"{len(done.failures)} of {given.runs} runs failed, the first with {done.failures[0]}")
    if not done.rewards:
        parser.exit(1, "no run came to its end\n")
    print(f"recorded {len(done.rewards)} runs in {given.store}, correct {done.mean('correct'):.3f}")


if __name__ == "__main__":
    main()
