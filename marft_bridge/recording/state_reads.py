"""The state that a node is given -> which of its keys the node read, and whether it may have read all of them.

LangGraph hands every state key to every node, so only watching the reads tells what a node depended on. A dict
state is handed on as an equal dict that notes its reads; an object state (pydantic, dataclass) stays what it is,
and its class is patched to note the reads of watched instances. Invariant: the node sees equal values by every way of
access, and a read is never missed silently: where the state is read as a whole (`dict(state)`, `**state`, `repr`, a
copy), or no read was seen at all (code in C may bypass us), `Reads.is_inexact` is True.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

# Attributes that give the whole object state, or all that code outside its class needs to read the whole.
_WHOLE_STATE_ATTRIBUTES = frozenset(
    [
        "__dict__",
        "__iter__",
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
        "__copy__",
        "__deepcopy__",
        "__pydantic_fields_set__",
        "__repr_args__",
        "model_fields_set",
        "model_dump",
        "model_dump_json",
        "model_copy",
        "dict",
        "json",
        "copy",
    ]
)


class Reads:
    """The keys that one attempt at a node has read of its state. Notes nothing before `begin` and after `end`."""

    __slots__ = ("_is_noting", "keys", "whole_state_read")

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.whole_state_read = False  # the state was read as a whole at least once
        self._is_noting = False

    @property
    def is_inexact(self) -> bool:
        """Whether any key may have been read, not only those in `keys`."""
        return self.whole_state_read or not self.keys

    def begin(self) -> None:
        """Starts a new attempt: forgets what an earlier one read."""
        self.keys.clear()
        self.whole_state_read = False
        self._is_noting = True

    def end(self) -> None:
        """Stops noting: later reads of the state are not the node's."""
        self._is_noting = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notes no reads inside the block: they are not the node's."""
        was_noting, self._is_noting = self._is_noting, False
        try:
            yield
        finally:
            self._is_noting = was_noting

    def note(self, key: Any) -> None:
        """Notes that the value of one key was read, or its presence tested."""
        # Once the state was read as a whole, a read of one key may be part of copying all of them.
        if self._is_noting and not self.whole_state_read and isinstance(key, str):
            self.keys.add(key)

    def note_whole_state(self) -> None:
        """Notes that the state was read as a whole."""
        if self._is_noting:
            self.whole_state_read = True


class WatchedState(dict[str, Any]):
    """A dict that notes its reads. Copies, merges and pickles of it are plain dicts."""

    __slots__ = ("reads",)

    def __init__(self, values: Mapping[str, Any], reads: Reads) -> None:
        super().__init__(values)
        self.reads = reads

    def plain_copy(self) -> dict[str, Any]:
        """The same values as a plain dict, without noting a read."""
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}

    def __getitem__(self, key: str) -> Any:
        self.reads.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As dict's; the key is noted."""
        self.reads.note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.reads.note(key)
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """As dict's; the key is noted."""
        self.reads.note(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As dict's; the key is noted."""
        self.reads.note(key)
        return super().setdefault(key, default)

    def popitem(self) -> tuple[str, Any]:
        """As dict's; counts as a read of the whole, because the dict chooses the key."""
        self.reads.note_whole_state()
        return super().popitem()

    # Overriding __iter__ also keeps dict(state) and {**state} off CPython's fast path, which would not call us.
    def __iter__(self) -> Iterator[str]:
        self.reads.note_whole_state()
        return super().__iter__()

    def __reversed__(self) -> Iterator[str]:
        self.reads.note_whole_state()
        return super().__reversed__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # typeshed: a class without a name
        """As dict's; counts as a read of the whole, because all values may be read by these keys."""
        self.reads.note_whole_state()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As dict's."""
        self.reads.note_whole_state()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As dict's."""
        self.reads.note_whole_state()
        return super().items()

    def __eq__(self, other: object) -> bool:
        self.reads.note_whole_state()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self.reads.note_whole_state()
        return super().__ne__(other)

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        self.reads.note_whole_state()
        return self.plain_copy() | other

    def __ror__(self, other: Any) -> Any:
        self.reads.note_whole_state()
        return other | self.plain_copy()

    def __repr__(self) -> str:
        self.reads.note_whole_state()
        return repr(self.plain_copy())

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        self.reads.note_whole_state()
        return self.plain_copy()

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.reads.note_whole_state()
        return (dict, (self.plain_copy(),))


class _WatchedClasses:
    """Watched objects, and their classes, whose attribute access is patched while any instance is watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[Any, Reads]] = {}  # id -> the object, kept alive so that its id stays its own
        self._undo: dict[type, tuple[int, Callable[[], None]]] = {}

    def watch(self, state: Any, reads: Reads) -> None:
        """Notes the attributes of `state` that are read from now on."""
        cls = type(state)
        with self._lock:
            instance_count, undo = self._undo.get(cls) or (0, self._patch_class(cls))
            self._undo[cls] = (instance_count + 1, undo)
            self._reads[id(state)] = (state, reads)

    def release(self, state: Any) -> None:
        """Stops noting; with the last instance the class gets its own attribute access back."""
        with self._lock:
            if self._reads.pop(id(state), None) is None:
                return
            instance_count, undo = self._undo.pop(type(state))
            if instance_count > 1:
                self._undo[type(state)] = (instance_count - 1, undo)
            else:
                undo()

    def reads_of(self, state: Any) -> Reads | None:
        """The reads of this very object; None when it is not watched."""
        watched = self._reads.get(id(state))
        return watched[1] if watched is not None and watched[0] is state else None

    def _patch_class(self, cls: type) -> Callable[[], None]:
        own_method = cls.__dict__.get("__getattribute__")
        inherited_method: Any = cls.__getattribute__
        fields, watched_objects = frozenset(field_names(cls)), self._reads

        @functools.wraps(inherited_method)
        def getattribute(state: Any, name: str) -> Any:
            if name in fields or name in _WHOLE_STATE_ATTRIBUTES:
                entry = watched_objects.get(id(state))
                if entry is not None:
                    if name in fields:
                        entry[1].note(name)
                    else:
                        entry[1].note_whole_state()
            return inherited_method(state, name)

        cls.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]

        def undo() -> None:
            if own_method is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own_method  # type: ignore[method-assign]

        return undo


_watched_classes = _WatchedClasses()


def field_names(cls: type) -> tuple[str, ...]:
    """The state keys of an object state's class; none for a class that is neither pydantic nor a dataclass."""
    if issubclass(cls, BaseModel):
        return tuple(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return ()


def state_keys(state: Any) -> tuple[str, ...] | None:
    """The keys that a node can read of this state; None for a value without keys to watch."""
    if isinstance(state, dict):
        return tuple(dict.__iter__(state)) if all(isinstance(key, str) for key in dict.__iter__(state)) else None
    return field_names(type(state)) or None


def watch_state(state: Any, reads: Reads) -> Any:
    """The object to hand to the node instead of `state`, so that its reads are noted. `release_state` must follow."""
    if type(state) is dict:
        return WatchedState(state, reads)
    if field_names(type(state)):
        _watched_classes.watch(state, reads)
    return state


def release_state(watched: Any) -> None:
    """Stops watching an object that `watch_state` returned."""
    reads = watched_reads(watched)
    if reads is not None:
        reads.end()
        _watched_classes.release(watched)


def watched_reads(state: Any) -> Reads | None:
    """The reads of this very state; None for one that is not watched."""
    return state.reads if isinstance(state, WatchedState) else _watched_classes.reads_of(state)
