"""Answers about a whole store -> the same answers again, for as long as its file stays as it is.

What is summed over all episodes of a run takes longer the more there are; a reader who turns pages asks it each time.
Invariant: an answer is never older than the file, which is looked at while the store is open, when nobody writes. It
does not know what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

_Answer = TypeVar("_Answer")
_MOST = 64


class Remembered:
    """Answers about the store at `path`. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._files = (path, path.with_name(path.name + ".wal"))
        self._state: tuple[Any, ...] | None = None
        self._answers: dict[Hashable, Any] = {}

    def of(self, question: Hashable, ask: Callable[[], _Answer]) -> _Answer:
        """What was answered before, or what `ask` says now. The store is open."""
        state = None if self._files[0].is_dir() else tuple(map(_stat, self._files))
        if state is None or state != self._state or len(self._answers) >= _MOST:
            self._state, self._answers = state, {}
        if question not in self._answers:
            self._answers[question] = ask()
        return cast("_Answer", self._answers[question])


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
