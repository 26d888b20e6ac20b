"""Texts that are erased -> the files that still hold one of them, in any of the usual encodings.

A text is known by its longest runs of letters, digits and spaces, at most three, of ASCII where it has one. Invariants:
a text with such a run is found wherever that run stands whole in a file, also in one that is larger than the memory,
gzipped, or compressed as Parquet compresses its columns; a text without one (`42`) is never looked for.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import duckdb
import numpy as np

from trace_store.connection import first_line
from trace_store.errors import StoreError
from trace_store.files import open_to_read

MIN_RUN, MAX_RUN = 10, 24  # characters; a shorter run is said by many
_RUNS_PER_TEXT = 3
# The places of a chunk's bytes in the table fit into a processor's cache: 1.6 times as fast as with chunks of 4 MiB.
_CHUNK_BYTES, _OVERLAP_BYTES = 1 << 18, 1 << 9  # the longest form of a run has fewer bytes than two chunks share
_KEY_BYTES = 8  # every form of a run has at least so many
_TABLE_BITS = 22
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hash, of 64 bits
_ASCII_RUN = re.compile(rf"[A-Za-z0-9 ]{{{MIN_RUN},}}")
_ANY_RUN = re.compile(rf"[^\W_](?:[^\W_]| ){{{MIN_RUN - 1},}}")
_GZIP_MAGIC, _PARQUET_MAGIC = b"\x1f\x8b", b"PAR1"
_TEXT_TYPE = re.compile(r"VARCHAR|BLOB|JSON|ENUM|VARIANT")  # somewhere in the type of a column that may hold a text
_ROWS = 64  # of a Parquet file that are in memory at the same time
_PARQUET_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": "1",
    "memory_limit": "1GiB",
    "temp_directory": "",
}


def text_to_runs(text: str) -> list[str]:
    """What a text is known by: its longest runs, of ASCII where it has one; none for a short text."""
    runs = {run.strip()[:MAX_RUN].strip() for run in _ASCII_RUN.findall(text) or _ANY_RUN.findall(text)}
    return sorted((run for run in runs if len(run) >= MIN_RUN), key=lambda run: (-len(run), run))[:_RUNS_PER_TEXT]


def run_to_forms(run: str) -> set[bytes]:
    """The bytes of a run in the encodings in which a file may hold it, base64 at each of its three offsets."""
    content = run.encode()
    padded = [base64.b64encode(b"\0" * shift + content)[4 if shift else 0 : -4] for shift in range(3)]
    texts = (
        *(json.dumps(run)[1:-1], "".join(f"&#{ord(letter)};" if ord(letter) > 127 else letter for letter in run)),
        *(quote(run), quote_plus(run), content.hex(), content.hex().upper()),
    )
    encoded = (run.encode(name) for name in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"))
    return {content, *padded, *encoded, *(text.encode() for text in texts)}


class TextSearch:
    """Looks for any of many texts in files."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._forms: dict[bytes, list[tuple[bytes, str]]] = {}  # the first bytes of a form -> it, and its run
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        for run in {run for text in set(texts) for run in text_to_runs(text)}:
            for form in run_to_forms(run):
                self._forms.setdefault(form[:_KEY_BYTES], []).append((form, run))
        if self._forms:
            self._table[_bytes_to_slots(b"".join(self._forms))[::_KEY_BYTES]] = True

    def runs_in(self, path: Path) -> Iterator[str]:
        """The runs of the texts that a file holds, each time that it holds them.

        What is gzipped is read unpacked; of Parquet, the bytes as they are and the columns that may hold a text. A file
        that is gone holds nothing. Raises StoreError for one that cannot be read.
        """
        if not self._forms:
            return
        try:
            with open_to_read(path) as file:
                magic = file.read(4)
                file.seek(0)
                is_packed = magic.startswith(_GZIP_MAGIC)
                stream = gzip.GzipFile(fileobj=file) if is_packed else file
                yield from self._runs_in_chunks(iter(partial(stream.read, _CHUNK_BYTES), b""))
            if magic == _PARQUET_MAGIC:
                yield from self._runs_in_chunks(_parquet_to_chunks(path))
        except FileNotFoundError:
            return
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        except duckdb.Error as error:  # damaged, encrypted, or with a value above the limit
            raise StoreError(f"cannot read {path}: {first_line(str(error))}") from error

    def runs_in_text(self, text: str) -> Iterator[str]:
        """The runs of the texts that a text holds."""
        return self._runs_in_bytes(text.encode("utf-8", "replace"))

    def _runs_in_chunks(self, chunks: Iterable[bytes]) -> Iterator[str]:
        tail = b""
        for chunk in chunks:
            yield from self._runs_in_bytes(tail + chunk)
            tail = (tail + chunk)[-_OVERLAP_BYTES:]

    def _runs_in_bytes(self, content: bytes) -> Iterator[str]:
        if len(content) < _KEY_BYTES or not self._forms:
            return
        for position in np.flatnonzero(self._table[_bytes_to_slots(content)]).tolist():
            for form, run in self._forms.get(content[position : position + _KEY_BYTES], ()):
                if content.startswith(form, position):
                    yield run


def _parquet_to_chunks(path: Path) -> Iterator[bytes]:
    """Every text and blob in the columns of a Parquet file, a line feed after each, in chunks. Raises duckdb.Error."""
    file_name = re.sub(r"[*?[]", r"[\g<0>]", str(path))  # DuckDB takes these for a pattern
    source = "read_parquet(?, hive_partitioning = false)"
    with duckdb.connect(":memory:", config=_PARQUET_CONFIG) as con:
        columns = con.execute(f"DESCRIBE FROM {source}", [file_name]).fetchall()
        names = [name.replace('"', '""') for name, kind, *_ in columns if _TEXT_TYPE.search(kind)]
        if not names:
            return
        quoted_names = ", ".join(f'"{name}"' for name in names)
        result = con.execute(f"SELECT {quoted_names} FROM {source}", [file_name])  # noqa: S608 - quoted
        while rows := result.fetchmany(_ROWS):
            content = b"".join(_value_to_lines(rows))
            for start in range(0, len(content), _CHUNK_BYTES):
                yield content[start : start + _CHUNK_BYTES]


def _value_to_lines(value: Any) -> Iterator[bytes]:
    """The texts and blobs in a value of any depth, a line feed after each."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace") + b"\n"
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value) + b"\n"
    elif isinstance(value, dict):
        yield from _value_to_lines([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _value_to_lines(item)


def _bytes_to_slots(content: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Each 8 bytes that follow each other in `content` -> their place in the table."""
    windows: np.ndarray[tuple[int], np.dtype[np.uint64]] = np.ndarray(
        (len(content) - _KEY_BYTES + 1,), np.uint64, buffer=content, strides=(1,)
    )
    return (windows * _MULTIPLIER) >> np.uint64(64 - _TABLE_BITS)
