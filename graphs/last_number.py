"""A text -> the whole numbers in it, and the last of them: what counts as the answer of a small model.

Invariant: any text is read in time linear in its length; digits that go on for longer than any answer are no number.
"""

from __future__ import annotations

import re

MOST_DIGITS = 9


def numbers_in(text: str) -> list[int]:
    """Every whole number of a text, in order."""
    return [int(found) for found in re.findall(r"-?[0-9]+", text) if len(found.lstrip("-")) <= MOST_DIGITS]


def last_number(text: str) -> int | None:
    """The last of them; None where there is none."""
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def number_credit(text: str, expected: int) -> float:
    """What a text is worth as an answer: 1 where its last number is the expected one, 0.1 where that occurs at all."""
    numbers = numbers_in(text)
    return 1.0 if numbers[-1:] == [expected] else 0.1 * (expected in numbers)
