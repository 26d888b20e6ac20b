"""A value of JSON -> the same with other texts in it, those of keys too. Invariant: what is no text stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_texts(value: Any, to_text: Callable[[str], str]) -> Any:
    """The value with `to_text` of every text in it, in the order in which they stand there."""
    if isinstance(value, str):
        return to_text(value)
    if isinstance(value, list):
        return [map_texts(item, to_text) for item in value]
    if isinstance(value, dict):
        return {map_texts(key, to_text): map_texts(item, to_text) for key, item in value.items()}
    return value
