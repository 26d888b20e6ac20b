"""A recorded run, and its thread as it was made again -> how the run is started there once more.

Invariant: input, config and context are the recorded ones; only the ids of checkpoints and interrupts are those of the
thread that was made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from marft_bridge.common.errors import GraphError
from marft_bridge.replay.private_memory import STORE_OF_RUN, PrivateMemory
from marft_bridge.replay.recorded_run import RecordedRun
from trace_store import conventions as c

INTERRUPTS = "__interrupt__"
"""A key of a run's result: what it waits for. The ids of interrupts are LangGraph's hashes of UUIDs."""


@dataclass(slots=True)
class ReplayedThread:
    """What the runs of one thread share."""

    memory: PrivateMemory = field(default_factory=PrivateMemory)  # in the place of the app's checkpointers and stores
    checkpoints: dict[str, str] = field(default_factory=dict)  # recorded id -> the replay's
    interrupts: dict[str, str] = field(default_factory=dict)  # recorded id -> the replay's
    begins_at: str | None = None  # the recorded checkpoint that it was copied up to; None: it was replayed

    def copy(self) -> ReplayedThread:
        """The same thread once more, to go on with on its own."""
        return replace(
            self, memory=self.memory.copy(), checkpoints=dict(self.checkpoints), interrupts=dict(self.interrupts)
        )


def add_memory(graph: Any, run: RecordedRun, memory: PrivateMemory) -> Any:
    """The graph; a copy with what it was run with and does not hold itself: LangGraph's server gives both.

    Without a checkpointer it gets that of `memory`, without a store one that is used inside `private_memory` only.
    """
    given: dict[str, Any] = {}
    if run.trajectory.episode.begins is not None and not isinstance(vars(graph)["checkpointer"], BaseCheckpointSaver):
        given["checkpointer"] = memory.saver
    if run.had_store and vars(graph).get("store") is None:
        given["store"] = STORE_OF_RUN
    return graph.copy(given) if given else graph


def run_to_arguments(
    run: RecordedRun, thread: ReplayedThread, given: Mapping[str, Any] | None, classes: Mapping[str, type]
) -> dict[str, Any]:
    """The keyword arguments of the run: as they are recorded, else as they are given.

    Args:
        classes: of the app's, that its context may have objects of; see `graph_to_classes`.

    Raises:
        GraphError: it begins at a checkpoint of a run that was not replayed before it, or after an edit of its thread.
    """
    episode, facts = run.trajectory.episode, run.run_config
    if run.root.attributes.get(c.EDITED) and thread.begins_at is None:
        raise GraphError(
            f"replay: episode {episode.episode_id} begins after its thread was edited by update_state, and what was"
            " written there is not recorded"
        )
    given_config = dict((given or {}).get("config") or {})
    configurable = {**given_config.get("configurable", {}), **(facts.get("configurable") or {})}
    configurable["thread_id"] = episode.thread_id or "replay"
    if episode.forked:
        if episode.from_checkpoint not in thread.checkpoints:
            raise GraphError(
                f"replay: episode {episode.episode_id} begins at a checkpoint of a run that was not replayed before it"
            )
        configurable["checkpoint_id"] = thread.checkpoints[episode.from_checkpoint]
    config: dict[str, Any] = {**given_config, "configurable": configurable}
    config["tags"] = [tag for tag, value in episode.tags.items() if value == ""]
    config["metadata"] = dict(episode.metadata)
    for name in ("recursion_limit", "max_concurrency"):
        if name in facts:
            config[name] = facts[name]
    arguments: dict[str, Any] = {"config": config}
    arguments |= {name: facts[name] for name in ("interrupt_before", "interrupt_after") if name in facts}
    context = run.context(classes)[0] if "context" in facts else (given or {}).get("context")
    if context is not None:
        arguments["context"] = context
    return arguments


def streamed_keys(graph: Any, run: RecordedRun) -> dict[str, Any]:
    """`output_keys` of a run that was streamed: `stream` ends with the whole state, `invoke` with the graph's output.

    Empty where the two are one, or nothing that was recorded tells them apart.
    """
    output = run.output
    if not isinstance(output, Mapping) or isinstance(graph.output_channels, str):
        return {}
    recorded_keys = output.keys() - {INTERRUPTS}
    is_more = not recorded_keys <= set(graph.output_channels)
    return {"output_keys": graph.stream_channels_asis} if is_more and recorded_keys <= graph.channels.keys() else {}


def translate_interrupts(value: Any, thread: ReplayedThread) -> Any:
    """A resume that names interrupts by their ids -> the same by the ids of the replay."""
    resume = getattr(value, "resume", None)
    if isinstance(resume, dict) and resume and all(key in thread.interrupts for key in resume):
        return replace(value, resume={thread.interrupts[key]: answer for key, answer in resume.items()})
    return value
