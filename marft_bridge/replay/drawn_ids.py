"""Ids that a run draws anew (UUIDs, addresses of objects) -> those that its replay draws in their place.

Compared, they go by number. Which is which is kept: an id of the record stands for one of the replay, all along the
run, and one that is given back, in the input or an answer, for itself. Invariant: a text without any stays as it is.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from langchain_core.messages import AIMessage

from marft_bridge.replay.json_texts import map_texts

_Recorded = TypeVar("_Recorded")
# UUIDs, also without their hyphens, and addresses of objects. Other texts of 32 digits (a digest) and other numbers (a
# colour) are the app's.
_DRAWN = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|\b[0-9a-f]{12}[1-8][0-9a-f]{3}[89ab][0-9a-f]{15}\b"
    r"|(?<=\bat )0x[0-9a-f]{6,}\b"
)


class DrawnIds:
    """Which id of one recorded run is which of its replay. Safe for any number of threads.

    Args:
        values: what the replay is given besides answers, with ids that stay as they are.
    """

    def __init__(self, values: Any) -> None:
        self._to_now: dict[str, str] = {}
        self._to_recorded: dict[str, str] = {}
        self._lock = threading.Lock()
        self.note_given(values)

    def note_given(self, value: Any) -> None:
        """Notes that the replay was given this, of the record: ids in it that are new stand for themselves."""
        with self._lock:
            for drawn in _find(value):
                if drawn not in self._to_now and drawn not in self._to_recorded:
                    self._to_now[drawn] = self._to_recorded[drawn] = drawn

    def fit(self, recorded: Any, now: Any) -> bool:
        """Whether the ids of a value stand for those of a recorded one that equals it by `number_ids`."""
        recorded_ids, ids_now = list(_find(recorded)), list(_find(now))
        with self._lock:
            return len(recorded_ids) == len(ids_now) and all(
                self._to_now.get(was, drawn) == drawn and self._to_recorded.get(drawn, was) == was
                for was, drawn in zip(recorded_ids, ids_now, strict=True)
            )

    def find_same(
        self,
        recorded: Sequence[_Recorded],
        now: Any,
        *,
        to_json: Callable[[_Recorded], Any],
        to_key: Callable[[Any], Any] | None = None,
    ) -> list[_Recorded]:
        """Those of `recorded` that `now` is; where none is, those that it may be: with the same key, and ids that fit.

        Args:
            now: what the replay has, as JSON.
            to_json: the same of one that is recorded.
            to_key: what has to be the same; None: all, with its ids by number.
        """
        # An id is mapped to an id, so what holds none is nothing but itself.
        as_now = self._snapshot() if any(True for _ in _find(now)) else None
        recorded_json = [to_json(record) for record in recorded]
        equal = [
            record
            for record, was in zip(recorded, recorded_json, strict=True)
            if (was if as_now is None else _map_ids(was, lambda drawn: as_now.get(drawn, drawn))) == now
        ]
        if equal:
            return equal
        make_key = to_key or number_ids
        key = make_key(now)
        return [
            record
            for record, was in zip(recorded, recorded_json, strict=True)
            if make_key(was) == key and self.fit(was, now)
        ]

    def note_pair(self, recorded: Any, now: Any) -> None:
        """Notes that the ids of a value stand for those of the recorded one, which they fit."""
        if self.to_now(recorded) == now:  # also where the keys of a table stand in another order
            self.note_given(now)
            return
        with self._lock:
            for was, drawn in zip(_find(recorded), _find(now), strict=True):
                self._to_now.setdefault(was, drawn)
                self._to_recorded.setdefault(drawn, was)

    def to_now(self, value: Any) -> Any:
        """A recorded value with the replay's ids in place of the record's."""
        to_now = self._snapshot()
        return _map_ids(value, lambda drawn: to_now.get(drawn, drawn))

    def _snapshot(self) -> dict[str, str]:
        with self._lock:
            return dict(self._to_now)

    def answer_to_now(self, answer: AIMessage) -> AIMessage:
        """As `to_now`, of what an answer says and calls."""
        with self._lock:
            if all(was == drawn for was, drawn in self._to_now.items()):
                return answer
        content = self.to_now(answer.content)
        calls, invalid_calls = (
            [{**call, "args": self.to_now(call["args"])} for call in made]
            for made in (answer.tool_calls, answer.invalid_tool_calls)
        )
        update = {"content": content, "tool_calls": calls, "invalid_tool_calls": invalid_calls}
        return answer.model_copy(update=update)


def number_ids(value: Any) -> Any:
    """A value of JSON in whose texts drawn ids go by number, so that which is which stays."""
    numbers: dict[str, str] = {}
    return _map_ids(value, lambda drawn: numbers.setdefault(drawn, f"id {len(numbers) + 1}"))


def _map_ids(value: Any, to_id: Callable[[str], str]) -> Any:
    return map_texts(value, lambda text: _DRAWN.sub(lambda drawn: to_id(drawn.group()), text))


def _find(value: Any) -> Iterator[str]:
    """The drawn ids of a value, in the order in which they stand there."""
    if isinstance(value, str):
        yield from (drawn.group() for drawn in _DRAWN.finditer(value))
    elif isinstance(value, list):
        for item in value:
            yield from _find(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find(key)
            yield from _find(item)
