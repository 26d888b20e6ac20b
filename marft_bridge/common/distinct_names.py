"""A list in a configuration -> the same, or the error that a name is empty or an entry there twice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator


def require_distinct(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same entries. Raises ValueError for an empty name, and for one that is there twice."""
    for number, entry in enumerate(entries):
        if entry == "":
            raise ValueError("a name is empty")
        if entry in entries[:number]:
            raise ValueError(f"{entry!r} is there twice")
    return entries


DistinctNames = Annotated[tuple[str, ...], AfterValidator(require_distinct)]
