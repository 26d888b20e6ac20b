"""Text of anybody's -> one line that any terminal and any log can show.

Invariant: what is not printable shows as its Python escape, such as `\\x1b`. Errors use it, so it imports nothing.
"""

from __future__ import annotations


def text_to_line(text: str, width: int | None = None) -> str:
    """One printable line, cut to `width` characters with an ellipsis; None cuts nothing."""
    cut_text = text if width is None or len(text) <= width else text[: width - 1] + "…"
    if cut_text.isprintable():
        return cut_text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in cut_text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
