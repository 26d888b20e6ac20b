"""What runs before a round earned -> the order of its tasks, and what its forks are drawn by.

Invariant: a round knows of rounds that are over in every execution, and of none that may be played beside it, so that a
training that was killed draws the same tasks and forks again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.runs.run_folder import TRAIN
from marft_bridge.tasks.reading import Task
from marft_bridge.training.planned_forks import known_runs_to_reach
from marft_bridge.training.round_plan import runs_of_rounds, runs_of_stored
from marft_bridge.training.success_draw import older_runs, rewards_to_draw_weights
from marft_bridge.training.task_draw import DrawRule, TaskRun, round_to_task_order, runs_to_weights
from marft_bridge.training.tree_plan import KnownBefore, StoredRun, siblings_of_rounds
from trace_store.records import Trajectory
from trace_store.store import TraceStore


class KnownRounds:
    """What each round of a training knows.

    Args:
        tasks: that the rounds take, in the order of the app.
        collected: the episodes that are known before the first round.
        own_ids: of those of them that this run collected.
    """

    def __init__(
        self,
        config: BridgeConfig,
        tasks: Sequence[Task],
        collected: Sequence[Trajectory],
        own_ids: Collection[str],
    ) -> None:
        tasks_per_round = -(-config.train.chains_per_round // config.train.samples_per_task)
        self._rule = DrawRule(config.seed, tasks_per_round, config.train.max_staleness)
        self._reward, self._nodes = config.train.trainer.reward, config.graph.nodes
        self._draws_stored = config.train.trees is not None and config.train.trees.stored_share > 0
        self._tasks = {str(task["id"]): task for task in tasks}
        self._collected = collected
        self._runs_before = runs_of_stored(collected, own_ids, self._reward)
        self._before: dict[int, KnownBefore] = {}  # of the round that was asked for last

    def ordered_tasks(self, store: TraceStore, number: int) -> list[Task]:
        """All tasks in the order in which a round takes them."""
        known_runs = self._runs_up_to(store, self._rule.last_known_round(number))
        return [
            self._tasks[task_id] for task_id in round_to_task_order(known_runs, self._tasks, number, rule=self._rule)
        ]

    def before(self, store: TraceStore, number: int) -> KnownBefore:
        """What the forks of a round are drawn by; read once a round."""
        if number in self._before:
            return self._before[number]
        last_known = self._rule.last_known_round(number)
        known_runs = self._runs_up_to(store, last_known)
        runs = list(store.trajectories(run_ids=[TRAIN], round=last_known)) if last_known else []
        reach = known_runs_to_reach(runs, self._collected, self._nodes)
        known = KnownBefore(
            runs_to_weights(known_runs, self._tasks, number, last_known=last_known),
            reach,
            siblings_of_rounds(store, TRAIN, last_known, reward=self._reward),
            stored=self._stored_runs(store, last_known),
        )
        self._before = {number: known}
        return known

    def _stored_runs(self, store: TraceStore, last_known: int) -> dict[str, StoredRun]:
        """Those of the round's tasks, by name, with how likely each is gone on from."""
        if not self._draws_stored:
            return {}
        runs = older_runs(store, oldest=0, before=last_known + 1, reward=self._reward)
        weights = rewards_to_draw_weights([run.earned for run in runs], last_known + 1)
        return {
            run.name: StoredRun(run.episode_id, weight)
            for run, weight in zip(runs, weights, strict=True)
            if run.earned.task_id in self._tasks and run.nodes >= set(self._nodes)  # else it cannot be forked
        }

    def _runs_up_to(self, store: TraceStore, last_known: int) -> list[TaskRun]:
        """What whole runs came to, those before the rounds and those of rounds up to one."""
        return [*self._runs_before, *runs_of_rounds(store, TRAIN, last_known, reward=self._reward)]
