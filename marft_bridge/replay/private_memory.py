"""The checkpointers, stores and caches that graphs hold -> empty ones in memory that stand in for them during a block.

It holds for every graph: the app's, its subgraphs, and those that a node or a tool calls. Invariants: while a block
runs, no graph of the process reads or writes one of the app's; what one graph keeps, another one that holds the same
object finds.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

from langchain_core.embeddings import Embeddings
from langgraph.cache.base import BaseCache
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore, Op, Result, SearchOp
from langgraph.store.memory import InMemoryStore

from marft_bridge.common.errors import GraphError

_HELD = ("checkpointer", "store", "cache")  # attributes of a graph


class _Saver(InMemorySaver):
    """A checkpointer that stands in for one of the app's."""


class _Store(InMemoryStore):
    """As `_Saver`. It searches by meaning as `held` does: with the embeddings of the app's.

    Where `held` does not say how it searches, a search by meaning is refused: another result would look like the app's.
    """

    def __init__(self, held: BaseStore) -> None:
        config: Any = getattr(held, "index_config", None)
        embeddings = getattr(held, "embeddings", None) or (config or {}).get("embed")
        has_index = config is not None and embeddings is not None
        index: Any = {**config, "embed": embeddings} if has_index else None
        super().__init__(index=index)
        # LangGraph's stores have the attribute, and ignore what is searched for where it is None.
        self._unknown_index_of = None if has_index or hasattr(held, "index_config") else type(held).__name__

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Refuses what it cannot search for, in the name of `replay`; else as LangGraph's. Raises GraphError."""
        known_ops = self._refuse_unknown(ops)
        if self.embeddings is None:
            return super().batch(known_ops)
        bound = copy.copy(self)  # the same tables
        bound.embeddings = _BoundEmbeddings(self.embeddings)
        return InMemoryStore.batch(bound, known_ops)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`."""
        return await super().abatch(self._refuse_unknown(ops))

    def _refuse_unknown(self, ops: Iterable[Op]) -> list[Op]:
        known_ops = list(ops)
        if self._unknown_index_of and any(isinstance(op, SearchOp) and op.query for op in known_ops):
            raise GraphError(
                f"replay: the app searches its {self._unknown_index_of} by meaning, and that store does not say how: it"
                " has no index_config, so that what it would find in memory is not known"
            )
        return known_ops


class _BoundEmbeddings(Embeddings):
    """The app's embeddings, called in the context that this was made in: the store embeds queries in other threads,
    where nobody would see that they connect."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings, self._context = embeddings, copy_context()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._context.copy().run(self._embeddings.embed_documents, texts)

    def embed_query(self, text: str) -> list[float]:
        return self._context.copy().run(self._embeddings.embed_query, text)


class StoreOfRun(BaseStore):
    """Stands for the store that a run was given from outside, as LangGraph's server does: nothing is known of it."""

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Never called: what is used is what stands in for it."""
        raise NotImplementedError

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`."""
        raise NotImplementedError


STORE_OF_RUN = StoreOfRun()
"""What a graph holds that has no store of its own, and was run with one. One object, since runs share the store."""


class _Cache(InMemoryCache[Any]):
    """As `_Saver`."""


_StandIns = dict[int, tuple[Any, Any]]  # id of an object of the app's -> that object, and what stands in for it


class PrivateMemory:
    """What stands in for each checkpointer, store and cache. Safe for any number of threads.

    Args:
        stores: another memory, whose stores this one shares.
    """

    def __init__(self, stores: PrivateMemory | None = None) -> None:
        self.saver: Any = _Saver()  # for a graph that has no checkpointer of its own, and was run with one
        self._savers: _StandIns = {}
        self._stores: _StandIns = {} if stores is None else stores._stores
        self._caches: _StandIns = {}
        self._lock = threading.Lock()

    def stand_in(self, held: Any) -> Any:
        """What a graph uses that holds `held`, an object of the app's; anything that keeps nothing stays."""
        if isinstance(held, (_Saver, _Store, _Cache)):
            return held
        with self._lock:
            if isinstance(held, BaseCheckpointSaver):
                return self._savers.setdefault(id(held), (held, _Saver(serde=held.serde)))[1]
            if isinstance(held, BaseStore):
                return self._stores.setdefault(id(held), (held, _Store(held)))[1]
            if isinstance(held, BaseCache):
                return self._caches.setdefault(id(held), (held, _Cache()))[1]
        return held

    @property
    def held(self) -> list[Any]:
        """The checkpointers and stores of the app's that something was asked to stand in for."""
        with self._lock:
            return [held for held, _ in (*self._savers.values(), *self._stores.values())]

    def clear_caches(self) -> None:
        """Empties the caches: what an earlier run left there is not known to have been there."""
        with self._lock:
            self._caches.clear()

    def copy(self) -> PrivateMemory:
        """A memory with the same content, which shares nothing with this one."""
        memory = PrivateMemory()
        memory.restore(self)
        return memory

    def restore(self, memory: PrivateMemory) -> None:
        """Takes over a copy of the content of another memory; those that share stores with this one see it too."""
        self.saver = _copy_saver(memory.saver)
        self._savers = {key: (held, _copy_saver(saver)) for key, (held, saver) in memory._savers.items()}
        stores = {key: (held, _copy_store(store)) for key, (held, store) in memory._stores.items()}
        self._stores.clear()
        self._stores.update(stores)


