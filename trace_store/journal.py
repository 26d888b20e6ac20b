"""Records -> lines of a segment file that survive a crash, and back.

A line is `crc32 SPACE compact-JSON NEWLINE`. Invariants: a record whose `append()` returned can be read back after
the process is killed, and one that a `sync()` covered after the machine is; a line that a crash or a full disk
left half written is dropped and counted, never half read. Each writer has its own segment and holds an exclusive
lock on it, so a reader knows whether it may still grow.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trace_store.errors import StoreError
from trace_store.files import create_file, make_folder, open_to_read, sync
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow

JournalRecord = RunRow | SpanRow | Reward | AdapterRow

SUFFIX = ".segment"
BATCH_S = 0.1  # syncs that nobody waits for are at least this far apart
IDLE_S = 1.0  # after this long without a request for a sync, the thread that syncs ends
_KINDS: dict[str, type[JournalRecord]] = {"run": RunRow, "span": SpanRow, "reward": Reward, "adapter": AdapterRow}
_NAMES = {record_class: kind for kind, record_class in _KINDS.items()}
_FIELDS = {kind: tuple(field.name for field in fields(record_class)) for kind, record_class in _KINDS.items()}
_GETTERS = {kind: attrgetter(*names) for kind, names in _FIELDS.items()}  # record -> the values of its fields
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def journal_of(store: Path) -> Path:
    """The folder where recorders journal for a store, next to its file."""
    return store.with_name(store.name + ".journal")


def journal_segments(store: Path) -> list[Path]:
    """The segments of the journal beside a store, in the order in which they are taken in; none where there is none."""
    folder = journal_of(store)
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def is_recorded(store: Path) -> bool:
    """Whether there is anything to read at this path: a store, or the journal of one that is still to be made."""
    return store.is_file() or bool(journal_segments(store))


class Journal:
    """One writer's end of a journal folder; safe to use from several threads and across a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._fd: int | None = None
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """Forget a segment without touching it: at the start, and in a forked child, where it is the parent's."""
        if self._fd is not None:
            os.close(self._fd)  # the parent's descriptor keeps the lock
        self._pid = os.getpid()
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._fd = None
        self._whole_bytes = 0  # bytes of whole lines
        self._synced_bytes = 0  # bytes that were acknowledged
        self._loss_reason: str | None = None  # set when the disk refused to keep what was appended
        self._sync_condition = threading.Condition()  # guards the next two
        self._sync_requested = False  # a sync was requested and has not begun
        self._sync_thread: threading.Thread | None = None
        self.failure: StoreError | None = None  # the first loss that no caller waited for

    def append(self, record: JournalRecord) -> None:
        """Write one record; it is acknowledged only by the next `sync()`.

        Raises StoreError when the disk does not take it; earlier records stay intact and later ones may succeed.
        """
        self.append_all((record,))

    def append_all(self, records: Sequence[JournalRecord]) -> None:
        """Write records in one go: all of them, or none when StoreError is raised."""
        self.append_lines(b"".join(map(line_of, records)))

    def append_lines(self, lines: bytes) -> None:
        """Write whole lines of another journal in one go; the caller has checked them.

        Raises StoreError as `append_all` does.
        """
        if not lines:
            return
        if self._pid != os.getpid():
            self._reset()
        with self._append_lock:
            self._refuse_if_unusable()
            try:
                if self._fd is None:
                    self._fd = self._new_segment()
                self._write(self._fd, lines)
            except OSError as error:
                self._fail(error)
            self._whole_bytes += len(lines)

    def _write(self, fd: int, lines: bytes) -> None:
        # Writing at the end of the whole lines overwrites what a failed append may have left behind.
        written_bytes = 0
        try:
            while written_bytes < len(lines):
                written_bytes += os.pwrite(fd, lines[written_bytes:], self._whole_bytes + written_bytes)
        except OSError:
            with suppress(OSError):  # if this fails too, the next line overwrites the rest, or a reader drops it
                os.ftruncate(fd, self._whole_bytes)
            raise

    def sync(self) -> None:
        """Acknowledge: when this returns, all records appended before it are on the disk."""
        if self._pid != os.getpid():
            self._reset()
        with self._sync_lock:
            with self._append_lock:
                self._refuse_if_unusable()
                fd, end = self._fd, self._whole_bytes
            if fd is None or end == self._synced_bytes:  # another thread's sync covered ours
                return
            try:
                os.fsync(fd)
                is_removed = os.fstat(fd).st_nlink == 0
            except OSError as error:
                # The kernel may have dropped the pages: a second fsync would succeed and acknowledge a loss.
                self._loss_reason = str(error)
                self._fail(error)
            if is_removed:
                self._abandon_removed_segment()
            self._synced_bytes = end

    def _abandon_removed_segment(self) -> NoReturn:
        """Raises StoreError for a segment that was deleted under its writer; later records go to a new one."""
        with self._append_lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        raise StoreError(f"a segment of {self._folder} was deleted while it was written; its records are lost")

    def sync_soon(self) -> None:
        """Ask for a sync without waiting for it: a thread does one, BATCH_S from now, for all who asked by then.

        For those who must not stall, such as an app's event loop. A loss shows in `failure`. Ending the process
        loses nothing meanwhile; ending the machine loses at most what came since the last sync.
        """
        if self._pid != os.getpid():
            self._reset()
        with self._sync_condition:
            self._sync_requested = True
            if self._sync_thread is not None:
                self._sync_condition.notify()
                return
            self._sync_thread = threading.Thread(target=self._sync_while_requested, name="journal-sync", daemon=True)
            try:
                self._sync_thread.start()
            except RuntimeError:  # the interpreter is ending, or the system has no thread left
                self._sync_thread, self._sync_requested = None, False
                self._sync_unattended()

    def _sync_while_requested(self) -> None:
        while True:
            with self._sync_condition:
                if not self._sync_condition.wait_for(lambda: self._sync_requested, IDLE_S):
                    self._sync_thread = None
                    return
            time.sleep(BATCH_S)
            with self._sync_condition:
                self._sync_requested = False
            self._sync_unattended()

    def _sync_unattended(self) -> None:
        try:
            self.sync()
        except StoreError as error:
            if not self._closed:  # closing syncs by itself, and says what it could not
                self.failure = self.failure or error

    def close(self) -> None:
        """Sync and release the segment. Closing twice does nothing."""
        if self._closed:
            return
        try:
            self.sync()
        finally:
            with self._sync_lock, self._append_lock:
                self._closed = True
                if self._fd is not None:
                    os.close(self._fd)
                    self._fd = None

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise StoreError(f"journal {self._folder} is closed; open another one")
        if self._loss_reason is not None:
            raise StoreError(
                f"journal {self._folder} lost records when the disk failed ({self._loss_reason});"
                " check the disk and restart"
            )

    def _fail(self, error: OSError) -> NoReturn:
        raise StoreError(
            f"cannot write the journal {self._folder}: {error.strerror or error}; free space or fix its permissions"
        ) from error

    def _new_segment(self) -> int:
        is_new = not self._folder.is_dir()
        make_folder(self._folder)
        if is_new:
            sync(self._folder.parent)
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{SUFFIX}"
        hidden_path = path.with_suffix(".new")
        fd = create_file(hidden_path)
        # Locked before it gets the name that readers look for: no reader ever finds it without its writer.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            hidden_path.rename(path)
            sync(self._folder)
        except OSError:
            os.close(fd)
            raise
        self._whole_bytes = self._synced_bytes = 0
        return fd


