"""Owns: docs/compatibility.md is what the suite of apps gives, and its counts are those of the tables by hand."""

from __future__ import annotations

import pytest
from apps.by_hand import RECORDED, RECORDING_LINES, SUITE
from support.pages.compatibility_page import PAGE, app_to_row, counts_to_text, pins, written


def test_the_page_is_what_the_suite_gives() -> None:
    assert written() == PAGE.read_text(encoding="utf-8"), "run `make pages`"


def test_two_lines_record_an_app() -> None:
    assert RECORDING_LINES == len([line for line in RECORDED.splitlines() if line]) == 2


@pytest.mark.parametrize(
    ("name", "exact", "bounds"),
    [
        ("swarm", "4 data, 4 tool, 3 trigger", "none"),  # of two runs: 3 + 1, 3 + 1, 2 + 1
        ("agents_as_tools", "5 data, 2 send, 3 tool, 4 trigger", "4 data"),
        ("joke_workflow", "2 data", "none"),
    ],
)
def test_the_counts_are_those_of_the_tables(name: str, exact: str, bounds: str) -> None:
    row = app_to_row(name, SUITE[name], pins())
    assert row.endswith(f"| {exact} | {bounds} |\n")


def test_nothing_to_count_is_said() -> None:
    assert counts_to_text({}) == "none"
