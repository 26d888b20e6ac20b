"""A text or bytes -> a whole file: a reader sees the old one or the new one, never a part; only its owner can read it.

Invariants: once it is written, a power cut takes neither its bytes nor its name away; what a killed writer left of an
earlier try is deleted by the next writer of the same file, and nothing of a writer that lives is. A file that tells of
its writer while it runs is known by the lock for one that the writer left behind.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trace_store.files import open_to_read, sync


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` by a text as UTF-8, or by bytes; 0600, synced to disk before it takes the name, which is synced.

    A link of that name is replaced itself; what it leads to stays as it is.
    """
    with replacing(path) as (handle, _), os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[tuple[int, Path]]:
    """An empty file, 0600, by its open descriptor and its path; it takes the name `path` when the block ends."""
    _delete_leftovers(path)
    handle, temporary = _make_temporary(path)
    try:
        yield handle, temporary
        os.fsync(handle)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


@contextmanager
def held_file(path: Path, content: str) -> Iterator[Callable[[], bool]]:
    """Writes a text as `write_atomically`, and holds the file until the block ends or this process does.

    Yields whether what lies at `path` is still that file: somebody may have deleted it, or put another in its place.
    """
    with ExitStack() as stack:
        with replacing(path) as (handle, _), os.fdopen(handle, "wb", closefd=False) as file:
            file.write(content.encode())
            held_handle = os.dup(handle)
            stack.callback(os.close, held_handle)  # the lock stays until its last descriptor is closed

        def is_there() -> bool:
            try:
                return os.path.samestat(path.lstat(), os.fstat(held_handle))
            except FileNotFoundError:
                return False

        yield is_there


def read_held(path: Path) -> str | None:
    """The text of a file that its writer holds; None for one that nobody holds, which is of a writer that is gone, and
    where there is none.

    The lock is that of the very bytes that are read: no writer who comes or goes meanwhile is taken for another. Raises
    StoreError for a link, a FIFO and the like.
    """
    try:
        file = open_to_read(path)
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().decode()
    return None


def _make_temporary(path: Path) -> tuple[int, Path]:
    """A file beside `path` that is locked: whoever dies lets go, and the next writer knows it for a leftover."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another writer took it for a leftover before it was locked


def _delete_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if re.fullmatch(r"[a-z0-9_]{8}", leftover.name[len(path.name) + 2 :]) is None:
            continue
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, a link, or another user's
            continue
        try:
            if stat.S_ISREG(os.fstat(handle).st_mode):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink(missing_ok=True)
        except BlockingIOError:  # its writer lives
            continue
        finally:
            os.close(handle)
