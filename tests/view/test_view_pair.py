"""Owns: two episodes side by side: which calls stand in one row, and what of their texts is marked.

- Ordinary edits are marked word by word, and without its marks each side is the text that was given.
- Texts whose comparison would take long are shown without marks, and space between words costs nothing.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from marft_bridge.view import pair
from marft_bridge.view.pair import MAX_MATCHES, match_cards, texts_side_by_side


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


@pytest.mark.parametrize(
    ("left", "right", "marked_left", "marked_right"),
    [
        ("so it is 11", "so it is 12", "so it is <del>11</del>", "so it is <ins>12</ins>"),
        ("a b c", "a c", "a <del>b</del> c", "a c"),
        ("a b", "a b c d", "a b", "a b<ins> c d</ins>"),
        ("a\n\nb", "a b", "a<del>\n\n</del>b", "a<ins> </ins>b"),
        (" a", "a", "<del> </del>a", "a"),
        ("<b> x", "<b> y", "&lt;b&gt; <del>x</del>", "&lt;b&gt; <ins>y</ins>"),
        ("", "a b", "", "<ins>a b</ins>"),
    ],
)
def test_what_differs_is_marked_word_by_word(left: str, right: str, marked_left: str, marked_right: str) -> None:
    found = texts_side_by_side(left, right)
    assert (found.left, found.right) == (marked_left, marked_right)
    assert found.differs


_TEXTS = st.text(alphabet="ab <&\n", max_size=30)


@given(_TEXTS, _TEXTS)
def test_without_its_marks_each_side_is_the_text_that_was_given(left: str, right: str) -> None:
    found = texts_side_by_side(left, right)
    for text, shown in ((left, found.left), (right, found.right)):
        assert shown is not None
        unmarked = re.sub("</?(del|ins)>", "", shown)
        assert Markup(unmarked).unescape() == text  # noqa: S704
    assert found.differs == (left != right)


def test_words_that_one_side_has_alone_cost_nothing_however_many_there_are() -> None:
    numbers = [" ".join(f"{side}{number}" for number in range(745)) for side in "ab"]
    words = [pair._text_to_words(text) for text in numbers]
    assert pair.count_matches(*words) == 0
    found = texts_side_by_side(*numbers)
    assert (found.left, found.right) == (f"<del>{numbers[0]}</del>", f"<ins>{numbers[1]}</ins>")


def test_texts_whose_comparison_would_take_long_are_shown_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = round(MAX_MATCHES**0.5)
    texts = {
        count: [" ".join(f"w {side}{number}" for number in range(count)) for side in "ab"]
        for count in (repeats - 1, repeats + 1)
    }
    assert "<del>" in str(texts_side_by_side(*texts[repeats - 1]).left)

    def no_comparison(*_: Any, **__: Any) -> None:
        raise AssertionError("compared")

    monkeypatch.setattr(pair, "SequenceMatcher", no_comparison)
    found = texts_side_by_side(*texts[repeats + 1])
    assert (found.left, found.right, found.differs) == (*texts[repeats + 1], True)
