"""A stored episode, the call to leave it at, and what is changed there -> the requests for its forks.

Invariant: what cannot be repeated as it was is refused in one line before anything runs; nothing else of the parent is
changed: its task, split and versions are those of its forks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.forks.given_tools import ToolChoice
from marft_bridge.forks.recorded_prefix import RecordedPrefix, run_to_prefix
from marft_bridge.forks.thread_start import is_started_by_app
from marft_bridge.model_calls.scripted_answer import FIXED_TEXT
from marft_bridge.recording.recorder import LIVE
from marft_bridge.replay.recorded_run import RecordedCall, RecordedRun, spans_to_run
from marft_bridge.rollouts.episode_plan import EpisodeRequest, ForkPoint, derived_seed
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.records import Episode, SpanRow, model_part


@dataclass(frozen=True, slots=True)
class ForkChange:
    """What is done otherwise from the forked call on."""

    version: int | None = None  # of the forked node; None: the parent's
    text: str | None = None  # that answers the forked call; None: a model does

    @property
    def variant(self) -> str | None:
        """The variant of the forks, which tells them from others at the same call; None where nothing is changed."""
        if self.text is not None:
            return f"say {hashlib.sha256(self.text.encode()).hexdigest()[:8]}"
        return None if self.version is None else f"with {self.version}"


def spans_to_parent(spans: Sequence[SpanRow]) -> RecordedRun:
    """An episode that a command started, to fork. Raises GraphError where it cannot be repeated, in the name of `fork`.

    For one that its app started see `thread_start.load_forked`.
    """
    try:
        run = spans_to_run(spans)
    except GraphError as error:
        raise GraphError(f"fork: {str(error).removeprefix('replay: ')}") from None
    if is_started_by_app(run):
        raise GraphError(
            f"fork: episode {run.episode_id} was started by its app, not by a command; `marft-bridge fork` can fork it"
        )
    return run


def text_to_call(run: RecordedRun, at: str) -> RecordedCall:
    """`NODE` or `NODE:k` -> the k-th call of that node, from 1. Raises ConfigError."""
    node, _, digits = at.rpartition(":")
    number: int | None = int(digits) if node and digits.isdecimal() else None
    if number is None or any(call.node == at for call in run.calls):
        node, number = at, None
    calls = [call for call in run.calls if call.node == node]
    if not calls:
        nodes = ", ".join(dict.fromkeys(call.node for call in run.calls))
        raise ConfigError(f"fork --at: episode {run.episode_id} has no call of {node!r}; it has calls of: {nodes}")
    if number is None and len(calls) > 1:
        raise ConfigError(f"fork --at: {node} made {len(calls)} calls; say which, as --at {node}:1")
    chosen_calls = [call for call in calls if call.number == (1 if number is None else number)]
    if not chosen_calls:
        raise ConfigError(f"fork --at: there is no call {number} of {node}; it made {len(calls)}")
    return chosen_calls[0]


def is_on_own_models(run: RecordedRun) -> bool:
    """Whether every node of an app's own run called the model that the app was written with, so that its forks do."""
    return run.trajectory.episode.split == LIVE and not run.trajectory.episode.adapters


def refuse_other_models(run: RecordedRun, config: BridgeConfig, registry: AdapterRegistry) -> None:
    """Raises ConfigError where the episode's calls were not answered by the models of this configuration."""
    episode = run.trajectory.episode
    nodes = (*config.graph.nodes, *config.graph.frozen)
    refusal = f"fork: episode {run.episode_id}"
    if missing_nodes := [node for node in config.graph.nodes if node not in episode.adapters]:
        raise ConfigError(f"{refusal} does not say at which version {missing_nodes[0]} ran; fork one of `collect`")
    if fixed_nodes := [action.node for action in run.trajectory.actions if action.model == FIXED_TEXT]:
        raise ConfigError(f"{refusal} has a call of {fixed_nodes[0]} that a fixed text answered; fork one without")
    for node in nodes:
        if model_part(episode.lineage, "base", node) not in (None, registry.base_of(node)):
            raise ConfigError(f"{refusal} ran {node} on another base model; fork it with the configuration of its run")


def plan_forks(
    run: RecordedRun, prefix: RecordedPrefix, change: ForkChange, *, run_id: str, samples: int, seed: int
) -> list[EpisodeRequest]:
    """One request for each sample of one fork point."""
    episode: Episode = run.trajectory.episode
    adapters = dict(episode.adapters)
    if change.version is not None:
        adapters[prefix.forked.node] = change.version
    fork = ForkPoint(run.episode_id, prefix.forked.action_id)
    return [
        EpisodeRequest(
            run_id=run_id,
            task={"id": episode.task_id, **episode.task},
            split=episode.split,
            sample=sample,
            seed=derived_seed(seed, None, f"{fork.episode_id}/{fork.action_id}", sample=sample),
            adapters=adapters,
            variant=change.variant,
            fork=fork,
            beginning=prefix,
        )
        for sample in range(samples)
    ]


def text_to_prefix(run: RecordedRun, at: str, text: str | None, tools: ToolChoice = "recorded") -> RecordedPrefix:
    """What a fork of a run at `NODE[:k]` gives again. Raises ConfigError, GraphError."""
    return run_to_prefix(run, text_to_call(run, at), text, tools=tools)
