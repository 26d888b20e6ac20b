"""A run that one of its limits cut short -> what it earned by that: the team's reward that is trained on.

Whatever runs episodes pays it, since all of it goes by way of `rollouts.collector`, here and in a worker on Ray:
`collect`, the rounds of `train` with refills, forks, evaluations and measurements, `compare`, `credit`, `fork`. `score`
gives it to the stored runs that it scores. Replays and live traffic earn nothing at all, `rank` compares what ended by
itself, and `distil` stores no trial that did not. Invariant: its source tells it from what a function or a kind
computed, so that whoever learns from the run knows that nothing would have followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from marft_bridge.rewards.contract import Earned
from marft_bridge.rewards.scoring import Score
from trace_store.records import OF_LIMIT


@dataclass(frozen=True, slots=True)
class LimitReward:
    """`graph.limit_reward`, and the name of the reward that it is."""

    name: str
    value: float

    def to_score(self) -> Score:
        """What such a run earned."""
        return Score(earned={self.name: [Earned(self.value)]}, sources={self.name: OF_LIMIT})
