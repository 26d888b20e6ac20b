"""An episode's request and its outcome -> attributes of its root span.

Invariant: terminated and truncated are kept apart, because the return of a run that was cut short is not known, but
where `graph.limit_reward` says what it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langgraph.errors import GraphRecursionError

from marft_bridge.common.agent_names import Actors
from marft_bridge.common.run_limits import RECURSION_LIMIT
from trace_store import conventions as names
from trace_store.records import SpanRow

CANCELLED = "cancelled"  # the reason of an episode that its caller cancelled, as a command does on Ctrl-C


SUBJECT_METADATA = "marft_subject_id"  # metadata key of a graph run: the person whose data the run holds


@dataclass(slots=True)
class EpisodeContext:
    """What the recorder writes on the root span of the run that starts in this context."""

    run_id: str
    task_id: str
    split: str
    sample: int = 0
    task: Mapping[str, Any] = field(default_factory=dict)
    round: int | None = None
    variant: str | None = None
    seed: int | None = None
    adapters: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    subject_id: str | None = None
    parent_episode: str | None = None
    fork_action: str | None = None  # the parent's, where it is a fork
    recorded_checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint of a thread that was made again -> the recorded one, which the run is said to begin at."""
    lineage: Mapping[str, str] = field(default_factory=dict)  # of the served model; tools are added while it runs
    recorder: object | None = None  # the one whose episode this is, where several record the run; None: any
    cut_short: str | None = None  # reason, set by the code that cancels the run: truncated instead of failed
    episode_id: str | None = None  # set by the recorder when the run starts
    actors: Actors = field(default_factory=Actors)  # who acts in its tasks, noted by the recorder
    judge_end: Callable[[BaseException | None], Exception | None] = lambda _: None
    """By the error that the run ended with: another one that it failed with, which the graph may have caught."""
    before_cut: Callable[[str], None] = lambda _: None
    """Called with the reason before the end of a run that was cut short is written: what it writes is there first."""
    spans: list[SpanRow] | None = None  # a list that the written spans are appended to, besides the journal


current_episode: ContextVar[EpisodeContext | None] = ContextVar("marft_episode", default=None)


def episode_to_attributes(episode: EpisodeContext, workflow: str) -> dict[str, Any]:
    """Attributes of the root span at its start; None where a value is not known."""
    return {
        names.OPERATION: names.INVOKE_WORKFLOW,
        names.AGENT_NAME: workflow,
        names.SCHEMA: names.SCHEMA_URL,
        names.RUN_ID: episode.run_id,
        names.TASK_ID: episode.task_id,
        names.TASK: _mapping_to_text(episode.task),
        names.SPLIT: episode.split,
        names.SAMPLE: episode.sample,
        names.ROUND: episode.round,
        names.VARIANT: episode.variant,
        names.SEED: episode.seed,
        names.ADAPTERS: _mapping_to_text(episode.adapters),
        names.TAGS: _mapping_to_text(episode.tags),
        names.SUBJECT_ID: episode.subject_id,
        names.PARENT_EPISODE: episode.parent_episode,
        names.FORK_ACTION: episode.fork_action,
    }


def _mapping_to_text(mapping: Mapping[str, Any]) -> str:
    return json.dumps(dict(mapping)) if mapping else "{}"


def end_to_outcome(
    episode: EpisodeContext, error: BaseException | None, interrupted: bool = False
) -> tuple[str, str | None]:
    """(outcome, reason) of a run; the outcome is terminated, truncated or failed. A resume is an episode of its own."""
    if episode.cut_short is not None:
        return "truncated", episode.cut_short
    if error is None:
        return ("truncated", "interrupted") if interrupted else ("terminated", None)
    if isinstance(error, GeneratorExit):
        return "truncated", "the stream was closed before its end"
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return "truncated", CANCELLED
    if isinstance(error, GraphRecursionError):
        return "truncated", RECURSION_LIMIT
    return "failed", f"{type(error).__name__}: {error}"
