"""Paths of a store or a run folder -> open files that are ours alone, and what the system caches -> the disk.

Every file that is written in place is opened here. Invariants: nothing is written through a link, symbolic or hard, nor
into a FIFO or a device, and opening one never waits; a file that is made here is readable by its owner only. What a
power cut may not take away needs both: the bytes of a file, and its name in every folder above it.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from trace_store.errors import StoreError

_NEVER_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO is refused instead of waited for
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def sync(path: Path) -> None:
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_descriptor(handle)
    finally:
        os.close(handle)


def sync_descriptor(handle: int) -> None:
    """Returns once what was written through an open file is on the disk.

    macOS's fsync hands the bytes to the drive, which may keep them in its memory; F_FULLFSYNC has it write them.
    """
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, full_sync)


def create_file(path: Path) -> int:
    """A descriptor of a new file, 0600, for reading and writing. Raises FileExistsError for any taken name."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NEVER_FOLLOW, 0o600)


def open_to_write(path: Path, *, append: bool = False) -> int:
    """A descriptor of a file to read and write in place, made 0600 where there is none.

    Raises StoreError for a link, a file with a second name, a FIFO, a device and a folder, each untouched.
    """
    handle = _open_regular(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0))
    try:
        _refuse_second_name(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_to_read(path: Path) -> BinaryIO:
    """A file to read. Raises StoreError as `open_to_write`, but takes hard links; FileNotFoundError where none is."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def _open_regular(path: Path, flags: int) -> int:
    with suppress(FileNotFoundError):
        _refuse_irregular(path, path.lstat().st_mode)  # before it is opened: opening a device may do something
    try:
        handle = os.open(path, flags | _NEVER_FOLLOW, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror or error}; check it and its permissions") from error
    try:
        _refuse_irregular(path, os.fstat(handle).st_mode)
        os.set_blocking(handle, True)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _refuse_irregular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise StoreError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}; only a plain file is used; remove it")


def _refuse_second_name(path: Path, status: os.stat_result, known_names: int = 1) -> None:
    if status.st_nlink > known_names:
        raise StoreError(f"{path} has a second name elsewhere (a hard link); put a copy of its own into its place")


def check_before_opening(path: Path, *, read_only: bool) -> None:
    """The checks of `open_to_read` or `open_to_write` for a path that another library will open; it may be missing.

    A link may be read: its user named it. Raises StoreError.
    """
    with suppress(FileNotFoundError):
        status = path.stat() if read_only else path.lstat()
        _refuse_irregular(path, status.st_mode)
        if not read_only:
            _refuse_second_name(path, status)


def make_folder(path: Path) -> None:
    """Makes a folder, 0700, and those above it that are missing; on return their names are on the disk.

    Raises StoreError where it is a link or something else.
    """
    for unsynced_folder in make_folder_unsynced(path):
        sync(unsynced_folder)


def make_folder_unsynced(path: Path) -> list[Path]:
    """Does the same without waiting for the disk; returns the folders that are to be synced.

    The one right above is always among them: another process may have made this one and not have synced it yet.
    """
    missing_parents = list(takewhile(lambda parent: not parent.exists(), path.parents))
    for parent in reversed(missing_parents):
        parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):  # what is there is looked at below
        path.mkdir(mode=0o700)
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise StoreError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a file')}, not a folder; put a folder there")
    return [path.parent, *(parent.parent for parent in missing_parents)]


@contextmanager
def locked_file(path: Path) -> Iterator[int | None]:
    """The descriptor of a lock file while nobody else holds it; None where somebody does.

    A process that dies loses its lock. Raises StoreError as `open_to_write`.
    """
    handle = open_to_write(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)


def refuse_unsafe_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder in which somebody else may have, or may put, a way out of it.

    Args:
        folder: may itself be reached by a link, which its user made.
        names: patterns of what is ours in it; the rest is nobody's business.

    Raises:
        StoreError: a link, a FIFO, a device, a file with a name outside the folder, or write permission for others.
    """
    counts_by_inode: dict[tuple[int, int], int] = {}
    linked_files: list[tuple[Path, os.stat_result]] = []
    for path, status in _walk(folder, names):
        if not stat.S_ISDIR(status.st_mode):
            _refuse_irregular(path, status.st_mode)
        if status.st_mode & _OTHERS_WRITE:
            raise StoreError(
                f"others may write {path}: {stat.filemode(status.st_mode)}; `chmod -R go-w {shlex.quote(str(folder))}`"
            )
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            inode = (status.st_dev, status.st_ino)
            counts_by_inode[inode] = counts_by_inode.get(inode, 0) + 1
            linked_files.append((path, status))
    for path, status in linked_files:  # killed while it wrote, `promote` leaves two names in one folder
        _refuse_second_name(path, status, counts_by_inode[status.st_dev, status.st_ino])


def _walk(folder: Path, names: Iterable[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder and what is under it, no link followed; what vanishes meanwhile is left out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield folder, folder.stat()
        waiting_paths = sorted({path for name in names for path in folder.glob(name)})
        while waiting_paths:
            path = waiting_paths.pop()
            try:
                status = path.lstat()
                yield path, status
                if stat.S_ISDIR(status.st_mode):
                    waiting_paths += path.iterdir()
            except FileNotFoundError:
                continue
