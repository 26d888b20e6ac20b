"""A file of JSON lines, or one JSON file -> objects, each with its location for error messages.

Invariants: lines are read one at a time and none is longer than MAX_LINE, so that no file fills the memory; a line ends
at a line feed and nowhere else; anything but a JSON object is refused in one line that names the file and the location.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from marft_bridge.common.errors import GraphError
from marft_bridge.common.plain_values import MAX_DEPTH, nesting_fault

MAX_LINE = 16 << 20  # bytes of one task
LocatedRecord = tuple[str, dict[str, Any]]
"""(location as error messages name it, the object)."""


def jsonl_to_objects(path: Path) -> Iterator[LocatedRecord]:
    """Every object of the file, in order, without empty lines. A name that ends in .gz is read as gzip.

    Raises:
        GraphError: the file cannot be read, or a line is too long or no JSON object.
    """
    try:
        with _open(path) as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                location = f"line {number} of {str(path)!r}"
                if len(line) > MAX_LINE:
                    raise GraphError(f"graph.tasks: {location} is longer than {MAX_LINE >> 20} MiB; a task is one line")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of editors on Windows
                if line.strip():
                    yield location, bytes_to_object(line, location)
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


def bytes_to_object(line: bytes, location: str) -> dict[str, Any]:
    """JSON in UTF-8 -> an object. Raises GraphError, which names the location."""
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError too
        raise GraphError(f"graph.tasks: {location} is not JSON: {error}") from None
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and (fault := nesting_fault(record)) is not None:
        raise GraphError(f"graph.tasks: {location} holds {fault}")
    if not isinstance(record, dict):
        raise GraphError(f"graph.tasks: {location} is not a JSON object")
    return record


def read_text_field(record: dict[str, Any], name: str, location: str, layout: str) -> str:
    """The text of a field that the layout requires. Raises GraphError: it is missing, or no text."""
    if name not in record:
        present_fields = ", ".join(sorted(record)) or "nothing"
        raise GraphError(f"graph.tasks: {location} lacks {name!r}, which {layout} has; it has: {present_fields}")
    if not isinstance(record[name], str):
        raise GraphError(f"graph.tasks: {name!r} in {location} is a {type(record[name]).__name__}, not a text")
    return str(record[name])


def add_fields(record: dict[str, Any], location: str, **fields: Any) -> dict[str, Any]:
    """The record with fields that the reader derives. Raises GraphError where the record already has one of them."""
    conflicts = sorted(fields.keys() & record.keys())
    if conflicts:
        raise GraphError(
            f"graph.tasks: {location} has a field {conflicts[0]!r}, which this reader makes itself; rename it, or "
            'read the file as kind = "jsonl"'
        )
    return record | fields


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _parse_finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number:.40} is beyond the numbers that can be stored")
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")
