"""Episodes -> the adapter versions that learned from them, by their own update or through the version before.

Invariant: a version is left out only when it is known not to have learned from any of the episodes. For a version of
which nothing was recorded, because it was made before that was, the rounds decide: version 1 learned from what was
collected, version r + 1 from round r. Weights are not looked into.
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

    Episodes that are not in the store, but in an export that it learned from, are known by what was recorded.
    """
    ids = list(episode_ids)
    among = "episode_id IN (SELECT unnest(?::VARCHAR[]))"
    recorded = set(store.sql(f"SELECT DISTINCT node, version FROM adapter_episodes WHERE {among}", (ids,)))
    known = set(store.sql("SELECT DISTINCT node, version FROM adapter_episodes"))
    derived = {
        int(version)
        for (version,) in store.sql(
            "SELECT DISTINCT CASE run_id WHEN 'collect' THEN 1 ELSE \"round\" + 1 END FROM episodes"
            f" WHERE {among} AND (run_id = 'collect' OR run_id = 'train' AND \"round\" IS NOT NULL)",
            (ids,),
        )
    }
    published = {(row.node, row.version): row for row in store.adapters()}
    found: dict[tuple[str, int], Basis] = {}
    for key in sorted(recorded | published.keys()):
        node, version = key
        row = published.get(key)
        parent = None if row is None else row.parent
        if key in recorded:
            found[key] = "recorded"
        elif key not in known and version in derived:
            found[key] = "derived"
        elif parent is not None and (node, parent) in found:
            found[key] = "inherited"
    return [
        TrainedAdapter(node, version, published[node, version].path if (node, version) in published else None, basis)
        for (node, version), basis in found.items()
    ]
