"""Pieces of a stream of server-sent events, cut anywhere -> its events -> the data of each.

Invariant: a line ends where the format says, at CRLF, LF or CR, and nowhere else. JSON may hold U+2028, U+2029 and
U+0085 unescaped, at which `str.splitlines` and httpx's `iter_lines` cut too.
"""

from __future__ import annotations

import re

_LINE_END = rb"(?:\r\n|\n|\r(?!\n|\Z))"  # a CR at the end of what has come may be half of a CRLF
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
_DATA_LINE = re.compile(rb"(?<![^\r\n])data:([^\r\n]*)(?:\r\n|\n|\r|\Z)")


class EventReader:
    """Pieces of a stream -> its events, each as soon as its blank line has come, without it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        start = max(0, len(self._rest) - 3)  # a blank line may have begun in the pieces before
        self._rest += piece
        if _BLANK_LINE.search(self._rest, start) is None:
            return []
        *events, rest = _BLANK_LINE.split(bytes(self._rest))
        self._rest = bytearray(rest)
        return events

    @property
    def rest(self) -> bytes:
        """The bytes of an event without an end."""
        return bytes(self._rest)


def event_to_data(event: bytes) -> bytes | None:
    """The data of an event, beside which it may have comments, a name or an id; None where it has none."""
    data: bytearray | None = None  # no list of lines, which would take many times the event's memory
    for line in _DATA_LINE.finditer(event):
        if data is None:
            data = bytearray()
        else:
            data += b"\n"
        data += line[1]
    return None if data is None else bytes(data.strip())


def replace_data(event: bytes, data: bytes) -> bytes:
    """The event with other data, of one line, and its blank line."""
    other_lines = _DATA_LINE.sub(b"", event).strip(b"\r\n")
    return (other_lines + b"\n" if other_lines else b"") + b"data: " + data + b"\n\n"
