"""`marft-bridge distil`: the good runs of a trained team -> stored episodes of an app with one LLM node, to learn from.

The episodes are of a run of their own, `distil-1`, and have no token ids, as ingested traces have none: `train`
re-tokenises and imitates them in its offline phase, and no round takes them. Invariants: their prompts are the app's
own; a good run that could not be turned is counted with its reason; what is stored can be imitated as it is.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.distillation.lessons import Lesson, Lessons, RunCost, store_to_lessons, trajectory_to_cost
from marft_bridge.distillation.played import play_lessons
from marft_bridge.distillation.team_adapters import copy_team_adapters
from marft_bridge.replay.episodes import path_to_store
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.held_out import HeldOutTasks
from marft_bridge.runs.ledger import begin_run, numbered_run_id
from marft_bridge.runs.run_folder import DISTIL, DISTILLED_FROM, RunFolder
from marft_bridge.runs.run_store import open_run_store
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.traces.copies import Copies, record_copy
from marft_bridge.traces.store_reader import open_for_reading
from marft_bridge.training.retokenise import NOT_RETOKENISED, Retokeniser, bases_to_retokeniser
from trace_store.journal import Journal
from trace_store.records import Reward, SpanRow, Trajectory
from trace_store.store import TraceStore

_SHOWN_REASONS = 20
_EARLIER = """
SELECT e.task_id, e.sample, e.tags::JSON ->> $1 FROM episodes e JOIN runs r USING (run_id) WHERE r.command = $2
"""


@dataclass(frozen=True, slots=True)
class _Distilled:
    """An episode of the app, with the lesson that it holds."""

    lesson: Lesson
    spans: Sequence[SpanRow]
    rewards: Sequence[Reward]
    cost: RunCost


def distil(config: BridgeConfig, team: Path, node: str, *, reporter: Reporter) -> None:
    """Stores an episode of the app for every good run of the team that it takes, and prints what both cost.

    Args:
        config: of the app with one node.
        team: a run folder, a store, or an export of one.
        node: the app's.

    Raises:
        BridgeError, StoreError: see the messages; nothing is stored then.
    """
    _refuse_unusable_config(config, node)
    folder = RunFolder(config.run_folder)
    team_store = path_to_store(team)
    if team_store.resolve() == folder.store.resolve():
        raise ConfigError(f"distil: {team} is the run folder of the app itself; name that of the team")
    app = load_app(config)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    retokeniser = bases_to_retokeniser(versions.bases, [node], retokenise=True)
    folder.create()
    with folder.lock_for(DISTIL):
        with open_run_store(folder, reporter) as store:
            run_id = numbered_run_id(store, DISTIL, resume=False)
            earlier_rows = store.sql(_EARLIER, (DISTILLED_FROM, DISTIL))
        with open_for_reading(team_store) as store:
            lessons = store_to_lessons(
                store,
                app,
                HeldOutTasks(app.heldout_tasks, app.task_to_input),
                options=config.train.trainer,
                known_ids={team_id for _, _, team_id in earlier_rows},
            )
            team_nodes = {name for (name,) in store.sql("SELECT DISTINCT node FROM actions WHERE node <> ''")}
        scratch = RunFolder(folder.scratch)
        try:
            shutil.rmtree(scratch.path, ignore_errors=True)  # of a command that was killed
            scratch.create()
            faults = play_lessons(
                config,
                app,
                lessons.lessons,
                scratch=scratch,
                run_id=run_id,
                samples=Counter(task_id for task_id, _, _ in earlier_rows),
                reporter=reporter,
            )
            distilled = _read_distilled(config, scratch, lessons, faults=faults, retokeniser=retokeniser)
        finally:
            shutil.rmtree(scratch.path, ignore_errors=True)
        _say_refused(lessons, len(distilled), team, reporter=reporter)
        if not distilled:
            raise ConfigError(f"distil: no run of {team} could be turned into one of {config.graph.app}")
        _list_beside_team(team_store, folder.store, reporter=reporter)
        _store_distilled(config, folder, run_id, distilled=distilled, reporter=reporter)
        copied, obstacle = copy_team_adapters(
            RunFolder(team), versions.registry, team_nodes=team_nodes, own_nodes=[node]
        )
    _report(config, run_id, distilled, reporter=reporter)
    if obstacle is None:
        names = ", ".join(f"{name}@{version}" for name, version in copied.items())
        reporter.say(f"the team's adapters are in {folder.adapters}, for [[compare.variants]]: {names}")
    else:
        reporter.say(f"the team's adapters are not copied for a comparison: {obstacle}")
    reporter.give(
        {
            "run": run_id,
            "run_folder": str(folder.path),
            "read": lessons.read,
            "distilled": len(distilled),
            "refused": dict(lessons.refused.most_common()),
            "team": _mean_costs([episode.lesson.cost for episode in distilled]),
            "node": _mean_costs([episode.cost for episode in distilled]),
            "adapters": copied,
        }
    )


def _refuse_unusable_config(config: BridgeConfig, node: str) -> None:
    nodes = (*config.graph.nodes, *config.graph.frozen)
    if node not in config.graph.nodes:
        raise ConfigError(f"distil --into: {node!r} is not in graph.nodes; there is: {', '.join(config.graph.nodes)}")
    if len(nodes) > 1:
        second = next(name for name in nodes if name != node)
        raise ConfigError(f"distil: the app has to have one LLM node, and graph names {second!r} beside {node!r}")
    offline = config.train.trainer.offline
    if offline.mode != "filtered" or not offline.retokenise:
        raise ConfigError(
            "distil: `train` would not learn from these episodes, which have no token ids: set train.trainer.offline "
            'to { mode = "filtered", retokenise = true }'
        )


def _read_distilled(
    config: BridgeConfig,
    scratch: RunFolder,
    lessons: Lessons,
    *,
    faults: dict[str, str | None],
    retokeniser: Retokeniser,
) -> list[_Distilled]:
    """The episodes that can be stored. The lessons of the others are counted in `lessons.refused`."""
    distilled: list[_Distilled] = []
    with TraceStore.open(scratch.store) as store:
        store.take_in()
        latest = {t.episode.tags[DISTILLED_FROM]: t for t in store.trajectories()}  # by their start
        for lesson in lessons.lessons:
            fault = faults[lesson.episode_id]
            if fault is None:
                played = latest[lesson.episode_id]
                retokenised = retokeniser.trajectory_to_retokenised(played, store.spans)
                fault = _find_token_fault(retokenised, config.sampling.max_tokens)
                if fault is None:
                    distilled.append(
                        _Distilled(
                            lesson,
                            spans=store.spans(played.episode.episode_id),
                            rewards=_to_rewards(config, played, lesson),
                            cost=trajectory_to_cost(retokenised),
                        )
                    )
                    continue
            lessons.refused[fault] += 1
    return distilled


def _find_token_fault(retokenised: Trajectory, max_tokens: int) -> str | None:
    """Why `train` could not imitate an episode, or the engine not sample it; None where both can."""
    for action in retokenised.actions:
        reason = action.untrainable_reason or ""
        if reason.startswith(NOT_RETOKENISED):
            return reason
        if len(action.sampled_ids or ()) > max_tokens:
            return f"an answer is longer than sampling.max_tokens ({max_tokens})"
    return None


def _to_rewards(config: BridgeConfig, played: Trajectory, lesson: Lesson) -> list[Reward]:
    """The app's rewards, and the team's reward that `offline` chooses by, where the app has none of that name."""
    rewards, name = list(played.rewards), config.train.trainer.offline.reward
    if name is not None and played.team_reward(name) is None:
        source = f"distilled from {lesson.episode_id}"
        episode_id = played.episode.episode_id
        rewards.append(Reward(episode_id, name, lesson.chosen_by, source=source, created_ns=time.time_ns()))
    return rewards


def _list_beside_team(team_store: Path, store: Path, *, reporter: Reporter) -> None:
    """So that `traces erase` of the team says where else its runs are told."""
    try:
        record_copy(team_store, Copies.DISTILLED, store)
    except OSError as error:
        reporter.say(f"{team_store} is not told of {store} ({error}): what is erased there, erase here too")


def _store_distilled(
    config: BridgeConfig, folder: RunFolder, run_id: str, *, distilled: Sequence[_Distilled], reporter: Reporter
) -> None:
    with open_run_store(folder, reporter) as store:
        begin_run(store, run_id, DISTIL, config=config, folder=folder)
        journal = Journal(folder.journal)
        try:
            for episode in distilled:
                journal.append_rewards(episode.rewards)  # first: one that came without them would count as distilled
                journal.append_all(episode.spans)
            journal.sync()
        finally:
            journal.close()
        store.take_in()


# -- what is said ---------------------------------------------------------------------------------------------------


def _say_refused(lessons: Lessons, distilled: int, team: Path, *, reporter: Reporter) -> None:
    good = distilled + lessons.refused.total()
    reporter.say(f"{lessons.read} runs of {team}, {good} of them good; {distilled} distilled")
    first_reasons = lessons.refused.most_common(_SHOWN_REASONS)
    for reason, count in first_reasons:
        reporter.say(f"not {count}: {reason}")
    if rest := lessons.refused.total() - sum(count for _, count in first_reasons):
        reporter.say(f"not {rest}: other reasons, see --json")


def _report(config: BridgeConfig, run_id: str, distilled: Sequence[_Distilled], *, reporter: Reporter) -> None:
    turns = _mean_costs([episode.cost for episode in distilled])
    reporter.say(f"the team: {_cost_to_text(_mean_costs([episode.lesson.cost for episode in distilled]))}")
    reporter.say(f"{config.graph.nodes[0]}: {_cost_to_text(turns)}")
    tasks = len({episode.lesson.task["id"] for episode in distilled})
    reporter.say(f"{run_id}: {len(distilled)} episodes on {tasks} tasks in {config.run_folder}; now train")


def _mean_costs(costs: Sequence[RunCost]) -> dict[str, float | None]:
    """Means over runs; None where one of them does not tell."""
    columns: dict[str, list[int | None]] = {
        "calls": [cost.calls for cost in costs],
        "prompt_tokens": [cost.prompt_tokens for cost in costs],
        "sampled_tokens": [cost.sampled_tokens for cost in costs],
    }
    means: dict[str, float | None] = {}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        means[name] = sum(values) / len(values) if values and len(values) == len(column) else None
    return means


def _cost_to_text(means: dict[str, float | None]) -> str:
    names = {"calls": "calls", "prompt_tokens": "prompt tokens", "sampled_tokens": "sampled tokens"}
    return ", ".join(f"{means[key]:.1f} {name}" for key, name in names.items() if means[key] is not None) + " a run"
