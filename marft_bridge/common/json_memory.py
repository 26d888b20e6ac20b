"""JSON that a stranger sent, still in bytes -> the memory that reading it would take, counted before it is read.

Two bytes of JSON (`1,`) can become an object of a hundred. Invariants: one pass over the bytes, which ends where the
bound is passed, and nothing is kept beside them; the estimate is an upper bound.
"""

from __future__ import annotations

import re

VALUE_BYTES = 128  # of a text, an object, a list, or an item of one, beside the characters of texts
# A text with its quotes (to the end of the data where none closes it), or the beginning of a value in a list or object.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{,]', re.DOTALL)
_WIDE, _WIDEST = re.compile(rb"[\xc4-\xff]"), re.compile(rb"[\xf0-\xff]")  # UTF-8 of what is above U+00FF, U+FFFF


def is_json_within(text: bytes | bytearray, memory_bytes: int, *, keeps_lines: bool = False) -> bool:
    """Whether reading this JSON takes at most so much memory.

    Args:
        keeps_lines: whether its texts are also written as JSON, as a journal does.
    """
    if not keeps_lines and len(text) * VALUE_BYTES <= memory_bytes:
        return True  # nothing takes more for a byte
    memory_left = memory_bytes - len(text) * character_bytes(text)  # all of it is one text, before it is many
    for token in _TOKEN.finditer(text):
        start, end = token.span()
        memory_left -= VALUE_BYTES
        if end - start > 2:
            string = text[start:end]
            width = 4 if b"\\u" in string else character_bytes(string)
            memory_left -= len(string) * (width + (line_bytes(width) if keeps_lines else 0))
        if memory_left < 0:
            return False
    return memory_left >= 0


def character_bytes(text: bytes | bytearray) -> int:
    """Bytes that Python takes for each character of this UTF-8, which its widest one decides."""
    if text.isascii() or not _WIDE.search(text):
        return 1
    return 4 if _WIDEST.search(text) else 2


def line_bytes(width: int) -> int:
    """Bytes for each character while it is written as a line of JSON: the escaped text, the line, and its bytes."""
    return 2 * width + 1
