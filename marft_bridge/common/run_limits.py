"""A limit of a run -> the reason that a run which it ended is recorded with, and back.

Invariant: these reasons are no others' (Ctrl-C, a question to a person, a server that was out), so that the text in a
store tells who ended a run, also in one that an earlier version wrote.
"""

from __future__ import annotations

import re

RECURSION_LIMIT = "recursion limit reached"
_LIMIT_PATTERN = rf"{RECURSION_LIMIT}|longer than \S+ s|its limit of \d+ sampled tokens is used up"
"""What the whole text of each of these reasons matches, and that of no other."""


def time_reason(seconds: float) -> str:
    """That of a run over its time."""
    return f"longer than {seconds:g} s"


def tokens_reason(tokens: int) -> str:
    """That of a run whose calls have sampled all that they might."""
    return f"its limit of {tokens} sampled tokens is used up"


def is_limit(reason: str | None) -> bool:
    """Whether a run that was cut short for this reason came to one of its limits."""
    return reason is not None and re.fullmatch(_LIMIT_PATTERN, reason) is not None
