"""Arrays of numbers about actions: their type, laid end to end, and grouped by a key."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
_Key = TypeVar("_Key", bound=Hashable)

NO_SPREAD = 1e-12  # relative: what float64 leaves of equal numbers, discounted along different branches


def rows_by_key(keys: Sequence[_Key]) -> dict[_Key, Rows]:
    """Each key, in order of first appearance, to the positions where it stands, ascending."""
    rows: dict[_Key, list[int]] = {}
    for i, key in enumerate(keys):
        rows.setdefault(key, []).append(i)
    return {key: np.array(positions, dtype=np.intp) for key, positions in rows.items()}


def range_of_most(values: Floats) -> float:
    """The largest less the smallest of some values without the outermost hundredth at each end, which would make it the
    distance to a single crash; of all where nothing is left between. 0 of none."""
    left_out, ordered = len(values) // 100, np.sort(values)
    middle = ordered[left_out : len(ordered) - left_out]
    spread = float(np.ptp(middle)) if len(middle) else 0.0
    return spread or (float(np.ptp(ordered)) if len(ordered) else 0.0)


def laid_end_to_end(parts: Sequence[Floats]) -> Floats:
    """One array per action to one array; empty where there is none."""
    return np.concatenate([np.zeros(0), *parts])
