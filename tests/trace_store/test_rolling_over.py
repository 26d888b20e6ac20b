"""Owns: a journal whose records are taken in stays small while its writer lives, and rolling over loses nothing.

A writer is killed at every byte and between any two calls of a roll-over; 24 hours of traffic are simulated at speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.sample_spans import START, chain

import trace_store.journal as journal_module
from trace_store import intake, schema
from trace_store.connection import connect_memory
from trace_store.intake import IntakeCounts, journal_to_rows
from trace_store.journal import Journal, folder_to_segments, line_of, lines_from
from trace_store.records import Reward
from trace_store.store import TraceStore

CALLS = ("open", "rename", "fsync", "close", "pwrite", "ftruncate", "unlink")


class Killed(BaseException):
    """The process is gone: nothing that comes after it may write."""


@contextmanager
def killed_after(units: int) -> Iterator[None]:
    """Kills the block after so many units: a call is one, and so is each byte that is written."""
    left = units

    def spend(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def limited(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left <= 0:
                raise Killed
            left -= 1
            if name == "pwrite" and left < len(arguments[1]):
                call(arguments[0], arguments[1][:left], arguments[2])
                left = 0
                raise Killed
            left -= len(arguments[1]) if name == "pwrite" else 0
            return None if name == "fsync" else call(*arguments, **options)  # a kill needs no disk

        return limited

    with mock.patch.multiple(os, **{name: spend(getattr(os, name), name) for name in CALLS}):
        yield


def reward(number: int) -> Reward:
    return Reward("e", "reward", float(number), "test", number)


def numbers_in(folder: Path) -> list[int]:
    numbers = []
    for path in folder_to_segments(folder):
        with path.open("rb") as file:
            records = [record for record, _ in lines_from(file, 0, growing=False)]
        numbers += [record.created_ns for record in records if isinstance(record, Reward)]
    return numbers


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


def test_a_writer_that_is_killed_at_any_byte_of_a_roll_over_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line_bytes = len(line_of(reward(1)))
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 2 * line_bytes)
    # Three segments: of records 1 and 2, of 3 and 4, and of 5. Each record is written and synced.
    units = 0
    seen = set()
    while True:
        folder, appended, journal = tmp_path / f"{units}", 0, None
        try:
            with killed_after(units):
                journal = Journal(folder)
                for number in range(1, 6):
                    journal.append(reward(number))
                    appended = number
                    journal.sync()
        except Killed:
            pass
        else:
            break
        finally:
            for fd in journal._open_fds() if journal is not None else ():
                os.close(fd)
        numbers = numbers_in(folder)
        # What `append` returned for survives the kill; of the next record there is all or nothing.
        assert numbers in (list(range(1, appended + 1)), list(range(1, appended + 2)))
        seen.add((appended, len(folder_to_segments(folder))))
        units += 1
    assert units > 5 * line_bytes
    assert {(2, 1), (2, 2), (4, 2), (4, 3)} <= seen  # before and after each roll-over
    assert numbers_in(folder) == [1, 2, 3, 4, 5]


def test_a_writer_that_is_killed_at_any_byte_of_several_records_leaves_all_of_them_or_none(tmp_path: Path) -> None:
    units, seen = 0, []
    while True:
        folder, journal = tmp_path / f"{units}", None
        try:
            with killed_after(units):
                journal = Journal(folder)
                journal.append_all([reward(1), reward(2)])
                journal.append_all([reward(3), reward(4), reward(5)])
        except Killed:
            pass
        else:
            break
        finally:
            for fd in journal._open_fds() if journal is not None else ():
                os.close(fd)
        seen.append(numbers_in(folder))
        units += 1
    assert seen == sorted(seen)  # more and more of them
    assert list(map(list, dict.fromkeys(map(tuple, seen)))) == [[], [1, 2]]
    assert numbers_in(folder) == [1, 2, 3, 4, 5]


def test_an_intake_gives_back_what_it_took_while_the_writer_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_bytes = len(b"".join(map(line_of, chain("0", START).spans())))
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 3 * trace_bytes)
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        journal = Journal(store.journal_folder)
        sizes = []
        for number in range(12):
            journal.append_all(chain(f"{number:x}", START + number).spans())
            journal.sync()
            assert store.take_in().episodes == 1
            sizes.append(size_of(store.journal_folder))
        assert max(sizes) < 3 * trace_bytes
        assert sizes[2::3] == [0] * 4  # the whole segment, as soon as it is full and taken in
        journal.close()
        assert len(store.episodes()) == 12


@pytest.mark.parametrize("hours", [1, pytest.param(24, marks=pytest.mark.slow)])
def test_a_day_at_forty_runs_a_second_stays_under_a_hundred_megabytes_of_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A run is 4,800 bytes (254 MB were 53,139 runs). All sizes are divided by 64, and an intake comes every minute."""
    scale, runs_per_s, run_bytes, intake_every_s = 64, 40, 4800, 60
    segment_bytes = journal_module.SEGMENT_BYTES
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", segment_bytes // scale)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    taken: list[int] = []

    def count(_: object, records: list[Reward]) -> IntakeCounts:
        taken.extend(record.created_ns for record in records)
        return IntakeCounts()

    monkeypatch.setattr(intake, "records_to_rows", count)
    con = connect_memory()
    columns = ", ".join(f'"{column.name}" {column.sql_type}' for column in schema.TAKEN_IN.columns)
    con.execute(f"CREATE TABLE taken_in ({columns}, PRIMARY KEY (segment))")

    @contextmanager
    def transaction() -> Iterator[Any]:
        yield con

    journal, peak = Journal(tmp_path / "j"), 0
    padding = "x" * (runs_per_s * run_bytes // scale - len(line_of(reward(10**6))))
    for second in range(hours * 3600):
        journal.append(Reward("e", "reward" + padding, 0.0, "test", second))
        journal.sync_soon(0)
        if second % intake_every_s == intake_every_s - 1:
            peak = max(peak, size_of(tmp_path / "j"))
            journal_to_rows(tmp_path / "j", transaction)
    journal.close()
    assert taken == list(range(hours * 3600))
    # By hand: the segment that is written, and what came since the last intake.
    assert peak * scale <= segment_bytes + intake_every_s * runs_per_s * run_bytes + 2 * runs_per_s * run_bytes
    assert peak * scale < 100e6
    assert peak * scale > intake_every_s * runs_per_s * run_bytes * 0.9


def test_what_nobody_takes_in_stays_however_many_segments_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 500)
    journal = Journal(tmp_path)
    for number in range(200):
        journal.append(reward(number))
        journal.sync()
    journal.close()
    assert len(folder_to_segments(tmp_path)) > 20
    assert numbers_in(tmp_path) == list(range(200))
