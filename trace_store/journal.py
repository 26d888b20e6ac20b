"""Records -> lines of a segment file that survive a crash, and back.

A line is `crc32 SPACE compact-JSON NEWLINE`. Invariants: a record whose `append()` returned can be read back after
the process is killed, and one that a `sync()` covered after the machine is; a line that a crash or a full disk
left half written is dropped and counted, never half read; nobody reads a line of an append before the whole append is
there, nor one of an append that failed; what a power cut must never leave in part is one line, because a disk may keep
some of the lines that were written in one go; a whole line that holds no record of this version is no
reason to stop. Each writer has its own segments and holds an exclusive lock on the last one, so a reader knows whether
it may still grow. A segment that a `sync()` finds full is let go, so that whoever takes it in can delete it; so is one
in which an append failed, because a reader may have come further in it than its writer.

The first byte of several lines is written last. Until then a NUL, which no line has, stands in its place.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from trace_store.errors import NotJsonError, StoreError
from trace_store.files import create_file, make_folder_unsynced, open_to_read, sync, sync_descriptor
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow

log = logging.getLogger("marft_bridge")


@dataclass(frozen=True, slots=True)
class RewardGroup:
    """Rewards of which a crash leaves all or none: those that one computation gave one episode."""

    rewards: tuple[Reward, ...]


JournalRecord = RunRow | SpanRow | Reward | RewardGroup | AdapterRow

SUFFIX = ".segment"
FOREIGN_SUFFIX = ".foreign"  # of lines that an intake set aside
HIDDEN_SUFFIX = ".new"  # of either, before it is whole
SEGMENT_BYTES = 8 * 2**20  # a segment of this size is full; it is larger by what came since the last sync
BATCH_S = 0.1  # syncs that nobody waits for are at least this far apart
IDLE_S = 1.0  # after this long without a request for a sync, the thread that syncs ends
_UNWRITTEN = b"\0"  # what a file holds where a later byte was written and this one not yet
_GROUP = "rewards"  # the kind of a line that holds several records, each with its fields, under the same name
_KINDS: dict[str, type[RunRow | SpanRow | Reward | AdapterRow]] = {
    "run": RunRow,
    "span": SpanRow,
    "reward": Reward,
    "adapter": AdapterRow,
}
_NAMES = {record_class: kind for kind, record_class in _KINDS.items()}
_FIELDS = {kind: tuple(field.name for field in fields(record_class)) for kind, record_class in _KINDS.items()}
_LINE_KEYS = {kind: ("kind", *names) for kind, names in _FIELDS.items()}
_GETTERS = {kind: attrgetter(*names) for kind, names in _FIELDS.items()}  # record -> the values of its fields
_TEXT, _TEXT_OR_NONE, _INT, _INT_OR_NONE, _DICT = (str,), (str, type(None)), (int,), (int, type(None)), (dict,)
_TYPES: dict[str, dict[str, tuple[type, ...]]] = {  # of the values of a record's fields, as JSON has them
    "run": {"run_id": _TEXT, "command": _TEXT, "started_ns": _INT, "config": _DICT, "version": _TEXT},
    "span": {
        "trace_id": _TEXT,
        "span_id": _TEXT,
        "parent_span_id": _TEXT_OR_NONE,
        "name": _TEXT,
        "operation": _TEXT,
        "start_ns": _INT,
        "end_ns": _INT,
        "status": _TEXT,
        "status_message": _TEXT_OR_NONE,
        "convention": _TEXT,
        "attributes": _DICT,
    },
    "reward": {
        "episode_id": _TEXT,
        "name": _TEXT,
        "value": (float,),
        "source": _TEXT,
        "created_ns": _INT,
        "scope": _TEXT,
        "action_id": _TEXT_OR_NONE,
        "node": _TEXT_OR_NONE,
    },
    "adapter": {
        "node": _TEXT,
        "version": _INT,
        "parent": _INT_OR_NONE,
        "path": _TEXT,
        "sha256": _TEXT,
        "base_sha256": _TEXT,
        "created_ns": _INT,
        "metrics": _DICT,
    },
}
_ALLOWED = {kind: tuple(_TYPES[kind][name] for name in names) for kind, names in _FIELDS.items()}
_SETTER = re.compile(rf"\.v(\d{{1,9}}){re.escape(FOREIGN_SUFFIX)}$")
_MAX_INT = 2**63 - 1  # of a BIGINT column
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# What `json` does not know, orjson leaves to it, which refuses it.
_AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def journal_of(store: Path) -> Path:
    """The folder where recorders journal for a store, next to its file."""
    return store.with_name(store.name + ".journal")


@dataclass(frozen=True, slots=True)
class ForeignLine:
    """A whole line of a segment that holds no record of this version: of a newer one, or of somebody else."""

    line: bytes
    reason: str


JournalLine = JournalRecord | ForeignLine | None  # None stands for a torn line


def journal_segments(store: Path) -> list[Path]:
    """The segments of the journal beside a store, in the order in which they are taken in; none where there is none."""
    return folder_to_segments(journal_of(store))


def folder_to_segments(folder: Path) -> list[Path]:
    """The segments of a journal folder: those of one writer in the order in which it wrote them."""
    return [path for path in _named_segments(folder) if is_plain(path)]


def folder_to_odd_paths(folder: Path) -> list[Path]:
    """What is called a segment and is none: links, pipes, devices, folders. Nobody opens them."""
    return [path for path in _named_segments(folder) if not is_plain(path)]


def _named_segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def is_plain(path: Path) -> bool:
    """Whether a name of a journal folder is a file's, or was until it was taken in."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:  # taken in meanwhile: whoever opens it finds out
        return True


