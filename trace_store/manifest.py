"""A folder of Parquet files <-> its manifest: which files count, what each holds, and of which schema they are.

    FOLDER/manifest.json
    FOLDER/<table>/run=<run id, which older stores may have empty>/day=<UTC day>/<export>-<number>.parquet

Invariants: a file counts only once the manifest names it, and the manifest is replaced whole, so an export that was
killed leaves nothing that looks finished; a path in a manifest never leads out of its folder; one process at a time
changes a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trace_store.errors import StoreError
from trace_store.files import create_file, make_folder, sync, sync_descriptor

MANIFEST = "manifest.json"
WRITING = ".writing-"  # how the folder of an unfinished export begins
_FORMAT = "marft-bridge traces"
_PATH = re.compile(r"(?P<table>[a-z_]+)/run=[^/\x00]*/day=\d{4}-\d\d-\d\d/[0-9a-f]+-\d+\.parquet")


@dataclass(frozen=True, slots=True)
class PartFile:
    """One Parquet file: some rows of one table, of one run and UTC day."""

    path: str  # relative to the folder, "/" between
    table: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder holds. `schema_version` is the newest that wrote into it."""

    schema_version: int
    files: tuple[PartFile, ...]

    def table_files(self, table: str) -> list[PartFile]:
        """The files of one table."""
        return [file for file in self.files if file.table == table]


def read_manifest(folder: Path, known_version: int) -> Manifest:
    """The manifest of a folder, its files checked to be there with the size that they had.

    Raises StoreError when the folder is no export, is damaged, or was written with a newer schema.
    """
    try:
        document: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise StoreError(f"{folder / MANIFEST} is not of {_FORMAT}; name a folder that `traces export` wrote")
        manifest = Manifest(int(document["schema_version"]), tuple(PartFile(**file) for file in document["files"]))
    except FileNotFoundError:
        raise StoreError(f"{folder} has no {MANIFEST}; name a folder that `traces export` wrote") from None
    except OSError as error:
        raise StoreError(f"cannot read {folder / MANIFEST}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder / MANIFEST} is damaged ({error}); export again into another folder") from None
    if manifest.schema_version > known_version:
        raise StoreError(
            f"{folder} was written with schema version {manifest.schema_version}, this marft-bridge knows up to"
            f" {known_version}; upgrade marft-bridge"
        )
    for file in manifest.files:
        _check_file(folder, file)
    return manifest


def _check_file(folder: Path, file: PartFile) -> None:
    match = _PATH.fullmatch(file.path)
    if match is None or match["table"] != file.table:
        raise StoreError(f"{folder / MANIFEST} names {file.path!r}, which no export writes; do not use this folder")
    path = folder / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{file.path!r} of {folder} is a link that leads out of the folder; do not use this folder")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreError(f"{path} is in the manifest, but cannot be read: {error.strerror or error}") from None
    if size != file.bytes:
        raise StoreError(f"{path} has {size} bytes, its manifest says {file.bytes}; fetch or export the folder again")


def check_hashes(folder: Path, manifest: Manifest) -> None:
    """Raises StoreError for the first file whose bytes are not those that were written."""
    for file in manifest.files:
        if file_sha256(folder / file.path) != file.sha256:
            raise StoreError(f"{folder / file.path} was changed after it was written; fetch or export the folder again")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest; on return it is on the disk, and so are the names of the files beside it.

    Raises StoreError for one that `read_manifest` would refuse, and leaves the old one.
    """
    for part in manifest.files:
        _check_file(folder, part)
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1) + "\n"
    hidden_path = folder / f".{MANIFEST}.{secrets.token_hex(4)}"
    with os.fdopen(create_file(hidden_path), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync_descriptor(file.fileno())
    sync(folder)  # the names of the tables' folders, before anything that names what is in them
    hidden_path.replace(folder / MANIFEST)
    sync(folder)


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, so that only this process changes it; files of an interrupted change are removed first.

    The folder is made when it is missing. Raises StoreError when another process is changing it, or when it holds
    something else: files of others are never touched.
    """
    make_folder(folder.resolve())  # its user may reach it by a link
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{folder} is being written by another process; wait until it ends") from None
        if not (folder / MANIFEST).exists():
            if any(folder.iterdir()):
                raise StoreError(f"{folder} holds other files; export into an empty or a new folder")
            write_manifest(folder, Manifest(0, ()))
        _clear_leftovers(folder)
        yield
    finally:
        os.close(handle)


def leftovers(folder: Path) -> list[Path]:
    """Files that a change to this folder wrote and no manifest names: it was interrupted, or goes on just now."""
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    listed_paths = {file["path"] for file in document.get("files", ())}
    unlisted_files = []
    for leftover in (*folder.glob(f"{WRITING}*/**/*"), *folder.glob(f".{MANIFEST}.*"), *folder.glob("*/run=*/day=*/*")):
        path = leftover.relative_to(folder).as_posix()
        is_export_path = path.startswith(".") or _PATH.fullmatch(path) is not None
        if is_export_path and path not in listed_paths and leftover.is_file() and not leftover.is_symlink():
            unlisted_files.append(leftover)
    return unlisted_files


def _clear_leftovers(folder: Path) -> None:
    """Remove files of interrupted changes, which may hold rows that were erased since."""
    for leftover in leftovers(folder):
        leftover.unlink()
    remove_empty_folders(folder)


def remove_empty_folders(folder: Path) -> None:
    """Remove the folders of runs and days in which no file is left."""
    patterns = (f"{WRITING}*/**", f"{WRITING}*", "*/run=*/day=*", "*/run=*")
    folders = {path for pattern in patterns for path in folder.glob(pattern) if path.is_dir() and not path.is_symlink()}
    for path in sorted(folders, key=lambda path: -len(path.parts)):
        if not any(path.iterdir()):
            path.rmdir()


def file_to_part(folder: Path, path: Path, table: str, rows: int) -> PartFile:
    """A finished file of the folder, synced to the disk -> its entry."""
    sync(path)
    relative = path.relative_to(folder).as_posix()
    return PartFile(relative, table, rows, bytes=path.stat().st_size, sha256=file_sha256(path))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def totals(files: Sequence[PartFile]) -> dict[str, int]:
    """Rows by table."""
    rows: dict[str, int] = {}
    for file in files:
        rows[file.table] = rows.get(file.table, 0) + file.rows
    return rows
