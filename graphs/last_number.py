"""A text -> the whole numbers in it, and the last of them, which counts as the answer of a small model.

Invariant: any text is read in time linear in its length; a run of more than MAX_DIGITS digits is no number.
"""

from __future__ import annotations

import re

MAX_DIGITS = 9


def numbers_in(text: str) -> list[int]:
    """Every whole number of a text, in order."""
    return [int(digits) for digits in re.findall(r"-?[0-9]+", text) if len(digits.lstrip("-")) <= MAX_DIGITS]


def last_number(text: str) -> int | None:
    """The last whole number of a text; None where it has none."""
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def number_credit(text: str, expected: int) -> float:
    """What a text is worth as an answer: 1 where its last number is the expected one, 0.1 where that occurs at all."""
    numbers = numbers_in(text)
    return 1.0 if numbers[-1:] == [expected] else 0.1 * (expected in numbers)
