"""The returns of every round so far -> from which spread on a round's returns say what was better.

An optimiser's steps have one size, whatever the size of the gradient: a round in which runs earned 1 and 1 - 1e-9 would
move adapters as far as one with 1 and 0. No number of ours could tell small from large, since rewards have any unit. So
what is small is told by the median of an agent's deviations of returns, of the rounds and of the collected episodes:
less than a thousandth of it is none. A median, so that one run that earned -1000 does not make all others alike; and a
round that is too even counts as the least that would have counted, so that a history of another size wears off.

Invariant: it depends on nothing but the returns that were noted, so a resumed run is as one that was not stopped.
Before anything was noted every spread is large. It knows nothing of estimators.

Shapes: _N one entry per return.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trainers.advantages.arrays import NO_SPREAD, Floats, rows_by_key

SMALLEST_SHARE = 0.001


class Spreads:
    """The deviations of each agent's returns, a round each."""

    def __init__(self) -> None:
        self._deviations: dict[str, list[float]] = {}

    def note(self, agent_N: Sequence[str], return_N: Floats) -> None:
        """A round's returns; NaN where one is not known. One in which all earned the same says nothing."""
        for agent, rows in rows_by_key(agent_N).items():
            known_N = return_N[rows][~np.isnan(return_N[rows])]
            if len(known_N) and known_N.std() > NO_SPREAD * np.abs(known_N).max():
                deviation = max(float(known_N.std()), self.least([agent]))
                self._deviations.setdefault(agent, []).append(deviation)

    def least(self, agents: Iterable[str]) -> float:
        """The smallest deviation that counts for all of some agents: what the most even of them needs; 0 where nothing
        tells it."""
        noted = [sorted(self._deviations[agent]) for agent in set(agents) if agent in self._deviations]
        return SMALLEST_SHARE * min((deviations[len(deviations) // 2] for deviations in noted), default=0.0)

    def to_state(self) -> dict[str, list[float]]:
        """As plain data, for a checkpoint."""
        return {agent: list(deviations) for agent, deviations in self._deviations.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Those of a checkpoint."""
        self._deviations = {agent: list(deviations) for agent, deviations in state.items()}
