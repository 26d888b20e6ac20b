"""`marft-bridge compare`: variants on held-out tasks -> a report, as a table, JSON, a page and Markdown.

This module composes; what it composes is in the modules beside it. Invariants: whatever is wrong with variants, apps
and tasks is said before a server starts; a comparison that is resumed is the one that was begun and repeats nothing;
base models are loaded for the KL only after the servers have stopped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_bridge.app import App, options_to_app
from marft_bridge.bases import Base, config_to_bases, with_modules
from marft_bridge.comparison.episodes import (
    Plan,
    Progress,
    config_to_plan,
    follow_plan,
    refuse_other_plan,
    stored_scores,
    with_known_metric,
)
from marft_bridge.comparison.figures import Around, episodes_to_report
from marft_bridge.comparison.kl import adapters_to_kl
from marft_bridge.comparison.nodes import Kl
from marft_bridge.comparison.page import write_report
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.table import report_table
from marft_bridge.comparison.variants import (
    Lineup,
    Team,
    by_server,
    live_versions,
    options_to_lineup,
    other_models_options,
)
from marft_bridge.config import BridgeConfig
from marft_bridge.engine import (
    begin_run,
    checked_app,
    load_app,
    numbered_run_id,
    server_options,
    still_to_run,
)
from marft_bridge.errors import BridgeError, ConfigError
from marft_bridge.heldout import heldout_leaks
from marft_bridge.learning_curve import run_to_learning_curve
from marft_bridge.prepare_model import check_model_dir
from marft_bridge.progress import Reporter
from marft_bridge.rollouts import Collector, EpisodeRequest, Tally
from marft_bridge.run_folder import RunFolder, bridge_version
from marft_bridge.run_store import WAIT_IN_RUN_S, keeping_what_runs, store_up_to_date
from marft_bridge.served_models import ServedModels
from marft_bridge.stage import Stage
from marft_bridge.tool_surface import Surface, refuse_changed, store_to_surface, surface_to_hashes
from trace_store.records import Trajectory
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line adds: versions of every node where no variants are declared; None: 0, and the newest."""

    before: int | None = None
    after: int | None = None


def compare(config: BridgeConfig, reporter: Reporter, resume: bool, flags: Flags = Flags()) -> Report:
    """Runs the variants on the held-out tasks, prints the table and writes the report.

    Raises:
        BridgeError, StoreError, TrainError: see the messages; what was finished before is kept.
    """
    folder = RunFolder(config.run_folder)
    folder.require_store("compare")
    app = load_app(config)
    began = time.monotonic()
    models = ServedModels(config, config_to_bases(config, reporter.say), folder.adapters)
    lineup = options_to_lineup(config, models.registry, flags.before, flags.after)
    _refuse_kl_without_torch(config, lineup)
    apps = {team.on.key: _app_of(config, app, team) for team in lineup.all}
    with folder.held_by("compare"):
        with store_up_to_date(folder, reporter) as store:
            config = with_known_metric(config, store)
            plan = config_to_plan(config, numbered_run_id(store, "compare", resume), lineup, app.heldout_tasks)
            _refuse_leaks(store, plan)
            refuse_other_plan(store, plan)
            begin_run(store, plan.run_id, "compare", config, folder, plan.content())
        runner = _Runner(config, folder, reporter, plan, models, apps)
        with keeping_what_runs(folder, reporter, "compare"):
            progress = runner.run()
            kl = _kl(config, folder, reporter, plan, models)
            with store_up_to_date(folder, reporter, WAIT_IN_RUN_S) as store:
                surface = runner.surfaces(store)
                around = Around(
                    versions={"marft-bridge": bridge_version()},
                    minutes=(time.monotonic() - began) / 60,
                    tool_surface=surface_to_hashes(surface[lineup.base.name]),
                    tool_surface_differs=runner.refuse_other_tools(store, same_graph_only=False),
                    learning_curve=run_to_learning_curve(store, folder.metrics, config.train.trainer.reward),
                    kl=kl,
                    say=reporter.say,
                )
                report = episodes_to_report(config, plan, progress, store, around)
    paths = write_report(report, folder.path)
    reporter.console.print(report_table(report))
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
    if config.compare.kl_actions and _trained(lineup) and importlib.util.find_spec("torch") is None:
        raise ConfigError("compare.kl_actions needs torch, which is not installed; set it to 0")


def _trained(lineup: Lineup) -> list[Team]:
    """The variants in which a trained adapter acts; version 0 has no distance to the base."""
    return [team for team in lineup.teams if any(team.adapters.values())]


def _app_of(config: BridgeConfig, app: App, team: Team) -> App:
    """The app that a team plays, checked; the configuration's own where it is that one."""
    graph, own_models = team.on.graph, team.on.own_models
    if graph == config.graph and not own_models:
        return app
    agents = {*graph.nodes, *graph.frozen}
    rewards = [reward for reward in config.rewards if reward.agent is None or reward.agent in agents]
    try:
        return checked_app(options_to_app(graph, rewards), own_models=own_models)
    except BridgeError as error:
        raise type(error)(f"compare.variants {team.name!r}: {error}") from error


