"""The state that a node is given -> which of its keys the node read, and whether it may have read all of them.

LangGraph hands every state key to every node, so only watching the reads tells what a node depended on. A dict
state is handed on as an equal dict that notes its reads; an object state (pydantic, dataclass) stays what it is,
and its class is taught to note the reads of watched instances. Invariant: the node sees equal values under equal
types of access, and a read is never missed silently: where the state leaves as a whole (`dict(state)`, `**state`,
`repr`, a copy), or nothing was seen at all (code in C may bypass us), `Reads` says that anything may have been
read. It knows nothing of graphs, tasks or spans.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

# Attributes that hand out a whole object state, or everything that code outside its class needs to.
_WHOLE_OBJECT = frozenset(
    {
        *("__dict__", "__iter__", "__getstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__"),
        *(
            "__pydantic_fields_set__",
            "__repr_args__",
            "model_fields_set",
            "model_dump",
            "model_dump_json",
            "model_copy",
        ),
        *("dict", "json", "copy"),
    }
)


class Reads:
    """What one attempt at a node has read of its state so far. It notes nothing before `begin` and after `end`."""

    __slots__ = ("_noting", "everything", "keys")

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.everything = False  # it left as a whole at least once
        self._noting = False

    @property
    def bounded(self) -> bool:
        """Whether any key may have been read, not only those in `keys`."""
        return self.everything or not self.keys

    def begin(self) -> None:
        """A new attempt starts: forget what an earlier one read."""
        self.keys.clear()
        self.everything = False
        self._noting = True

    def end(self) -> None:
        """The node is done; whoever looks at its state now is not the node."""
        self._noting = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is read inside the block is not the node's doing."""
        noting, self._noting = self._noting, False
        try:
            yield
        finally:
            self._noting = noting

    def note(self, key: Any) -> None:
        """The value of one key was read, or its presence asked for."""
        # Once it left as a whole, a read of one key may be the copying of all of them.
        if self._noting and not self.everything and isinstance(key, str):
            self.keys.add(key)

    def note_everything(self) -> None:
        """The state as a whole was read."""
        if self._noting:
            self.everything = True


class WatchedState(dict[str, Any]):
    """A dict that notes its reads. Copies, merges and pickles of it are plain dicts."""

    __slots__ = ("reads",)

    def __init__(self, values: Mapping[str, Any], reads: Reads) -> None:
        super().__init__(values)
        self.reads = reads

    def plain(self) -> dict[str, Any]:
        """The same values as a plain dict, unnoticed."""
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
        """As dict's; which key it takes is not ours to say."""
        self.reads.note_everything()
        return super().popitem()

    # Overriding __iter__ also keeps dict(state) and {**state} off CPython's fast path, which would not call us.
    def __iter__(self) -> Iterator[str]:
        self.reads.note_everything()
        return super().__iter__()

    def __reversed__(self) -> Iterator[str]:
        self.reads.note_everything()
        return super().__reversed__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # typeshed: a class without a name
        """As dict's; whoever has the keys may read them all."""
        self.reads.note_everything()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As dict's."""
        self.reads.note_everything()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As dict's."""
        self.reads.note_everything()
        return super().items()

    def __eq__(self, other: object) -> bool:
        self.reads.note_everything()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self.reads.note_everything()
        return super().__ne__(other)

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        self.reads.note_everything()
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        self.reads.note_everything()
        return other | self.plain()

    def __repr__(self) -> str:
        self.reads.note_everything()
        return repr(self.plain())

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        self.reads.note_everything()
        return self.plain()

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.reads.note_everything()
        return (dict, (self.plain(),))


class _WatchedClasses:
    """Classes whose attribute access is watched, while any instance of them is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[Any, Reads]] = {}  # id -> the object, kept alive so that its id stays its own
        self._undo: dict[type, tuple[int, Callable[[], None]]] = {}

    def watch(self, state: Any, reads: Reads) -> None:
        """Notes the attributes of `state` that are read from now on."""
        cls = type(state)
        with self._lock:
            users, undo = self._undo.get(cls) or (0, self._teach(cls))
            self._undo[cls] = (users + 1, undo)
            self._reads[id(state)] = (state, reads)

    def release(self, state: Any) -> None:
        """Stops noting; the last instance gives the class its own attribute access back."""
        with self._lock:
            if self._reads.pop(id(state), None) is None:
                return
            users, undo = self._undo.pop(type(state))
            if users > 1:
                self._undo[type(state)] = (users - 1, undo)
            else:
                undo()

    def reads_of(self, state: Any) -> Reads | None:
        """Who notes this very object; None when nobody does."""
        watched = self._reads.get(id(state))
        return watched[1] if watched is not None and watched[0] is state else None

    def _teach(self, cls: type) -> Callable[[], None]:
        own = cls.__dict__.get("__getattribute__")
        inherited: Any = cls.__getattribute__
        fields, watched = frozenset(field_names(cls)), self._reads

        @functools.wraps(inherited)
        def noting(state: Any, name: str) -> Any:
            if name in fields or name in _WHOLE_OBJECT:
                entry = watched.get(id(state))
                if entry is not None:
                    if name in fields:
                        entry[1].note(name)
                    else:
                        entry[1].note_everything()
            return inherited(state, name)

        cls.__getattribute__ = noting  # type: ignore[method-assign,assignment]

        def undo() -> None:
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own  # type: ignore[method-assign]

        return undo


_objects = _WatchedClasses()


def field_names(cls: type) -> tuple[str, ...]:
    """The state keys of an object state's class; none for a class that is neither pydantic nor a dataclass."""
    if issubclass(cls, BaseModel):
        return tuple(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return ()


def state_keys(state: Any) -> tuple[str, ...] | None:
    """The keys that a node could read of this state; None for a value that has no keys to watch."""
    if isinstance(state, dict):
        return tuple(dict.__iter__(state)) if all(isinstance(key, str) for key in dict.__iter__(state)) else None
    return field_names(type(state)) or None


def watch_state(state: Any, reads: Reads) -> Any:
    """What to hand to the node instead of `state`, so that its reads are noted. `release_state` must follow."""
    if type(state) is dict:
        return WatchedState(state, reads)
    if field_names(type(state)):
        _objects.watch(state, reads)
    return state


def release_state(watched: Any) -> None:
    """Stops watching what `watch_state` gave out."""
    reads = watched_reads(watched)
    if reads is not None:
        reads.end()
        _objects.release(watched)


def watched_reads(state: Any) -> Reads | None:
    """Who notes the reads of this very state; None for one that is not watched."""
    return state.reads if isinstance(state, WatchedState) else _objects.reads_of(state)
