"""What is stored, here and in traces of others -> the episodes that a training begins with, and its rounds' tasks.

    the run's own     what `collect` played, in the order of its plan
    `distil`          runs of a team, as those of the app that is trained
    `train.traces`    episodes of other programs

Invariants: no episode and no task of a round is held out, and no episode is of a task kept for measuring, as far as ids
and content tell; token ids are those of the trained models, where `retokenise` says so; a training that would have
nothing to begin with, or does not know the reward that it is to learn, is refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import in_planned_order, plan_collection, replaced_attempts
from marft_bridge.rollouts.held_out import HeldOutTasks, content_digests
from marft_bridge.runs.run_folder import COLLECT, DISTIL, RunFolder
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.tasks.reading import Task
from marft_bridge.training.external_traces import EpisodeReader, config_to_names, traces_to_episodes
from marft_bridge.training.hosted_answers import AnswerPool
from marft_bridge.training.progress import split_measured
from marft_bridge.training.retokenise import bases_to_retokeniser
from trace_store.records import Episode, SpanRow, Trajectory
from trace_store.store import TraceStore
from trainers.config import TrainerOptions

_OF_ANOTHER = "trace:"  # before the id of a task that another program calls as this one calls a different task


@dataclass(frozen=True, slots=True)
class StoredEpisodes:
    """What a training begins with."""

    collected: Sequence[Trajectory]  # all that is learned from before the rounds
    own_ids: Collection[str]  # of the run's own episodes, which `collect` played, whether they are among these or not
    tasks: Sequence[Task]  # that the rounds take
    measured: Sequence[Task]  # that are kept for measuring, see `progress`
    hosted: AnswerPool | None  # recorded answers of hosted nodes; None where their provider answers
    traces: Sequence[Trajectory] = ()  # of those of other programs, what rounds may draw from: `success_traces`


def read_stored_episodes(
    config: BridgeConfig,
    store: TraceStore,
    app: App,
    *,
    heldout: HeldOutTasks,
    bases: Sequence[BaseModelSpec],
    reporter: Reporter,
) -> StoredEpisodes:
    """Reads them, and says what is left out and why.

    Raises:
        ConfigError: nothing is stored, or what is lacks what the options name.
        StoreError: a folder of `train.traces` cannot be read.
        TrainError: see `bases_to_retokeniser`.
    """
    retokeniser = bases_to_retokeniser(bases, config.graph.nodes, config.train.trainer.offline.retokenise)
    tasks = heldout.drop_held_out_tasks(app.train_tasks, reporter.say)
    hosted = _config_to_pool(config, (*config.graph.nodes, *app.frozen))

    def read_episode(trajectory: Trajectory, spans_of: Callable[[str], Sequence[SpanRow]]) -> Trajectory:
        if hosted is not None:
            hosted.add(trajectory, spans_of)
        return retokeniser.trajectory_to_retokenised(trajectory, spans_of)

    played = in_planned_order(
        store.trajectories(run_ids=[COLLECT], split="train"),
        plan_collection(config, tasks),
        replaced_attempts(store, COLLECT),
    )
    collected = [read_episode(trajectory, store.spans) for trajectory in played]
    own_ids = {trajectory.episode.episode_id for trajectory in collected}
    distil_ids = [run.run_id for run in store.runs() if run.command == DISTIL]
    collected += [read_episode(trajectory, store.spans) for trajectory in store.trajectories(run_ids=distil_ids)]
    collected += _external_episodes(config, collected, read_episode, reporter=reporter)
    collected = heldout.drop_held_out(collected, "stored episodes", reporter.say)
    if (line := retokeniser.summary()) is not None:
        reporter.say(line)
    if hosted is not None:
        _say_pool(hosted, reporter)
    measured, tasks = split_measured(tasks, config.train.progress, config.seed)
    if measured:  # told as held-out tasks are: another program may have one under an id of its own
        kept_for_measuring = HeldOutTasks(measured, app.task_to_input)
        collected = [each for each in collected if not kept_for_measuring.is_held_out(each.episode)]
    if not collected:
        store_path = RunFolder(config.run_folder).store
        raise ConfigError(f"train: {store_path} holds no collected episode; run `marft-bridge collect` first")
    _refuse_unknown_reward(collected, config.train.trainer)
    draws_traces = config.train.trainer.experimental.success_traces
    traces = _to_success_traces(collected, own_ids, tasks=tasks, app=app) if draws_traces else []
    return StoredEpisodes(collected, own_ids, tasks, measured=measured, hosted=hosted, traces=traces)


def _external_episodes(
    config: BridgeConfig, stored: Sequence[Trajectory], read_episode: EpisodeReader, reporter: Reporter
) -> list[Trajectory]:
    return traces_to_episodes(
        config.train.traces,
        known_ids={trajectory.episode.episode_id for trajectory in stored},
        models=config_to_names(config.model_dump(mode="json")),
        reporter=reporter,
        read_episode=read_episode,
    )


def _to_success_traces(
    collected: Sequence[Trajectory], own_ids: Collection[str], *, tasks: Sequence[Task], app: App
) -> list[Trajectory]:
    """The episodes that this run did not collect, each under the id of the training task that it is of.

    Content and graph input tell, since two programs may both number their tasks. The id tells where a trace has no
    content; one that is a training task's, of a trace with other content, is replaced by an id that is no task's.
    """
    foreign = [trajectory for trajectory in collected if trajectory.episode.episode_id not in own_ids]
    if not foreign:
        raise ConfigError(
            "train.trainer.experimental.success_traces: this run has no episode of another program: name some in "
            "train.traces, or leave it out"
        )
    digests_of = {str(task["id"]): content_digests(task, app.task_to_input) for task in tasks}
    id_of = {digest: task_id for task_id, digests in digests_of.items() for digest in digests}

    def own_task_id(episode: Episode) -> str:
        task_id, has_content = episode.task_id, bool(episode.task.keys() - {"id"})
        digests = content_digests(episode.task, app.task_to_input) if has_content else set()
        if not digests or digests & digests_of.get(task_id, set()):
            return task_id
        matches = [id_of[digest] for digest in sorted(digests) if digest in id_of]
        if matches:
            return matches[0]
        while task_id in digests_of:
            task_id = f"{_OF_ANOTHER}{task_id}"
        return task_id

    return [replace(t, episode=replace(t.episode, task_id=own_task_id(t.episode))) for t in foreign]


def _config_to_pool(config: BridgeConfig, routed: Sequence[str]) -> AnswerPool | None:
    """The pool of recorded answers, still empty; None where hosted nodes are answered by their provider."""
    choice = config.train.hosted_answers
    return None if choice == "provider" else AnswerPool(routed, only=choice == "recorded_only")


def _say_pool(pool: AnswerPool, reporter: Reporter) -> None:
    if not pool.counts:
        raise ConfigError(
            "train.hosted_answers: no stored episode has an answer of a node that is neither in graph.nodes nor in "
            f"graph.frozen; leave it out, or name traces in train.traces ({pool.summary()})"
        )
    reporter.say(pool.summary())


def _refuse_unknown_reward(collected: Sequence[Trajectory], options: TrainerOptions) -> None:
    name = options.offline.reward
    if name is None or any(trajectory.team_reward(name) is not None for trajectory in collected):
        return
    names = sorted({r.name for trajectory in collected for r in trajectory.rewards if r.scope == "episode"})
    raise ConfigError(
        f"train.trainer.offline.reward: no stored episode has a team reward {name!r}; they have: "
        f"{', '.join(names) or 'none'}; `marft-bridge traces mark` and `marft-bridge rank` give some"
    )