def is_recorded(store: Path) -> bool:
    """Whether there is anything to read at this path: a store, or the journal of one that is still to be made."""
    return store.is_file() or bool(journal_segments(store))


class Journal:
    """One writer's end of a journal folder; safe to use from several threads and across a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._fd: int | None = None
        self._full_fds: list[int] = []
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """Forget a segment without touching it: at the start, and in a forked child, where it is the parent's."""
        for fd in self._open_fds():
            os.close(fd)  # the parent's descriptor keeps the lock
        self._pid = os.getpid()
        self._name = f"{self._pid}-{secrets.token_hex(8)}"  # of this writer: the part that its segments share
        self._segment_count = 0
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._fd = None  # of the segment that is written
        self._full_fds = []  # of those that are not written any more, until they are synced
        self._unsynced_folders: tuple[Path, ...] = ()  # in which a segment, or a folder above it, is new
        self._whole_bytes = 0  # bytes of whole lines
        self._synced_bytes = 0  # bytes that were acknowledged
        self._loss_reason: str | None = None  # set when the disk refused to keep what was appended
        self._sync_condition = threading.Condition()  # guards the next three
        self._sync_requested = False  # a sync was requested and has not begun
        self._sync_delay_s = BATCH_S
        self._sync_thread: threading.Thread | None = None
        self.failure: StoreError | None = None  # the first loss that no caller waited for

    def append(self, record: JournalRecord) -> None:
        """Write one record; it is acknowledged only by the next `sync()`.

        Raises StoreError when the disk does not take it; earlier records stay intact and later ones may succeed.
        """
        self.append_all((record,))

    def append_all(self, records: Sequence[JournalRecord]) -> None:
        """Write records in one go: all, or none when StoreError is raised (NotJsonError where one is to blame).

        A kill leaves all of them or none; a power cut may leave some: see `append_rewards`.
        """
        self.append_lines(b"".join(map(line_of, records)))

    def append_rewards(self, rewards: Sequence[Reward]) -> None:
        """Write what one computation gave one episode, so that no crash leaves a part of it; as `append`.

        Nothing is written where there is none.
        """
        if rewards:
            self.append(rewards[0] if len(rewards) == 1 else RewardGroup(tuple(rewards)))

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

    def _write(self, fd: int, lines: bytes) -> None:
        """Write behind the whole lines. Where a part of it may be there afterwards, nothing more is written into this
        segment: a reader may have taken a line of it, and would look for the next one behind that.

        A single line needs no more than its end to be whole. Of several the first byte comes last, so that no reader
        takes one of them before all of them are there; see `lines_from`.
        """
        begin = self._whole_bytes
        written_bytes = held_bytes = 1 if lines.find(b"\n") < len(lines) - 1 else 0
        unwritten = memoryview(lines)[held_bytes:]
        try:
            while unwritten:
                count = os.pwrite(fd, unwritten, begin + written_bytes)
                written_bytes, unwritten = written_bytes + count, unwritten[count:]
            if held_bytes:
                os.pwrite(fd, lines[:held_bytes], begin)
            self._whole_bytes = begin + len(lines)
        except BaseException as error:  # an interrupt as well
            is_untouched = written_bytes == held_bytes and isinstance(error, OSError)
            if not is_untouched:  # a full disk that took nothing at all costs no segment each time
                self._abandon_failed_segment(fd, begin)
            raise

    def _abandon_failed_segment(self, fd: int, whole_bytes: int) -> None:
        """Cut off what a failed append left, and let the segment go; the next record begins another.

        Where the disk refuses even that, a reader drops what is left: the end of a last line, or a first byte, lacks.
        """
        self._fd = None
        with suppress(OSError):
            os.ftruncate(fd, whole_bytes)
        if whole_bytes:
            self._full_fds.append(fd)
            return
        with suppress(OSError):  # an empty one is no harm
            self._segment_path().unlink()
        release(fd)

    def sync(self) -> None:
        """Acknowledge: when this returns, all records appended before it are on the disk.

        A segment that is full is let go after that; the next record begins another.
        """
        if self._pid != os.getpid():
            self._reset()
        with self._sync_lock:
            with self._append_lock:
                self._refuse_if_unusable()
                if self._fd is not None and self._whole_bytes >= SEGMENT_BYTES:
                    self._full_fds.append(self._fd)
                    self._fd = None  # records that come from now on need not wait
                full_fds = tuple(self._full_fds)  # also of a sync that was interrupted in here
                fd, end, folders = self._fd, self._whole_bytes, self._unsynced_folders
            for full_fd in full_fds:
                self._sync_segment(full_fd, folders)
                with self._append_lock:
                    self._full_fds.remove(full_fd)  # before it is closed: a child that is forked closes what it finds
                release(full_fd)
            if fd is not None and end != self._synced_bytes:  # else another thread's sync covered ours
                self._sync_segment(fd, folders)
                with self._append_lock:
                    if self._fd == fd:  # else an append failed meanwhile, and these are the numbers of another segment
                        self._synced_bytes = end

    def _sync_segment(self, fd: int, folders: Sequence[Path]) -> None:
        """The bytes of a segment, and the names that lead to it, to the disk. Raises StoreError."""
        try:
            sync_descriptor(fd)
            is_removed = os.fstat(fd).st_nlink == 0
            if self._unsynced_folders and not is_removed:
                for folder in folders:
                    sync(folder)
        except OSError as error:
            # The kernel may have dropped the pages: a second fsync would succeed and acknowledge a loss.
            self._loss_reason = str(error)
            self._fail(error)
        if is_removed:
            self._abandon_removed_segment(fd)
        with self._append_lock:
            if self._unsynced_folders is folders:  # else there is a new segment again
                self._unsynced_folders = ()

    def _abandon_removed_segment(self, fd: int) -> NoReturn:
        """Raises StoreError for a segment that was deleted under its writer; later records go to a new one."""
        with self._append_lock:
            if self._fd == fd:
                self._fd = None
            else:
                self._full_fds.remove(fd)
            os.close(fd)
        raise StoreError(f"a segment of {self._folder} was deleted while it was written; its records are lost")

    def sync_soon(self, delay_s: float = BATCH_S) -> None:
        """Ask for a sync without waiting for it: a thread does one, `delay_s` from now, for all who asked by then.

        For those who must not stall, such as an app's event loop. A loss shows in `failure`. Ending the process
        loses nothing meanwhile; ending the machine loses at most what came since the last sync. With a delay of 0 the
        caller waits for the sync, and nothing that came before can be lost.
        """
        if self._pid != os.getpid():
            self._reset()
        if delay_s == 0:
            self._sync_unattended()
            return
        with self._sync_condition:
            self._sync_requested, self._sync_delay_s = True, delay_s
            if self._sync_thread is not None and self._sync_thread.is_alive():
                self._sync_condition.notify()
                return
            self._sync_thread = threading.Thread(target=self._sync_while_requested, name="journal-sync", daemon=True)
            try:
                Context().run(self._sync_thread.start)  # it serves all runs, so it belongs to no context of one
            except RuntimeError:  # the interpreter is ending, or the system has no thread left
                self._sync_thread, self._sync_requested = None, False
                self._sync_unattended()

    def _sync_while_requested(self) -> None:
        try:
            while True:
                with self._sync_condition:
                    if not self._sync_condition.wait_for(lambda: self._sync_requested, IDLE_S):
                        self._sync_thread = None
                        return
                    delay_s = self._sync_delay_s
                time.sleep(delay_s)
                with self._sync_condition:
                    self._sync_requested = False
                self._sync_unattended()
        except BaseException as error:  # noqa: BLE001 - not the disk: nothing is lost yet, and the next sync may succeed
            with self._sync_condition:
                self._sync_thread = None
            log.warning(
                "the thread that syncs the journal %s ended (%s); the next record that asks for a sync starts it again",
                self._folder,
                type(error).__name__,
            )

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
                for fd in self._open_fds():
                    release(fd)
                self._fd, self._full_fds = None, []

    def renewed(self) -> Journal:
        """Another writer for the same folder, and the end of this one: for who writes again what a sync lost."""
        with suppress(StoreError):  # said by the sync that failed
            self.close()
        return Journal(self._folder)

    def _open_fds(self) -> list[int]:
        return self._full_fds if self._fd is None else [self._fd, *self._full_fds]

    def _segment_path(self) -> Path:
        return self._folder / f"{self._name}-{self._segment_count:06}{SUFFIX}"

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
        unsynced_folders = (self._folder, *make_folder_unsynced(self._folder))
        self._segment_count += 1
        path = self._segment_path()
        hidden_path = path.with_suffix(HIDDEN_SUFFIX)
        fd = create_file(hidden_path)
        # Locked before it gets the name that readers look for: no reader ever finds it without its writer.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            hidden_path.rename(path)
        except OSError:
            os.close(fd)
            raise
        # Synced with the first records: this may be the thread of an app's event loop. A segment in which an append
        # failed may wait for the same.
        self._unsynced_folders = tuple(dict.fromkeys((*self._unsynced_folders, *unsynced_folders)))
        self._whole_bytes = self._synced_bytes = 0
        return fd


