"""Folders and weight files on disk: written whole or not at all, and identified by their bytes.

Invariant: a reader never sees a half-written folder. It knows nothing of what the files mean.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from trainers.errors import TrainError


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder to write into, which becomes `folder` when the block ends without an error.

    An existing `folder` is replaced: it is moved aside, the new one takes its name, then the old one is deleted. A
    crash between the two moves leaves both complete, and `finish_replacing` goes on from there. What a crash left of an
    earlier try is deleted.

    Raises:
        TrainError: `folder` is a link, which may lead anywhere.
    """
    if folder.is_symlink():
        raise TrainError(f"{folder} is a link; put a folder there")
    _make_parents(folder)
    finish_replacing(folder)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # created 0700
    lock = os.open(fresh, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever dies lets go, and the next writer knows it for a leftover
        yield fresh
        for path in fresh.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
            _sync(path)
        _sync(fresh)
        _sync(folder.parent)  # `finish_replacing` tells by its name that it is whole
        old = fresh.with_name(fresh.name + ".old")
        if folder.exists():
            folder.rename(old)
        try:
            fresh.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(lock)
        shutil.rmtree(fresh, ignore_errors=True)


def _delete_leftovers(folder: Path) -> None:
    """Deletes what dead writers left beside a folder: unfinished ones, and, where there is a folder, replaced ones."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        name = re.fullmatch(r"[a-z0-9_]{8}(\.old)?", leftover.name[len(folder.name) + 2 :])
        if name is None or leftover.is_symlink() or not leftover.is_dir() or (name[1] and not folder.exists()):
            continue
        handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:  # its writer lives
            continue
        finally:
            os.close(handle)


def finish_replacing(folder: Path) -> None:
    """Ends what a crash in `whole_folder` left: `folder` gets its name again, and what is left over is deleted.

    Only between the two moves is there the old folder beside the new one, which is whole by then, and nothing under
    the name.
    """
    if not folder.exists():
        for old in folder.parent.glob(f".{glob.escape(folder.name)}.*.old"):
            fresh = old.with_suffix("")
            if fresh.is_dir():
                fresh.rename(folder)
                _sync(folder.parent)
                shutil.rmtree(old, ignore_errors=True)
                break
    _delete_leftovers(folder)


def weights_to_sha256(model_dir: Path) -> str:
    """A model directory to the SHA-256 over its safetensors files (names and bytes, in order of name).

    Raises:
        TrainError: the directory has no safetensors weights.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise TrainError(f"{model_dir} has no *.safetensors weights: save the model with save_pretrained")
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            total.update(path.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _make_parents(folder: Path) -> None:
    """Makes the folders above this one that are missing, 0700, and syncs their names."""
    missing = list(takewhile(lambda parent: not parent.exists(), folder.parents))
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for parent in missing:
        _sync(parent.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
