"""Texts that are erased -> the files that still hold one of them, in any of the usual encodings.

A text is known by its longest runs of letters, digits and spaces, at most three, of ASCII where it has one. Invariants:
a text with such a run is found wherever that run stands whole in a file, also in one that is larger than the memory; a
text without one (`42`) is never looked for.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, quote_plus

import numpy as np

from trace_store.errors import StoreError
from trace_store.files import open_to_read

MIN_RUN, MAX_RUN = 10, 24  # characters; a shorter run is said by many
_RUNS_PER_TEXT = 3
_CHUNK_BYTES, _OVERLAP_BYTES = 1 << 22, 1 << 9  # the longest form of a run has fewer bytes than two chunks share
_KEY_BYTES = 8  # every form of a run has at least so many
_TABLE_BITS = 22
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplicative hash, of 64 bits
_ASCII_RUN = re.compile(rf"[A-Za-z0-9 ]{{{MIN_RUN},}}")
_ANY_RUN = re.compile(rf"[^\W_](?:[^\W_]| ){{{MIN_RUN - 1},}}")
_GZIP_MAGIC = b"\x1f\x8b"


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
        """The runs of the texts that a file holds, each time that it holds them; what is gzipped is read unpacked.

        A file that is gone holds nothing. Raises StoreError for one that cannot be read.
        """
        if not self._forms:
            return
        try:
            with open_to_read(path) as file:
                is_packed = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                yield from self._runs_in_stream(gzip.GzipFile(fileobj=file) if is_packed else file)
        except FileNotFoundError:
            return
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"cannot read {path}: {error}") from error

    def runs_in_text(self, text: str) -> Iterator[str]:
        """The runs of the texts that a text holds."""
        return self._runs_in_bytes(text.encode("utf-8", "replace"))

    def _runs_in_stream(self, file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
        tail = b""
        while chunk := file.read(_CHUNK_BYTES):
            yield from self._runs_in_bytes(tail + chunk)
            tail = (tail + chunk)[-_OVERLAP_BYTES:]

    def _runs_in_bytes(self, content: bytes) -> Iterator[str]:
        if len(content) < _KEY_BYTES or not self._forms:
            return
        for position in np.flatnonzero(self._table[_bytes_to_slots(content)]).tolist():
            for form, run in self._forms.get(content[position : position + _KEY_BYTES], ()):
                if content.startswith(form, position):
                    yield run


def _bytes_to_slots(content: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Each 8 bytes that follow each other in `content` -> their place in the table."""
    windows: np.ndarray[tuple[int], np.dtype[np.uint64]] = np.ndarray(
        (len(content) - _KEY_BYTES + 1,), np.uint64, buffer=content, strides=(1,)
    )
    return (windows * _MULTIPLIER) >> np.uint64(64 - _TABLE_BITS)
