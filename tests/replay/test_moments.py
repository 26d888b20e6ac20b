"""Owns: which texts of a date say a moment of the recorded run, and that none of them stops a replay."""

from __future__ import annotations

import datetime

import pytest

from marft_bridge.replay.moments import MOMENT, RunMoments

START = datetime.datetime(2026, 11, 28, 8, 0, 0, tzinfo=datetime.UTC)
RUN = RunMoments(int(START.timestamp() * 1e9), int((START.timestamp() + 10) * 1e9))


@pytest.mark.parametrize(
    ("text", "unified"),
    [
        ("at 2026-11-28T08:00:05+00:00", f"at {MOMENT}"),
        ("at 2026-11-28T09:00:05+01:00", f"at {MOMENT}"),
        ("at 2026-11-28T08:00:15+00:00", "at 2026-11-28T08:00:15+00:00"),
        ("on 2026-02-31T08:00:05", "on 2026-02-31T08:00:05"),
        ("since 0001-01-01 00:00:00", "since 0001-01-01 00:00:00"),
        ("until 9999-12-31 23:59:59", "until 9999-12-31 23:59:59"),
        ("until 9999-12-31T23:59:59-12:00", "until 9999-12-31T23:59:59-12:00"),
    ],
)
def test_a_moment_of_the_run_is_one_and_any_other_date_stays(text: str, unified: str) -> None:
    assert RUN.unify({"a": [text]}) == {"a": [unified]}
