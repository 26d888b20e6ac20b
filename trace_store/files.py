"""A file or folder, as the system caches it -> the disk; a path -> a plain file, and nothing else.

Invariant: what a power cut may not take away needs both: the bytes of a file, and its name in every folder above it.
"""

from __future__ import annotations

import errno
import os
import stat
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO


def sync(path: Path) -> None:
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_durable_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; on return their names are on the disk."""
    for unsynced_folder in make_folder(folder):
        sync(unsynced_folder)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder, 0700, and those above it that are missing; returns the folders whose names are to be synced.

    The one right above is always among them: another process may have made this one and not have synced it yet.
    """
    missing_parents = list(takewhile(lambda parent: not parent.exists(), folder.parents))
    for parent in reversed(missing_parents):
        parent.mkdir(exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return [folder.parent, *(parent.parent for parent in missing_parents)]


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting for anybody.

    Raises OSError for a link, a pipe, a device, a socket and a folder.
    """
    if not stat.S_ISREG(path.lstat().st_mode):  # opening a device may already do something
        raise OSError(errno.EINVAL, "not a plain file")
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # exchanged meanwhile
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file")
    return os.fdopen(handle, "rb")
