"""The trace store: a DuckDB file of spans and of the Flex-MG trajectories that they assemble to.

    recorder -> Journal -> segment files -> TraceStore.take_in -> spans, episodes, actions, edges -> Trajectory

`TraceStore` and `Journal` are loaded on first use: those who only need the records do not pay for DuckDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trace_store.journal import Journal
    from trace_store.store import TraceStore

__all__ = ["Journal", "TraceStore"]


def __getattr__(name: str) -> Any:
    if name == "TraceStore":
        from trace_store.store import TraceStore

        return TraceStore
    if name == "Journal":
        from trace_store.journal import Journal

        return Journal
    raise AttributeError(f"module 'trace_store' has no attribute {name!r}")
