"""`marft-bridge credit`: the same tasks and seeds with agents replaced -> what each agent contributes.

The team and the teams in which agents are replaced run next to each other on one server; or the team's episodes are
those of a run that is stored, and only the others run. What each agent added to an episode of the full team is written
to that episode as a reward of level `agent`, so it can be looked at and trained on. Invariants: a share is only formed
of scores on the same task, sample and seed; tasks are training tasks, since held-out ones are for comparing. How
findings are made is in `judged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marft_bridge.app import App
from marft_bridge.bases import config_to_bases
from marft_bridge.config import BridgeConfig
from marft_bridge.contribution.found import Found
from marft_bridge.contribution.games import Team, all_teams
from marft_bridge.contribution.judged import Method
from marft_bridge.contribution.substitutes import Substitute, refuse_idle, text_to_substitute
from marft_bridge.engine import Engine, begin_run, load_app, numbered_run_id, still_to_run
from marft_bridge.errors import ConfigError
from marft_bridge.plan import EpisodeRequest, plan_episodes, task_order
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.run_store import WAIT_IN_RUN_S, keeping_what_runs, store_up_to_date
from trace_store.records import Episode, model_part
from trace_store.store import TraceStore

MOST_AGENTS = 6  # of a Shapley value: 64 teams
TASKS = 32


@dataclass(frozen=True, slots=True)
class CreditOptions:
    """What the command line asks for."""

    nodes: tuple[str, ...] = ()  # none: all that are trained
    substitute: str = "base"
    method: Method = "leave-one-out"
    tasks: int | None = None  # at most; None: `TASKS`, or all of a stored run
    samples: int = 1
    run_of: str | None = None  # a stored run whose episodes are the team's
    metric: str | None = None  # None: train.trainer.reward
    worth: float = 0.05


def credit(config: BridgeConfig, options: CreditOptions, reporter: Reporter, resume: bool) -> None:
    """Runs the teams, writes the rewards, and prints what each agent contributes.

    Raises:
        BridgeError, StoreError: see the messages; what was finished before is kept.
    """
    folder = RunFolder(config.run_folder)
    agents = _agents(config, options)
    substitute = text_to_substitute(options.substitute)
    metric = options.metric or config.train.trainer.reward
    teams = _teams(agents, options.method)
    app = load_app(config)
    bases = config_to_bases(config, reporter.say)
    folder.create()
    with folder.held_by("credit"):
        engine = Engine(config, folder, app, bases, reporter)
        with store_up_to_date(folder, reporter) as store:
            run_id = numbered_run_id(store, "credit", resume)
            if options.run_of is None:
                full = _fresh_team(config, engine, app, options)
            else:
                full = _stored_team(store, config, engine, options, options.run_of, metric)
            refuse_idle(substitute, agents, full[0].adapters, config.graph.frozen)
            if substitute.version:
                for agent in agents:
                    engine.registry.get(agent, substitute.version)
            plan = _plan(full, teams if options.run_of is None else teams[1:], agents, substitute, run_id)
            _refuse_other_plan(store, run_id, plan)
            begin_run(store, run_id, "credit", config, folder)
            requests = still_to_run(store, plan)
        if requests:
            with keeping_what_runs(folder, reporter, "credit"), engine:
                engine.serve_only(_versions(plan))
                engine.run(requests, "credit", metric)
        names = {on: substitute.team_name(on, agents) for on in teams}
        found = Found(agents, options.method, metric, names, run_id, options.run_of, substitute.label)
        with keeping_what_runs(folder, reporter, "credit"), store_up_to_date(folder, reporter, WAIT_IN_RUN_S) as store:
            found.keep_and_show(store, options.worth, config.seed, reporter)


# -- what runs ------------------------------------------------------------------------------------------------


def _agents(config: BridgeConfig, options: CreditOptions) -> tuple[str, ...]:
    known = (*config.graph.nodes, *config.graph.frozen)
    agents = tuple(dict.fromkeys(options.nodes)) or config.graph.nodes
    if strange := [agent for agent in agents if agent not in known]:
        raise ConfigError(f"credit --nodes: {strange[0]!r} is not in graph.nodes or graph.frozen: {', '.join(known)}")
    if options.method == "shapley" and len(agents) > MOST_AGENTS:
        raise ConfigError(
            f"credit --method shapley: {len(agents)} agents make {2 ** len(agents)} teams; name at most {MOST_AGENTS} "
            "with --nodes, or use leave-one-out"
        )
    return agents


def _fresh_team(config: BridgeConfig, engine: Engine, app: App, options: CreditOptions) -> list[EpisodeRequest]:
    """The full team, every node at its newest version, on training tasks."""
    tasks = task_order(app.train_tasks, config.seed)
    if options.tasks is not None and options.tasks > len(tasks):
        raise ConfigError(f"credit --tasks: {options.tasks} asked for, but there are {len(tasks)} training tasks")
    newest = {node: engine.registry.latest(node) for node in config.graph.nodes}
    tasks = tasks[: options.tasks or TASKS]
    return plan_episodes(
        tasks,
        len(tasks) * options.samples,
        options.samples,
        seed=config.seed,
        run_id="",
        split="train",
        adapters={node: row.version if row is not None else 0 for node, row in newest.items()},
    )


def _stored_team(
    store: TraceStore, config: BridgeConfig, engine: Engine, options: CreditOptions, run_of: str, metric: str
) -> list[EpisodeRequest]:
    """The full team as a stored run has it, one request for each scored episode; only the other teams run."""
    runs = {run.run_id: run for run in store.runs()}
    if run_of not in runs:
        raise ConfigError(
            f"credit --run-of: there is no run {run_of!r} in {store.path}; there are: {', '.join(runs) or 'none'}"
        )
    scored = {
        row[0]
        for row in store.sql(
            "SELECT DISTINCT r.episode_id FROM rewards r JOIN episodes e USING (episode_id)"
            " WHERE e.run_id = ? AND r.scope = 'episode' AND r.name = ?",
            (run_of, metric),
        )
    }
    episodes = [e for e in store.episodes(run_id=run_of, split="train") if e.episode_id in scored]
    if not episodes:
        raise ConfigError(f"credit --run-of: run {run_of!r} has no training episode with the reward {metric!r}")
    if any(e.variant is not None or e.adapters != episodes[0].adapters for e in episodes):
        raise ConfigError(
            f"credit --run-of: the episodes of run {run_of!r} are of several teams or versions; "
            "leave it out, and the newest team runs"
        )
    sampling = config.sampling.model_dump(mode="json")
    others = [
        node
        for node in (*config.graph.nodes, *config.graph.frozen)
        if {model_part(e.lineage, "base", node) for e in episodes} - {None, engine.registry.base_of(node)}
    ]
    if others or runs[run_of].config.get("sampling", sampling) != sampling:
        what = "on another base model" if others else "with another [sampling]"
        raise ConfigError(
            f"credit --run-of: run {run_of!r} ran {what}, so nothing could be told from a difference to it; "
            "leave it out, and the newest team runs"
        )
    kept = list(dict.fromkeys(e.task_id for e in episodes))[: options.tasks]
    return [_episode_to_request(e) for e in episodes if e.task_id in kept]


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


def _teams(agents: Sequence[str], method: Method) -> list[Team]:
    """All that must have scores, the full one first."""
    full = frozenset(agents)
    return [full, *(full - {agent} for agent in agents)] if method == "leave-one-out" else [*all_teams(agents)[::-1]]


def _plan(
    full: Sequence[EpisodeRequest],
    teams: Sequence[Team],
    agents: Sequence[str],
    substitute: Substitute,
    run_id: str,
) -> list[EpisodeRequest]:
    """Every team of each task and sample next to each other, with one seed."""
    planned = []
    for request in full:
        for on in teams:
            adapters, answers = substitute.standing_in(on, agents, request.adapters)
            variant = substitute.team_name(on, agents)
            planned.append(replace(request, run_id=run_id, variant=variant, adapters=adapters, answers=answers))
    return planned


def _versions(plan: Sequence[EpisodeRequest]) -> dict[str, list[int]]:
    """Node -> the versions that the plan needs."""
    found: dict[str, list[int]] = {}
    for request in plan:
        for node, version in request.adapters.items():
            if version not in found.setdefault(node, []):
                found[node].append(version)
    return found


def _refuse_other_plan(store: TraceStore, run_id: str, plan: Sequence[EpisodeRequest]) -> None:
    """A resumed run must not mix episodes of other teams, tasks or seeds into its scores."""
    planned = {request.key: (dict(request.adapters), request.seed) for request in plan}
    for episode in store.episodes(run_id=run_id):
        key = (episode.task_id, episode.sample, episode.variant, episode.round)
        if planned.get(key) != (episode.adapters, episode.seed):
            raise ConfigError(
                f"credit --resume: {run_id} began with other teams, tasks or versions (it has {episode.variant!r} with "
                f"{episode.adapters} on task {episode.task_id!r}); give the same options, or leave out --resume"
            )