def release(fd: int) -> None:
    """Close a segment that is written no more. Its lock goes also where a forked child still has it open."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock_if_abandoned(file: BinaryIO) -> bool:
    """Whether the writer of a segment is gone, or has let it go; if so, it is locked until the file is closed."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def record_to_rewards(record: JournalRecord) -> tuple[Reward, ...]:
    """The rewards of a line; none of one that holds another record."""
    if isinstance(record, RewardGroup):
        return record.rewards
    return (record,) if isinstance(record, Reward) else ()


def line_of(record: JournalRecord) -> bytes:
    """One record -> its journal line. Raises NotJsonError when it holds something that JSON cannot."""
    if isinstance(record, RewardGroup):
        rows = [_GETTERS["reward"](reward) for reward in record.rewards]
        members = [dict(zip(_FIELDS["reward"], values, strict=True)) for values in rows]
        none_count = sum(values.count(None) for values in rows)
        body = _json_bytes({"kind": _GROUP, _GROUP: members}, none_count=none_count)
    else:
        kind = _NAMES.get(type(record))
        if kind is None:
            raise StoreError(f"a journal takes runs, spans, rewards and adapters, not {type(record).__name__}")
        values = (kind, *_GETTERS[kind](record))
        body = _json_bytes(dict(zip(_LINE_KEYS[kind], values, strict=True)), none_count=values.count(None))
    return b"%08x %s\n" % (zlib.crc32(body), body)


