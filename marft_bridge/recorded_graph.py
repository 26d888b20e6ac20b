"""A compiled LangGraph graph -> the same graph, recorded.

`wrap` changes no result and needs no edit of the app: it adds one callback handler to each call. Undo it by
using the original graph again. For spans from a whole process see the recorder in `record`.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from marft_bridge.record import Recorder
from marft_bridge.task_writes import write_hook
from trace_store.journal import Journal


class RecordedGraph:
    """Stands in for a compiled graph: what is not a way to run it is the graph's own."""

    def __init__(self, app: Any, recorder: Recorder) -> None:
        self._app = app
        self.recorder = recorder
        write_hook.attach()
        self._detach = weakref.finalize(self, write_hook.detach)  # once: by unwrap, or when nobody holds this any more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    def unwrap(self) -> Any:
        """The original graph; this wrapper records no dependencies any more."""
        self._detach()
        return self._app

    def _recorded(self, config: RunnableConfig | None) -> RunnableConfig:
        return merge_configs(config, {"callbacks": [self.recorder]})

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the graph's own."""
        return self._app.invoke(input, self._recorded(config), **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As the graph's own."""
        return await self._app.ainvoke(input, self._recorded(config), **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """As the graph's own."""
        return iter(self._app.stream(input, self._recorded(config), **kwargs))

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """As the graph's own."""
        async for part in self._app.astream(input, self._recorded(config), **kwargs):
            yield part

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """As the graph's own; every input is an episode of its own."""
        return list(self._app.batch(inputs, self._recorded_each(config, len(inputs)), **kwargs))

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """As the graph's own; every input is an episode of its own."""
        return list(await self._app.abatch(inputs, self._recorded_each(config, len(inputs)), **kwargs))

    def _recorded_each(self, config: Any, count: int) -> list[RunnableConfig]:
        configs: Sequence[Any] = config if isinstance(config, Sequence) else [config] * count
        return [self._recorded(one) for one in configs]


def wrap(app: Any, store: str | Path | Recorder) -> RecordedGraph:
    """Records every run of `app`.

    Args:
        app: a compiled LangGraph graph.
        store: path of the DuckDB store (its journal is written beside it, and taken in when the store is next
            opened and told to `take_in`), or a recorder that several graphs share.

    Wrapping a graph that is wrapped already gives it back unchanged, with the recorder that it has.
    """
    if isinstance(app, RecordedGraph):
        return app
    if not isinstance(store, Recorder):
        path = Path(store)
        store = Recorder(Journal(path.with_name(path.name + ".journal")))
    return RecordedGraph(app, store)
