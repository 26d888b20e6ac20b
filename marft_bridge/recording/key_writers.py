"""Writes of one state key, superstep by superstep -> whose values the key holds after each.

What is left of an earlier value is decided by the reducer, which is never called here: of those that are known
(`operator.add`, `operator.or_`, `add_messages`) the rule is known, and of any other one the outcome is looked at. A
list or dict is looked at piece by piece, what a written dict holds too, anything else as one piece. Invariant: a writer
is certain (True) only where its very value is seen in the outcome, or the rule says that the outcome is made of it; it
is gone only where nothing of its value can be left; in all other cases it is possible (False).
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, RemoveMessage
from langgraph.channels import AnyValue, BinaryOperatorAggregate, EphemeralValue, LastValue, Topic, UntrackedValue
from langgraph.channels.last_value import LastValueAfterFinish
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Overwrite

from marft_bridge.common.library_internals import task_path_str, writes_sort_key

Writers = dict[str, bool]
"""Task -> whether it is known to have written (True), or may have (False)."""

OwnerOf = Callable[[str], "Writers | None"]
"""Message id -> its writers, where they are known one by one."""

_JOINING = (operator.add, operator.concat, operator.iadd, operator.iconcat)
_MERGING = (operator.or_, operator.ior)
_SCAN_LIMIT, _MAX_DEPTH = 10_000, 6  # of what is looked at in the elements of one value
_OVERWRITE = "__overwrite__"  # LangGraph's form of an Overwrite that went through JSON


def merge_writers(*groups: Writers) -> Writers:
    """All writers of the groups; certain where one group says so."""
    merged: Writers = {}
    for writers in groups:
        for task, is_certain in writers.items():
            merged[task] = is_certain or merged.get(task, False)
    return merged


def _possible(writers: Writers) -> Writers:
    return dict.fromkeys(writers, False)


class KeyWrite(NamedTuple):  # one for each write: a frozen dataclass takes three times as long to make
    """One write of a key: LangGraph's path of the task that wrote it, and its number among the task's writes."""

    path: tuple[Any, ...]
    number: int
    value: Any
    writers: Writers
    owner_of: OwnerOf | None = None  # of the messages in it, where it passes on those of others
    pieces: tuple[Hashable, ...] | None = None  # as it was when written: a reducer may change it in place
    inner_pieces: tuple[Hashable, ...] = ()  # of what a dict holds, for a reducer that is told in it what to do

    def writers_of(self, message_id: str | None) -> Writers:
        """The writers of one message in it."""
        owners = self.owner_of(message_id) if self.owner_of is not None and message_id is not None else None
        return self.writers if owners is None else owners

    @property
    def order(self) -> Any:
        """LangGraph's order of the writes of a superstep."""
        return writes_sort_key(task_path_str(self.path)), self.number

    @property
    def overwrites(self) -> bool:
        """Whether it replaces the value whatever the reducer is."""
        return isinstance(self.value, Overwrite) or (isinstance(self.value, dict) and _OVERWRITE in self.value)


class _Rule(ABC):
    """How the writes of a superstep change whose values a key holds."""

    keeps_pieces = False  # whether the outcome is looked at, so that writes are kept as they were
    keeps_one = False  # whether one write alone decides: the key then has its writers, overwriting or not
    lasts = True  # whether a value is still there when the next superstep has written none

    @abstractmethod
    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        """Writers before the superstep, its writes in order and the value after it -> writers after it."""

    def owner_of(self, message_id: str) -> Writers | None:
        """The writers of one message; None where they are not known one by one."""
        return None

    def look_at(self, value: Any) -> None:  # noqa: B027 - most rules have nothing to look at
        """The value before the first write."""

    def reset(self, write: KeyWrite, outcome: Any) -> Writers:
        """As `settle`, after a write that replaced the value whatever the reducer is."""
        return dict(write.writers)


class _Replace(_Rule):
    keeps_one = True

    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        return merge_writers(*(write.writers for write in writes))


class _ReplaceEachStep(_Replace):
    lasts = False


class _OneOfEqual(_ReplaceEachStep):
    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        return dict(writes[0].writers) if len(writes) == 1 else _possible(super().settle(earlier, writes, outcome))


class _Join(_Rule):
    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        return merge_writers(earlier, *(write.writers for write in writes))


