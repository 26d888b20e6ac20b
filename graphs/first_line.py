"""A text -> its first line with content: what a small model writes after its answer is dropped."""

from __future__ import annotations


def first_line(text: str) -> str:
    """The first line that is neither empty nor the fence of a code block, stripped; "" where there is none."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("```")), "")
