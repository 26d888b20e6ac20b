"""Owns: what a help text says of options and places is code on the generated pages."""

from __future__ import annotations

import pytest
from support.pages.code_in_text import text_to_markdown


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("None means runs/<name>.", "None means `runs/<name>`."),
        ("run only with --probe: once", "run only with `--probe`: once"),
        ("as `--probe TEXT` says", "as `--probe TEXT` says"),
        ("a dash -- of two, a -> b, a < b > c", "a dash -- of two, a -> b, a < b > c"),
    ],
)
def test_options_and_words_in_angle_brackets_become_code(text: str, markdown: str) -> None:
    assert text_to_markdown(text) == markdown