def record_of(line: bytes) -> JournalLine:
    """One journal line -> its record; None when the line is damaged."""
    body = line[9:-1]
    if line[8:9] != b" " or not line.endswith(b"\n") or line[:8] != b"%08x" % zlib.crc32(body):
        return None
    try:
        values = json.loads(body)
        kind = values.pop("kind", None)
        if kind == _GROUP:
            record: JournalRecord = _values_to_group(values)
        else:
            record = _values_to_record(kind, values)
    except KeyError as error:
        return ForeignLine(line, f"the kind or field {error} is not known")
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        return ForeignLine(line, f"{type(error).__name__}: {error}")
    if b"\\u" in body and not _is_storable(json.loads(body)):
        return ForeignLine(line, "half of a surrogate pair, which no text can hold")
    return record


def _values_to_group(values: dict[str, Any]) -> RewardGroup:
    """Raises KeyError, TypeError or ValueError for what is no group of this version."""
    members = [_values_to_record("reward", member) for member in values.pop(_GROUP)]
    if values or not members:
        raise ValueError(f"a line of {_GROUP} has one field, and at least one of them in it")
    return RewardGroup(tuple(member for member in members if isinstance(member, Reward)))


def _values_to_record(kind: Any, values: dict[str, Any]) -> RunRow | SpanRow | Reward | AdapterRow:
    """Raises KeyError, TypeError or ValueError for what is no record of this version."""
    if kind == "reward":
        values["value"] = float(values["value"])  # NaN and infinities travel as text
    record = _KINDS[kind](**values)
    for value, allowed, name in zip(_GETTERS[kind](record), _ALLOWED[kind], _FIELDS[kind], strict=True):
        if type(value) not in allowed or (type(value) is int and not -_MAX_INT <= value <= _MAX_INT):
            raise TypeError(f"the field {name!r} of a {kind} is not what it should be")
    return record


