"""What each critic explained, round after round -> which of them are asked in the next one.

A critic costs a pass of the base model over every observation, and a fit. A baseline that explains a share x of what
returns differ by saves about x of the rollouts, so one that explains next to nothing out of sample is not worth its
pass: it rests for some rounds, and is then looked at again for two, since the second values what the first has taught
it. Each rest that follows a vain look is twice as long, up to eight rounds.

Invariant: the schedule depends on nothing but what was explained, so a resumed run rests as one that was not stopped.
It knows nothing of features or returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WORTH = 0.05  # share of the variance that is worth a pass, which takes 5 to 15 % of a round
LOOKS = 2
_SHORTEST, _LONGEST = 2, 8


@dataclass(slots=True)
class _Schedule:
    rest: int = 0  # rounds that it will not be asked
    looks: int = LOOKS  # rounds without worth before it rests
    next_rest: int = _SHORTEST

    def end_look(self, explained: float | None) -> None:
        """A round in which it was asked; None says nothing, for or against."""
        if explained is None:
            return
        if explained >= WORTH:
            self.looks, self.next_rest = LOOKS, _SHORTEST
            return
        self.looks -= 1
        if self.looks <= 0:
            self.begin_rest()

    def begin_rest(self) -> None:
        self.rest, self.next_rest = self.next_rest, min(_LONGEST, 2 * self.next_rest)
        self.looks = LOOKS


class CriticRests:
    """Which of some critics, by key, are asked in a round."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._schedules = {key: _Schedule() for key in keys}

    @property
    def resting(self) -> frozenset[str]:
        """The critics that are not asked in the round to come."""
        return frozenset(key for key, schedule in self._schedules.items() if schedule.rest > 0)

    def end_warm_up(self, explained: Mapping[str, float | None]) -> None:
        """What each explained of stored episodes that it did not see; below `WORTH` it rests at once."""
        for key, share in explained.items():
            if share is not None and share < WORTH:
                self._schedules[key].begin_rest()

    def end_round(self, explained: Mapping[str, float | None]) -> None:
        """What each that was asked explained out of sample; those that rested come one round nearer to their look."""
        for key, schedule in self._schedules.items():
            if schedule.rest > 0:
                schedule.rest -= 1
            elif key in explained:
                schedule.end_look(explained[key])

    def to_state(self) -> dict[str, dict[str, int]]:
        """The schedules as plain data, for a checkpoint."""
        return {key: asdict(schedule) for key, schedule in self._schedules.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Those of a checkpoint; a critic that it does not name starts afresh."""
        for key in self._schedules:
            self._schedules[key] = _Schedule(**state.get(key, {}))
