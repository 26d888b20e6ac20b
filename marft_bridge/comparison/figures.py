"""The stored episodes of one comparison -> its report: every number that pages show and promotion gates read.

Invariants: one variant's episodes are read at a time and held without their tokens; an episode without the deciding
metric is counted with its reason, and its pair is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import model_to_pinned
from marft_bridge.comparison.changes import add_losses, pairs_to_changes
from marft_bridge.comparison.choices import outcomes_to_choices
from marft_bridge.comparison.cohorts import pairs_to_cohorts
from marft_bridge.comparison.contrasts import (
    MIN_TASKS,
    pairs_to_deciding_contrasts,
    pairs_to_power,
    pairs_to_secondary_contrasts,
)
from marft_bridge.comparison.episodes import Plan, Progress
from marft_bridge.comparison.margins import add_margin
from marft_bridge.comparison.mixed import scores_to_mixed
from marft_bridge.comparison.nodes import KlEstimates, episodes_to_nodes
from marft_bridge.comparison.outcomes import (
    Outcome,
    Outcomes,
    Pair,
    SampleKey,
    pair_outcomes,
    read_currency,
    read_node_money,
    read_outcomes,
    shared_metrics,
    sort_pairs,
)
from marft_bridge.comparison.records import (
    Estimate,
    Mixed,
    NodeSide,
    Report,
    Setup,
    Stopping,
    Tournament,
    Variant,
    interval_to_estimate,
)
from marft_bridge.comparison.stopping import min_tasks_to_settle
from marft_bridge.comparison.tournament import games_to_tournament, trajectory_to_game
from marft_bridge.comparison.variants import Team
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.runs.learning_curve import LearningPoint
from marft_bridge.statistics import (
    MeanInterval,
    avg_at_k,
    mean_interval,
    pass_at_k,
)
from trace_store.records import Trajectory
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report holds besides the figures of its own episodes."""

    versions: Mapping[str, str] = field(default_factory=dict)  # of software: package -> version
    minutes: float | None = None  # wall-clock
    tool_surface: Mapping[str, str] = field(default_factory=dict)
    tool_surface_differs: bool = False
    learning_curve: tuple[LearningPoint, ...] = ()
    kl: KlEstimates = field(default_factory=dict)
    print_line: Callable[[str], None] = lambda _: None


def episodes_to_report(
    config: BridgeConfig, plan: Plan, progress: Progress, store: TraceStore, context: ReportContext
) -> Report:
    """The stored episodes of a plan, as far as it was followed, into the report.

    Raises:
        ConfigError: a candidate and the base have too few pairs, or pairs of too few tasks.
    """
    lineup, metric = plan.lineup, plan.metric
    outcomes = {team.name: _team_outcomes(plan, progress, store, team=team) for team in lineup.all_teams}
    base = outcomes[lineup.base.name]
    pairs = {team.name: list(sort_pairs(pair_outcomes(base, outcomes[team.name]))) for team in lineup.candidates}
    _refuse_few_pairs(plan, outcomes, pairs)
    for name, candidate_pairs in pairs.items():
        if missing := progress.tasks[name] * plan.samples - len(candidate_pairs):
            context.print_line(f"{name}: {missing} pairs left out, because one side has no {metric!r}")
    _print_unranked_metrics(config, pairs, context)
    teams = lineup.teams
    nodes = episodes_to_nodes(
        {team.name: _read_trajectories(store, outcomes[team.name].scored) for team in teams},
        list(dict.fromkeys(node for team in teams for node in _team_nodes(team))),
        context.kl,
        spans_of=store.spans,
        money={team.name: read_node_money(store, plan.run_id, team.name) for team in teams},
    )
    contrasts = pairs_to_deciding_contrasts(
        pairs,
        metric,
        plan.seed,
        ranks=config.compare.ranks,
        interim_results=progress.interim_results if plan.looks else None,
        looks=len(progress.looks),
    )
    if config.compare.non_inferior is not None:
        contrasts = add_margin(contrasts, pairs, metric, margin=config.compare.non_inferior)
    cohorts = pairs_to_cohorts(
        (
            (name, pair.base.trajectory, pair.candidate.trajectory)
            for name, candidate_pairs in pairs.items()
            for pair in candidate_pairs
        ),
        config.compare.cohorts,
        metric,
        seed=plan.seed,
        print_line=context.print_line,
    )
    now = datetime.now(UTC)
    return Report(
        metric=metric,
        base=lineup.base.name,
        variants=tuple(_variant(config, team, outcomes[team.name], plan=plan, nodes=nodes) for team in teams),
        contrasts=contrasts,
        secondary=tuple(
            row
            for name, candidate_pairs in pairs.items()
            for row in pairs_to_secondary_contrasts(
                name, candidate_pairs, metric, seed=plan.seed, ranks=config.compare.ranks
            )
        ),
        power=tuple(
            pairs_to_power(name, candidate_pairs, metric, candidates=len(pairs))
            for name, candidate_pairs in pairs.items()
        ),
        stopping=_stopping(plan, progress),
        nodes=nodes,
        mixed=_mixed(plan, outcomes),
        tournament=_tournament(config, plan, store, outcomes=outcomes, print_line=context.print_line),
        choices=outcomes_to_choices({team.name: outcomes[team.name] for team in lineup.own_teams}, metric),
        currency=read_currency(store),
        cohorts=add_losses(store, cohorts, pairs, metric=metric, base=lineup.base.name),
        tasks=tuple(
            changed
            for name, candidate_pairs in pairs.items()
            if (changed := pairs_to_changes(store, candidate_pairs, metric, base=lineup.base.name, candidate=name))
            is not None
        ),
        learning_curve=context.learning_curve,
        setup=Setup(
            model=model_to_pinned(config.model.path),
            graph=config.graph.app,
            versions=dict(context.versions),
            date=now,
            seed=plan.seed,
            tasks=len(plan.tasks),
            samples_per_task=plan.samples,
            temperature=plan.temperature,
            minutes=context.minutes,
            tool_surface=dict(context.tool_surface),
            tool_surface_differs=context.tool_surface_differs,
        ),
        created=now,
    )


