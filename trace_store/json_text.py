"""JSON that a model, a user, a span or the network wrote -> its value.

Python's reader raises RecursionError for lists in lists without end, which a model writes that repeats itself; and what
it still reads may be too deep for whoever walks it. Invariants: a text is read or raises ValueError, nothing else; a
value that was read has at most `MAX_NESTING` lists and objects in each other, whatever called the reader.
"""

from __future__ import annotations

import json
from typing import Any

MAX_NESTING = 200


class TooDeepError(json.JSONDecodeError):
    """More lists and objects in each other than are read."""


def read_json(text: str | bytes | bytearray, *, strict: bool = True) -> Any:
    """The value of a JSON text. `strict` refuses control characters in texts.

    Raises ValueError (json.JSONDecodeError, or UnicodeDecodeError for bytes) where it is no JSON, or too deep.
    """
    if isinstance(text, (bytes, bytearray)):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = json.loads(text, strict=strict)
    except RecursionError:
        raise TooDeepError("lists and objects in each other without end", text, 0) from None
    if text.count("[") + text.count("{") > MAX_NESTING and _is_too_deep(value):
        raise TooDeepError(f"more than {MAX_NESTING} lists and objects in each other", text, 0)
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_NESTING):
        if not level:
            return False
        items = (item for part in level for item in (part.values() if isinstance(part, dict) else part))
        level = [item for item in items if isinstance(item, (dict, list))]
    return bool(level)
