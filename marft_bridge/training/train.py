"""`marft-bridge train`: stored episodes, then fresh ones -> adapter versions, each published as soon as it exists.

    version 1         from what was collected: critic warm-up, then replay
    version r + 1     from round r: episodes by version r (or by up to `max_staleness` before it), one MARFT update

Invariant: the checkpoint is the only state. A version's adapter files and the server's adapters follow from it, so a
run that is killed anywhere resumes after its last finished update, and the episodes of an unfinished round are used,
not run again. This module composes trainer, rollouts and store, which do not import one another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import require_extra
from marft_bridge.common.progress import Reporter, Task
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.forks.given_tools import given_tools
from marft_bridge.recording.tool_schemas import refuse_changed, runs_to_surfaces, trajectories_to_surface
from marft_bridge.rollouts.app import App, load_app
from marft_bridge.rollouts.episode_plan import (
    EpisodeRequest,
    finished_keys,
    in_planned_order,
    plan_episodes,
    replaced_attempts,
    requests_to_versions,
    task_order,
    unfinished_requests,
)
from marft_bridge.rollouts.held_out import HeldOutTasks, record_learned_tasks
from marft_bridge.rollouts.ray.connection import connect_ray, refuse_unusable_cluster
from marft_bridge.rollouts.ray.session import ClusterSession, open_cluster_session, refuse_unusable_rollouts
from marft_bridge.rollouts.session import Session, open_session
from marft_bridge.runs.device_lines import announced_devices
from marft_bridge.runs.ledger import begin_run, refuse_second_run
from marft_bridge.runs.named_version import NamedVersion, write_named_version
from marft_bridge.runs.run_folder import (
    EVALUATE,
    MEASURE,
    TRAIN,
    RunFolder,
    read_forecast,
    read_metrics,
    write_metrics,
)
from marft_bridge.runs.run_store import WAIT_IN_RUN_S, open_run_store, take_in_journal, take_in_on_failure
from marft_bridge.serving.model_versions import ModelVersions, config_to_versions
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.server_file import server_options
from marft_bridge.training.advantage_log import credits_to_file, delete_rounds_after
from marft_bridge.training.async_rollouts import BackgroundRollouts
from marft_bridge.training.child_learners import ChildLearners
from marft_bridge.training.hosted_answers import AnswerPool, trajectories_to_hosted_metrics
from marft_bridge.training.known_rounds import KnownRounds
from marft_bridge.training.league_draw import draw_opponents
from marft_bridge.training.learners import Followers, Learners, go_on_after_losses, open_learners
from marft_bridge.training.loggers.run_loggers import RunLoggers, open_loggers, require_loggers
from marft_bridge.training.planned_forks import forks_in_planned_order, read_waves
from marft_bridge.training.progress import (
    change_to_metrics,
    join_settled,
    plan_measurement,
    settle_round,
)
from marft_bridge.training.ray_learners import OPTION as RAY_OPTION
from marft_bridge.training.ray_learners import RayLearners, config_to_needs, devices_on_cluster
from marft_bridge.training.regression_check import run_to_regression_text
from marft_bridge.training.retokenise import bases_to_tokenizers
from marft_bridge.training.round_plan import (
    RoundPlan,
    next_wave,
    plan_round,
    wasted_share,
)
from marft_bridge.training.round_runs import RoundRuns
from marft_bridge.training.round_timings import PUBLISH, ROLLOUT, SCORE, RoundClock
from marft_bridge.training.scoring_teacher import config_to_teacher
from marft_bridge.training.served_checks import check_staleness, served_versions
from marft_bridge.training.signal_check import SignalCheck, check_forecast
from marft_bridge.training.start_adapters import (
    config_to_start,
    refuse_learned_tasks,
    refuse_other_start,
    start_to_text,
)
from marft_bridge.training.stored_episodes import StoredEpisodes, read_stored_episodes
from marft_bridge.training.success_draw import older_runs, rewards_to_draw_weights
from marft_bridge.training.task_draw import TaskReward
from marft_bridge.training.teacher_labels import TeacherLabels, teacher_metrics_to_text
from marft_bridge.training.torchrun_learners import (
    TorchrunLearners,
    count_learners,
    follow_torchrun,
    refuse_torchrun,
    torchrun_rank,
)
from marft_bridge.training.tree_metrics import round_to_tree_metrics
from marft_bridge.training.tree_plan import ForkRules, RoundForks
from marft_bridge.training.update_lines import (
    LearnedRound,
    offline_to_lines,
    round_to_figures,
    round_to_lines,
)
from marft_bridge.training.version_naming import lines_to_stop_text, named_to_metrics, named_to_text, store_to_named
from trace_store.files import open_to_write
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trainers import checkpoint
from trainers.checks.memory_guard import MemoryGuard
from trainers.common.free_memory import give_back_card_memory
from trainers.config import TrainerOptions


def train(config: BridgeConfig, reporter: Reporter, resume: bool, without_signal: bool = False) -> None:
    """Trains one adapter per node and publishes every version.

    Args:
        without_signal: goes on where rewards hardly tell runs apart; a run that is resumed keeps to what it began with.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; the last checkpoint stays usable.
    """
    is_on_ray = config.train.engine == "ray"
    if is_on_ray:
        refuse_torchrun(config.train.learners)
        refuse_unusable_cluster(config.ray, RAY_OPTION)
    plays_on_ray = config.train.rollouts == "ray"
    if plays_on_ray:
        refuse_unusable_rollouts(config)
    if torchrun_rank(config.train.learners):
        follow_torchrun()
        return
    learner_count = count_learners(config.train.learners)
    config = config.model_copy(update={"train": config.train.model_copy(update={"learners": learner_count})})
    folder = RunFolder(config.run_folder)
    if config.train.trainer.system.shard_base and learner_count == 1:
        raise ConfigError(
            "train.trainer.system.shard_base deals the base model out over several learners, and there is one: set "
            "train.learners to 2 or more, or leave it out"
        )
    require_loggers(config.train.loggers)
    if config.train.trainer.system.load_in_4bit:
        require_extra("qlora", "train.trainer.system.load_in_4bit")
    if config.train.traces:
        folder.create()  # nothing needs to be collected where there are other traces
    else:
        folder.require_store("train")
    app = load_app(config)
    heldout = HeldOutTasks(app.heldout_tasks, app.task_to_input)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    start = {} if checkpoint.is_saved(folder.checkpoint) else config_to_start(config, versions.registry)
    model_dirs = {node: versions.base_of(node).directory for node in config.graph.nodes}
    if plays_on_ray:
        options = [base.serve for base in versions.bases]
    else:
        options = server_options(versions.bases, folder, reporter)
    placement = Placement(config, versions.bases, options, trains=True, serves_here=not plays_on_ray)
    device_lines = placement.lines()
    for device_line in device_lines:
        reporter.say(device_line)
    # before a server is started in vain; the trainer checks again once the server has taken its share of the GPU
    memory = MemoryGuard.of_agents(
        placement.trainer_options(),
        model_dirs,
        config.graph.nodes,
        sharers=config.learners_here,
        learners=learner_count,
    )
    memory.check()
    teacher_dir = config_to_teacher(config, versions.bases, reporter.say)
    if teacher_dir is not None:
        memory.check_teacher(teacher_dir)
    if (memory_line := memory.describe()) is not None:
        reporter.say(memory_line if learner_count == 1 else f"{memory_line}, for each of {learner_count} learners")
    with folder.lock_for("train"), announced_devices(folder, device_lines):
        with open_run_store(folder, reporter) as store:
            refuse_second_run(store, TRAIN, "train", folder=folder, resume=resume)
            refuse_other_start(config, store)
            stored = read_stored_episodes(config, store, app, heldout=heldout, bases=versions.bases, reporter=reporter)
            surfaces = runs_to_surfaces(stored.collected)
            refuse_changed(surfaces, config.train.allow_tool_change, "train.allow_tool_change")
            signal = check_forecast(
                config,
                stored.collected,
                stored.own_ids,
                resume=resume,
                without_signal=without_signal,
                reporter=reporter,
            )
            learned_tasks: Sequence[str] = ()
            if start:
                learned_tasks = refuse_learned_tasks(config, app.heldout_tasks)
                reporter.say(start_to_text(start, config))
            begin_run(store, TRAIN, "train", config=config, folder=folder)

        def train_once() -> None:
            with (
                take_in_on_failure(folder, reporter),
                _connect_for_all(config),
                _open_learners(
                    config, folder, versions, placement=placement, teacher_dir=teacher_dir, notify=reporter.say
                ) as learners,
                _open_session(
                    config, folder, app, versions=versions, reporter=reporter, placement=placement, hosted=stored.hosted
                ) as session,
                BackgroundRollouts(session.stop) as rollouts,
                open_loggers(config, folder, checkpoint.is_saved(folder.checkpoint), say=reporter.say) as loggers,
            ):
                _Training(
                    config,
                    folder,
                    session,
                    trainer_options=placement.trainer_options(),
                    learners=learners,
                    rollouts=rollouts,
                    loggers=loggers,
                    heldout=heldout,
                    stored=stored,
                    signal=signal,
                    teacher_dir=teacher_dir,
                    start={node: Path(row.path) for node, row in start.items()},
                    learned_tasks=learned_tasks,
                ).run()

        if is_on_ray:
            go_on_after_losses(train_once, partial(_count_updates, folder), reporter.say)
        else:
            train_once()
        take_in_journal(folder, reporter)


def _count_updates(folder: RunFolder) -> int:
    return len(read_metrics(folder.metrics))


def _connect_for_all(config: BridgeConfig) -> AbstractContextManager[Any]:
    """One connection for learners and rollouts where both are on Ray: a cluster of this machine has room for both."""
    if config.train.engine != "ray" or config.train.rollouts != "ray":
        return nullcontext()
    processors = config.train.learners - 1 + config.ray.workers * config.ray.cpus_per_worker
    return connect_ray(config.ray, option=RAY_OPTION, processors=processors)


def _open_session(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    versions: ModelVersions,
    reporter: Reporter,
    *,
    placement: Placement,
    hosted: AnswerPool | None,
) -> AbstractContextManager[Session | ClusterSession]:
    """Where the rounds are played."""
    if config.train.rollouts == "ray":
        return open_cluster_session(
            config, folder, app, versions=versions, reporter=reporter, taken_cards=placement.taken_cards()
        )
    return open_session(config, folder, app, versions=versions, reporter=reporter, placement=placement, hosted=hosted)


def _open_learners(
    config: BridgeConfig,
    folder: RunFolder,
    versions: ModelVersions,
    *,
    placement: Placement,
    teacher_dir: Path | None,
    notify: Callable[[str], None],
) -> AbstractContextManager[Learners]:
    """The learners of the configuration, wherever they are."""
    count, devices = config.train.learners, placement.learner_devices()
    followers: Followers | None = None
    if count > 1 and config.train.engine == "ray":
        options = placement.trainer_options()
        if len(devices) < count:
            devices = devices_on_cluster(options, count)
        needs = partial(
            config_to_needs,
            config,
            versions,
            options=options,
            devices=devices,
            checkpoint_dir=folder.checkpoint,
            teacher_dir=teacher_dir,
        )
        followers = RayLearners(config.ray, devices, needs=needs, taken_cards=placement.taken_cards(), notify=notify)
    elif torchrun_rank(count) is not None:
        followers = TorchrunLearners(count)
    elif count > 1:
        followers = ChildLearners(count, folder.learner_log)
    return open_learners(devices, followers)


@dataclass(frozen=True, slots=True)
class _Lessons:
    """The episodes of all taught rounds so far, with the teacher's answers, and the counts of the newest."""

    taught: Sequence[Trajectory]
    labels: TeacherLabels


