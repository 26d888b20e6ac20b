"""Text and tables of a store -> output that is safe for a terminal, a pipe or a JSON reader.

Span text is written by models and strangers. Invariant: nothing of it reaches a terminal as a control character, an
escape sequence or a change of writing direction, and nothing of it is taken for markup; an unprintable character shows
as its Python escape, such as `\\x1b`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from marft_bridge.common.printable import text_to_line as text_to_line

_UNCUT_COLUMNS = ("id", "started")  # columns that are useless when they are wrapped
_UNBOUNDED_WIDTH = 1_000_000  # characters in a line
_LIST_ENDS = 3  # items shown at each end of a long list


def text_to_lines(text: str) -> list[str]:
    """Printable lines; a newline starts a new one, everything else that is not printable is escaped."""
    return [text_to_line(line) for line in text.split("\n")]


def value_to_cell(value: Any, width: int | None = None) -> str:
    """One value of a table as one printable line: None is empty, a long list shows its ends and its length."""
    if value is None:
        return ""
    if isinstance(value, list) and len(value) > 2 * _LIST_ENDS + 1:
        ends = (value[:_LIST_ENDS], value[-_LIST_ENDS:])
        end_texts = [", ".join(value_to_cell(item, width) for item in end) for end in ends]
        return text_to_line(f"[{end_texts[0]}, … {end_texts[1]}] ({len(value)})")
    if isinstance(value, float):
        return f"{value:.6g}"
    return text_to_line(str(value), width)


def text_to_cell(text: str, style: str = "") -> Text:
    """One printable line as a cell or title of a rich table, which takes a plain string for markup."""
    return Text(text_to_line(text), style=style)


def value_to_json(value: Any, indent: int | None = 1) -> str:
    """JSON of ASCII only; numbers that JSON cannot hold become text, as in the store's own JSON columns."""
    text = json.dumps(_to_jsonable(value), ensure_ascii=True, indent=indent, allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_jsonable(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def print_line(console: Console, line: str) -> None:
    """Prints one line without markup or wrapping; of what is not printable, tabs and newlines are kept."""
    shown = "\n".join("\t".join(map(text_to_line, part.split("\t"))) for part in line.split("\n"))
    console.file.write(shown + "\n")


def print_uncut(console: Console, shown: RenderableType) -> None:
    """Prints a table or a tree: within the width of a terminal, and elsewhere so that no cell is cut or wrapped."""
    if not console.is_terminal:
        console = Console(file=console.file, highlight=False, width=_UNBOUNDED_WIDTH)
    console.print(shown)


def print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Collection[str] = ()
) -> None:
    """Prints a table on a terminal; elsewhere a line of names and one per row, separated by tabs.

    `numbers` names the columns that are aligned right. On a terminal that is far too narrow for the table, each row
    becomes a block of lines.
    """
    names = [text_to_line(column) for column in columns]
    if not console.is_terminal:
        print_line(console, "\t".join(names))
        for row in rows:
            print_line(console, "\t".join(map(value_to_cell, row)))
        return
    cells = [[value_to_cell(value, console.width) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) + 1 for column in zip(names, *cells, strict=True)]
    if sum(widths) > 2 * console.width:
        for number, row_cells in enumerate(cells, start=1):
            print_line(console, f"-- {number}")
            for name, cell in zip(names, row_cells, strict=True):
                console.print(Text(f"{name}: {cell}"), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column, name in zip(columns, names, strict=True):
        is_number = column in numbers
        table.add_column(
            Text(name),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number or column in _UNCUT_COLUMNS,
        )
    for row_cells in cells:
        table.add_row(*map(Text, row_cells))
    console.print(table)


def print_csv(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints comma-separated values, lists and objects as JSON. Exact in a file or a pipe, printable on a terminal."""
    writer = csv.writer(console.file, lineterminator="\n")
    for row in (columns, *rows):
        cells = [_value_to_csv(value) for value in row]
        writer.writerow(map(text_to_line, cells) if console.is_terminal else cells)


def _value_to_csv(value: Any) -> str:
    if value is None:
        return ""
    return value_to_json(value, None) if isinstance(value, (list, dict)) else str(value)
