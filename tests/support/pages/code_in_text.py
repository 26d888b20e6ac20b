"""A sentence of a help text -> the same in Markdown: options and `<words>` stand as code.

As plain text an option is broken across lines, and a word in angle brackets is taken for an element of HTML and shown
nowhere. Invariant: what is code already stays as it is.
"""

from __future__ import annotations

import re

_CODE = re.compile(r"`[^`]*`|(?<![\w-])(?:--[a-z][a-z-]*|[\w./]*<\w+>[\w./]*\w)(?![\w-])|[\w./]*<\w+>")


def text_to_markdown(text: str) -> str:
    """`None means runs/<name>.` -> the same with `runs/<name>` as code."""
    return _CODE.sub(lambda word: word[0] if word[0].startswith("`") else f"`{word[0]}`", text)
