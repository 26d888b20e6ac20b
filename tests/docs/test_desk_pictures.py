"""Owns: the picture of docs/hosted-to-local.md that shows where a local team is worse.

- A real comparison's page still has those parts, with the task and what both sides did.
- The picture is small and stands on its page.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import CHROMIUM
from support.desk_pictures import PICTURE, compare_desk, photograph
from support.paths import ROOT

MAX_BYTES = 150_000


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the page was not rendered")
def test_the_page_shows_which_customers_lose_and_what_was_said_to_one(tmp_path: Path) -> None:
    report = compare_desk(tmp_path, tasks=60)
    lost = {cohort.value: cohort.regressed for cohort in report.cohorts if cohort.regressed}
    assert list(lost) == ["stock"]
    words = photograph(tmp_path / "run/report.html", tmp_path / "picture.png", tmp_path / "profile")
    assert "local minus hosted, by route" in words
    assert "local in route stock: −" in words
    (first, *_) = lost["stock"]["local"]
    assert all(step.text in words for trace in (first.a, first.b) for step in trace.steps)
    assert {step.adapter for step in first.b.steps if step.kind == "call"} == {
        f"{node}@1" for node in ("extractor", "router", "lookup", "writer")
    }


def test_the_picture_is_small_and_stands_on_its_page() -> None:
    assert PICTURE.stat().st_size <= MAX_BYTES
    assert f"({PICTURE.name})" in (ROOT / "docs/hosted-to-local.md").read_text()
