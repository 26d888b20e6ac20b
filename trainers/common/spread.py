"""Things of several kinds -> some of them, chosen so that each kind has its part.

A stride over things that alternate, as the calls of a run do, may meet one kind only. Here things are laid out kind by
kind and cut into equal stretches; one of each stretch is chosen, at a place that moves on by the golden ratio from
stretch to stretch, so that it keeps step with nothing.

Invariant: the choice follows from the kinds and their order alone, so every process makes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_GOLDEN = 2654435769  # of 2 ** 32: the fraction of the golden ratio


def spread_rows(kinds: Sequence[Any], count: int) -> list[int]:
    """Ascending positions of `count` things, or of all where they are no more.

    A kind of n of N things has about count * n / N places, and never none where that is 2 or more.

    Args:
        kinds: of each thing; they can be sorted.
    """
    total = len(kinds)
    if total <= count:
        return list(range(total))
    laid_out = sorted(range(total), key=kinds.__getitem__)  # stable: within a kind in their own order
    chosen = []
    for k in range(count):
        start, end = k * total // count, (k + 1) * total // count
        fraction = (k + 1) * _GOLDEN % 2**32
        chosen.append(laid_out[start + (fraction * (end - start) >> 32)])
    return sorted(chosen)
