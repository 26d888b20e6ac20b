"""`marft-bridge credit`: the same tasks and seeds with agents replaced -> what each agent contributes.

The full team and the teams in which agents are replaced run next to each other on one server; or the full team's
episodes are those of a stored run, and only the others run. What each agent added to an episode of the full team is
written to that episode as a reward of level `agent`, so it can be inspected and trained on. Invariants: scores are
only subtracted on the same task, sample and seed; tasks are training tasks, since held-out ones are for comparing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marft_bridge.agent_credit.estimates import Method
from marft_bridge.agent_credit.replacement_rewards import CreditRun
from marft_bridge.agent_credit.stored_team import read_stored_team
from marft_bridge.agent_credit.substitutes import Substitute, refuse_no_op_substitute, text_to_substitute
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.compare import BEST, Version
from marft_bridge.rollouts.app import App, load_app
from marft_bridge.rollouts.episode_plan import (
    EpisodeRequest,
    episode_to_key,
    plan_episodes,
    requests_to_versions,
    task_order,
    unfinished_requests,
)
from marft_bridge.rollouts.session import open_session
from marft_bridge.runs.ledger import begin_run, numbered_run_id
from marft_bridge.runs.named_version import read_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.runs.run_store import WAIT_IN_RUN_S, open_run_store, take_in_on_failure
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.statistics.shapley import Team, all_teams
from trace_store.records import Episode
from trace_store.store import TraceStore

MAX_SHAPLEY_AGENTS = 6  # 64 teams
DEFAULT_TASKS = 32


@dataclass(frozen=True, slots=True)
class CreditOptions:
    """The options of the command line."""

    nodes: tuple[str, ...] = ()  # none: all that are trained
    substitute: str = "base"
    method: Method = "leave-one-out"
    tasks: int | None = None  # at most; None: `DEFAULT_TASKS`, or all of a stored run
    samples: int = 1  # per task
    run_of: str | None = None  # a stored run whose episodes are the full team's
    metric: str | None = None  # None: train.trainer.reward
    min_contribution: float = 0.05  # an agent that is shown to add less is lazy
    version: Version = BEST  # of every node in the full team, unless that is a stored run's


def credit(config: BridgeConfig, options: CreditOptions, reporter: Reporter, resume: bool) -> None:
    """Runs the teams, writes the rewards, and prints what each agent contributes.

    With `resume` the latest `credit` run goes on, and episodes that it has are not run again.

    Raises:
        BridgeError, StoreError: see the messages; what was finished before is kept.
    """
    folder = RunFolder(config.run_folder)
    agents = _chosen_agents(config, options)
    substitute = text_to_substitute(options.substitute)
    metric = options.metric or config.train.trainer.reward
    teams = _method_to_teams(agents, options.method)
    app = load_app(config)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    folder.create()
    with folder.lock_for("credit"):
        with open_run_store(folder, reporter) as store:
            run_id = numbered_run_id(store, "credit", resume)
            if options.run_of is None:
                adapters = _choose_adapters(config, folder, versions.registry, version=options.version)
                full_requests = _plan_full_team(config, app, options, adapters=adapters)
            else:
                full_requests = _read_stored_team(
                    store, config, versions.registry, options=options, run_of=options.run_of, metric=metric
                )
            refuse_no_op_substitute(substitute, agents, full_requests[0].adapters, frozen=config.graph.frozen)
            if substitute.version:
                for agent in agents:
                    versions.registry.get(agent, substitute.version)
            plan = _plan_teams(
                full_requests,
                teams if options.run_of is None else teams[1:],
                agents,
                substitute=substitute,
                run_id=run_id,
            )
            _refuse_other_plan(store, run_id, plan)
            begin_run(store, run_id, "credit", config=config, folder=folder)
            requests = unfinished_requests(store, plan)
        if requests:
            with (
                take_in_on_failure(folder, reporter),
                open_session(config, folder, app, versions=versions, reporter=reporter) as session,
            ):
                session.models.serve_only(requests_to_versions(plan))
                session.run(requests, "credit", metric, finished_before=len(plan) - len(requests))
        variants = {team: substitute.team_name(team, agents) for team in teams}
        credit_run = CreditRun(
            agents,
            options.method,
            metric,
            variants=variants,
            run_id=run_id,
            run_of=options.run_of,
            substitute=substitute.label,
        )
        with take_in_on_failure(folder, reporter), open_run_store(folder, reporter, WAIT_IN_RUN_S) as store:
            credit_run.store_and_print(store, options.min_contribution, config.seed, reporter=reporter)


# -- what runs ------------------------------------------------------------------------------------------------


def _chosen_agents(config: BridgeConfig, options: CreditOptions) -> tuple[str, ...]:
    graph_nodes = (*config.graph.nodes, *config.graph.frozen)
    agents = tuple(dict.fromkeys(options.nodes)) or config.graph.nodes
    if unknown := [agent for agent in agents if agent not in graph_nodes]:
        raise ConfigError(
            f"credit --nodes: {unknown[0]!r} is not in graph.nodes or graph.frozen: {', '.join(graph_nodes)}"
        )
    if options.method == "shapley" and len(agents) > MAX_SHAPLEY_AGENTS:
        raise ConfigError(
            f"credit --method shapley: {len(agents)} agents make {2 ** len(agents)} teams; name at most "
            f"{MAX_SHAPLEY_AGENTS} with --nodes, or use leave-one-out"
        )
    return agents


def _choose_adapters(
    config: BridgeConfig, folder: RunFolder, registry: AdapterRegistry, version: Version
) -> dict[str, int]:
    """Node -> the version that acts in the full team; the newest where training named none, 0 where there is none."""
    named = read_named_version(folder) if version == BEST else None
    number = named.version if named is not None else version
    if isinstance(number, int):
        return {node: registry.get(node, number).version if number else 0 for node in config.graph.nodes}
    newest_rows = {node: registry.latest(node) for node in config.graph.nodes}
    return {node: row.version if row is not None else 0 for node, row in newest_rows.items()}


def _plan_full_team(
    config: BridgeConfig, app: App, options: CreditOptions, adapters: dict[str, int]
) -> list[EpisodeRequest]:
    """The full team at these versions on training tasks."""
    tasks = task_order(app.train_tasks, config.seed)
    if options.tasks is not None and options.tasks > len(tasks):
        raise ConfigError(f"credit --tasks: {options.tasks} asked for, but there are {len(tasks)} training tasks")
    tasks = tasks[: options.tasks or DEFAULT_TASKS]
    return plan_episodes(
        tasks,
        len(tasks) * options.samples,
        options.samples,
        seed=config.seed,
        run_id="",
        split="train",
        adapters=adapters,
    )


def _read_stored_team(
    store: TraceStore, config: BridgeConfig, registry: AdapterRegistry, options: CreditOptions, run_of: str, metric: str
) -> list[EpisodeRequest]:
    """The full team of a stored run: one request for each of its scored episodes, which is not run again."""
    remedy = "leave it out, and the best team runs"
    episodes = read_stored_team(store, config, registry, run_of=run_of, metric=metric, remedy=remedy)
    chosen_tasks = list(dict.fromkeys(e.task_id for e in episodes))[: options.tasks]
    return [_episode_to_request(e) for e in episodes if e.task_id in chosen_tasks]


def _episode_to_request(episode: Episode) -> EpisodeRequest:
    assert episode.seed is not None  # every command gives its episodes one
    return EpisodeRequest(
        run_id="",
        task=episode.task,
        split=episode.split,
        sample=episode.sample,
        seed=episode.seed,
        adapters=episode.adapters,
    )


def _method_to_teams(agents: Sequence[str], method: Method) -> list[Team]:
    """The teams whose scores the method needs, the full one first."""
    full_team = frozenset(agents)
    return (
        [full_team, *(full_team - {agent} for agent in agents)]
        if method == "leave-one-out"
        else [*all_teams(agents)[::-1]]
    )


def _plan_teams(
    full_requests: Sequence[EpisodeRequest],
    teams: Sequence[Team],
    agents: Sequence[str],
    substitute: Substitute,
    run_id: str,
) -> list[EpisodeRequest]:
    """The full team's requests into those of all `teams`: next to each other for each task and sample, on one seed."""
    planned = []
    for request in full_requests:
        for team in teams:
            adapters, answers = substitute.replace_agents(team, agents, request.adapters)
            variant = substitute.team_name(team, agents)
            planned.append(replace(request, run_id=run_id, variant=variant, adapters=adapters, answers=answers))
    return planned


def _refuse_other_plan(store: TraceStore, run_id: str, plan: Sequence[EpisodeRequest]) -> None:
    """Raises ConfigError where a resumed run has episodes that are not in the plan: they would mix into its scores."""
    planned = {request.key: (dict(request.adapters), request.seed) for request in plan}
    for episode in store.episodes(run_id=run_id):
        if planned.get(episode_to_key(episode)) != (episode.adapters, episode.seed):
            raise ConfigError(
                f"credit --resume: {run_id} began with other teams, tasks or versions (it has {episode.variant!r} with "
                f"{episode.adapters} on task {episode.task_id!r}); give the same options, or leave out --resume"
            )
