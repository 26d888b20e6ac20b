"""`marft-bridge fork`: a stored episode, run again up to a call and sampled on from there -> a reward for each fork.

Forks are episodes of a run of their own, with the parent and the action that they leave it at. Invariant: they run on
the parent's versions, unless one is named for the forked node; a fork that fails is a row and a line with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from marft_bridge.common.errors import ConfigError, EpisodesFailedError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.forks.fork_plan import (
    ForkChange,
    is_on_own_models,
    plan_forks,
    refuse_other_models,
    text_to_prefix,
)
from marft_bridge.forks.given_tools import ToolChoice, given_tools
from marft_bridge.forks.recorded_prefix import RecordedPrefix
from marft_bridge.forks.run_entry import RunEntry
from marft_bridge.forks.thread_start import ThreadStart, is_started_by_app, load_forked, run_to_start
from marft_bridge.replay.earlier_runs import LoadRun, RunWithEarlier
from marft_bridge.replay.episodes import load_run
from marft_bridge.replay.private_memory import PrivateMemory, private_memory
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.rollouts.app import App, load_app
from marft_bridge.rollouts.episode_plan import EpisodeRequest, episode_to_fork, replaced_attempts, unfinished_requests
from marft_bridge.rollouts.run_settings import RunSettings
from marft_bridge.rollouts.session import GraphSession, open_own_session, open_session
from marft_bridge.runs.ledger import begin_run, numbered_run_id
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.runs.run_store import WAIT_IN_RUN_S, open_run_store, take_in_on_failure
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.model_versions import ModelVersions, config_to_versions
from marft_bridge.statistics.fork_worth import ForkWorth, interval_to_text, rewards_to_worth
from marft_bridge.traces.episode_prefix import prefix_to_episode
from trace_store.store import TraceStore

NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """The options of the command line."""

    episode: str  # first digits of the parent's id
    at: str  # NODE[:k]
    samples: int = 8
    version: str | None = None  # of the forked node: a number, or newest; None: the parent's
    text: str | None = None  # answers the forked call instead of a model
    metric: str | None = None  # None: train.trainer.reward
    tools: ToolChoice = "recorded"  # before the forked call


@dataclass(frozen=True, slots=True)
class _Fork:
    """What one command runs and reports."""

    run_id: str
    forked: RunWithEarlier
    parent_reward: float | None
    prefix: RecordedPrefix
    change: ForkChange
    metric: str
    plan: Sequence[EpisodeRequest]
    tools: ToolChoice
    versions: ModelVersions | None  # None: its nodes call the models of the app's own

    @property
    def parent(self) -> RecordedRun:
        """The episode that is forked."""
        return self.forked.run


@dataclass(frozen=True, slots=True)
class _StoredFork:
    """What is said of one fork."""

    episode_id: str
    outcome: str
    reason: str | None
    reward: float | None

    @property
    def outcome_text(self) -> str:
        """How it ended, for people."""
        if self.reward is not None:
            return f"reward {self.reward:g}"
        return f"{self.outcome}: {self.reason}" if self.reason is not None else "no reward"


def fork(config: BridgeConfig, options: ForkOptions, reporter: Reporter, resume: bool) -> None:
    """Runs the forks, and prints the reward of each, of the parent, and the forks' mean with its interval.

    With `resume` the latest `fork` run goes on, and forks that it has are not run again.

    Raises:
        BridgeError, StoreError: see the messages; what was finished before is kept. EpisodesFailedError, after the
            report, where most forks failed.
    """
    folder = RunFolder(config.run_folder)
    _refuse_options(options)
    app = load_app(config)
    folder.create()
    failure: EpisodesFailedError | None = None
    start: ThreadStart | None = None
    with folder.lock_for("fork"):
        with open_run_store(folder, reporter) as store:
            planned = _plan(store, config, options, reporter=reporter, resume=resume)
            _refuse_other_plan(store, planned)
            begin_run(store, planned.run_id, "fork", config=config, folder=folder, plan=_to_noted_plan(planned))
            requests = unfinished_requests(store, planned.plan)
        if requests:
            with (
                take_in_on_failure(folder, reporter),
                _open_session(planned, config, app, reporter=reporter) as session,
            ):
                load = _run_loader(folder, reporter)
                start = _find_start(planned, session, app, samples=len(requests), load=load)
                try:
                    _run_forks(planned, requests, session, start=start)
                except EpisodesFailedError as error:
                    failure = error  # the line of each fork is said before
        with take_in_on_failure(folder, reporter), open_run_store(folder, reporter, WAIT_IN_RUN_S) as store:
            _report(store, planned, reporter, start=start)
    if failure is not None:
        raise failure


@contextmanager
def _open_session(planned: _Fork, config: BridgeConfig, app: App, reporter: Reporter) -> Iterator[GraphSession]:
    """The app on the models that answered for the parent."""
    folder = RunFolder(config.run_folder)
    if planned.versions is None:
        with open_own_session(config, folder, app, reporter=reporter) as own_session:
            yield own_session
        return
    with open_session(config, folder, app, versions=planned.versions, reporter=reporter) as session:
        session.models.serve_only({node: [version] for node, version in planned.plan[0].adapters.items()})
        yield session


def _run_loader(folder: RunFolder, reporter: Reporter) -> LoadRun:
    """Loads runs with the store open for the moment: nobody holds it while a graph works."""

    def load(episode_id: str) -> RecordedRun:
        with TraceStore.open(folder.store, read_only=True, wait_s=WAIT_IN_RUN_S, on_wait=reporter.say) as store:
            return load_run(store, episode_id)

    return load


def _find_start(planned: _Fork, session: GraphSession, app: App, samples: int, *, load: LoadRun) -> ThreadStart | None:
    """What the forks begin with; None: a task."""
    if not is_started_by_app(planned.parent):
        return None
    return run_to_start(
        session.collector.graph,
        planned.forked,
        planned.prefix.forked,
        samples=samples,
        tools=planned.tools,
        load=load,
        settings=_fixed_settings(app),
        runner=session.stage.loop,
    )


def _run_forks(
    planned: _Fork, requests: Sequence[EpisodeRequest], session: GraphSession, start: ThreadStart | None
) -> None:
    with given_tools(), nullcontext() if start is None else private_memory(PrivateMemory()):
        prefix = planned.prefix if start is None else start.prefix_to_rest(planned.prefix)
        started_requests = [replace(request, start=start, beginning=prefix) for request in requests]
        finished_before = len(planned.plan) - len(requests)
        tally = session.run(started_requests, "fork", planned.metric, finished_before=finished_before)
        tally.refuse_if_all_failed()


def _fixed_settings(app: App) -> dict[str, Any]:
    """What holds for every run of the app; what a function says of a task does not hold for a run without one."""
    context, config = app.runs.context, app.runs.config
    fixed = RunSettings(None if callable(context) else context, None if callable(config) else config)
    return fixed.to_arguments({"id": ""}, {})


def _refuse_options(options: ForkOptions) -> None:
    if not options.at:
        raise ConfigError("fork: say which call to make again with --at NODE[:K]")
    if options.version is not None and options.text is not None:
        raise ConfigError("fork: --with and --say both say who answers; leave one out")
    if options.version is not None and options.version != NEWEST and not options.version.isdecimal():
        raise ConfigError(f"fork --with: {options.version!r} is no version; give a number, or {NEWEST}")


def _plan(store: TraceStore, config: BridgeConfig, options: ForkOptions, *, reporter: Reporter, resume: bool) -> _Fork:
    run_id = numbered_run_id(store, "fork", resume)
    episode_id = prefix_to_episode(store, options.episode, command="fork")
    forked = load_forked(store, episode_id)
    parent, versions = forked.run, None
    if is_on_own_models(parent):
        if options.version is not None:
            raise ConfigError(f"fork --with: episode {episode_id} ran on its app's own models, which have no versions")
    else:
        versions = config_to_versions(config, RunFolder(config.run_folder).adapters, reporter.say)
        refuse_other_models(parent, config, versions.registry)
    prefix = text_to_prefix(parent, options.at, options.text, tools=options.tools)
    version = None if versions is None else _choose_version(config, options, versions.registry, node=prefix.forked.node)
    change = ForkChange(version, options.text)
    metric = options.metric or config.train.trainer.reward
    stored = store.trajectory(episode_id)
    assert stored is not None  # its spans are there
    plan = plan_forks(parent, prefix, change, run_id=run_id, samples=options.samples, seed=config.seed)
    for node, number in plan[0].adapters.items():
        if number and versions is not None:
            versions.registry.get(node, number)
    return _Fork(
        run_id,
        forked,
        stored.team_reward(metric),
        prefix=prefix,
        change=change,
        metric=metric,
        plan=plan,
        tools=options.tools,
        versions=versions,
    )


def _choose_version(config: BridgeConfig, options: ForkOptions, registry: AdapterRegistry, node: str) -> int | None:
    if options.version is None:
        return None
    if node not in config.graph.nodes:
        reason = "is frozen" if node in config.graph.frozen else "calls a model of its own"
        raise ConfigError(f"fork --with: {node} {reason}, and has no versions; leave it out")
    if options.version != NEWEST:
        return int(options.version)
    newest = registry.latest(node)
    return newest.version if newest is not None else 0


def _to_noted_plan(planned: _Fork) -> dict[str, Any]:
    """What a resumed command has to find unchanged."""
    request = planned.plan[0]
    assert request.fork is not None
    return {
        "episode": request.fork.episode_id,
        "action": request.fork.action_id,
        "variant": request.variant,
        "adapters": dict(request.adapters),
        "seed": request.seed,
        "tools": planned.tools,
    }


def _refuse_other_plan(store: TraceStore, planned: _Fork) -> None:
    """Raises ConfigError where a resumed run began with another fork: two would mix in its figures."""
    for run in store.runs():
        if run.run_id == planned.run_id and run.config.get("plan") != _to_noted_plan(planned):
            raise ConfigError(
                f"fork --resume: {planned.run_id} began with another episode, call, version, text, seed or tools;"
                " give the same, or leave out --resume"
            )


# -- what is said ---------------------------------------------------------------------------------------------


def _report(store: TraceStore, planned: _Fork, reporter: Reporter, start: ThreadStart | None) -> None:
    forks = _read_forks(store, planned)
    rewards = [stored.reward for stored in forks.values()]
    worth = rewards_to_worth(planned.parent_reward, rewards, comparable=False)
    forked = planned.prefix.forked
    given_count = len(planned.prefix.given)
    reporter.say(
        f"{planned.run_id}: {planned.parent.episode_id[:12]} at {forked.node}, call {forked.number};"
        f" {given_count} {'call' if given_count == 1 else 'calls'} before it given again{start or ''}"
    )
    for sample, each in sorted(forks.items()):
        reporter.say(f"sample {sample}: {each.episode_id[:12]} {each.outcome_text}")
    reporter.say(_summary(planned.metric, worth))
    reporter.give(
        {
            "run": planned.run_id,
            "parent": planned.parent.episode_id,
            "node": forked.node,
            "call": forked.number,
            "variant": planned.change.variant,
            "metric": planned.metric,
            "given_again": given_count,
            "checkpoint": None if start is None else start.thread.begins_at,
            "earlier_runs": 0 if start is None else start.replayed_count,
            **_entry_to_findings(start),
            "parent_reward": planned.parent_reward,
            "forks": [
                {
                    "sample": sample,
                    "episode_id": each.episode_id,
                    "outcome": each.outcome,
                    "reason": each.reason,
                    "reward": each.reward,
                }
                for sample, each in sorted(forks.items())
            ],
            "mean": worth.mean,
            "low": worth.low,
            "high": worth.high,
            "interval": worth.interval,
        }
    )


def _entry_to_findings(start: ThreadStart | None) -> dict[str, Any]:
    """Where the forks entered their run, and how many supersteps that spared each; or why they did not."""
    entry = None if start is None else start.entry
    if not isinstance(entry, RunEntry):
        return {"entered_at": None, "spared_supersteps": 0, "not_entered": entry}
    return {"entered_at": entry.checkpoint_id, "spared_supersteps": entry.superstep_count, "not_entered": None}


def _read_forks(store: TraceStore, planned: _Fork) -> dict[int, _StoredFork]:
    """Sample -> the last attempt at it that counts."""
    replaced = replaced_attempts(store, planned.run_id)
    request = planned.plan[0]
    return {
        trajectory.episode.sample: _StoredFork(
            trajectory.episode.episode_id,
            trajectory.episode.outcome,
            trajectory.episode.reason,
            reward=trajectory.team_reward(planned.metric),
        )
        for trajectory in store.trajectories(run_ids=[planned.run_id], forks=True)  # by their start
        if trajectory.episode.episode_id not in replaced and episode_to_fork(trajectory.episode) == request.fork
    }


def _summary(metric: str, worth: ForkWorth) -> str:
    parent = "no reward" if worth.recorded is None else f"{worth.recorded:g}"
    start = f"{metric}: parent {parent}; "
    if worth.mean is None:
        return f"{start}no fork has a reward"
    forks = "1 fork" if worth.resampled == 1 else f"{worth.resampled} forks"
    return f"{start}{forks}, mean {worth.mean:.3g}, {interval_to_text(worth)}"