def _copy_saver(saver: _Saver) -> _Saver:
    """Checkpoints are written as bytes and never changed, so that copying the tables is enough."""
    copied = _Saver(serde=saver.serde)
    for thread_id, namespaces in saver.storage.items():
        for namespace, checkpoints in namespaces.items():
            copied.storage[thread_id][namespace] = dict(checkpoints)
    for key, writes in saver.writes.items():
        copied.writes[key] = dict(writes)
    copied.blobs.update(saver.blobs)
    return copied


def _copy_store(store: _Store) -> _Store:
    """With what was embedded, which is embedded once; the app's embeddings are the same object."""
    shared = (store.index_config, store.embeddings)
    return copy.deepcopy(store, {id(config): config for config in shared})


# -- in place of what graphs hold -----------------------------------------------------------------------------------

_memory_of_run: ContextVar[PrivateMemory | None] = ContextVar("marft_private_memory", default=None)
_blocks: list[PrivateMemory] = []
_defaults: dict[str, Any] = {}  # what LangGraph's class has
_lock = threading.Lock()


@contextmanager
def private_memory(memory: PrivateMemory) -> Iterator[None]:
    """While the block runs, graphs use what stands in for what they hold: in the memory of their run, else in `memory`.

    Blocks nest; the innermost counts.
    """
    with _lock:
        if not _blocks:
            for name in _HELD:
                _defaults[name] = getattr(Pregel, name, None)
                setattr(Pregel, name, _to_property(name))
        _blocks.append(memory)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(memory)
            if not _blocks:
                for name in _HELD:
                    setattr(Pregel, name, _defaults[name])  # which each graph's own value hides again


@contextmanager
def memory_of_run(memory: PrivateMemory) -> Iterator[None]:
    """What is called in the block, and in its context, uses this memory; for runs beside each other."""
    reset_token = _memory_of_run.set(memory)
    try:
        yield
    finally:
        _memory_of_run.reset(reset_token)


def _to_property(name: str) -> property:
    """Hides the graph's own value, which stays where it is."""

    def get(graph: Any) -> Any:
        held = vars(graph).get(name)
        try:
            memory = _memory_of_run.get() or _blocks[-1]
        except IndexError:  # the last block has ended just now, in another thread
            return held
        return memory.stand_in(held)

    def keep(graph: Any, value: Any) -> None:
        vars(graph)[name] = value

    return property(get, keep)
