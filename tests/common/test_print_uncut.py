"""Owns: a table that is printed into a file or a pipe has all of its text; on a terminal it keeps to the width."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from marft_bridge.common.terminal_text import print_uncut

NAME = "a variant with a name that is longer than the narrow terminal of the test"


def printed(console: Console) -> list[str]:
    table = Table(title=f"what {NAME} adds")
    table.add_column("variant", no_wrap=True)
    table.add_row(NAME)
    print_uncut(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [None, 40])
def test_a_file_gets_every_cell_in_one_line(width: int | None) -> None:
    lines = printed(Console(file=io.StringIO(), width=width))
    assert any(NAME in line and "│" in line for line in lines)


def test_a_terminal_gets_no_line_wider_than_itself() -> None:
    lines = printed(Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None))
    assert max(map(cell_len, lines)) <= 40
    assert not any(NAME in line for line in lines)