class _Messages(_Rule):
    """`add_messages`: a message stays until it is removed, or another one is written under its id."""

    def __init__(self) -> None:
        self._owners: dict[str, Writers] = {}  # message id -> its writers
        self._unplaced: Writers = {}  # writers of messages whose ids are not known
        self._others: Writers = {}  # writers of no message: those who removed some, or wrote an empty list

    def owner_of(self, message_id: str) -> Writers | None:
        return self._owners.get(message_id)

    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        must_recount = False
        unidentified: list[Writers] = []
        written_writers: list[Writers] = []
        for write in writes:
            items = write.value if isinstance(write.value, list) else [write.value]
            removals = [number for number, item in enumerate(items) if isinstance(item, RemoveMessage)]
            clearings = [number for number in removals if items[number].id == REMOVE_ALL_MESSAGES]
            if clearings:
                self._clear()
                unidentified.clear()
                must_recount, items = True, items[clearings[-1] + 1 :]
            if not items or removals:
                self._others = merge_writers(self._others, write.writers)
            owned_writers: list[Writers] = []
            for item in items:
                message_id = item.get("id") if isinstance(item, dict) else getattr(item, "id", None)
                writers = write.writers_of(message_id)
                if isinstance(item, RemoveMessage):
                    must_recount |= self._remove(message_id)
                elif message_id is None:
                    unidentified.append(writers)
                else:
                    must_recount |= self._owners.get(message_id, writers) != writers
                    self._owners[message_id] = writers
                    owned_writers.append(writers)
            if write.owner_of is not None:  # what passes messages on is written by their owners, and perhaps others
                self._others = merge_writers(self._others, _possible(write.writers))
            written_writers += owned_writers
        self._place(unidentified, outcome)
        if must_recount:
            return merge_writers(*self._owners.values(), self._unplaced, self._others)
        return merge_writers(earlier, self._others, *written_writers, *unidentified)

    def reset(self, write: KeyWrite, outcome: Any) -> Writers:
        self._clear()
        self._others = dict(write.writers)
        for message in outcome if isinstance(outcome, list) else ():
            if getattr(message, "id", None) is not None:
                self._owners[message.id] = dict(write.writers)
        return dict(write.writers)

    def _clear(self) -> None:
        self._owners, self._unplaced, self._others = {}, {}, {}

    def _remove(self, message_id: str | None) -> bool:
        if message_id is not None and self._owners.pop(message_id, None) is None:
            self._unplaced = _possible(self._unplaced)  # one of theirs, or of an earlier run
        return True

    def _place(self, unidentified: Sequence[Writers], outcome: Any) -> None:
        """Finds the ids of messages that were written without one: they are the newest ones of the outcome."""
        if not unidentified:
            return
        newest_ids = [getattr(message, "id", None) for message in outcome] if isinstance(outcome, list) else []
        new_ids = [message_id for message_id in newest_ids if message_id is not None and message_id not in self._owners]
        if len(new_ids) == len(unidentified):
            self._owners.update(zip(new_ids, unidentified, strict=True))
        else:
            self._unplaced = merge_writers(self._unplaced, *unidentified)


