"""Arrays of numbers about actions: their type, laid end to end, and grouped by a key."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
_Key = TypeVar("_Key", bound=Hashable)


def rows_by_key(keys: Sequence[_Key]) -> dict[_Key, Rows]:
    """Each key, in order of first appearance, to the positions where it stands, ascending."""
    rows: dict[_Key, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    return {key: np.array(positions, dtype=np.intp) for key, positions in rows.items()}


def laid_end_to_end(parts: Sequence[Floats]) -> Floats:
    """One array per action to one array; empty where there is none."""
    return np.concatenate([np.zeros(0), *parts])
