"""Texts of a recorded run and of its replay -> the same texts, in which every moment of the recorded run reads alike.

The clock of a replay may stand at the start of the recorded run, whose own clock went on: what a node wrote of it into
a prompt lies somewhat later. Invariant: a date with a time of day that lies outside the run stays as it is.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

from marft_bridge.replay.json_texts import map_texts

MOMENT = "[a moment of the run]"
_DATE_AND_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?P<second>:\d\d(?P<fraction>\.\d{1,9})?)?(?:Z\b|[+-]\d\d:?\d\d\b)?"
)


class RunMoments:
    """The time of one recorded run, from `start_ns` to `end_ns` of Unix time."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._start_s, self._end_s = start_ns / 1e9, end_ns / 1e9

    def unify(self, value: Any) -> Any:
        """Texts, and the texts in lists and dicts, with `MOMENT` for each of the run's moments."""
        return map_texts(value, lambda text: _DATE_AND_TIME.sub(self._to_moment, text))

    def _to_moment(self, match: re.Match[str]) -> str:
        try:
            moment = datetime.datetime.fromisoformat(match[0])
        except ValueError:  # the 31st of February
            return match[0]
        # A text without a zone is of the local clock or of UTC; one that is cut off means all of its second or minute.
        zones = [None, datetime.UTC] if moment.tzinfo is None else [moment.tzinfo]
        length_s = 60.0 if match["second"] is None else 1.0 if match["fraction"] is None else 1e-3
        for zone in zones:
            try:
                begin_s = moment.replace(tzinfo=zone).timestamp()
            except (ValueError, OverflowError, OSError):  # the year 1, in which no clock stands
                continue
            if begin_s <= self._end_s and self._start_s < begin_s + length_s:
                return MOMENT
        return match[0]
