"""The stored episodes of one comparison -> its report: every number that pages show and gates read.

Invariants: one variant's episodes are read at a time, and what is kept of them holds no tokens; an episode without the
deciding metric is counted with the reason, and takes its pair out. How the episodes were run is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from marft_bridge.comparison.changes import pairs_to_changes
from marft_bridge.comparison.cohorts import pairs_to_cohorts
from marft_bridge.comparison.contrasts import FEWEST_TASKS, deciding_contrasts, pairs_to_power, secondary_contrasts
from marft_bridge.comparison.episodes import Plan, Progress
from marft_bridge.comparison.mixed import scores_to_mixed
from marft_bridge.comparison.nodes import Kl, episodes_to_nodes
from marft_bridge.comparison.outcomes import (
    Outcomes,
    Pair,
    in_order,
    pairs_of,
    shared_metrics,
    stored_outcomes,
)
from marft_bridge.comparison.records import (
    Estimate,
    LearningPoint,
    Mixed,
    Report,
    Setup,
    Stopping,
    Variant,
)
from marft_bridge.comparison.stopping import fewest_tasks
from marft_bridge.comparison.variants import Team
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.statistics import (
    MeanInterval,
    avg_at_k,
    mean_interval,
    pass_at_k,
)
from trace_store.records import Trajectory
from trace_store.store import TraceStore


@dataclass(frozen=True, slots=True)
class Around:
    """What a report says besides the figures of its own episodes."""

    versions: Mapping[str, str] = field(default_factory=dict)
    minutes: float | None = None
    tool_surface: Mapping[str, str] = field(default_factory=dict)
    tool_surface_differs: bool = False
    learning_curve: tuple[LearningPoint, ...] = ()
    kl: Kl = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None


def episodes_to_report(
    config: BridgeConfig, plan: Plan, progress: Progress, store: TraceStore, around: Around
) -> Report:
    """What was run into the report.

    Raises:
        ConfigError: a candidate and the base have too few pairs, or pairs of too few tasks.
    """
    lineup, metric = plan.lineup, plan.metric
    outcomes = {team.name: _outcomes(plan, progress, store, team) for team in lineup.all}
    base = outcomes[lineup.base.name]
    pairs = {team.name: list(in_order(pairs_of(base, outcomes[team.name]))) for team in lineup.candidates}
    _refuse_few_pairs(plan, outcomes, pairs)
    for name, those in pairs.items():
        if lost := progress.tasks[name] * plan.samples - len(those):
            around.say(f"{name}: {lost} pairs left out, because one side has no {metric!r}")
    _say_unranked(config, pairs, around)
    visible = lineup.teams
    now = datetime.now(UTC)
    return Report(
        metric=metric,
        base=lineup.base.name,
        variants=tuple(_variant(config, team, outcomes[team.name], plan) for team in visible),
        contrasts=deciding_contrasts(
            pairs,
            metric,
            plan.seed,
            config.compare.ranks,
            standings=progress.standings if plan.looks else None,
            looks=len(progress.looks),
        ),
        secondary=tuple(
            row
            for name, those in pairs.items()
            for row in secondary_contrasts(name, those, metric, plan.seed, config.compare.ranks)
        ),
        power=tuple(pairs_to_power(name, those, metric, len(pairs)) for name, those in pairs.items()),
        stopping=_stopping(plan, progress),
        nodes=episodes_to_nodes(
            {team.name: _scored(store, plan.run_id, team.name, outcomes[team.name]) for team in visible},
            list(dict.fromkeys(node for team in visible for node in _nodes(team))),
            around.kl,
            store.spans,
        ),
        mixed=_mixed(plan, outcomes),
        cohorts=pairs_to_cohorts(
            ((name, pair.base.trajectory, pair.other.trajectory) for name, those in pairs.items() for pair in those),
            config.compare.cohorts,
            metric,
            plan.seed,
            around.say,
        ),
        tasks=tuple(
            changed
            for name, those in pairs.items()
            if (changed := pairs_to_changes(store, those, metric, lineup.base.name, name)) is not None
        ),
        learning_curve=around.learning_curve,
        setup=Setup(
            model=config.model.path,
            graph=config.graph.app,
            versions=dict(around.versions),
            date=now,
            seed=plan.seed,
            tasks=len(plan.tasks),
            samples_per_task=plan.samples,
            temperature=plan.temperature or config.sampling.temperature,
            minutes=around.minutes,
            tool_surface=dict(around.tool_surface),
            tool_surface_differs=around.tool_surface_differs,
        ),
        created=now,
    )


def _outcomes(plan: Plan, progress: Progress, store: TraceStore, team: Team) -> Outcomes:
    ran = plan.task_ids()[: progress.tasks.get(team.name, 0)]
    expected = [(task, sample) for task in ran for sample in range(plan.samples)]
    return stored_outcomes(store, plan.run_id, team.name, plan.metric, expected)


def _scored(store: TraceStore, run_id: str, variant: str, outcomes: Outcomes) -> Iterator[Trajectory]:
    """The episodes that count, whole, one after the other."""
    wanted = {outcome.episode_id for outcome in outcomes.scored.values()}
    found = store.trajectories(run_ids=[run_id], variant=variant)
    yield from (trajectory for trajectory in found if trajectory.episode.episode_id in wanted)


def _nodes(team: Team) -> tuple[str, ...]:
    return (*team.on.graph.nodes, *team.on.graph.frozen)


def _say_unranked(config: BridgeConfig, pairs: Mapping[str, Sequence[Pair]], around: Around) -> None:
    """Names that were asked for, and of which there is nothing to rank."""
    if "ranks" not in config.compare.model_fields_set:
        return
    for name, those in pairs.items():
        known = {config.compare.metric, *shared_metrics(those, config.compare.metric)}
        for unknown in (ranked for ranked in config.compare.ranks if ranked not in known):
            around.say(f"{name}: compare.ranks names {unknown!r}, which both sides of no pair have")


def _refuse_few_pairs(plan: Plan, outcomes: Mapping[str, Outcomes], pairs: Mapping[str, Sequence[Pair]]) -> None:
    needed = fewest_tasks(len(pairs)) if plan.looks else FEWEST_TASKS
    for name, those in pairs.items():
        tasks = len({pair.base.task_id for pair in those})
        if tasks >= needed:
            continue
        sides = (plan.lineup.base.name, name)
        reasons = [f"{side}: {reason} ({count})" for side in sides for reason, count in outcomes[side].reasons.items()]
        why = f"; {'; '.join(reasons[:2])}" if reasons else ""
        raise ConfigError(
            f"compare: {name!r} and the base have {len(those)} pairs with the reward {plan.metric!r}, of {tasks} tasks;"
            f" {needed} tasks are needed: check compare.metric and the app{why}"
        )


# -- variants -------------------------------------------------------------------------------------------------


def _variant(config: BridgeConfig, team: Team, outcomes: Outcomes, plan: Plan) -> Variant:
    values, tasks = outcomes.values(plan.metric)
    binary = all(value in (0.0, 1.0) for value in values)
    graph = team.on.graph.app
    return Variant(
        name=team.name,
        adapters=dict(team.adapters),
        graph=None if graph == config.graph.app else graph,
        model="its own models" if team.on.own_models else team.on.model,
        episodes=len(values) + outcomes.unscored,
        unscored=outcomes.unscored,
        reasons=dict(outcomes.reasons),
        score=_estimate(mean_interval(values, clusters=tasks)) if values else None,
        pass_at=_at_k(config, pass_at_k, values, tasks) if binary else {},
        avg_at=_at_k(config, avg_at_k, values, tasks),
    )


def _at_k(
    config: BridgeConfig, function: Callable[..., MeanInterval], values: Sequence[float], tasks: Sequence[str]
) -> dict[int, Estimate]:
    """Over the tasks that have k samples with a score."""
    found, samples = {}, Counter(tasks)
    for k in sorted(set(config.compare.pass_at)):
        enough = [(value, task) for value, task in zip(values, tasks, strict=True) if samples[task] >= k]
        if enough:
            found[k] = _estimate(function([value for value, _ in enough], [task for _, task in enough], k))
    return found


def _estimate(interval: MeanInterval) -> Estimate:
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high)


# -- the rest --------------------------------------------------------------------------------------------------


def _stopping(plan: Plan, progress: Progress) -> Stopping | None:
    if not plan.looks:
        return None
    return Stopping(
        planned=len(plan.tasks),
        used=progress.used,
        looks=tuple(progress.looks),
        spent=sum(standing.spent for standing in progress.standings.values()),
        early=progress.used < len(plan.tasks),
    )


def _mixed(plan: Plan, outcomes: Mapping[str, Outcomes]) -> Mixed | None:
    lineup = plan.lineup
    if lineup.mixed_candidate is None:
        return None
    scores: dict[frozenset[str], dict[str, list[float]]] = {}
    for on, team in lineup.mixed.items():
        by_task = scores.setdefault(on, {})
        for outcome in outcomes[team.name].scored.values():
            by_task.setdefault(outcome.task_id, []).append(outcome.values[plan.metric])
    names = {on: team.name for on, team in lineup.mixed.items()}
    return scores_to_mixed(lineup.mixed_candidate, scores, lineup.mixed_nodes, plan.seed, names)
