"""`marft-bridge train`: stored episodes, then fresh ones -> adapter versions, each published as soon as it exists.

    version 1         from what was collected: critic warm-up, then replay
    version r + 1     from round r: episodes by version r (or by up to `max_staleness` before it), one MARFT update

Invariant: the checkpoint is the truth. A version's adapter files and the server follow from it, so a run that is
killed anywhere goes on from its last finished update, and episodes of the round that was cut short are used, not
run again. This module composes trainer, engine and store; none of them knows another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from marft_bridge.ahead import RoundsAhead
from marft_bridge.app import App
from marft_bridge.bases import config_to_bases, directory_of
from marft_bridge.config import BridgeConfig
from marft_bridge.elsewhere import config_to_names, traces_to_episodes
from marft_bridge.engine import Engine, begin_run, load_app, refuse_used, still_to_run
from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically
from marft_bridge.heldout import HeldOut, note_learned
from marft_bridge.kept_advantages import credits_to_file, forget_rounds_after
from marft_bridge.lost_ground import run_to_lost_ground
from marft_bridge.metrics_lines import read_metrics
from marft_bridge.progress import Reporter, Task
from marft_bridge.retokenise import Retokeniser, bases_to_retokeniser
from marft_bridge.rollouts import plan_episodes, task_order
from marft_bridge.round_clock import PUBLISH, ROLLOUT, SCORE, RoundClock
from marft_bridge.run_folder import COLLECT, TRAIN, RunFolder
from marft_bridge.run_store import WAIT_IN_RUN_S, keeping_what_runs, store_up_to_date, take_in_what_ran
from marft_bridge.served import check_staleness, served_versions
from marft_bridge.tensorboard import require_tensorboard, write_scalars
from marft_bridge.tool_surface import refuse_changed, runs_to_surfaces, trajectories_to_surface
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trainers import checkpoint
from trainers.marft import MarftTrainer
from trainers.memory_guard import MemoryGuard

# Episodes of this run's rounds, and the collected ones, which version 0 sampled. Those that failed, or were stopped
# before their reward was there, would be drawn in vain.
_REPLAYABLE = """
SELECT episode_id FROM episodes e
WHERE (run_id = $1 AND $2 <= round AND round < $3 OR run_id = $4 AND split = 'train' AND $2 <= 0)
  AND outcome <> 'failed' AND EXISTS (
    SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id AND r.scope = 'episode' AND r.name = $5)
