"""`marft-bridge compare`: variants on held-out tasks -> a report, as a table, JSON, a page and Markdown.

Invariants: whatever is wrong with variants, apps and tasks is refused before a server starts; a resumed comparison has
the plan that was begun and runs no episode twice; base models are loaded for the KL only after the servers have
stopped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import BridgeError, ConfigError
from marft_bridge.common.hub_names import directory_to_hub_name
from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_uncut
from marft_bridge.comparison.episodes import (
    Plan,
    Progress,
    config_to_plan,
    follow_plan,
    refuse_other_plan,
    resolve_metric,
    stored_scores,
)
from marft_bridge.comparison.figures import ReportContext, episodes_to_report
from marft_bridge.comparison.kl import adapters_to_kl
from marft_bridge.comparison.nodes import KlEstimates
from marft_bridge.comparison.page import write_report
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.table import report_table
from marft_bridge.comparison.variants import (
    Lineup,
    Team,
    describe_choice,
    live_versions,
    options_to_lineup,
    other_model_serve_options,
    teams_by_server,
)
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.compare import Version
from marft_bridge.config.prices import file_to_prices
from marft_bridge.recording.tool_schemas import Surface, refuse_changed, store_to_surface, surface_to_hashes
from marft_bridge.rollouts.app import App, check_app, load_app, options_to_app
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import EpisodeRequest, replaced_attempts, unfinished_requests
from marft_bridge.rollouts.graph_stage import Stage, open_stage
from marft_bridge.rollouts.held_out import heldout_leaks
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.device_lines import announced_devices
from marft_bridge.runs.learning_curve import run_to_learning_curve
from marft_bridge.runs.ledger import begin_run, numbered_run_id
from marft_bridge.runs.named_version import read_named_version
from marft_bridge.runs.run_folder import RunFolder, bridge_version
from marft_bridge.runs.run_store import WAIT_IN_RUN_S, open_run_store, take_in_on_failure
from marft_bridge.serving.base_models import BaseModelSpec, prepare_directory, with_modules
from marft_bridge.serving.model_versions import ModelVersions, bases_to_versions, config_to_versions
from marft_bridge.serving.served_bases import ServedBases, serve_bases
from marft_bridge.serving.server_file import server_options
from trace_store.records import Trajectory
from trace_store.store import TraceStore

_EPISODES = """
SELECT episode_id FROM episodes WHERE run_id = ? AND variant = ? ORDER BY task_id, sample, started_ns, episode_id
"""


@dataclass(frozen=True, slots=True)
class VersionFlags:
    """--before, --after and --opponents: versions of every node."""

    before_version: int | None = None  # None: 0, where no variants are declared
    after_version: Version | None = None  # None: the one that training named, or else each node's newest
    opponents: tuple[Version, ...] = ()  # some: every two variants play each other


def compare(config: BridgeConfig, reporter: Reporter, resume: bool, flags: VersionFlags = VersionFlags()) -> Report:
    """Runs the variants on the held-out tasks, prints the table and writes the report.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; what was finished before is kept.
    """
    folder = RunFolder(config.run_folder)
    folder.require_store("compare")
    prices = None if config.compare.prices is None else file_to_prices(Path(config.compare.prices), "compare.prices")
    app = load_app(config)
    started_s = time.monotonic()
    versions = config_to_versions(config, folder.adapters, reporter.say)
    named = read_named_version(folder)
    lineup = options_to_lineup(
        config,
        versions.registry,
        flags.before_version,
        after_version=flags.after_version,
        named_version=None if named is None else named.version,
        opponents=flags.opponents,
    )
    for team in lineup.teams:
        if team.choice is not None:
            reporter.say(f"{team.name}: {describe_choice(team)}")
    _refuse_kl_without_torch(config, lineup)
    apps = {team.deployment.key: _team_app(config, app, team) for team in lineup.all_teams}
    with folder.lock_for("compare"):
        with open_run_store(folder, reporter) as store:
            if prices is not None:
                prices.put_into(store)
            config = resolve_metric(config, store)
            plan = config_to_plan(config, numbered_run_id(store, "compare", resume), lineup, heldout=app.heldout_tasks)
            _refuse_leaks(store, plan)
            refuse_other_plan(store, plan)
            begin_run(store, plan.run_id, "compare", config=config, folder=folder, plan=plan.content())
        runner = _Runner(config, folder, reporter, plan=plan, versions=versions, apps=apps)
        with take_in_on_failure(folder, reporter):
            progress = runner.run()
            kl = _estimate_kl(config, folder, reporter, plan=plan, versions=versions)
            with open_run_store(folder, reporter, WAIT_IN_RUN_S) as store:
                surfaces = runner.surfaces(store)
                context = ReportContext(
                    versions={"marft-bridge": bridge_version()},
                    minutes=(time.monotonic() - started_s) / 60,
                    tool_surface=surface_to_hashes(surfaces[lineup.base.name]),
                    tool_surface_differs=runner.refuse_other_tools(store, same_graph_only=False),
                    learning_curve=run_to_learning_curve(store, folder.metrics, config.train.trainer.reward),
                    kl=kl,
                    print_line=reporter.say,
                )
                report = episodes_to_report(config, plan, progress, store=store, context=context)
    paths = write_report(report, folder.path)
    print_uncut(reporter.console, report_table(report))
    reporter.say(f"report: {', '.join(map(str, paths))}")
    return report


def _refuse_leaks(store: TraceStore, plan: Plan) -> None:
    if leaked := heldout_leaks(store, plan.tasks):
        raise ConfigError(
            f"compare: {len(leaked)} of {len(plan.tasks)} held-out tasks were trained on in this run folder "
            f"({', '.join(leaked[:3])}{', ...' if len(leaked) > 3 else ''}): graph.heldout or the tasks have changed "
            "since; set them back, or train again in another --run folder"
        )


def _refuse_kl_without_torch(config: BridgeConfig, lineup: Lineup) -> None:
    if config.compare.kl_actions and _trained_teams(lineup) and importlib.util.find_spec("torch") is None:
        raise ConfigError("compare.kl_actions needs torch, which is not installed; set it to 0")


def _trained_teams(lineup: Lineup) -> list[Team]:
    """The variants in which a trained adapter acts; version 0 has no KL to the base model."""
    return [team for team in lineup.teams if any(team.adapters.values())]


def _team_app(config: BridgeConfig, app: App, team: Team) -> App:
    """The checked app of a team: the configuration's own where the team's graph is that one."""
    graph, own_models = team.deployment.graph, team.deployment.own_models
    if graph == config.graph and not own_models:
        return app
    agents = {*graph.nodes, *graph.frozen}
    rewards = [reward for reward in config.rewards if reward.agent is None or reward.agent in agents]
    try:
        return check_app(options_to_app(graph, rewards, config.limit_reward), own_models=own_models)
    except BridgeError as error:
        raise type(error)(f"compare.variants {team.name!r}: {error}") from error


_RunningStage = tuple[Stage, dict[str, Collector]]
"""The opened graphs and servers, and team name -> the collector that runs its episodes."""


class _Runner:
    """Follows a plan: starts the servers that it needs, and runs its requests."""

    def __init__(
        self,
        config: BridgeConfig,
        folder: RunFolder,
        reporter: Reporter,
        plan: Plan,
        versions: ModelVersions,
        apps: dict[tuple[Any, ...], App],
    ) -> None:
        self._config, self._folder, self._reporter = config, folder, reporter
        self._plan, self._versions, self._apps = plan, versions, apps
        self._tallies = {team.name: Tally() for team in plan.lineup.all_teams}
        self._running: _RunningStage | None = None
        self._stack = ExitStack()

    def run(self) -> Progress:
        """Runs all episodes of the plan that are not stored yet. Servers start only where there are some."""
        with self._stack:
            progress = follow_plan(self._plan, self._run, self._scores, check=self._check)
            for team in self._plan.lineup.all_teams:
                tally = self._tallies[team.name]
                for line in (
                    *tally.missing_reward_lines(),
                    *tally.silent_node_lines([*team.adapters]),
                    *tally.unused_prompt_lines(team.prompts),
                ):
                    self._reporter.say(f"{team.name}: {line}")
        return progress

    def surfaces(self, store: TraceStore) -> dict[str, Surface]:
        """Variant -> the tools that its nodes offered in the episodes so far."""
        return {
            team.name: store_to_surface(store, self._plan.run_id, team.name) for team in self._plan.lineup.all_teams
        }

    def refuse_other_tools(self, store: TraceStore, *, same_graph_only: bool) -> bool:
        """Raises ConfigError where a variant offers other tools than the base -> whether one does, where allowed."""
        teams = self._plan.lineup.all_teams
        graphs = {team.name: team.deployment.graph.app for team in teams}
        base_app = graphs[teams[0].name]
        surfaces = {
            name: surface
            for name, surface in self.surfaces(store).items()
            if not same_graph_only or graphs[name] == base_app
        }
        return refuse_changed(
            surfaces, self._config.compare.allow_tool_change, "compare.allow_tool_change", graphs=graphs
        )

    def _check(self) -> None:
        """Refuses other tools between variants of one graph; all tools of all graphs are known at the end only."""
        with self._store() as store:
            self.refuse_other_tools(store, same_graph_only=True)

    def _scores(self, variant: str) -> dict[tuple[str, int], float]:
        with self._store() as store:
            return stored_scores(store, self._plan.run_id, variant, metric=self._plan.metric)

    def _run(self, requests: Sequence[EpisodeRequest]) -> None:
        with self._store() as store:
            remaining = unfinished_requests(store, requests)
        is_open = {request.key for request in remaining}
        for request in requests:  # a variant is stopped by the share of all its episodes that fails
            self._tallies[request.variant or ""].finished_before += request.key not in is_open
        if not remaining:
            return
        if self._running is None:
            self._running = self._start()
        stage, collectors = self._running
        jobs = [(collectors[r.variant or ""], r, self._tallies[r.variant or ""]) for r in remaining]
        stage.run(jobs, "compare", self._plan.metric)
        for collector in dict.fromkeys(collectors.values()):
            for line in collector.take_thread_lines():
                self._reporter.say(line)

    def _store(self) -> AbstractContextManager[TraceStore]:
        return open_run_store(self._folder, self._reporter, WAIT_IN_RUN_S)

    # -- servers and graphs -----------------------------------------------------------------------------------

    def _start(self) -> _RunningStage:
        """Starts the servers that the teams need, and opens every graph once, until `run` ends."""
        stage = self._stack.enter_context(open_stage(self._config, self._folder, self._reporter))
        models = {
            name: self._stack.enter_context(self._served(name, teams, stage))
            for name, teams in teams_by_server(self._plan.lineup.all_teams).items()
        }
        judge = models[None].judge if None in models else None
        collectors: dict[tuple[Any, ...], Collector] = {}
        for team in self._plan.lineup.all_teams:
            if team.deployment.key not in collectors:
                model = None if team.deployment.own_models else models[team.deployment.model]
                collector = stage.open_app(self._apps[team.deployment.key], model, judge)
                collectors[team.deployment.key] = self._stack.enter_context(collector)
        return stage, {team.name: collectors[team.deployment.key] for team in self._plan.lineup.all_teams}

    @contextmanager
    def _served(self, name: str | None, teams: Sequence[Team], stage: Stage) -> Iterator[ServedBases]:
        live = live_versions(teams)
        whose = ""  # of the folder's command; another base model's server has a note of its own
        if name is None:
            versions, log_of = self._versions, self._folder.server_log_of
            options = server_options(versions.bases, self._folder, self._reporter)
        else:
            directory = prepare_directory(name, self._config.model, self._reporter.say)
            whose = digest = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
            hub_name = directory_to_hub_name(directory)
            title = directory.name if hub_name is None else hub_name.repository.partition("/")[2]
            model_folder = self._folder.other_models / f"{title}-{digest}"
            serve = with_modules(self._config, other_model_serve_options(self._config, teams))
            base = BaseModelSpec("", directory, serve, nodes=tuple(live))
            versions = bases_to_versions([base], model_folder / "adapters", self._config)
            log_of, options = RunFolder(model_folder).server_log_of, [serve]
        with serve_bases(
            self._config,
            versions,
            options,
            log_of=log_of,
            loop=stage.loop,
            reporter=self._reporter,
            announce=partial(announced_devices, self._folder, whose=whose),
        ) as models:
            versions.register_zero(live)
            models.serve_only(live)
            yield models


def _estimate_kl(
    config: BridgeConfig, folder: RunFolder, reporter: Reporter, plan: Plan, versions: ModelVersions
) -> KlEstimates:
    limit, teams = config.compare.kl_actions, _trained_teams(plan.lineup)
    if not limit or not teams:
        return {}

    def episodes(variant: str) -> Iterator[Trajectory]:
        """Streams a variant's episodes; the store is open while they are read, and not while the model computes."""
        with open_run_store(folder, reporter, WAIT_IN_RUN_S) as store:
            replaced = replaced_attempts(store, plan.run_id)
            for (episode_id,) in store.sql(_EPISODES, (plan.run_id, variant)):
                trajectory = store.trajectory(episode_id)
                if trajectory is not None and episode_id not in replaced:
                    yield trajectory

    served_teams = [
        team for team in plan.lineup.teams if not team.deployment.own_models and team.deployment.model is None
    ]
    with reporter.bars(), reporter.task("distance to the base model"):
        by_variant = {team.name: episodes(team.name) for team in served_teams}
        return adapters_to_kl(
            config, versions.bases, versions.registry, by_variant=by_variant, limit=limit, seed=plan.seed
        )