class _Observed(_Rule):
    """Any other reducer: whose pieces are in the outcome."""

    keeps_pieces = True

    def __init__(self, merges_dicts: bool) -> None:
        self._merges_dicts = merges_dicts  # known to be `old | new`
        self._value: Any = None
        self._pieces: tuple[Hashable, ...] | None = None
        self._owners: dict[Hashable, list[Writers]] = {}  # piece of the value -> writers, once for each occurrence

    def look_at(self, value: Any) -> None:
        if self._value is not value:  # a value of an earlier run
            self._value, self._pieces = value, value_to_pieces(value)
            self._owners = {piece: [{}] for piece in self._pieces or ()}

    def settle(self, earlier: Writers, writes: Sequence[KeyWrite], outcome: Any) -> Writers:
        written_writers = [write.writers for write in writes]
        pieces = value_to_pieces(outcome)
        previous_value, previous_pieces, owners = self._value, self._pieces, self._owners
        self._value, self._pieces, self._owners = outcome, pieces, {}
        if self._merges_dicts and isinstance(outcome, dict):
            return self._merge_dicts(earlier, owners, writes, outcome=outcome)
        if self._merges_dicts and isinstance(outcome, (set, frozenset)):
            return merge_writers(earlier, *written_writers)
        if pieces is None:
            return _possible(merge_writers(earlier, *written_writers))
        same_writes = [write for write in writes if write.value is outcome and write.pieces == pieces]
        if len(same_writes) == 1 and outcome is not previous_value:
            self._owners = {piece: [same_writes[0].writers] * count for piece, count in Counter(pieces).items()}
            return merge_writers(same_writes[0].writers, *map(_possible, written_writers))
        return self._match_pieces(earlier, owners, (previous_pieces, writes, pieces))

    def reset(self, write: KeyWrite, outcome: Any) -> Writers:
        self._value, self._pieces = outcome, value_to_pieces(outcome)
        self._owners = {piece: [write.writers] * count for piece, count in Counter(self._pieces or ()).items()}
        return dict(write.writers)

    def _match_pieces(
        self,
        earlier: Writers,
        owners: dict[Hashable, list[Writers]],
        situation: tuple[tuple[Hashable, ...] | None, Sequence[KeyWrite], tuple[Hashable, ...]],
    ) -> Writers:
        previous_pieces, writes, pieces = situation
        all_writers = merge_writers(earlier, *(write.writers for write in writes))
        if previous_pieces is None or any(write.pieces is None for write in writes):
            return _possible(all_writers)
        candidates = {piece: list(groups) for piece, groups in owners.items()}
        for write in writes:
            for piece in (*(write.pieces or ()), *write.inner_pieces):
                candidates.setdefault(piece, []).append(write.writers)
        holders: Writers = {}
        for piece, count in Counter(pieces).items():
            groups = candidates.get(piece)
            if groups is None:  # made anew, of anything
                writers = _possible(all_writers)
            elif count >= len(groups) or all(group == groups[0] for group in groups):
                writers = merge_writers(*groups)
            else:
                writers = _possible(merge_writers(*groups))
            self._owners[piece] = groups if groups is not None and count == len(groups) else [writers] * count
            holders = merge_writers(holders, writers)
        # A write of which nothing is left may still have decided what is.
        return merge_writers(_possible(merge_writers(*(write.writers for write in writes))), holders)

    def _merge_dicts(
        self,
        earlier: Writers,
        owners: dict[Hashable, list[Writers]],
        writes: Sequence[KeyWrite],
        outcome: dict[Any, Any],
    ) -> Writers:
        by_key: dict[Any, list[Writers]] = {_key_of(piece): groups for piece, groups in owners.items()}
        for write in writes:
            if not isinstance(write.value, dict):
                return _possible(merge_writers(earlier, *(each.writers for each in writes)))
            by_key.update({("key", key): [write.writers] for key in write.value})
        self._owners = {
            piece: by_key.get(_key_of(piece), [_possible(earlier)]) for piece in value_to_pieces(outcome) or ()
        }
        # A write of which nothing is left may still have decided what is.
        return merge_writers(
            *(_possible(write.writers) for write in writes),
            *(group for groups in self._owners.values() for group in groups),
        )


def _key_of(piece: Hashable) -> Hashable:
    return piece[:2] if isinstance(piece, tuple) and piece[0] == "key" else piece


def value_to_pieces(value: Any) -> tuple[Hashable, ...] | None:
    """What a value is made of, each piece so named that the same name elsewhere is the same object, unchanged.

    None where that cannot be told: an object that may be changed in place, or a small one that Python has only once.
    """
    children = _Children()
    if isinstance(value, list):
        return tuple(("item", children.name(item)) for item in value)
    if isinstance(value, dict):
        return tuple(("key", key, children.name(item)) for key, item in value.items())
    return (("value", id(value)),) if isinstance(value, (str, bytes)) and len(value) > 1 else None


def _dict_to_inner_pieces(value: dict[Any, Any]) -> tuple[Hashable, ...]:
    """The pieces of each of its values, as in `{"type": "override", "value": [...]}`, which leaves the list."""
    return tuple(piece for item in value.values() for piece in value_to_pieces(item) or ())


class _Children:
    """Names of the elements of one value. An element without a name of its own gets one that no other has."""

    def __init__(self) -> None:
        self._budget = _SCAN_LIMIT

    def name(self, item: Any) -> Hashable:
        """By identity, and for an object that may be changed in place by its content too."""
        if isinstance(item, (str, bytes)):
            return id(item) if len(item) > 1 else object()
        if item is None or isinstance(item, (bool, int, float, complex)):
            return object()
        return (id(item), self._content(item, depth=0))

    def _content(self, item: Any, depth: int) -> Hashable:
        self._budget -= 1
        if item is None or isinstance(item, (bool, int, float, complex)):
            return (type(item), item)
        if isinstance(item, (str, bytes)):
            return id(item)
        if depth > _MAX_DEPTH or self._budget < 0:
            return object()
        if isinstance(item, (list, tuple)):
            return (id(item), *(self._content(child, depth + 1) for child in item))
        if isinstance(item, dict):
            return (id(item), *((key, self._content(child, depth + 1)) for key, child in item.items()))
        fields = getattr(item, "__dict__", None)  # a message, a dataclass, a pydantic object
        if not isinstance(fields, dict) or isinstance(item, type):
            return object()
        # A message without an id is given one in place, by the reducer or before it: it stays its writer's message.
        hidden = "id" if isinstance(item, BaseMessage) else None
        return (id(item), *((key, self._content(child, depth + 1)) for key, child in fields.items() if key != hidden))