def line_of(record: JournalRecord) -> bytes:
    """One record -> its journal line. Raises StoreError when it holds something that JSON cannot."""
    kind = _NAMES.get(type(record))
    if kind is None:
        raise StoreError(f"a journal takes runs, spans, rewards and adapters, not {type(record).__name__}")
    body = _json_bytes({"kind": kind} | dict(zip(_FIELDS[kind], _GETTERS[kind](record), strict=True)))
    return b"%08x %s\n" % (zlib.crc32(body), body)


def record_of(line: bytes) -> JournalRecord | None:
    """One journal line -> its record; None when the line is damaged."""
    body = line[9:-1]
    if line[8:9] != b" " or not line.endswith(b"\n") or line[:8] != b"%08x" % zlib.crc32(body):
        return None
    values = json.loads(body)
    kind = values.pop("kind", None)
    if kind == "reward":
        values["value"] = float(values["value"])  # NaN and infinities travel as text
    try:
        return _KINDS[kind](**values)
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"the journal has a line that this version does not know ({error}); use the marft-bridge that wrote it"
        ) from error


def json_text(value: Any) -> str:
    """A JSON value -> compact standard JSON. Numbers that are not finite become "NaN", "Infinity", "-Infinity";
    halves of a surrogate pair, which no UTF-8 text can hold, become U+FFFD."""
    return storable_text(_value_to_json(value))


def _json_bytes(value: Any) -> bytes:
    """The same as UTF-8: a line is encoded once."""
    text = _value_to_json(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return storable_text(text).encode()


def _value_to_json(value: Any) -> str:
    try:
        try:
            return _ENCODER.encode(value)
        except ValueError:
            return _ENCODER.encode(_finite_json(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot store a value as JSON: {error}; record only JSON values") from error


def storable_text(text: str) -> str:
    """The text itself, or with U+FFFD where it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _finite_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_json(item) for item in value]
    return value


def lines_from(file: BinaryIO, offset: int, *, growing: bool) -> Iterator[tuple[JournalRecord | None, int]]:
    """Records of an open segment from `offset`, each with the offset after it; None stands for a torn line.

    With `growing`, damage at the end is held back, because its writer may still be writing it.
    """
    file.seek(offset)
    damaged_ends: list[int] = []
    for line in file:
        offset += len(line)
        if line.isspace():
            continue  # erased: see `blank_lines`
        record = record_of(line)
        if record is None and growing:
            damaged_ends.append(offset)
            continue
        yield from ((None, end) for end in damaged_ends)
        damaged_ends.clear()
        yield record, offset


def blank_lines(fd: int, start_and_ends: Iterable[tuple[int, int]]) -> None:
    """Overwrite whole lines of a segment with spaces, on the disk when this returns; readers pass over them.

    Its writer is not disturbed: it writes behind its last whole line only, and these are whole.
    """
    for start, end in start_and_ends:
        written_bytes = start
        while written_bytes < end - 1:
            written_bytes += os.pwrite(fd, b" " * (end - 1 - written_bytes), written_bytes)
    os.fsync(fd)


def read_segment(path: Path) -> tuple[list[JournalRecord], int]:
    """All records of a segment whose writer is gone, and the number of torn lines that were dropped."""
    with open_to_read(path) as file:
        line_records = [record for record, _ in lines_from(file, 0, growing=False)]
    records = [record for record in line_records if record is not None]
    return records, len(line_records) - len(records)
