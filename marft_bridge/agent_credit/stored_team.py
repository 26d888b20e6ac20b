"""A run of the store -> the scored training episodes of one team, on the models and the sampling of today.

Invariant: what ran on several versions, on another base model or with another sampling is refused, since nothing could
be told from a difference to it.
"""

from __future__ import annotations

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.records import Episode, model_part
from trace_store.store import TraceStore


def read_stored_team(
    store: TraceStore, config: BridgeConfig, registry: AdapterRegistry, run_of: str, metric: str, *, remedy: str
) -> list[Episode]:
    """The episodes of a run that have the reward `metric`. Raises ConfigError, with what to do instead."""
    runs = {run.run_id: run for run in store.runs()}
    if run_of not in runs:
        raise ConfigError(
            f"credit --run-of: there is no run {run_of!r} in {store.path}; there are: {', '.join(runs) or 'none'}"
        )
    scored_ids = {
        row[0]
        for row in store.sql(
            "SELECT DISTINCT r.episode_id FROM rewards r JOIN episodes e USING (episode_id)"
            " WHERE e.run_id = ? AND r.scope = 'episode' AND r.name = ?",
            (run_of, metric),
        )
    }
    episodes = [e for e in store.episodes(run_id=run_of, split="train") if e.episode_id in scored_ids]
    if not episodes:
        raise ConfigError(f"credit --run-of: run {run_of!r} has no training episode with the reward {metric!r}")
    if any(e.variant is not None or e.adapters != episodes[0].adapters for e in episodes):
        raise ConfigError(f"credit --run-of: the episodes of run {run_of!r} are of several teams or versions; {remedy}")
    sampling = config.sampling.model_dump(mode="json")
    nodes_on_other_base = [
        node
        for node in (*config.graph.nodes, *config.graph.frozen)
        if {model_part(e.lineage, "base", node) for e in episodes} - {None, registry.base_of(node)}
    ]
    if nodes_on_other_base or runs[run_of].config.get("sampling", sampling) != sampling:
        deviation = "on another base model" if nodes_on_other_base else "with another [sampling]"
        raise ConfigError(
            f"credit --run-of: run {run_of!r} ran {deviation}, so nothing could be told from a difference to it;"
            f" {remedy}"
        )
    return episodes
