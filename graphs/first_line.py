"""A text -> its first line that says something: a small model goes on after its answer, and nobody is to read that."""

from __future__ import annotations


def first_line(text: str) -> str:
    """The first line that is neither empty nor the mark of a block of code, stripped; "" where there is none."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("```")), "")