def _team_outcomes(plan: Plan, progress: Progress, store: TraceStore, team: Team) -> Outcomes:
    task_ids = plan.task_ids()[: progress.tasks.get(team.name, 0)]
    expected = [(task, sample) for task in task_ids for sample in range(plan.samples)]
    return read_outcomes(store, plan.run_id, team.name, metric=plan.metric, expected=expected)


def _read_trajectories(store: TraceStore, outcomes: Mapping[SampleKey, Outcome]) -> Iterator[Trajectory]:
    """The episodes with all of their actions, one after the other, by (task, sample)."""
    for outcome in outcomes.values():
        trajectory = store.trajectory(outcome.episode_id)
        assert trajectory is not None  # it was just read
        yield trajectory


def _team_nodes(team: Team) -> tuple[str, ...]:
    return (*team.deployment.graph.nodes, *team.deployment.graph.frozen)


def _print_unranked_metrics(config: BridgeConfig, pairs: Mapping[str, Sequence[Pair]], context: ReportContext) -> None:
    """Prints the metrics of compare.ranks that no pair has on both sides, where ranks are configured."""
    if "ranks" not in config.compare.model_fields_set:
        return
    for name, candidate_pairs in pairs.items():
        available = {config.compare.metric, *shared_metrics(candidate_pairs, config.compare.metric)}
        for unknown in (metric for metric in config.compare.ranks if metric not in available):
            context.print_line(f"{name}: compare.ranks names {unknown!r}, which both sides of no pair have")


def _refuse_few_pairs(plan: Plan, outcomes: Mapping[str, Outcomes], pairs: Mapping[str, Sequence[Pair]]) -> None:
    needed_tasks = min_tasks_to_settle(len(pairs)) if plan.looks else MIN_TASKS
    for name, candidate_pairs in pairs.items():
        tasks = len({pair.base.task_id for pair in candidate_pairs})
        if tasks >= needed_tasks:
            continue
        sides = (plan.lineup.base.name, name)
        reasons = [f"{side}: {reason} ({count})" for side in sides for reason, count in outcomes[side].reasons.items()]
        reason_text = f"; {'; '.join(reasons[:2])}" if reasons else ""
        raise ConfigError(
            f"compare: {name!r} and the base have {len(candidate_pairs)} pairs with the reward {plan.metric!r}, "
            f"of {tasks} tasks; {needed_tasks} tasks are needed: check compare.metric and the app{reason_text}"
        )


# -- variants -------------------------------------------------------------------------------------------------