class _Training:
    """One run of the outer loop."""

    def __init__(
        self,
        config: BridgeConfig,
        folder: RunFolder,
        session: Session | ClusterSession,
        rollouts: BackgroundRollouts,
        *,
        loggers: RunLoggers,
        trainer_options: TrainerOptions,
        learners: Learners,
        heldout: HeldOutTasks,
        stored: StoredEpisodes,
        signal: SignalCheck,
        teacher_dir: Path | None,
        start: Mapping[str, Path],
        learned_tasks: Sequence[str],
    ) -> None:
        self.teacher_dir = teacher_dir
        self.config, self.folder, self.session, self.rollouts = config, folder, session, rollouts
        self.heldout, self.collected, self.signal, self.loggers = heldout, stored.collected, signal, loggers
        self.tasks, self.measured = stored.tasks, stored.measured
        self.known_rounds = KnownRounds(config, stored.tasks, stored.collected, own_ids=stored.own_ids)
        self.models, self.registry = session.models, session.models.versions.registry
        self.reporter = session.reporter
        self.nodes = config.graph.nodes
        self.options = config.train
        self.fork_rules = ForkRules(config, self.registry, folder.trees, run_id=TRAIN, is_heldout=heldout.is_held_out)
        self.tokenizers = (
            bases_to_tokenizers(session.models.versions.bases, self.nodes) if config.train.asking_rounds else {}
        )
        self.surface = trajectories_to_surface(stored.collected)
        self.phase: Task | None = None
        self.clock = RoundClock()
        self.store_lock = Lock()  # rollouts open the store too, on their thread, to see what a round still lacks
        versions = self.models.versions
        is_resumed = checkpoint.is_saved(folder.checkpoint)
        with self._updating():  # so that the trainer finds the memory that it will have
            self.trainer = learners.make_trainer(
                trainer_options,
                {node: versions.base_of(node).directory for node in self.nodes},
                self.nodes,
                seed=config.seed,
                progress=self._show_phase,
                lineage=versions.lineage,
                is_heldout=heldout.is_held_out,
                checkpoint=folder.checkpoint if is_resumed else None,
                start={} if is_resumed else start,
                learned_tasks=() if is_resumed else learned_tasks,
            )
        self.success_traces = self._imitable(stored.traces)
        for model in self.trainer.policies.models.values():
            if (line := model.slow_attention()) is not None:
                self.reporter.say(line)

    def _imitable(self, traces: Sequence[Trajectory]) -> list[Trajectory]:
        """Those of other programs' episodes that rounds may draw as successes."""
        if not traces:
            return []
        imitable_ids = self.trainer.imitable_ids(traces)
        self.reporter.say(f"rounds draw successes from {len(imitable_ids)} of {len(traces)} episodes of other programs")
        return [trace for trace in traces if trace.episode.episode_id in imitable_ids]

    def run(self) -> None:
        """Trains from the checkpoint's round, or from the offline phase, to the last round."""
        if checkpoint.is_saved(self.folder.checkpoint):
            checkpoint.load(self.trainer, self.folder.checkpoint)
            self._delete_metrics_after(self.trainer.rounds)
            delete_rounds_after(self.folder.advantages, self.trainer.rounds)
            self.reporter.say(f"resuming after round {self.trainer.rounds} of {self.options.rounds}")
            self.loggers.log(read_metrics(self.folder.metrics))
        else:
            self._delete_metrics_after(-1)  # the line of an offline phase that was killed before its checkpoint
            self._replay()
        with self.clock.part(self._version(), PUBLISH):  # round r is played by version r, so both have one number
            self._publish()
        with self.reporter.bars(), self.reporter.overall_task("train", self.options.rounds) as overall:
            overall.update(self.trainer.rounds)
            while self.trainer.rounds < self.options.rounds and self._stop_text() is None:
                figures = self._run_round(self.trainer.rounds + 1)
                overall.update(self.trainer.rounds, figures)
        if (stop_text := self._stop_text()) is not None:
            self.reporter.say(stop_text)
        last = self._version()
        self.reporter.say(f"trained {', '.join(f'{node}@{last}' for node in self.nodes)} in {self.folder.adapters}")
        with self._store() as store:
            reward, learned = self.options.trainer.reward, self.trainer.rounds
            if (regression := run_to_regression_text(store, TRAIN, reward, rounds_learned=learned)) is not None:
                self.reporter.say(regression)
        self._evaluate()
        with self._store() as store:
            named = self._name_version(store)
        self.reporter.say(named_to_text(named))
        self.reporter.give(
            {
                "run_folder": str(self.folder.path),
                "rounds": self.trainer.rounds,
                "versions": dict.fromkeys(self.nodes, last),
                "best": named.version,
                "metrics": str(self.folder.metrics),
            }
        )

    def _version(self) -> int:
        return self.trainer.rounds + 1

    def _newly_learned_ids(self, store: TraceStore, node: str) -> list[str]:
        """The ids of the episodes that a node's newest version was trained on, without those of earlier versions."""
        if self.trainer.rounds == 0:
            return [trajectory.episode.episode_id for trajectory in self.collected]
        progress = self.options.progress
        is_late = progress is not None and progress.agent == node
        replaced = replaced_attempts(store, TRAIN)
        played = store.episodes(run_id=TRAIN, round=self.trainer.rounds - is_late, forks=True)
        return [episode.episode_id for episode in played if episode.episode_id not in replaced]

    @contextmanager
    def _store(self) -> Iterator[TraceStore]:
        with self.store_lock, open_run_store(self.folder, self.reporter, WAIT_IN_RUN_S) as store:
            yield store

    def _replay(self) -> None:
        collected = self.collected
        self.reporter.say(f"learning from {len(collected)} stored episodes")
        record_learned_tasks(self.folder.path, collected)
        with self._updating():
            with self._show_progress("warm-up"):
                warm_up = self.trainer.warm_up(collected)
            with self._show_progress("replay"):
                replay = self.trainer.replay(collected)
        with self.clock.part(1, PUBLISH):
            line = {"phase": "offline", "round": 0, "warm_up": warm_up, "replay": replay}
            self._commit(line)
        for text in offline_to_lines(line, len(collected)):
            self.reporter.say(text)

    def _run_round(self, number: int) -> str:
        """Rollouts, update, publication; returns the figures for the progress bar.

        With `max_staleness` the rollouts of the next rounds are started before the update, by the current versions, so
        that a round learns from episodes that are at most so many versions old.
        """
        version = self._version()
        self._measure()
        self.rollouts.finish(number, partial(self._plan_rollouts, number))
        with self._store() as store:
            chains, forks = self._played(store, number)
            played = [*chains, *forks]
            episodes = self.heldout.drop_held_out(played, f"episodes of round {number}", self.reporter.say)
            whole_runs = [each for each in episodes if each.episode.fork_action is None]
            is_taught = number <= self.options.teacher_rounds
            replayed = [] if is_taught else self._draw_replayed(store, number, whole_runs)
            lessons = self._lessons(store, number, episodes) if number <= self.options.asking_rounds else None
            learned, progress = self._join_settled(store, number, episodes)
        # what the teacher said, or scored, is learned from, whatever was earned
        teaching = None if is_taught else self.trainer.teaching_episodes(episodes, replayed)
        wasted = None if teaching is None else wasted_share(len(played), len(teaching))
        staleness = check_staleness(
            episodes, self.nodes, version, limit=self.options.max_staleness, title=f"round {number}"
        )
        self._refuse_other_tools(f"round {number}", episodes)
        record_learned_tasks(self.folder.path, [*episodes, *replayed])
        last_ahead = min(number + self.options.max_staleness, self.options.rounds)
        for next_number in range(number + 1, last_ahead + 1):
            self.rollouts.start(next_number, partial(self._plan_rollouts, next_number))
        with self._updating(), self._show_progress(f"round {number}/{self.options.rounds}"):
            with self.clock.part(number, SCORE):
                served = served_versions(self.trainer.policies, self.registry, episodes, newest=version)
            log_credits = partial(credits_to_file, folder=self.folder.advantages, number=number)
            if lessons is not None:
                metrics = self.trainer.distil(self.collected, lessons.taught)
                metrics["teacher"] = lessons.labels.metrics()
            elif is_taught:
                assert self.teacher_dir is not None
                metrics = self.trainer.distil_on_policy(episodes, self.teacher_dir, newest=version)
            else:
                credited = log_credits if self.options.keep_advantages else None
                metrics = self.trainer.update(learned, replayed, credited, newest=version)
        for warning in metrics["warnings"]:
            self.reporter.say(f"round {number}: {warning}")
        metrics["wasted_rollouts"] = wasted
        if self.options.trees is not None:
            metrics["trees"] = round_to_tree_metrics(
                chains,
                forks,
                self.options.episodes_per_round,
                reward=self.options.trainer.reward,
                stored=self.options.trees.stored_share > 0,
            )
        if self.options.progress is not None:
            metrics["progress"] = progress
        if self.options.hosted_answers != "provider":
            metrics["hosted"] = trajectories_to_hosted_metrics(played, self.session.routed)
        line = {"phase": "online", "round": number, "served": served, "staleness": staleness, **metrics}
        with self._store() as store:
            named = store_to_named(store, self.nodes, number, reward=self.options.trainer.reward)
        line["best"] = named_to_metrics(
            named, read_metrics(self.folder.metrics), self.options.rounds, stop_early=self.options.stop_early
        )
        line["signal"] = is_taught or self.signal.has_signal(metrics, [*learned, *replayed])
        line["seconds"] = self.clock.finish(number, metrics["seconds"])
        with self.clock.part(number + 1, PUBLISH):
            self._commit(line)
            self._publish()
        waves = [] if self.options.trees is None else read_waves(self.folder.trees, number)
        learned_round = LearnedRound(number, whole_runs, waves, metrics=metrics)
        for text in round_to_lines(learned_round, self.options):
            self.reporter.say(text)
        self.signal.refuse_silence(read_metrics(self.folder.metrics), whole_runs)
        return round_to_figures(learned_round, self.options)

    def _measure(self) -> None:
        """Plays the measured tasks by the newest version, in a run of their own, from which nothing learns."""
        if not self.measured:
            return
        version = self._version()
        requests = plan_measurement(self.measured, self.nodes, version, seed=self.config.seed)
        self._play_aside(MEASURE, requests, f"measurement of version {version}")

    def _play_aside(self, run_id: str, requests: Sequence[EpisodeRequest], title: str) -> None:
        """Plays what is left of these requests, in a run of their own."""
        with self._store() as store:
            begin_run(store, run_id, "train", config=self.config, folder=self.folder)
            remaining = unfinished_requests(store, requests)
        if remaining:
            finished_before = len(requests) - len(remaining)
            self.session.run(remaining, title, self.options.trainer.reward, finished_before=finished_before)

    def _join_settled(
        self, store: TraceStore, number: int, episodes: list[Trajectory]
    ) -> tuple[list[Trajectory], dict[str, Any] | None]:
        """What a round's update learns from, and what the update before it changed, as metrics; see `progress`."""
        options = self.options.progress
        if options is None:
            return episodes, None
        if number == 1:
            return join_settled(episodes, [], options.agent), None
        change = settle_round(store, number - 1, options)
        before, _ = self._played(store, number - 1)
        settled = self.heldout.drop_held_out(before, f"episodes of round {number - 1}", self.reporter.say)
        return join_settled(episodes, settled, options.agent), change_to_metrics(change)

    def _lessons(self, store: TraceStore, number: int, episodes: Sequence[Trajectory]) -> _Lessons:
        """What the teacher said in the rounds so far; `episodes`: those of this round, whose calls are counted."""
        taught: list[Trajectory] = []
        for earlier in range(1, number):
            labels = TeacherLabels(self.tokenizers)
            chains, _ = self._played(store, earlier)
            chains = self.heldout.drop_held_out(chains, f"episodes of round {earlier}", self.reporter.say)
            taught += [labels.trajectory_to_taught(each, store.spans) for each in chains]
        labels = TeacherLabels(self.tokenizers)
        taught += [labels.trajectory_to_taught(each, store.spans) for each in episodes]
        if not labels.labelled:
            raise ConfigError(
                f"train.teacher_rounds: no call of round {number} has an answer of its node's own model: "
                f"{teacher_metrics_to_text(labels.metrics())}"
            )
        return _Lessons(taught, labels)

    def _played(self, store: TraceStore, number: int) -> tuple[list[Trajectory], list[Trajectory]]:
        """A round's whole runs and its forks, each in the order of their plan."""
        replaced = replaced_attempts(store, TRAIN)
        chains = in_planned_order(
            store.trajectories(run_ids=[TRAIN], round=number), self._plan(store, number).requests, replaced
        )
        if self.options.trees is None:
            return chains, []
        stored = list(store.trajectories(run_ids=[TRAIN], round=number, forks=True))
        return chains, forks_in_planned_order(stored, read_waves(self.folder.trees, number), replaced)

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """The trainer has what a server on its card needs no more until the block ends, and gives it back."""
        with self.models.asleep():
            yield
            give_back_card_memory()

    def _plan_rollouts(self, number: int) -> Callable[[], None]:
        """A function that plays the episodes that a round lacks, and refills it, by the currently newest versions."""
        with self._store() as store:
            plan = self._plan(store, number)

        def play() -> None:
            played: list[EpisodeRequest] = []
            round_runs = RoundRuns(TRAIN, number)
            while True:
                with self._store() as store:
                    wave = next_wave(plan, store, played, to_teaching=self._teaching_episodes)
                    if not wave and self.options.trees is not None:
                        wave = RoundForks(
                            self.fork_rules,
                            store,
                            plan,
                            known=partial(self.known_rounds.before, store, number),
                            runs=round_runs,
                        ).next_wave(played)
                    if not wave:
                        return
                    finished_before = sum(number == round_number for *_, round_number, _ in finished_keys(store, TRAIN))
                title = f"round {number}/{self.options.rounds} {_wave_name(wave, played)}"
                # what tools did before a forked call happened once: they give their recorded results
                tools = given_tools() if wave[0].fork is not None else nullcontext()
                self._publish_played(wave)
                with self.clock.part(number, ROLLOUT), tools:
                    self.session.run(wave, title, self.options.trainer.reward, finished_before=finished_before)
                played += wave

        return play

    def _plan(self, store: TraceStore, number: int) -> RoundPlan:
        plan = plan_round(
            self.known_rounds.ordered_tasks(store, number),
            self.options,
            self.config.seed,
            run_id=TRAIN,
            split="train",
            adapters=dict.fromkeys(self.nodes, self._version()),
            round=number,
        )
        league = self.options.league
        if league is None:
            return plan
        draw = partial(
            draw_opponents,
            options=league,
            sides=self.options.trainer.learning_sides,
            newest=self._version(),
            seed=self.config.seed,
        )
        return RoundPlan(tuple(draw(plan.planned)), addable=tuple(draw(plan.addable)))

    def _publish_played(self, wave: Sequence[EpisodeRequest]) -> None:
        """Has the versions served that a wave is played by, until `_publish` takes them out again.

        Earlier ones are a league's opponents, and those of runs that were played before a kill and are forked now.
        """
        for node, versions in requests_to_versions(wave).items():
            for version in versions:
                self.models.publish({node: version})

    def _teaching_episodes(self, episodes: Sequence[Trajectory]) -> set[str]:
        return self.trainer.teaching_episodes([e for e in episodes if not self.heldout.is_held_out(e.episode)])

    def _draw_replayed(self, store: TraceStore, number: int, whole_runs: Sequence[Trajectory]) -> list[Trajectory]:
        """Draws the stored episodes that join a round, out of those that may still be replayed."""
        replay = self.options.trainer.replay
        if replay.round_share == 0:
            return []
        oldest = 0 if replay.successes else number - replay.max_staleness
        reward = self.options.trainer.reward
        stored = older_runs(store, oldest=oldest, before=number, reward=reward)
        drawable: list[str | Trajectory] = [run.episode_id for run in stored]
        if replay.successes:
            own_ids = {*drawable, *(run.episode.episode_id for run in whole_runs)}
            traces = [trace for trace in self.success_traces if trace.episode.episode_id not in own_ids]
            foreign = [TaskReward(t.episode.task_id, 0, t.team_reward(reward) or 0.0) for t in traces]
            rewards = [run.earned for run in stored]
            drawable += traces
            positions = self.trainer.draw_successes(
                rewards_to_draw_weights(rewards, number, foreign),
                len(whole_runs),
                tasks=[earned.task_id for earned in (*rewards, *foreign)],
                round_tasks={run.episode.task_id for run in whole_runs},
            )
        else:
            samples_of = [(run.earned.task_id, run.earned.round) for run in stored]
            positions = self.trainer.draw_replay(samples_of, len(whole_runs))
        drawn = [drawable[i] for i in positions]
        episodes = [store.trajectory(run) if isinstance(run, str) else run for run in drawn]
        replayed = [trajectory for trajectory in episodes if trajectory is not None]
        return self.heldout.drop_held_out(replayed, "replayed episodes", self.reporter.say)

    def _refuse_other_tools(self, title: str, episodes: Sequence[Trajectory]) -> None:
        """Refuses episodes whose tools differ from those that were learned with; new tools join the surface."""
        surface = trajectories_to_surface(episodes)
        surfaces = {"what was learned from": self.surface, title: surface}
        refuse_changed(surfaces, self.options.allow_tool_change, "train.allow_tool_change")
        self.surface = {**surface, **self.surface}

    # -- the named version -------------------------------------------------------------------------------------

    def _name_version(self, store: TraceStore) -> NamedVersion:
        """Names the version that is best by the evidence so far, in `best.json`."""
        named = store_to_named(store, self.nodes, self.trainer.rounds, reward=self.options.trainer.reward)
        write_named_version(self.folder, named)
        return named

    def _stop_text(self) -> str | None:
        return lines_to_stop_text(read_metrics(self.folder.metrics), self.options.rounds)

    def _evaluate(self) -> None:
        """Plays `train.evaluation_episodes` by the newest version, in a run of their own, from which nothing learns.

        Not after rounds that stopped early: there the newest version is the one that lost.
        """
        if not self.options.evaluation_episodes or self._stop_text() is not None:
            return
        version = self._version()
        requests = plan_episodes(
            task_order(self.tasks, self.config.seed),
            self.options.evaluation_episodes,
            1,
            seed=self.config.seed + 1,  # a round of the same number, once there is one, samples otherwise
            run_id=EVALUATE,
            split="evaluation",
            adapters=dict.fromkeys(self.nodes, version),
            round=version,
        )
        self._play_aside(EVALUATE, requests, f"evaluation of version {version}")

    # -- the commit point and its consequences ----------------------------------------------------------------

    def _commit(self, metrics: dict[str, Any]) -> None:
        """Writes the metrics, then the checkpoint: on resume, a line of a round after the checkpoint is deleted."""
        with os.fdopen(open_to_write(self.folder.metrics, append=True), "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        checkpoint.save(self.trainer, self.folder.checkpoint)
        self.loggers.log(read_metrics(self.folder.metrics))

    def _delete_metrics_after(self, rounds: int) -> None:
        path = self.folder.metrics
        kept_lines = [line for line in read_metrics(path) if line["round"] <= rounds]
        write_metrics(path, forecast=read_forecast(path), updates=kept_lines)

    def _publish(self) -> None:
        """Makes the newest version of every node from the trainer's state, registers it, and has it served."""
        version, registry = self._version(), self.registry
        lines = read_metrics(self.folder.metrics)
        newest: dict[str, Any] = lines[-1] if lines else {}
        for node in self.nodes:
            if version not in registry.versions(node):
                self.trainer.policies.save_adapter(node, registry.new_folder(node, version))
                agent_metrics = newest.get("agents", newest.get("replay", {}).get("agents", {})).get(node, {})
                registry.register(node, version, version - 1, metrics=agent_metrics)
        with self._store() as store:
            for node in self.nodes:
                store.put_adapter(registry.get(node, version))
                store.put_adapter_episodes(node, version, self._newly_learned_ids(store, node))
            self._name_version(store)
        kept_count = self.options.keep_versions + self.options.max_staleness  # running rollouts use older versions
        kept_versions = range(max(1, version - kept_count + 1), version + 1)
        self.models.retire_all_but(dict.fromkeys(self.nodes, kept_versions))
        self.models.publish(dict.fromkeys(self.nodes, version))

    # -- progress ---------------------------------------------------------------------------------------------

    @contextmanager
    def _show_progress(self, name: str) -> Iterator[None]:
        with self.reporter.bars(), self.reporter.task(name) as self.phase:
            yield
        self.phase = None

    def _show_phase(self, phase: str, done: int, total: int) -> None:
        if self.phase is not None:
            self.phase.update(figures=f"{phase} {done}/{total}")


def _wave_name(wave: Sequence[EpisodeRequest], played: Sequence[EpisodeRequest]) -> str:
    if wave[0].fork is not None:
        return "forks"
    return "refill" if played else "rollouts"
