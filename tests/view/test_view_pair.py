"""Owns: which calls of two episodes stand in one row when they are laid side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marft_bridge.view.pair import match_cards


def rows_of(left: str, right: str) -> list[tuple[str, str]]:
    """Nodes by letter, in the order of their calls -> the rows: the side's own position and node, or `-`."""
    sides: list[list[Any]] = [
        [
            SimpleNamespace(action=SimpleNamespace(node=node), label=f"{position}{node}")
            for position, node in enumerate(side)
        ]
        for side in (left, right)
    ]
    return [
        ("-" if a is None else a.label, "-" if b is None else b.label)  # type: ignore[attr-defined]
        for a, b in match_cards(*sides)
    ]


@pytest.mark.parametrize(
    ("left", "right", "rows"),
    [
        ("ab", "ab", [("0a", "0a"), ("1b", "1b")]),
        ("aba", "aa", [("0a", "0a"), ("1b", "-"), ("2a", "1a")]),  # the second call of a beside the second
        ("ab", "acb", [("0a", "0a"), ("-", "1c"), ("1b", "2b")]),
        ("ab", "cab", [("-", "0c"), ("0a", "1a"), ("1b", "2b")]),
        ("ab", "abc", [("0a", "0a"), ("1b", "1b"), ("-", "2c")]),
        ("", "ab", [("-", "0a"), ("-", "1b")]),
    ],
)
def test_the_same_call_of_a_node_is_one_row_and_what_one_side_lacks_stands_where_it_came(
    left: str, right: str, rows: list[tuple[str, str]]
) -> None:
    assert rows_of(left, right) == rows
