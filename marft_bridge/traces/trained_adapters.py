"""Episodes -> the adapter versions that learned from them, by their own update or through the version before.

Invariant: a version is left out only when it is known not to have learned from any of the episodes. For a version made
before the store recorded which episodes an update used, the rounds decide: version 1 learned from the collected
episodes, version r + 1 from round r. Weights are not read.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trace_store.store import TraceStore

Basis = Literal["recorded", "derived", "inherited"]


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """One adapter version that learned from some of the episodes.

    `basis`: `recorded` for its own update; `derived` for its round, as nothing was recorded; `inherited` from an
    earlier version, whose weights it began with.
    """

    node: str
    version: int
    path: str | None  # None for a version that was trained, but not published before its run was interrupted
    basis: Basis


def episodes_to_adapters(store: TraceStore, episode_ids: Sequence[str]) -> list[TrainedAdapter]:
    """The adapters of a store that learned from these episodes, by node and version.

    For episodes that are in an export only, and not in this store, there are only the recorded updates.
    """
    ids = list(episode_ids)
    condition = "episode_id IN (SELECT unnest(?::VARCHAR[]))"
    learned_versions = set(store.sql(f"SELECT DISTINCT node, version FROM adapter_episodes WHERE {condition}", (ids,)))
    recorded_versions = set(store.sql("SELECT DISTINCT node, version FROM adapter_episodes"))
    derived_numbers = {
        int(version)
        for (version,) in store.sql(
            "SELECT DISTINCT CASE run_id WHEN 'collect' THEN 1 ELSE \"round\" + 1 END FROM episodes"
            f" WHERE {condition} AND (run_id = 'collect' OR run_id = 'train' AND \"round\" IS NOT NULL)",
            (ids,),
        )
    }
    published_rows = {(row.node, row.version): row for row in store.adapters()}
    basis_by_version: dict[tuple[str, int], Basis] = {}
    for key in sorted(learned_versions | published_rows.keys()):
        node, version = key
        row = published_rows.get(key)
        parent = None if row is None else row.parent
        if key in learned_versions:
            basis_by_version[key] = "recorded"
        elif key not in recorded_versions and version in derived_numbers:
            basis_by_version[key] = "derived"
        elif parent is not None and (node, parent) in basis_by_version:
            basis_by_version[key] = "inherited"
    return [
        TrainedAdapter(
            node,
            version,
            published_rows[node, version].path if (node, version) in published_rows else None,
            basis=basis,
        )
        for (node, version), basis in basis_by_version.items()
    ]