def _is_storable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def json_text(value: Any) -> str:
    """A JSON value -> compact standard JSON. Numbers that are not finite become "NaN", "Infinity", "-Infinity";
    halves of a surrogate pair, which no UTF-8 text can hold, become U+FFFD."""
    return storable_text(_value_to_json(value))


def _json_bytes(value: dict[str, Any], none_count: int) -> bytes:
    """The same as UTF-8, of a record with that many fields that are None.

    orjson takes a fifth of the time of `json`. It writes a number that is not finite as null, so where there are more
    of these than fields that are None (or a text has the word), and where orjson refuses a value, `json` writes all.
    """
    try:
        body = orjson.dumps(value, option=_AS_JSON)
        if body.count(b"null") == none_count:
            return body
    except TypeError:  # what orjson refuses: halves of surrogate pairs, integers of more than 64 bits
        pass
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
        raise NotJsonError(f"cannot store a value as JSON: {error}; record only JSON values") from error


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


def lines_from(file: BinaryIO, offset: int, *, growing: bool) -> Iterator[tuple[JournalLine, int]]:
    """Records of an open segment from `offset`, each with the offset after it; None stands for a torn line.

    With `growing`, damage at the end is held back, because its writer may still be writing it. Several lines that are
    written in one go are held back until all of them are there; without their writer they are torn ones.
    """
    file.seek(offset)
    damaged_ends: list[int] = []
    is_unfinished = False
    for line in file:
        if growing and not line.endswith(b"\n"):
            return  # the file may have grown since: what comes next would be the rest of this line
        offset += len(line)
        if line.isspace():
            continue  # erased: see `blank_lines`
        record = None if is_unfinished else record_of(line)
        if record is None and begins_unfinished(line):
            if growing:
                return
            is_unfinished = True  # an append is the last thing in its segment until it has returned
        if record is None and growing:
            damaged_ends.append(offset)
            continue
        yield from ((None, end) for end in damaged_ends)
        damaged_ends.clear()
        yield record, offset


