"""A file of JSON lines, or one JSON file -> objects, each with where it stands.

Invariants: lines are read one after the other and none is longer than MAX_LINE, so that no file fills the memory at
once; a line ends at a line feed and nowhere else; what is no JSON object is one line with the file, the place and what
is wrong. It does not know what the objects mean.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from marft_bridge.errors import GraphError

MAX_LINE = 16 << 20  # bytes of one task
Placed = tuple[str, dict[str, Any]]
"""Where, as a message says it; and the object."""


def jsonl_to_objects(path: Path) -> Iterator[Placed]:
    """Every object of the file, in order; empty lines are passed over. A name that ends in .gz is read as gzip.

    Raises:
        GraphError: it cannot be read, or a line is too long, or no JSON object.
    """
    try:
        with _opened(path) as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                where = f"line {number} of {str(path)!r}"
                if len(line) > MAX_LINE:
                    raise GraphError(f"graph.tasks: {where} is longer than {MAX_LINE >> 20} MiB; a task is one line")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # as editors of Windows begin a file
                if line.strip():
                    yield where, bytes_to_object(line, where)
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"graph.tasks: cannot read {str(path)!r}: {error}") from None


def file_to_object(path: Path) -> dict[str, Any]:
    """The one object of a JSON file. Raises GraphError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LINE + 1)
    except OSError as error:
        raise GraphError(f"graph.tasks: cannot read {str(path)!r}: {error}") from None
    if len(content) > MAX_LINE:
        raise GraphError(f"graph.tasks: {str(path)!r} is longer than {MAX_LINE >> 20} MiB; a file is one task")
    return bytes_to_object(content, repr(str(path)))


def bytes_to_object(line: bytes, where: str) -> dict[str, Any]:
    """JSON in UTF-8 -> an object. Raises GraphError, which names `where`."""
    try:
        found = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError too
        raise GraphError(f"graph.tasks: {where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise GraphError(f"graph.tasks: {where} is not a JSON object")
    return found


def text_field(record: dict[str, Any], name: str, where: str, layout: str) -> str:
    """A field that the layout must have, and that holds a text. Raises GraphError."""
    if name not in record:
        has = ", ".join(sorted(record)) or "nothing"
        raise GraphError(f"graph.tasks: {where} lacks {name!r}, which {layout} has; it has: {has}")
    if not isinstance(record[name], str):
        raise GraphError(f"graph.tasks: {name!r} in {where} is a {type(record[name]).__name__}, not a text")
    return str(record[name])


def with_made(record: dict[str, Any], where: str, **made: Any) -> dict[str, Any]:
    """The record with fields that the reader makes. Raises GraphError where the record has one of them already."""
    taken = sorted(made.keys() & record.keys())
    if taken:
        raise GraphError(
            f"graph.tasks: {where} has a field {taken[0]!r}, which this reader makes itself; rename it, or read the "
            'file as kind = "jsonl"'
        )
    return record | made


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")
