"""`marft-bridge compare`: held-out tasks through the graph before and after -> a paired verdict and a report.

Both sides run the same tasks with the same seeds, interleaved on one server, so that what the machine does to one
side it does to the other. Invariant: an episode that has no reward on one side (it failed, or was cut short) takes
its pair out of the comparison, and the report says how many pairs that were.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from marft_bridge.config import BridgeConfig
from marft_bridge.engine import Engine, begin_run, check_versions, load_app, model_directory, still_to_run
from marft_bridge.errors import ConfigError
from marft_bridge.learning_curve import run_to_learning_curve
from marft_bridge.progress import Reporter
from marft_bridge.report import (
    NodeOutput,
    NodePair,
    NodeSide,
    Report,
    Setup,
    Side,
    TaskChange,
    changed_tasks,
    comparison_fields,
    report_table,
    secondary_metrics,
    write_report,
)
from marft_bridge.rollouts import EpisodeRequest, plan_episodes
from marft_bridge.run_folder import RunFolder, bridge_version
from marft_bridge.run_store import WAIT_IN_RUN_S, keeping_what_runs, store_up_to_date
from marft_bridge.statistics import PairedResult, minimum_detectable_effect, paired_difference
from trace_store.records import Action, Trajectory
from trace_store.store import TraceStore

BEFORE, AFTER = "before", "after"
Pair = tuple[Trajectory, Trajectory]


def compare(config: BridgeConfig, reporter: Reporter, resume: bool, versions: tuple[int, int | None]) -> Report:
    """Runs both sides on the held-out tasks, prints the table and writes report.json and report.html.

    Args:
        versions: of every node, before and after; None means each node's newest.

    Raises:
        BridgeError, StoreError: see the messages.
    """
    folder = RunFolder(config.run_folder)
    folder.require_store("compare")
    app = load_app(config)
    model_dir = model_directory(config, reporter.say)
    tasks = sorted(app.heldout_tasks, key=lambda task: str(task["id"]))[: config.compare.tasks]
    if config.compare.tasks is not None and len(tasks) < config.compare.tasks:
        raise ConfigError(
            f"compare.tasks asks for {config.compare.tasks} held-out tasks, but graph.heldout leaves {len(tasks)}"
        )
    began = time.monotonic()
    with folder.held_by("compare"):
        with store_up_to_date(folder, reporter) as store:
            run_id = _run_id(store, resume)
        with Engine(config, folder, app, model_dir, reporter) as engine:
            sides = {name: _versions(engine, at) for name, at in zip((BEFORE, AFTER), versions, strict=True)}
            for side in sides.values():
                check_versions(engine, side)
            with store_up_to_date(folder, reporter) as store:
                _refuse_other_sides(store, run_id, sides)
                begin_run(store, run_id, "compare", config, folder)
                requests = still_to_run(store, _plan(config, run_id, tasks, sides))
            newest = {node: [side[node] for side in sides.values()] for node in config.graph.nodes}
            engine.retire_all_but(newest)
            for side in sides.values():
                engine.publish(side)
            if requests:
                with keeping_what_runs(folder, reporter, "compare"):
                    engine.run(requests, "compare", config.compare.metric)
        minutes = (time.monotonic() - began) / 60
        with (
            keeping_what_runs(folder, reporter, "compare"),
            store_up_to_date(folder, reporter, WAIT_IN_RUN_S) as store,
        ):
            report = episodes_to_report(config, folder, store, run_id, sides, minutes, reporter)
    json_path, html_path = write_report(report, folder.path)
    reporter.console.print(report_table(report))
    reporter.say(f"report: {json_path} and {html_path}")
    return report


def _run_id(store: TraceStore, resume: bool) -> str:
    earlier = sum(1 for run in store.runs() if run.command == "compare")
    if resume and not earlier:
        raise ConfigError(f"compare: nothing to resume in {store.path.parent}; leave out --resume")
    return f"compare-{earlier if resume else earlier + 1}"


def _versions(engine: Engine, at: int | None) -> dict[str, int]:
    if at is not None:
        return dict.fromkeys(engine.config.graph.nodes, at)
    newest = {node: engine.registry.latest(node) for node in engine.config.graph.nodes}
    missing = [node for node, row in newest.items() if row is None or row.version == 0]
    if missing:
        raise ConfigError(f"compare: node {missing[0]!r} has no trained adapter; run `marft-bridge train` first")
    return {node: row.version for node, row in newest.items() if row is not None}


def _refuse_other_sides(store: TraceStore, run_id: str, sides: Mapping[str, Mapping[str, int]]) -> None:
    """A resumed comparison must not mix episodes of other versions into its sides."""
    for name, side in sides.items():
        for episode in store.episodes(run_id=run_id, variant=name):
            if episode.adapters != side:
                raise ConfigError(
                    f"compare --resume: {run_id} began with {name} = {episode.adapters}, now it would be {dict(side)}; "
                    "start a new comparison without --resume"
                )


def _plan(
    config: BridgeConfig, run_id: str, tasks: Sequence[dict[str, Any]], sides: Mapping[str, Mapping[str, int]]
) -> list[EpisodeRequest]:
    """Both sides of each task and sample next to each other, with one seed."""
    samples = config.compare.samples_per_task
    planned = plan_episodes(
        tasks,
        len(tasks) * samples,
        samples,
        seed=config.seed,
        run_id=run_id,
        split="heldout",
        adapters={},
        temperature=config.compare.temperature,
    )
    return [replace(request, variant=name, adapters=side) for request in planned for name, side in sides.items()]


# -- figures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    """One number per episode, by name."""

    name: str
    of: Callable[[Trajectory], float | None]


def _tokens(episode: Trajectory) -> float | None:
    counts = [len(action.sampled_ids) for action in episode.actions if action.sampled_ids is not None]
    return float(sum(counts)) if len(counts) == len(episode.actions) else None


_COSTS = (
    _Measured("tokens", _tokens),
    _Measured("steps", lambda episode: float(len(episode.actions))),
    _Measured("seconds", lambda episode: (episode.episode.ended_ns - episode.episode.started_ns) / 1e9),
)


def _paired(store: TraceStore, run_id: str, metric: str) -> tuple[list[Pair], int]:
    """Pairs of episodes that both have the metric, by task and sample, and how many pairs lack it."""
    by_side: dict[str, dict[tuple[str, int], Trajectory]] = {}
    for name in (BEFORE, AFTER):
        scored = (e for e in store.trajectories(run_ids=[run_id], variant=name) if e.team_reward(metric) is not None)
        by_side[name] = {(e.episode.task_id, e.episode.sample): e for e in scored}
    keys = sorted(by_side[BEFORE].keys() & by_side[AFTER].keys())
    every = by_side[BEFORE].keys() | by_side[AFTER].keys()
    return [(by_side[BEFORE][key], by_side[AFTER][key]) for key in keys], len(every) - len(keys)


def _difference(config: BridgeConfig, pairs: Sequence[Pair], measured: _Measured) -> PairedResult | None:
    values = [(measured.of(a), measured.of(b), a.episode.task_id) for a, b in pairs]
    known = [(a, b, task) for a, b, task in values if a is not None and b is not None]
    if not known:
        return None
    before, after, tasks = zip(*known, strict=True)
    return paired_difference(measured.name, before, after, clusters=tasks, seed=config.seed)


def episodes_to_report(
    config: BridgeConfig,
    folder: RunFolder,
    store: TraceStore,
    run_id: str,
    sides: Mapping[str, Mapping[str, int]],
    minutes: float,
    reporter: Reporter,
) -> Report:
    """One comparison's stored episodes into its report.

    Args:
        sides: adapter versions by side.
        minutes: how long the comparison took.

    Raises:
        ConfigError: fewer than two pairs have the deciding metric.
    """
    metric = config.compare.metric
    pairs, left_out = _paired(store, run_id, metric)
    if len(pairs) < 2:
        raise ConfigError(
            f"compare: only {len(pairs)} pairs have the reward {metric!r}; check compare.metric and the app"
        )
    if left_out:
        reporter.say(f"{left_out} pairs left out: one side has no {metric!r}")
    main = _difference(config, pairs, _reward(metric))
    assert main is not None  # every pair has the metric
    names = {r.name for a, _ in pairs for r in a.rewards if r.scope == "episode"} - {metric}
    others = [_difference(config, pairs, m) for m in (*map(_reward, sorted(names)), *_COSTS)]
    differences = [_reward(metric).of(b) - _reward(metric).of(a) for a, b in pairs]  # type: ignore[operator]
    clusters = [a.episode.task_id for a, _ in pairs]
    now = datetime.now(UTC)
    return Report(
        **comparison_fields(main),
        a=Side(name=BEFORE, adapters=dict(sides[BEFORE])),
        b=Side(name=AFTER, adapters=dict(sides[AFTER])),
        seed=config.seed,
        metrics=secondary_metrics([result for result in others if result is not None]),
        nodes={node: _node_pair(node, pairs) for node in config.graph.nodes},
        learning_curve=run_to_learning_curve(store, folder.metrics, config.train.trainer.reward),
        tasks=changed_tasks(_task_changes(pairs, metric)),
        setup=Setup(
            model=config.model.path,
            graph=config.graph.app,
            versions={"marft-bridge": bridge_version()},
            date=now,
            samples_per_task=config.compare.samples_per_task,
            temperature=config.compare.temperature or config.sampling.temperature,
            minutes=minutes,
        ),
        minimum_detectable_effect=minimum_detectable_effect(differences, clusters=clusters),
        created=now,
    )


def _reward(name: str) -> _Measured:
    return _Measured(name, lambda episode: episode.team_reward(name))


def _node_pair(node: str, pairs: Sequence[Pair]) -> NodePair:
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    return NodePair(a=_node_side(node, before), b=_node_side(node, after))


def _node_side(node: str, episodes: Sequence[Trajectory]) -> NodeSide | None:
    calls = [action for episode in episodes for action in episode.actions if action.node == node]
    if not calls:
        return None
    lengths = [len(call.sampled_ids) for call in calls if call.sampled_ids is not None]
    reasons = Counter(call.finish_reason for call in calls if call.finish_reason is not None)
    logprobs = [value for call in calls for value in call.logprobs or ()]
    return NodeSide(
        tokens_mean=sum(lengths) / len(lengths) if lengths else None,
        stop_share=(reasons["stop"] + reasons["tool_calls"]) / reasons.total() if reasons else None,
        calls_per_episode=len(calls) / len(episodes),
        logprob_mean=sum(logprobs) / len(logprobs) if logprobs else None,
    )


def _task_changes(pairs: Sequence[Pair], metric: str) -> list[TaskChange]:
    by_task: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_task.setdefault(pair[0].episode.task_id, []).append(pair)
    changes = []
    for task_id, of_task in by_task.items():
        task = of_task[0][0].episode.task
        reward_a, reward_b = (
            sum(pair[side].team_reward(metric) or 0.0 for pair in of_task) / len(of_task) for side in (0, 1)
        )
        changes.append(
            TaskChange(
                task_id=task_id,
                text=str(task.get("question") or task),
                expected=str(task["answer"]) if "answer" in task else None,
                reward_a=reward_a,
                reward_b=reward_b,
                outputs_a=_outputs(of_task[0][0].actions),
                outputs_b=_outputs(of_task[0][1].actions),
            )
        )
    return changes


def _outputs(actions: Sequence[Action]) -> tuple[NodeOutput, ...]:
    return tuple(NodeOutput(node=action.node, text=action.completion or "") for action in actions)
