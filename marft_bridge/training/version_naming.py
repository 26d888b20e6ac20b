"""A training run's stored rewards -> `best.json`, the part `best` of a metrics line, and what is said of them.

Invariants: what a version is worth is read off episodes that it sampled itself, by the adapters that each episode
recorded; whether rounds have stopped stands in metrics.jsonl, so a resumed run decides as the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marft_bridge.runs.named_version import NamedVersion, VersionEvidence
from marft_bridge.runs.run_folder import COLLECT, EVALUATE, TRAIN
from marft_bridge.training.best_version import (
    PATIENCE,
    ScoredEpisode,
    episodes_to_evidence,
    evidence_to_best,
    evidence_to_stop,
)
from trace_store.store import TraceStore

# Rewards of what was collected, of this run's rounds, and of the evaluation; by what the episode's adapters were. Ids
# of episodes are random: in their order the sums would differ in their last bits from one run to the next.
_REWARDS = """
SELECT e.run_id, e.adapters::VARCHAR, e.task_id, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE (e.run_id = $1 AND e.split = 'train' OR e.run_id = $2 AND e.round <= $3 OR e.run_id = $4)
  AND r.name = $5 AND isfinite(r.value) AND e.fork_action IS NULL
ORDER BY e.run_id, e.round, e.task_id, e.sample, e.started_ns
"""


def store_to_named(store: TraceStore, nodes: Sequence[str], rounds: int, reward: str) -> NamedVersion:
    """The version to name after so many rounds, of versions 1 to `rounds` + 1; the newest where nothing is known."""
    newest = rounds + 1
    episodes = []
    for run_id, adapters, task, value in store.sql(_REWARDS, (COLLECT, TRAIN, rounds, EVALUATE, reward)):
        version = 0 if run_id == COLLECT else _team_version(json.loads(adapters), nodes)
        if version is not None and version <= newest:
            episodes.append(ScoredEpisode(version, task, value))
    evidence = episodes_to_evidence(episodes, newest)
    version = evidence_to_best(evidence).version if evidence else newest
    return NamedVersion(version=version, newest=newest, reward=reward, evidence=evidence)


def _team_version(adapters: Mapping[str, int], nodes: Sequence[str]) -> int | None:
    """The version of all trained nodes; None where they differ."""
    versions = {adapters.get(node) for node in nodes}
    return versions.pop() if len(versions) == 1 else None


def named_to_metrics(
    named: NamedVersion, lines: Sequence[Mapping[str, Any]], rounds: int, stop_early: bool
) -> dict[str, Any]:
    """The part `best` of a round's line.

    Args:
        lines: those of the rounds before it. After a stop that more rounds were asked for, `PATIENCE` rounds are
            played before the next.
        rounds: how many are asked for.
    """
    row, number = named.named_evidence, named.newest - 1
    stops = [line["round"] for line in lines if (line.get("best") or {}).get("stopped")]
    may_stop = stop_early and number < rounds and (not stops or number - stops[-1] >= PATIENCE)
    return {
        "version": named.version,
        "estimate": None if row is None else row.estimate,
        "low": None if row is None else row.low,
        "high": None if row is None else row.high,
        "above_newest": None if row is None else row.above_newest,
        "stopped": may_stop and evidence_to_stop(named.evidence),
        "rounds_asked": rounds,
    }


def lines_to_stop_text(lines: Sequence[Mapping[str, Any]], rounds: int) -> str | None:
    """One line where the last round stopped the run, and no more rounds are asked for than then; else None."""
    best = (lines[-1].get("best") if lines else None) or {}
    if not best.get("stopped") or rounds > best["rounds_asked"]:
        return None
    number = lines[-1]["round"]
    return (
        f"rounds end after {number} of {best['rounds_asked']}, since they no longer pay: version {best['version']} is "
        f"better than version {number + 1} with {best['above_newest']:.0%}; more than {best['rounds_asked']} rounds "
        "with --resume go on, and train.stop_early = false never stops"
    )


def named_to_text(named: NamedVersion) -> str:
    """One line: which version is named, and why."""
    title = f"best version: {named.version} of {named.newest}, which compare and export take"
    row = named.named_evidence
    if row is None:
        return f"{title}; no round tells them apart"
    newest = named.evidence[-1]
    if row.version == newest.version:
        return f"{title}: {named.reward} {_estimate(row)}, and no earlier one is credibly better"
    return (
        f"{title}: {named.reward} {_estimate(row)}, better than the newest with {row.above_newest:.0%}, "
        f"whose {named.reward} is {_estimate(newest)}"
    )


def _estimate(row: VersionEvidence) -> str:
    sampled = f"over {row.episodes} episodes" if row.episodes else "not played"
    return f"{row.estimate:.3f} (95% {row.low:.3f} to {row.high:.3f}, {sampled})"
