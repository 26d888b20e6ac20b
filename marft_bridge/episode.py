"""What an episode is, before and after its run: who asked for it, and how it ended -> attributes of its root span.

Terminated and truncated are kept apart from here on: a run that was cut short has no return that is known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langgraph.errors import GraphRecursionError

from trace_store import conventions as names
from trace_store.records import SpanRow

CANCELLED = "cancelled"  # the reason of an episode that whoever ran it gave up, as a command does on Ctrl-C


SUBJECT_METADATA = "marft_subject_id"  # key of a graph run's metadata: whose data the run holds


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
    lineage: Mapping[str, str] = field(default_factory=dict)  # of the served model; tools are seen while it runs
    recorder: object | None = None  # whose episode this is, where several recorders see the run; None: anyone's
    cut_short: str | None = None  # set by whoever cancels the run: why, making it truncated instead of failed
    episode_id: str | None = None  # set by the recorder when the run starts
    spans: list[SpanRow] | None = None  # given by whoever wants the spans, as they are written, besides the journal


current_episode: ContextVar[EpisodeContext | None] = ContextVar("marft_episode", default=None)


def episode_to_attributes(episode: EpisodeContext, workflow: str) -> dict[str, Any]:
    """What the root span says at its start; None where nothing is known."""
    return {
        names.OPERATION: names.INVOKE_WORKFLOW,
        names.WORKFLOW_NAME: workflow,
        names.RUN_ID: episode.run_id,
        names.TASK_ID: episode.task_id,
        names.TASK: json.dumps(episode.task),
        names.SPLIT: episode.split,
        names.SAMPLE: episode.sample,
        names.ROUND: episode.round,
        names.VARIANT: episode.variant,
        names.SEED: episode.seed,
        names.ADAPTERS: json.dumps(dict(episode.adapters)),
        names.TAGS: json.dumps(dict(episode.tags)),
        names.SUBJECT_ID: episode.subject_id,
        names.PARENT_EPISODE: episode.parent_episode,
    }


def end_to_outcome(
    episode: EpisodeContext, error: BaseException | None, interrupted: bool = False
) -> tuple[str, str | None]:
    """How a run ended, and why: (terminated | truncated | failed, reason). A resume is an episode of its own."""
    if episode.cut_short is not None:
        return "truncated", episode.cut_short
    if error is None:
        return ("truncated", "interrupted") if interrupted else ("terminated", None)
    if isinstance(error, GeneratorExit):
        return "truncated", "the stream was closed before its end"
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return "truncated", CANCELLED
    if isinstance(error, GraphRecursionError):
        return "truncated", "recursion limit reached"
    return "failed", f"{type(error).__name__}: {error}"
