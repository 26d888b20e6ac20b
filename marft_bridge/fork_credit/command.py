"""`marft-bridge credit --by forks`: recorded runs, forked around each call -> what each call decides and adds.

Three kinds of forks of each drawn run: before a call, after it, and before it with a stand-in that answers for its node
from there on. Invariants: runs are drawn without a look at their rewards; the recorded runs are those of one team on
today's models and sampling; nothing is written to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.agent_credit.stored_team import read_stored_team
from marft_bridge.agent_credit.substitutes import Substitute, refuse_no_op_substitute, text_to_substitute
from marft_bridge.common.errors import ConfigError, EpisodesFailedError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.fork_credit.credit_plan import ChosenRuns, CreditPlan, choose_runs
from marft_bridge.fork_credit.estimates import runs_to_credits
from marft_bridge.fork_credit.leave_one_out import read_leave_one_out
from marft_bridge.fork_credit.measurement import measure_runs, read_forks, read_recorded_rewards
from marft_bridge.fork_credit.report import CreditReport
from marft_bridge.fork_credit.run_levels import RunLevels, run_to_levels
from marft_bridge.forks.fork_plan import refuse_other_models, spans_to_parent
from marft_bridge.forks.given_tools import ToolChoice, given_tools
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.episode_plan import EpisodeRequest, requests_to_versions, unfinished_requests
from marft_bridge.rollouts.session import open_session
from marft_bridge.runs.ledger import begin_run, numbered_run_id
from marft_bridge.runs.run_folder import COLLECT, RunFolder
from marft_bridge.runs.run_store import WAIT_IN_RUN_S, open_run_store, take_in_on_failure
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.model_versions import config_to_versions
from trace_store.records import Episode
from trace_store.store import TraceStore

COMMAND = "credit-forks"
"""What its runs are called in the store, so that those of `credit` by replaced agents keep their numbers."""
NOBODY = "none"


@dataclass(frozen=True, slots=True)
class ForkCreditOptions:
    """The options of the command line."""

    nodes: tuple[str, ...] = ()  # none: all that are trained
    substitute: str = "base"  # none: nobody stands in
    forks: int = 256  # of all runs together, about
    samples: int = 2  # of each level
    run_of: str = COLLECT
    metric: str | None = None  # None: train.trainer.reward
    min_contribution: float = 0.05  # an agent that is shown to matter less is lazy, or idle
    tools: ToolChoice = "recorded"  # before the forked calls


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: CreditPlan
    chosen: ChosenRuns
    metric: str
    options: ForkCreditOptions
    requests: Sequence[EpisodeRequest]

    def to_noted_plan(self) -> dict[str, Any]:
        """What a resumed command has to find unchanged."""
        return {
            "episodes": [levels.run.episode_id for levels in self.chosen.runs],
            "nodes": list(self.plan.nodes),
            "samples": self.plan.samples,
            "substitute": None if self.plan.substitute is None else self.plan.substitute.label,
            "seed": self.plan.seed,
            "metric": self.metric,
            "tools": self.options.tools,
        }


def credit_by_forks(config: BridgeConfig, options: ForkCreditOptions, reporter: Reporter, resume: bool) -> None:
    """Runs the forks, and prints what each node and each of its calls decides and adds.

    With `resume` the latest run of it goes on, and forks that it has are not run again.

    Raises:
        BridgeError, StoreError: see the messages; what was finished before is kept.
    """
    folder = RunFolder(config.run_folder)
    app = load_app(config)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    folder.create()
    failure: EpisodesFailedError | None = None
    with folder.lock_for("credit"):
        with open_run_store(folder, reporter) as store:
            planned = _plan(store, config, options, registry=versions.registry, resume=resume)
            run_id = planned.plan.run_id
            _refuse_other_plan(store, planned)
            begin_run(store, run_id, COMMAND, config=config, folder=folder, plan=planned.to_noted_plan())
            requests = unfinished_requests(store, planned.requests)
        reporter.say(_plan_line(planned))
        if requests:
            with (
                take_in_on_failure(folder, reporter),
                open_session(config, folder, app, versions=versions, reporter=reporter) as session,
            ):
                session.models.serve_only(requests_to_versions(planned.requests))
                try:
                    with given_tools():
                        tally = session.run(
                            requests,
                            "credit",
                            planned.metric,
                            finished_before=len(planned.requests) - len(requests),
                        )
                        tally.refuse_if_all_failed()
                except EpisodesFailedError as error:
                    failure = error  # what was measured is said before
        with take_in_on_failure(folder, reporter), open_run_store(folder, reporter, WAIT_IN_RUN_S) as store:
            _report(store, planned, config.seed, reporter=reporter)
    if failure is not None:
        raise failure


def _plan(
    store: TraceStore, config: BridgeConfig, options: ForkCreditOptions, *, registry: AdapterRegistry, resume: bool
) -> _Planned:
    metric = options.metric or config.train.trainer.reward
    remedy = "name another run"
    episodes = read_stored_team(store, config, registry, run_of=options.run_of, metric=metric, remedy=remedy)
    graph_nodes = (*config.graph.nodes, *config.graph.frozen)
    nodes = tuple(dict.fromkeys(options.nodes)) or config.graph.nodes
    if unknown := [node for node in nodes if node not in graph_nodes]:
        raise ConfigError(
            f"credit --nodes: {unknown[0]!r} is not in graph.nodes or graph.frozen: {', '.join(graph_nodes)}"
        )
    substitute = _to_substitute(config, options, nodes, adapters=episodes[0].adapters)
    if substitute is not None and substitute.version:
        for node in nodes:
            registry.get(node, substitute.version)
    run_id = numbered_run_id(store, COMMAND, resume)
    plan = CreditPlan(run_id, config.seed, options.samples, nodes=nodes, substitute=substitute)

    def to_levels(episode: Episode) -> RunLevels:
        run = spans_to_parent(store.spans(episode.episode_id))
        refuse_other_models(run, config, registry)
        return run_to_levels(run, nodes, options.tools)

    chosen = choose_runs(episodes, to_levels, budget=options.forks, forks_of_run=plan.forks_of_run, seed=config.seed)
    requests = [request for levels in chosen.runs for request in plan.requests(levels)]
    return _Planned(plan, chosen, metric=metric, options=options, requests=requests)


def _to_substitute(
    config: BridgeConfig, options: ForkCreditOptions, nodes: Sequence[str], *, adapters: dict[str, int]
) -> Substitute | None:
    if options.substitute == NOBODY:
        return None
    substitute = text_to_substitute(options.substitute)
    try:
        refuse_no_op_substitute(substitute, nodes, adapters, frozen=config.graph.frozen)
    except ConfigError as error:
        raise ConfigError(f"{error}; or --substitute none, and only what each call decides is measured") from None
    return substitute


def _refuse_other_plan(store: TraceStore, planned: _Planned) -> None:
    """Raises ConfigError where a resumed run began with other forks: two plans would mix in its figures."""
    for run in store.runs():
        if run.run_id == planned.plan.run_id and run.config.get("plan") != planned.to_noted_plan():
            raise ConfigError(
                f"credit --resume: {planned.plan.run_id} began with other runs, nodes, forks, stand-in, seed or tools;"
                " give the same options, or leave out --resume"
            )


def _plan_line(planned: _Planned) -> str:
    runs = planned.chosen.runs
    tasks = {levels.run.trajectory.episode.task_id for levels in runs}
    tokens = sum(map(planned.plan.tokens_of_run, runs))
    return (
        f"{planned.plan.run_id}: {len(runs)} runs of {planned.options.run_of}, of {len(tasks)} tasks, drawn by seed"
        f" {planned.plan.seed} whatever they earned; {len(planned.requests)} forks, {planned.plan.samples} at each"
        f" point, some {tokens:,} sampled tokens"
    )


def _report(store: TraceStore, planned: _Planned, seed: int, reporter: Reporter) -> None:
    plan, runs = planned.plan, planned.chosen.runs
    forks = read_forks(store, plan.run_id, planned.metric)
    recorded = read_recorded_rewards(store, runs, planned.metric)
    measured, score_range = measure_runs(plan, runs, forks.rewards, recorded=recorded)
    node_credits, call_credits = runs_to_credits(
        measured,
        plan.nodes,
        score_range=score_range,
        min_contribution=planned.options.min_contribution,
        seed=seed,
    )
    CreditReport(
        plan.run_id,
        planned.options.run_of,
        planned.metric,
        substitute=None if plan.substitute is None else plan.substitute.label,
        runs=len(runs),
        tasks=len({each.task for each in measured}),
        forks=forks.count,
        failures=forks.failures,
        refused=planned.chosen.refused,
        nodes=node_credits,
        calls=call_credits,
        leave_one_out=read_leave_one_out(store, planned.metric),
        min_contribution=planned.options.min_contribution,
    ).print(reporter)
