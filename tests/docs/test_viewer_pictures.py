"""Owns: the pictures of the viewer in docs/.

- They are of pages that the viewer still shows: the same words stand on them, but for numbers and ids.
- Each is a picture of its window, in light and dark and for a phone, under 150 kB, and stands on a page.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from support.browser import CHROMIUM, browsing
from support.paths import ROOT
from support.viewer_pictures import DESKTOP, FOLDER, PHONE, WORDS, photograph, viewed

MAX_BYTES = 150_000
PICTURES = sorted(FOLDER.glob("viewer-*.png"))


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the pages were not rendered")
def test_the_viewer_still_says_what_its_pictures_say(tmp_path: Path) -> None:
    work, fresh = tmp_path / "work", tmp_path / "fresh"
    work.mkdir()
    fresh.mkdir()
    with viewed(work) as (served, shots), browsing(tmp_path / "profile") as browser:
        words = {shot.name: photograph(browser, served, shot, fresh) for shot in shots}
        assert browser.errors == []
    assert words == json.loads(WORDS.read_text(encoding="utf-8")), "run `make pictures`"
    assert sorted(path.name for path in fresh.iterdir()) == [path.name for path in PICTURES], "run `make pictures`"


def test_no_picture_is_left_over() -> None:
    names = json.loads(WORDS.read_text(encoding="utf-8"))
    files = {f"viewer-{name}{kind}.png" for name in names for kind in ("", "-dark", "-phone")}
    assert {path.name for path in FOLDER.iterdir() if path.suffix != ".svg"} == files | {WORDS.name}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_has_the_size_of_its_window_and_stands_on_a_page(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.size == (PHONE if path.stem.endswith("-phone") else DESKTOP)
    assert path.stat().st_size <= MAX_BYTES
    assert any(f"pictures/{path.name}" in page.read_text() for page in (ROOT / "docs").glob("*.md")), path.name
