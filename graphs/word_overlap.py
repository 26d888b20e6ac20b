"""An answer and the expected one -> how far they are the same words: exact match and F1, as in question answering.

Both are taken after lower-casing and without punctuation and articles. Invariant: each is from 0 to 1, and 1 exactly
where the words are the same (F1: in any order). It knows no task and no graph.
"""

from __future__ import annotations

import re
from collections import Counter

ARTICLES = frozenset({"a", "an", "the"})


def exact_match(answer: str, expected: str) -> float:
    """1 where both are the same words in the same order, else 0."""
    return float(_words(answer) == _words(expected))


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of the share of the answer's words that are expected and the share of the expected ones given."""
    given, wanted = Counter(_words(answer)), Counter(_words(expected))
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else float(given == wanted)


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if word not in ARTICLES]