def begins_unfinished(line: bytes) -> bool:
    """Whether a line is whole but for its first byte: it begins an append of several lines that has not returned."""
    return line[:1] == _UNWRITTEN and line.endswith(b"\n") and line[1:9] == (b"%08x " % zlib.crc32(line[9:-1]))[1:]


def finished_lines(lines: bytes) -> bytes:
    """Of bytes that were read from a growing segment, the whole lines before an append that has not returned."""
    finished_bytes = lines.partition(_UNWRITTEN)[0]
    return finished_bytes[: finished_bytes.rfind(b"\n") + 1]


def blank_lines(fd: int, start_and_ends: Iterable[tuple[int, int]]) -> None:
    """Overwrite whole lines of a segment with spaces, on the disk when this returns; readers pass over them.

    Its writer is not disturbed: it writes behind its last whole line only, and these are whole.
    """
    for start, end in start_and_ends:
        written_bytes = start
        while written_bytes < end - 1:
            written_bytes += os.pwrite(fd, b" " * (end - 1 - written_bytes), written_bytes)
    sync_descriptor(fd)


def read_segment(path: Path) -> tuple[list[JournalRecord], int]:
    """All records of a segment whose writer is gone, and the number of torn lines that were dropped.

    Raises StoreError for a line that this version does not know.
    """
    records: list[JournalRecord] = []
    torn_lines = 0
    with open_to_read(path) as file:
        for record, _ in lines_from(file, 0, growing=False):
            if isinstance(record, ForeignLine):
                raise StoreError(
                    f"the journal has a line that this version does not know ({record.reason});"
                    " use the marft-bridge that wrote it"
                )
            if record is None:
                torn_lines += 1
            else:
                records.append(record)
    return records, torn_lines


def set_aside(segment: Path, begin: int, lines: Sequence[ForeignLine], version: int) -> Path:
    """Write lines of a segment to a file of their own beside it, synced; the file holds those from `begin` on.

    `version` is the newest version of a store that the writer knows: see `return_known`. Writing the same again
    replaces it.
    """
    path = segment.with_name(f"{segment.stem}.{begin}.v{version}{FOREIGN_SUFFIX}")
    hidden_path = path.with_suffix(HIDDEN_SUFFIX)
    hidden_path.unlink(missing_ok=True)  # of an intake that was killed
    with os.fdopen(create_file(hidden_path), "wb") as file:
        file.write(b"".join(foreign.line for foreign in lines))
        file.flush()
        sync_descriptor(file.fileno())
    hidden_path.replace(path)
    sync(path.parent)
    return path


def return_known(folder: Path, version: int) -> None:
    """Make segments again of what an older version set aside: this one may know it."""
    for path in folder.glob(f"*{FOREIGN_SUFFIX}"):
        setter = _SETTER.search(path.name)
        if setter is not None and int(setter[1]) < version and is_plain(path):
            with suppress(FileNotFoundError):  # another intake did it
                path.rename(path.with_suffix(SUFFIX))
