"""The metrics of an update -> the lines that say what it did, and the figures beside the progress bar.

Invariant: they only say what is in the metrics and the episodes; a figure that is not known is a dash, not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.config.bridge import TrainOptions
from marft_bridge.runs.imitation_lines import updates_to_imitation_lines
from marft_bridge.training.hosted_answers import hosted_metrics_to_text
from marft_bridge.training.planned_forks import Wave
from marft_bridge.training.scoring_teacher import round_to_distilled_text
from marft_bridge.training.teacher_labels import teacher_metrics_to_text
from marft_bridge.training.tree_metrics import tree_metrics_to_text
from trace_store.records import Trajectory
from trainers.marft import DISTIL_ON_POLICY


@dataclass(frozen=True, slots=True)
class LearnedRound:
    """A round whose update is done."""

    number: int
    whole_runs: Sequence[Trajectory]
    waves: Sequence[Wave]  # of its forks
    metrics: Mapping[str, Any]


def offline_to_lines(line: dict[str, Any], stored_count: int) -> Iterator[str]:
    """What the offline phase did; `line`: its metrics, of so many stored episodes."""
    explained_variance, replay = line["warm_up"]["critic"]["explained_variance"], line["replay"]
    yield (
        f"offline: critic explains {_figure(explained_variance)} of the variance; "
        f"{replay['mode']} replay of {replay['used']} actions from {stored_count} stored episodes"
    )
    yield from updates_to_imitation_lines([line])
    for warning in replay.get("warnings", ()):
        yield f"offline: {warning}"


def round_to_lines(learned: LearnedRound, options: TrainOptions) -> Iterator[str]:
    """What a round earned, and what its update did."""
    number, metrics = learned.number, learned.metrics
    rewards = _rewards(learned, options)
    measured = [seconds for seconds in metrics["seconds"].values() if seconds is not None]
    nodes = "  ".join(
        f"{node}@{number + 1}: KL {_figure(agent.get('approx_kl'))} clip {_figure(agent.get('clipfrac'))}"
        for node, agent in metrics["agents"].items()
    )
    yield (
        f"round {number}/{options.rounds}: reward {_figure(_mean(rewards))} over {len(rewards)} episodes, "
        f"{_percent(metrics['wasted_rollouts'])} wasted; "
        f"{nodes}; update {sum(measured):.0f} s; rounds left: {options.rounds - number}"
    )
    if "teacher" in metrics:
        yield f"round {number}: {teacher_metrics_to_text(metrics['teacher'])}"
    if metrics.get("mode") == DISTIL_ON_POLICY:
        yield f"round {number}: {round_to_distilled_text(metrics)}"
    if options.progress is not None and (progress := metrics.get("progress")) is not None:
        yield (
            f"round {number - 1} changed {options.progress.metric} by {progress['change']:+.3f}, from "
            f"{progress['before']:.3f} to {progress['after']:.3f} on {progress['tasks']} measured tasks"
        )
    if "hosted" in metrics:
        yield f"round {number}: {hosted_metrics_to_text(metrics['hosted'])}"
    if "trees" in metrics:
        yield f"round {number}: {tree_metrics_to_text(metrics['trees'], learned.waves)}"


def round_to_figures(learned: LearnedRound, options: TrainOptions) -> str:
    """What stands beside the progress bar of the rounds."""
    kls = [agent["approx_kl"] for agent in learned.metrics["agents"].values() if agent.get("approx_kl") is not None]
    return f"reward {_figure(_mean(_rewards(learned, options)))}  KL {_figure(max(kls, default=None))}"


def _rewards(learned: LearnedRound, options: TrainOptions) -> list[float]:
    return [value for run in learned.whole_runs if (value := run.team_reward(options.trainer.reward)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