class _Runner:
    """Follows a plan: starts what it needs, and runs its requests."""

    def __init__(
        self,
        config: BridgeConfig,
        folder: RunFolder,
        reporter: Reporter,
        plan: Plan,
        models: ServedModels,
        apps: dict[tuple[Any, ...], App],
    ) -> None:
        self._config, self._folder, self._reporter = config, folder, reporter
        self._plan, self._models, self._apps = plan, models, apps
        self._tallies = {team.name: Tally() for team in plan.lineup.all}
        self._collectors: dict[str, Collector] | None = None
        self._stack = ExitStack()

    def run(self) -> Progress:
        """Everything that is not there yet. Servers start only where something is to run."""
        with self._stack:
            progress = follow_plan(self._plan, self._run, self._scores, self._check)
            for team in self._plan.lineup.all:
                tally = self._tallies[team.name]
                for line in (*tally.without(), *tally.silent([*team.adapters])):
                    self._reporter.say(f"{team.name}: {line}")
        return progress

    def surfaces(self, store: TraceStore) -> dict[str, Surface]:
        """Variant -> the tools that its nodes offered so far."""
        return {team.name: store_to_surface(store, self._plan.run_id, team.name) for team in self._plan.lineup.all}

    def refuse_other_tools(self, store: TraceStore, *, same_graph_only: bool) -> bool:
        """Whether any variant offers other tools than the base; refuses it unless that is allowed."""
        teams = self._plan.lineup.all
        graphs = {team.name: team.on.graph.app for team in teams}
        first = graphs[teams[0].name]
        surfaces = {
            name: surface
            for name, surface in self.surfaces(store).items()
            if not same_graph_only or graphs[name] == first
        }
        return refuse_changed(surfaces, self._config.compare.allow_tool_change, "compare.allow_tool_change", graphs)

    def _check(self) -> None:
        """What one task shows already; a graph's tools all together are known at the end only."""
        with self._store() as store:
            self.refuse_other_tools(store, same_graph_only=True)

    def _scores(self, variant: str) -> dict[tuple[str, int], float]:
        with self._store() as store:
            return stored_scores(store, self._plan.run_id, variant, self._plan.metric)

    def _run(self, requests: Sequence[EpisodeRequest]) -> None:
        with self._store() as store:
            remaining = still_to_run(store, requests)
        if not remaining:
            return
        if self._collectors is None:
            self._collectors = self._open()
        jobs = [(self._collectors[r.variant or ""], r, self._tallies[r.variant or ""]) for r in remaining]
        self._stage.run(jobs, "compare", self._plan.metric)

    def _store(self) -> AbstractContextManager[TraceStore]:
        return store_up_to_date(self._folder, self._reporter, WAIT_IN_RUN_S)

    # -- servers and graphs -----------------------------------------------------------------------------------

    def _open(self) -> dict[str, Collector]:
        """The servers that the teams need, and every graph once; returns each team's collector."""
        self._stage = self._stack.enter_context(Stage(self._config, self._folder, self._reporter))
        models = {
            name: self._stack.enter_context(self._served(name, teams))
            for name, teams in by_server(self._plan.lineup.all).items()
        }
        judged_at = models[None].place if None in models else None
        opened: dict[tuple[Any, ...], Collector] = {}
        for team in self._plan.lineup.all:
            if team.on.key not in opened:
                model = None if team.on.own_models else models[team.on.model]
                collector = self._stage.opened(self._apps[team.on.key], model, judged_at)
                opened[team.on.key] = self._stack.enter_context(collector)
        return {team.name: opened[team.on.key] for team in self._plan.lineup.all}

    @contextmanager
    def _served(self, name: str | None, teams: Sequence[Team]) -> Iterator[ServedModels]:
        live = live_versions(teams)
        if name is None:
            models, log_of = self._models, self._folder.server_log_of
            options = server_options(models.bases, self._folder, self._reporter)
        else:
            directory = check_model_dir(Path(name))
            path = str(directory.resolve()).encode()
            place = self._folder.other_models / f"{directory.name}-{hashlib.sha256(path).hexdigest()[:8]}"
            serve = with_modules(self._config, other_models_options(self._config, teams))
            models = ServedModels(self._config, [Base("", directory, serve, tuple(live))], place / "adapters")
            log_of, options = RunFolder(place).server_log_of, [serve]
        with models.served(options, log_of, self._stage.loop, self._reporter):
            models.register_null(live)
            models.serve_only(live)
            yield models


def _kl(config: BridgeConfig, folder: RunFolder, reporter: Reporter, plan: Plan, models: ServedModels) -> Kl:
    limit, teams = config.compare.kl_actions, _trained(plan.lineup)
    if not limit or not teams:
        return {}

    def episodes(variant: str) -> Iterator[Trajectory]:
        """The store is open while they are read, and not while the model works."""
        with store_up_to_date(folder, reporter, WAIT_IN_RUN_S) as store:
            yield from store.trajectories(run_ids=[plan.run_id], variant=variant)

    on_base = [team for team in plan.lineup.teams if not team.on.own_models and team.on.model is None]
    with reporter.bars(), reporter.task("distance to the base model"):
        by_variant = {team.name: episodes(team.name) for team in on_base}
        return adapters_to_kl(config, models.bases, models.registry, by_variant, limit, plan.seed)
