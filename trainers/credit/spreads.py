"""The returns of every round so far -> from which spread on a round's returns say what was better.

An optimiser's steps have one size, whatever the size of the gradient: a round in which runs earned 1 and 1 - 1e-9 would
move adapters as far as one with 1 and 0. No number of ours could tell small from large, since rewards have any unit. So
what is small is told by the largest deviation that an agent's returns had in a round, or among the collected episodes:
less than a hundredth of it is none.

Invariant: the largest deviation never shrinks, and depends on nothing but the returns that were noted, so a resumed run
is as one that was not stopped. Before anything was noted every spread is large. It knows nothing of estimators.

Shapes: _N one entry per return.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trainers.advantages.arrays import Floats, rows_by_key

SMALLEST_SHARE = 0.01


class Spreads:
    """The largest deviation of each agent's returns."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def note(self, agent_N: Sequence[str], return_N: Floats) -> None:
        """A round's returns; NaN where one is not known."""
        for agent, rows in rows_by_key(agent_N).items():
            known = return_N[rows][~np.isnan(return_N[rows])]
            if len(known):
                self._largest[agent] = max(self._largest.get(agent, 0.0), float(known.std()))

    def least(self, agents: Iterable[str]) -> float:
        """The smallest deviation that counts for all of some agents: what the most even of them needs; 0 where nothing
        tells it."""
        largest = [self._largest.get(agent, 0.0) for agent in set(agents)]
        return SMALLEST_SHARE * min((spread for spread in largest if spread > 0), default=0.0)

    def to_state(self) -> dict[str, float]:
        """As plain data, for a checkpoint."""
        return dict(self._largest)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Those of a checkpoint."""
        self._largest = dict(state)
