"""The checkpointers, stores and caches that graphs hold -> empty ones in memory that stand in for them during a block.

It holds for every graph: the app's, its subgraphs, and those that a node or a tool calls. Invariants: while a block
runs, no graph of the process reads or writes one of the app's; what one graph keeps, another one that holds the same
object finds.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langgraph.cache.base import BaseCache
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

_HELD = ("checkpointer", "store", "cache")  # attributes of a graph


class _Saver(InMemorySaver):
    """A checkpointer that stands in for one of the app's."""


class _Store(InMemoryStore):
    """As `_Saver`."""


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
                return self._stores.setdefault(id(held), (held, _Store()))[1]
            if isinstance(held, BaseCache):
                return self._caches.setdefault(id(held), (held, _Cache()))[1]
        return held

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
    copied = _Store()
    for item in store.search((), limit=sys.maxsize):
        copied.put(item.namespace, item.key, copy.deepcopy(item.value))
    return copied


# -- in place of what graphs hold -----------------------------------------------------------------------------------

_memory_of_run: ContextVar[PrivateMemory | None] = ContextVar("marft_private_memory", default=None)
_blocks: list[PrivateMemory] = []
_lock = threading.Lock()


@contextmanager
def private_memory(memory: PrivateMemory) -> Iterator[None]:
    """While the block runs, graphs use what stands in for what they hold: in the memory of their run, else in `memory`.

    Blocks nest; the innermost counts.
    """
    with _lock:
        if not _blocks:
            for name in _HELD:
                setattr(Pregel, name, _to_property(name))
        _blocks.append(memory)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(memory)
            if not _blocks:
                for name in _HELD:
                    setattr(Pregel, name, None)  # LangGraph's default, which each graph's own value hides


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

    def put(graph: Any, value: Any) -> None:
        vars(graph)[name] = value

    return property(get, put)
