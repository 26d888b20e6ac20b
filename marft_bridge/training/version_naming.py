"""A training run's stored rewards -> `best.json`, the part `best` of a metrics line, and what is said of them.

Invariants: what a version is worth is read off episodes that it sampled itself, by the adapters that each episode
recorded, with those that came to no result; whether rounds have stopped stands in metrics.jsonl, so a resumed run
decides as the one before it.
"""

from __future__ import annotations

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
from marft_bridge.training.run_results import store_to_results
from trace_store.store import TraceStore


def store_to_named(store: TraceStore, nodes: Sequence[str], rounds: int, reward: str) -> NamedVersion:
    """The version to name after so many rounds, of versions 1 to `rounds` + 1; the newest where nothing is known."""
    newest = rounds + 1
    episodes = []
    for run_id, last_round in ((COLLECT, None), (EVALUATE, None), (TRAIN, rounds)):
        results = store_to_results(store, run_id, reward, last_round=last_round)
        if all(result.value is None for result in results):  # it has no such reward, so nothing says how it went
            continue
        for result in results:
            if result.value is None and result.ended:  # a judge that gave no answer says nothing of the version
                continue
            version = 0 if run_id == COLLECT else _team_version(result.adapters, nodes)
            if version is not None and version <= newest:
                episodes.append(ScoredEpisode(version, result.task_id, result.value))
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
        reason = f"{named.reward} {_estimate(row)}, and no earlier one is credibly better"
    else:
        reason = (
            f"{named.reward} {_estimate(row)}, better than the newest with {row.above_newest:.0%}, "
            f"whose {named.reward} is {_estimate(newest)}"
        )
    return f"{title}: {reason}{_without_result(named.evidence, row)}"


def _without_result(evidence: Sequence[VersionEvidence], named_row: VersionEvidence) -> str:
    """What of the evidence are runs that failed, were cut short or have no reward; empty where none are."""
    lost, played = sum(row.without_result for row in evidence), sum(row.episodes for row in evidence)
    if not lost:
        return ""
    own_share = f" ({named_row.without_result / named_row.episodes:.0%} of its own)" if named_row.episodes else ""
    return f"; {lost / played:.0%} of the rounds' runs{own_share} came to no result, and count as the worst reward"


def _estimate(row: VersionEvidence) -> str:
    sampled = f"over {row.episodes} episodes" if row.episodes else "not played"
    return f"{row.estimate:.3f} (95% {row.low:.3f} to {row.high:.3f}, {sampled})"