def _variant(
    config: BridgeConfig, team: Team, outcomes: Outcomes, plan: Plan, nodes: Mapping[str, Mapping[str, NodeSide]]
) -> Variant:
    values, tasks = outcomes.values(plan.metric)
    binary = all(value in (0.0, 1.0) for value in values)
    graph = team.deployment.graph.app
    return Variant(
        name=team.name,
        adapters=dict(team.adapters),
        choice=team.choice,
        hosted=_hosted_nodes(config, team, [node for node, sides in nodes.items() if team.name in sides]),
        prompts=dict(team.prompts),
        max_tokens=team.max_tokens,
        graph=None if graph == config.graph.app else graph,
        model="its own models" if team.deployment.own_models else team.deployment.pinned_model,
        episodes=len(values) + outcomes.unscored,
        unscored=outcomes.unscored,
        reasons=dict(outcomes.reasons),
        measured=outcomes.measured(),
        score=interval_to_estimate(mean_interval(values, clusters=tasks)) if values else None,
        pass_at=_at_k(config, pass_at_k, values, tasks=tasks) if binary else {},
        avg_at=_at_k(config, avg_at_k, values, tasks=tasks),
    )


def _hosted_nodes(config: BridgeConfig, team: Team, acting_nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes that are not served to the team: those that are configured, then others that made calls in its runs.

    None where it runs another graph, with other nodes.
    """
    graph = team.deployment.graph
    if graph.app != config.graph.app:
        return ()
    served_nodes = () if team.deployment.own_models else (*graph.nodes, *graph.frozen)
    nodes = dict.fromkeys((*config.graph.nodes, *config.graph.frozen, *acting_nodes))
    return tuple(node for node in nodes if node not in served_nodes)


def _at_k(
    config: BridgeConfig, estimator: Callable[..., MeanInterval], values: Sequence[float], tasks: Sequence[str]
) -> dict[int, Estimate]:
    """k -> pass@k or avg@k over the tasks with at least k scored samples; a k that no task reaches is absent."""
    estimates, samples = {}, Counter(tasks)
    for k in sorted(set(config.compare.pass_at)):
        rows = [(value, task) for value, task in zip(values, tasks, strict=True) if samples[task] >= k]
        if rows:
            estimates[k] = interval_to_estimate(estimator([value for value, _ in rows], [task for _, task in rows], k))
    return estimates


# -- the rest --------------------------------------------------------------------------------------------------


def _stopping(plan: Plan, progress: Progress) -> Stopping | None:
    if not plan.looks:
        return None
    return Stopping(
        planned=len(plan.tasks),
        used=progress.used,
        looks=tuple(progress.looks),
        spent=sum(interim_result.spent for interim_result in progress.interim_results.values()),
        early=progress.used < len(plan.tasks),
    )


def _tournament(
    config: BridgeConfig,
    plan: Plan,
    store: TraceStore,
    *,
    outcomes: Mapping[str, Outcomes],
    print_line: Callable[[str], None],
) -> Tournament | None:
    lineup = plan.lineup
    if not lineup.seatings:
        return None
    trainer = config.train.trainer
    games = [
        game
        for seating in lineup.seatings
        for trajectory in _read_trajectories(store, outcomes[seating.team.name].ended)  # whoever won, by any metric
        if (game := trajectory_to_game(trajectory, seating, trainer)) is not None
    ]
    planned = len(lineup.seatings) * len(plan.tasks) * plan.samples
    tournament = games_to_tournament(games, lineup, trainer, left_out=planned - len(games), seed=plan.seed)
    if tournament is None:
        print_line(
            "no ratings: two variants have no game in which both sides have a payoff; check train.trainer.shaping"
        )
    return tournament


def _mixed(plan: Plan, outcomes: Mapping[str, Outcomes]) -> Mixed | None:
    lineup = plan.lineup
    if lineup.mixed_candidate is None:
        return None
    scores: dict[frozenset[str], dict[str, list[float]]] = {}
    for swapped, team in lineup.mixed_teams.items():
        by_task = scores.setdefault(swapped, {})
        for outcome in outcomes[team.name].scored.values():
            by_task.setdefault(outcome.task_id, []).append(outcome.values[plan.metric])
    names = {swapped: team.name for swapped, team in lineup.mixed_teams.items()}
    return scores_to_mixed(lineup.mixed_candidate, scores, lineup.mixed_nodes, seed=plan.seed, names=names)
