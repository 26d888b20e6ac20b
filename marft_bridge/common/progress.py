"""Progress of long work -> bars on a terminal, plain lines elsewhere.

A caller reports its steps and current figures; only this module decides how they are shown. On a terminal a bar
shows figures and time left; in a file or a pipe a line with both comes every few seconds, and one at the end. With
`--json` all of that goes to standard error, and standard output gets what the command found as one JSON value.

Invariant: names, figures and lines hold text of models and exceptions, and reach no terminal but as printable text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from marft_bridge.common.terminal_text import text_to_line, text_to_lines, value_to_json

LINE_EVERY_S = 10.0


class Task:
    """One piece of long work, of `total` steps (None: unknown)."""

    def __init__(self, reporter: Reporter, name: str, total: int | None) -> None:
        self._reporter, self._name, self._total = reporter, text_to_line(name), total
        self._done, self._figures = 0, ""
        self._start_s = self._last_line_s = time.monotonic()
        self._bar = None
        if reporter.live is not None:
            self._bar = reporter.live.add_task(self._name, total=total, figures="")

    def update(self, done: int | None = None, figures: str | None = None) -> None:
        """Shows that `done` steps are finished; `figures` is a short text such as "212 tok/s". None keeps the last."""
        self._done = self._done if done is None else done
        self._figures = self._figures if figures is None else text_to_line(figures)
        if self._bar is not None:
            assert self._reporter.live is not None
            self._reporter.live.update(self._bar, completed=self._done, figures=self._figures)
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._line()

    def finish(self, quiet: bool = False) -> None:
        """Removes the bar and, unless `quiet`, prints the last state as a line."""
        if self._bar is not None:
            assert self._reporter.live is not None
            self._reporter.live.remove_task(self._bar)
        if not quiet:
            self._line()

    def _line(self) -> None:
        self._last_line_s = time.monotonic()
        steps = "" if self._total is None else f" {self._done}/{self._total}"
        figures = f"  {self._figures}" if self._figures else ""
        elapsed_s = self._last_line_s - self._start_s
        time_left = ""
        if self._total is not None and 0 < self._done < self._total and elapsed_s >= 1:
            time_left = f", about {elapsed_s / self._done * (self._total - self._done):.0f} s left"
        self._reporter.say(f"{self._name}{steps}{figures}  [{elapsed_s:.0f} s{time_left}]")


class Reporter:
    """Where a command's progress and messages go.

    Args:
        json_output: gets the command's findings; None where they were not asked for as JSON.
    """

    def __init__(self, console: Console | None = None, json_output: TextIO | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.json_output = json_output
        self.live: Progress | None = None

    def say(self, text: str) -> None:
        """Prints plain lines; text of a model is never taken for markup, nor obeyed by a terminal."""
        self.console.print("\n".join(text_to_lines(text)), markup=False, soft_wrap=True)

    def give(self, findings: Any) -> None:
        """Prints what a command found as JSON, where that was asked for; people have read it in the lines."""
        if self.json_output is not None:
            self.json_output.write(value_to_json(findings) + "\n")

    @contextmanager
    def bars(self) -> Iterator[Reporter]:
        """Shows bars inside the block when the console is a terminal."""
        if not self.console.is_terminal or self.live is not None:
            yield self
            return
        self.live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        try:
            with self.live:
                yield self
        finally:
            self.live = None

    @contextmanager
    def overall_task(self, name: str, total: int) -> Iterator[Task]:
        """A bar above the others for work whose parts report themselves; prints nothing without a terminal."""
        task = Task(self, name, total)
        yield task
        task.finish(quiet=True)

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Task]:
        """Follows one piece of work."""
        task = Task(self, name, total)
        try:
            yield task
        finally:
            task.finish()


@contextmanager
def open_reporter(as_json: bool) -> Iterator[Reporter]:
    """A reporter for one command. With `as_json` nothing but its findings reaches standard output, whatever the user's
    app prints."""
    if not as_json:
        yield Reporter()
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield Reporter(json_output=stdout)  # its console prints to what is standard output now
