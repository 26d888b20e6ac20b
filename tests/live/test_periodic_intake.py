"""Owns: the journal of live traffic is taken in while it goes on, and stays small.

- After each minute in which the journal grew its records are in the store, and its full segments are gone; else nothing
  is opened.
- A store that another process has open is left alone; what is recorded meanwhile is there a minute later.
- What goes wrong is said once, and the minutes after it are tried.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.growth_rig import secret_trace, trace_id
from support.paths import ROOT

from marft_bridge.live import periodic_intake as intake
from trace_store import journal as journal_module
from trace_store.errors import StoreBusyError, StoreError
from trace_store.journal import Journal
from trace_store.store import TraceStore

JOURNAL = "store.duckdb.journal"


class Minutes:
    """A clock whose minutes pass at once: after each, one action; the last ends the loop."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self._actions = list(actions)
        self.periods: list[float] = []

    def wait(self, period_s: float) -> bool:
        self.periods.append(period_s)
        if not self._actions:
            return True
        self._actions.pop(0)()
        return False


def episodes_in(path: Path) -> set[str]:
    with TraceStore.open(path, read_only=True) as store:
        return {episode.episode_id for episode in store.episodes()}


def taken_in(path: Path) -> set[str]:
    """The episodes in the file itself, past the journal."""
    folder = path.with_name("copy")
    folder.mkdir()
    (folder / path.name).write_bytes(path.read_bytes())
    try:
        return episodes_in(folder / path.name)
    finally:
        (folder / path.name).unlink()
        folder.rmdir()


def run_minutes(path: Path, *actions: Callable[[], None]) -> list[str]:
    """Returns what was said."""
    lines: list[str] = []
    clock = Minutes(*actions)
    intake.take_in_until(path, clock.wait, lines.append)
    assert clock.periods == [60.0] * (len(actions) + 1)
    return lines


def test_each_minute_of_a_live_writer_is_taken_in_and_its_full_segments_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1000)  # less than one trace
    path = tmp_path / "store.duckdb"
    journal = Journal(tmp_path / JOURNAL)
    seen: list[set[str]] = []

    def record(name: str) -> Callable[[], None]:
        def append() -> None:
            seen.append(taken_in(path) if path.exists() else set())
            journal.append_all(secret_trace(name, "of a minute", [1]))
            journal.sync()

        return append

    assert run_minutes(path, record("a1"), record("b1"), record("c1")) == []
    assert seen == [set(), {trace_id("a1")}, {trace_id("a1"), trace_id("b1")}]
    assert taken_in(path) == {trace_id("a1"), trace_id("b1"), trace_id("c1")}
    assert sum(segment.stat().st_size for segment in journal_module.folder_to_segments(path.with_name(JOURNAL))) < 1000
    journal.close()


def test_a_quiet_journal_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.duckdb"
    journal = Journal(tmp_path / JOURNAL)
    journal.append_all(secret_trace("a1", "once", [1]))
    journal.sync()
    openings: list[Path] = []
    open_store = TraceStore.open

    def count(opened: Path) -> TraceStore:
        openings.append(opened)
        return open_store(opened)

    monkeypatch.setattr(TraceStore, "open", count)
    assert run_minutes(path, *[lambda: None] * 5) == []
    assert openings == [path]
    journal.close()


@contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    code = "import sys, duckdb; con = duckdb.connect(sys.argv[1]); print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.communicate(b"", timeout=60)


def test_a_store_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    TraceStore.open(path).close()
    journal = Journal(tmp_path / JOURNAL)
    journal.append_all(secret_trace("a1", "waits", [1]))
    journal.sync()
    began = time.monotonic()
    with held_by_another_process(path):
        with pytest.raises(StoreBusyError):
            TraceStore.open(path)
        assert run_minutes(path, lambda: None, lambda: None) == []
    assert taken_in(path) == set()
    assert run_minutes(path, lambda: None) == []
    assert taken_in(path) == {trace_id("a1")}
    assert time.monotonic() - began < 60
    journal.close()


def test_what_goes_wrong_is_said_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.duckdb"
    journal = Journal(tmp_path / JOURNAL)
    journal.append_all(secret_trace("a1", "at last", [1]))
    journal.sync()
    open_store = TraceStore.open
    failures = [StoreError("no space on the disk")] * 3

    def fail_first(opened: Path) -> TraceStore:
        if failures:
            raise failures.pop()
        return open_store(opened)

    monkeypatch.setattr(TraceStore, "open", fail_first)
    lines = run_minutes(path, *[lambda: None] * 4)
    monkeypatch.undo()
    assert lines == ["the journal is not taken in, and grows: no space on the disk"]
    assert taken_in(path) == {trace_id("a1")}
    journal.close()


def test_the_thread_ends_with_its_block(tmp_path: Path) -> None:
    began = time.monotonic()
    with intake.periodic_intake(tmp_path / "store.duckdb", warn=pytest.fail):
        pass
    assert time.monotonic() - began < 30  # and not a minute
    assert list(tmp_path.iterdir()) == []
