"""The cases of a law -> its parameters, of which the fast tests try one in so many, and the slow tests all others.

Invariant: every case is tried by one of the two tiers, and never by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def one_in(count: int, cases: Mapping[str, Any]) -> list[Any]:
    """Cases by id -> `pytest.param`s: each `count`-th, from the first on, is fast, and all others are slow.

    A case that is a tuple has several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[pytest.mark.slow] * (i % count > 0)
        )
        for i, (name, case) in enumerate(cases.items())
    ]
