"""A value as JSON or TOML gives it -> why it cannot be worked with, or nothing.

Readers take what their formats allow: a thousand lists in each other, on which every later walk would fail; texts with
a NUL, which no path can have; integers of a thousand digits. Invariant: walking needs no recursion itself.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100  # of lists and objects in each other
_MAX_INTEGER = 2**63


def nesting_fault(value: Any) -> str | None:
    """What is wrong with how deep lists and objects lie in each other; None where nothing is."""
    level, depth = [value], 0
    while level := [item for container in level for item in _items(container)]:
        depth += 1
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} lists or tables in each other"
    return None


def value_fault(value: Any) -> str | None:
    """What no option can be, in a value, its keys and all that is in it; None where nothing is."""
    if (fault := nesting_fault(value)) is not None:
        return fault
    level = [value]
    while level:
        for item in level:
            if isinstance(item, str) and "\0" in item:
                return "a text with a NUL character"
            if isinstance(item, int) and not -_MAX_INTEGER <= item < _MAX_INTEGER:
                return "an integer of more than 64 bits"
        level = [part for item in level for part in (*_keys(item), *_items(item))]
    return None


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(container.values())
    return list(container) if isinstance(container, (list, tuple)) else []


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else []
