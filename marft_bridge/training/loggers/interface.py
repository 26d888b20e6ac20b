"""What a logger is, and what it is told of the run.

A logger is a module with a function that opens it: `open_<name>(options, run) -> Logger`. Invariants: opening it again
with the same `LoggedRun.run_id` goes on in the same run; whatever it raises costs the run that logger, and nothing
else; without an option that says so it writes below `LoggedRun.folder` only and makes no connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Takes the figures of one step after the other."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Notes the figures of a step, by their nested names."""

    def close(self) -> None:
        """Ends it; what was logged is written or sent."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One training run as a logger knows it."""

    name: str  # the configuration's `name`
    run_id: str  # of this run, made once and kept for --resume
    folder: Path  # for its files
    options: Mapping[str, Any]  # what it is trained with, as JSON values

    @property
    def title(self) -> str:
        """A name that no other run has."""
        return f"{self.name}-{self.run_id}"


def flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options -> dotted names and values."""
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Sets variables while the block runs, for libraries that ask no other way; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set_environment(values)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
