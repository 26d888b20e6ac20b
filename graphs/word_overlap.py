"""An answer and the expected answer -> exact match and F1 over their words, as in question answering.

Words are compared in lower case, without punctuation and articles. Invariant: each score is from 0 to 1, and 1 exactly
where the words are the same (F1: in any order).
"""

from __future__ import annotations

import re
from collections import Counter

ARTICLES = frozenset({"a", "an", "the"})


def exact_match(answer: str, expected: str) -> float:
    """1 where both are the same words in the same order, else 0."""
    return float(_text_to_words(answer) == _text_to_words(expected))


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision (share of the answer's words that are expected) and recall (the reverse)."""
    answer_words, expected_words = Counter(_text_to_words(answer)), Counter(_text_to_words(expected))
    common = (answer_words & expected_words).total()
    total = answer_words.total() + expected_words.total()
    return 2 * common / total if common else float(answer_words == expected_words)


def _text_to_words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in ARTICLES]