@dataclass(slots=True)
class KeyWriters:
    """Whose values one state key holds, after each superstep."""

    rule: _Rule
    # (step, writers after it), the newest last; two suffice, a reader is never more than one step late
    _history: list[tuple[int, Writers]] = field(default_factory=list)
    _pending_step: int = -1
    _pending: list[KeyWrite] = field(default_factory=list)
    _channel: Any = None

    def note(self, step: int, write: KeyWrite, channel: Any) -> None:
        """Notes a write of superstep `step`, before it is applied. `channel` is LangGraph's."""
        if self._pending and self._pending_step != step:
            self._settle()
        if self.rule.keeps_pieces:
            if not self._pending:
                self.rule.look_at(_channel_value(channel))
            inner_pieces = _dict_to_inner_pieces(write.value) if isinstance(write.value, dict) else ()
            write = write._replace(pieces=value_to_pieces(write.value), inner_pieces=inner_pieces)
        self._pending_step, self._channel = step, channel
        self._pending.append(write)

    def with_fresh(self, step: int, writes: Sequence[KeyWrite]) -> Writers:
        """Whose values a router of a task of `step` is given: the key before the step, with the task's own writes."""
        writers = [write.writers for write in writes]
        if any(write.overwrites for write in writes) or (writes and isinstance(self.rule, _Replace)):
            return merge_writers(*writers)
        return merge_writers(_possible(self.before(step)) if writes else self.before(step), *map(_possible, writers))

    def owner_of(self, message_id: str) -> Writers | None:
        """The writers of one message; None where they are not known one by one."""
        return self.rule.owner_of(message_id)

    def holds(self, value: Any) -> bool:
        """Whether the key's channel has this very object now; False where that cannot be seen."""
        return self._channel is not None and _channel_value(self._channel) is value

    def before(self, step: int | None) -> Writers:
        """Whose values the key holds for a task of `step`; None asks for the latest."""
        if self._pending and (step is None or self._pending_step < step):
            self._settle()
        for written_step, writers in reversed(self._history):
            if step is None or written_step < step:
                return writers if self.rule.lasts or step in (None, written_step + 1) else {}
        return {}

    def _settle(self) -> None:
        writes, self._pending = self._pending, []
        if len(writes) == 1 and self.rule.keeps_one:  # most keys
            self._remember(writes[0].writers)
            return
        if len(writes) > 1:
            writes.sort(key=lambda write: write.order)
        earlier = self._history[-1][1] if self._history else {}
        overwrite = next((write for write in writes if write.overwrites), None)
        outcome = _channel_value(self._channel)
        if overwrite is not None:  # LangGraph drops the others of the superstep
            writers = self.rule.reset(overwrite, outcome)
        else:
            writers = self.rule.settle(earlier, writes, outcome)
        self._remember(writers)

    def _remember(self, writers: Writers) -> None:
        self._history.append((self._pending_step, writers))
        del self._history[:-2]


def channel_to_rule(channel: Any) -> _Rule:
    """The rule of a LangGraph channel."""
    if channel is None or isinstance(channel, (LastValue, LastValueAfterFinish, UntrackedValue)):
        return _Replace()
    if isinstance(channel, EphemeralValue):
        return _ReplaceEachStep()
    if isinstance(channel, AnyValue):
        return _OneOfEqual()
    if isinstance(channel, Topic):
        return _Join() if channel.accumulate else _ReplaceEachStep()
    if isinstance(channel, BinaryOperatorAggregate):
        reducer = getattr(channel.operator, "func", channel.operator)
        if reducer in _JOINING:
            return _Join()
        return _Messages() if reducer is add_messages else _Observed(merges_dicts=reducer in _MERGING)
    return _Observed(merges_dicts=False)


def _channel_value(channel: Any) -> Any:
    return getattr(channel, "value", None)
