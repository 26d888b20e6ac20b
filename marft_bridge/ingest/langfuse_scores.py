"""Scores of Langfuse -> rewards of the episodes that its traces became.

A score of a trace is the team's, one of an observation that is an LLM call is of that step, one of a node is of that
agent. Invariant: a score that cannot be placed is counted with the reason; storing scores again adds nothing.
"""

from __future__ import annotations

from dataclasses import replace

from marft_bridge.ingest.langfuse_export import LangfuseRecords, Score
from marft_bridge.ingest.report import IngestReport
from trace_store import conventions as c
from trace_store.records import Reward
from trace_store.store import TraceStore


def put_scores(store: TraceStore, records: LangfuseRecords, report: IngestReport) -> None:
    """Stores the scores of traces that are episodes, those of earlier ingests too, and counts them in the report."""
    if records.unusable_scores:
        report.rejected["a score that is no number, or of no trace"] += records.unusable_scores
    if not records.scores:
        return
    trace_ids = list({score.trace_id for score in records.scores})
    operations = {
        (trace_id, span_id): (operation, node)
        for trace_id, span_id, operation, node in store.sql(
            "SELECT trace_id, span_id, operation, attributes->>? FROM spans WHERE trace_id = ANY(?)"
            " AND trace_id IN (SELECT episode_id FROM episodes)",
            [f'$."{c.NODE}"', trace_ids],
        )
    }
    episode_ids = {trace_id for trace_id, _ in operations}
    rewards: list[Reward] = []
    for score in records.scores:
        reward = _score_to_reward(score, operations, episode_ids)
        if isinstance(reward, str):
            report.rejected[reward] += 1
        else:
            rewards.append(reward)
    report.rewards = store.put_rewards(rewards)


def _score_to_reward(
    score: Score, operations: dict[tuple[str, str], tuple[str, str | None]], episode_ids: set[str]
) -> Reward | str:
    """The reward, or the reason why there is none."""
    if score.trace_id not in episode_ids:
        return "a score of a trace that is no episode"
    reward = Reward(
        episode_id=score.trace_id,
        name=score.name,
        value=score.value,
        source=f"langfuse:{score.source}",
        created_ns=score.created_ns,
    )
    if score.span_id is None:
        return reward
    operation, node = operations.get((score.trace_id, score.span_id), ("", None))
    if operation == c.INVOKE_WORKFLOW:
        return reward
    if operation == c.CHAT:
        return replace(reward, scope="step", action_id=score.span_id)
    if operation == c.INVOKE_AGENT:
        return replace(reward, scope="agent", node=node)
    return "a score of an observation that is neither a call, a node nor the run"