ORDER BY run_id = $4, started_ns, episode_id
"""


def train(config: BridgeConfig, reporter: Reporter, resume: bool) -> None:
    """Trains one adapter per node and publishes every version.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; the last checkpoint stays usable.
    """
    folder = RunFolder(config.run_folder)
    if config.train.tensorboard:
        require_tensorboard()
    if config.train.traces:
        folder.create()  # others' traces can be all that there is
    else:
        folder.require_store("train")
    app = load_app(config)
    heldout = HeldOut(app.heldout_tasks, app.task_to_input)
    bases = config_to_bases(config, reporter.say)
    model_dirs = {node: directory_of(bases, node) for node in config.graph.nodes}
    # before a server is started for it; the trainer looks again when the server has taken its share
    memory = MemoryGuard.of_agents(config.train.trainer, model_dirs, config.graph.nodes)
    memory.check()
    if (planned := memory.said()) is not None:
        reporter.say(planned)
    with folder.held_by("train"):
        with store_up_to_date(folder, reporter) as store:
            refuse_used(store, TRAIN, "train", folder, resume)
            ids = bases_to_retokeniser(bases, config.graph.nodes, config.train.trainer.offline.retokenise)
            here = store.trajectories(run_ids=[COLLECT], split="train")
            collected = [ids.trajectory_to_retokenised(trajectory, store.spans) for trajectory in here]
            collected += _elsewhere(config, collected, ids, reporter)
            collected = heldout.left_out_of(collected, "stored episodes", reporter.say)
            if (line := ids.said()) is not None:
                reporter.say(line)
            if not collected:
                raise ConfigError(f"train: {folder.store} holds no collected episode; run `marft-bridge collect` first")
            refuse_changed(runs_to_surfaces(collected), config.train.allow_tool_change, "train.allow_tool_change")
            begin_run(store, TRAIN, "train", config, folder)
        with keeping_what_runs(folder, reporter, "train"), Engine(config, folder, app, bases, reporter) as engine:
            _Training(config, app, heldout, folder, engine, reporter).run(collected)
        take_in_what_ran(folder, reporter)


def _elsewhere(
    config: BridgeConfig, here: Sequence[Trajectory], ids: Retokeniser, reporter: Reporter
) -> list[Trajectory]:
    return traces_to_episodes(
        config.train.traces,
        known={trajectory.episode.episode_id for trajectory in here},
        models=config_to_names(config.model_dump(mode="json")),
        reporter=reporter,
        read=ids.trajectory_to_retokenised,
    )


class _Training:
    """One run of the outer loop."""

    def __init__(
        self,
        config: BridgeConfig,
        app: App,
        heldout: HeldOut,
        folder: RunFolder,
        engine: Engine,
        reporter: Reporter,
    ) -> None:
        self.heldout = heldout
        self.config, self.folder, self.engine, self.reporter = config, folder, engine, reporter
        self.nodes = config.graph.nodes
        self.tasks = task_order(heldout.tasks_left_of(app.train_tasks, reporter.say), config.seed)
        self.options = config.train
        self.phase: Task | None = None
        self.clock = RoundClock()
        model_dirs = {node: directory_of(engine.models.bases, node) for node in self.nodes}
        self.trainer = MarftTrainer(
            *(self.options.trainer, model_dirs, self.nodes, config.seed, self._show_phase, engine.lineage),
            is_heldout=heldout.holds,
        )

    def run(self, collected: Sequence[Trajectory]) -> None:
        """From wherever the checkpoint is to the last round."""
        self.collected = [trajectory.episode.episode_id for trajectory in collected]
        self.surface = trajectories_to_surface(collected)
        if (self.folder.checkpoint / checkpoint.STATE_FILE).exists():
            checkpoint.load(self.trainer, self.folder.checkpoint)
            self._forget_metrics_after(self.trainer.rounds)
            forget_rounds_after(self.folder.advantages, self.trainer.rounds)
            self.reporter.say(f"resuming after round {self.trainer.rounds} of {self.options.rounds}")
        else:
            self._replay(collected)
        with self.clock.part(self._version(), PUBLISH):  # the round is called as the version that plays it
            self._publish()
        with (
            self.reporter.bars(),
            self.reporter.overall("train", self.options.rounds) as overall,
            RoundsAhead(self.engine.stop_running) as self.ahead,
        ):
            overall.update(self.trainer.rounds)
            while self.trainer.rounds < self.options.rounds:
                figures = self._round(self.trainer.rounds + 1)
                overall.update(self.trainer.rounds, figures)
        last = self._version()
        self.reporter.say(f"trained {', '.join(f'{node}@{last}' for node in self.nodes)} in {self.folder.adapters}")
        with self._store() as store:
            if (lost := run_to_lost_ground(store, TRAIN, self.options.trainer.reward)) is not None:
                self.reporter.say(lost)

    def _version(self) -> int:
        return self.trainer.rounds + 1

    def _learned_from(self, store: TraceStore) -> list[str]:
        """The episodes that the newest version was trained on, besides those of the versions before it."""
        if self.trainer.rounds == 0:
            return self.collected
        return [episode.episode_id for episode in store.episodes(run_id=TRAIN, round=self.trainer.rounds)]

    def _store(self) -> AbstractContextManager[TraceStore]:
        return store_up_to_date(self.folder, self.reporter, WAIT_IN_RUN_S)

    def _replay(self, collected: Sequence[Trajectory]) -> None:
        self.reporter.say(f"learning from {len(collected)} stored episodes")
        note_learned(self.folder.path, collected)
        with self._showing("warm-up"):
            warm_up = self.trainer.warm_up(collected)
        with self._showing("replay"):
            replay = self.trainer.replay(collected)
        with self.clock.part(1, PUBLISH):
            self._commit({"phase": "offline", "round": 0, "warm_up": warm_up, "replay": replay})
        explained = warm_up["critic"]["explained_variance"]
        self.reporter.say(
            f"offline: critic explains {_figure(explained)} of the variance; "
            f"{replay['mode']} replay of {replay['used']} actions from {len(collected)} stored episodes"
        )

    def _round(self, number: int) -> str:
        """Rollouts, update, publication; returns the figures for the progress bar.

        With `max_staleness` the rollouts of the rounds to come are started before the update: their versions are
        those of now, so that what a round learns from is at most so many versions old.
        """
        version = self._version()
        self.ahead.finish(number, partial(self._rollouts, number))
        with self._store() as store:
            played = store.trajectories(run_ids=[TRAIN], round=number)
            episodes = self.heldout.left_out_of(played, f"episodes of round {number}", self.reporter.say)
            older = self._older(store, number, len(episodes))
        staleness = check_staleness(episodes, self.nodes, version, self.options.max_staleness, f"round {number}")
        self._refuse_other_tools(f"round {number}", episodes)
        note_learned(self.folder.path, [*episodes, *older])
        for coming in range(number + 1, min(number + self.options.max_staleness, self.options.rounds) + 1):
            self.ahead.start(coming, partial(self._rollouts, coming))
        with self._showing(f"round {number}/{self.options.rounds}"):
            with self.clock.part(number, SCORE):
                served = served_versions(self.trainer.policies, self.engine.registry, episodes, version)
            keep = partial(credits_to_file, folder=self.folder.advantages, number=number)
            metrics = self.trainer.update(episodes, older, keep if self.options.keep_advantages else None)
        for warning in metrics["warnings"]:
            self.reporter.say(f"round {number}: {warning}")
        line = {"phase": "online", "round": number, "served": served, "staleness": staleness, **metrics}
        line["seconds"] = self.clock.finish(number, metrics["seconds"])
        with self.clock.part(number + 1, PUBLISH):
            self._commit(line)
            self._publish()
        return self._say_round(number, episodes, metrics)

    def _rollouts(self, number: int) -> Callable[[], None]:
        """What plays the episodes of a round that are not stored yet, by the versions of now."""
        requests = plan_episodes(
            self._tasks_of(number),
            self.options.episodes_per_round,
            self.options.samples_per_task,
            seed=self.config.seed,
            run_id=TRAIN,
            split="train",
            adapters=dict.fromkeys(self.nodes, self._version()),
            round=number,
        )
        with self._store() as store:
            remaining = still_to_run(store, requests)
        title = f"round {number}/{self.options.rounds} rollouts"

        def play() -> None:
            if remaining:
                with self.clock.part(number, ROLLOUT):
                    self.engine.run(remaining, title, self.options.trainer.reward)

        return play

    def _older(self, store: TraceStore, number: int, fresh: int) -> list[Trajectory]:
        """The stored episodes that join a round, drawn from what may still be replayed."""
        replay = self.options.trainer.replay
        if replay.share == 0:
            return []
        oldest, reward = number - replay.max_staleness, self.options.trainer.reward
        stored = [row[0] for row in store.sql(_REPLAYABLE, (TRAIN, oldest, number, COLLECT, reward))]
        drawn = [store.trajectory(stored[i]) for i in self.trainer.draw_replay(len(stored), fresh)]
        found = [trajectory for trajectory in drawn if trajectory is not None]
        return self.heldout.left_out_of(found, "replayed episodes", self.reporter.say)

    def _refuse_other_tools(self, title: str, episodes: Sequence[Trajectory]) -> None:
        """What was learned so far was learned with certain tools; those that only appear now are known from now on."""
        surface = trajectories_to_surface(episodes)
        known = {"what was learned from": self.surface, title: surface}
        refuse_changed(known, self.options.allow_tool_change, "train.allow_tool_change")
        self.surface = {**surface, **self.surface}

    def _tasks_of(self, number: int) -> list[dict[str, Any]]:
        """A window that moves on by a round's worth of tasks each round, and around."""
        needed = math.ceil(self.options.episodes_per_round / self.options.samples_per_task)
        start = (number - 1) * needed % len(self.tasks)
        return [*self.tasks[start:], *self.tasks[:start]]

    # -- the commit point and what follows from it ------------------------------------------------------------

    def _commit(self, metrics: dict[str, Any]) -> None:
        """Metrics first: a line of a round that the checkpoint does not have is dropped on resume."""
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        self.folder.metrics.chmod(0o600)
        if self.options.tensorboard:
            write_scalars(self.folder.tensorboard, metrics, metrics["round"])
        checkpoint.save(self.trainer, self.folder.checkpoint)

    def _forget_metrics_after(self, rounds: int) -> None:
        lines = [line for line in read_metrics(self.folder.metrics) if line["round"] <= rounds]
        write_atomically(self.folder.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def _publish(self) -> None:
        """Makes the newest version of every node from the trainer's state, and has it served."""
        version, registry = self._version(), self.engine.registry
        lines = read_metrics(self.folder.metrics)
        newest: dict[str, Any] = lines[-1] if lines else {}
        for node in self.nodes:
            if version not in registry.versions(node):
                self.trainer.policies.save_adapter(node, registry.new_folder(node, version))
                agent = newest.get("agents", newest.get("replay", {}).get("agents", {})).get(node, {})
                registry.register(node, version, version - 1, agent)
        with self._store() as store:
            episodes = self._learned_from(store)
            for node in self.nodes:
                store.put_adapter(registry.get(node, version))
                store.put_adapter_episodes(node, version, episodes)
        kept = self.options.keep_versions + self.options.max_staleness  # rounds that are being sampled use older ones
        keep = range(max(1, version - kept + 1), version + 1)
        self.engine.retire_all_but(dict.fromkeys(self.nodes, keep))
        self.engine.publish(dict.fromkeys(self.nodes, version))

    # -- what people see --------------------------------------------------------------------------------------

    @contextmanager
    def _showing(self, name: str) -> Iterator[None]:
        with self.reporter.bars(), self.reporter.task(name) as self.phase:
            yield
        self.phase = None

    def _show_phase(self, phase: str, done: int, total: int) -> None:
        if self.phase is not None:
            self.phase.update(figures=f"{phase} {done}/{total}")

    def _say_round(self, number: int, episodes: Sequence[Trajectory], metrics: dict[str, Any]) -> str:
        rewards = [r for e in episodes if (r := e.team_reward(self.options.trainer.reward)) is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        taken = [seconds for seconds in metrics["seconds"].values() if seconds is not None]
        nodes = "  ".join(
            f"{node}@{self._version()}: KL {_figure(agent.get('approx_kl'))} clip {_figure(agent.get('clipfrac'))}"
            for node, agent in metrics["agents"].items()
        )
        self.reporter.say(
            f"round {number}/{self.options.rounds}: reward {_figure(mean)} over {len(rewards)} episodes; "
            f"{nodes}; update {sum(taken):.0f} s; rounds left: {self.options.rounds - number}"
        )
        kls = [agent["approx_kl"] for agent in metrics["agents"].values() if agent.get("approx_kl") is not None]
        return f"reward {_figure(mean)}  KL {_figure(max(kls, default=None))}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
