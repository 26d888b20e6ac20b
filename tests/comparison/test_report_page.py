"""Owns: what a browser makes of report.html.

- no horizontal scrolling at the width of a phone or a laptop, whatever the texts are, and the tables fit
- each drawing shows once; a strip has its place and its reference line is continuous
- bars that are compared begin and end at the same places
- texts from models never become elements
- the scheme is the one that the reader asks for
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sample_report import HOSTILE, bare_report, full_report, hostile_report, sample_report

from marft_bridge.comparison.page import write_report
from marft_bridge.comparison.records import Report

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the page was not rendered"),
]

MEASURE = """<!doctype html><title></title>
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const frame = document.querySelector("iframe"), inside = frame.contentDocument, root = inside.documentElement;
  const all = (selector) => [...inside.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  document.title = JSON.stringify({{
    viewport: frame.contentWindow.innerWidth,
    width: root.scrollWidth,
    wideTables: all(".card.scroll").filter(e => e.scrollWidth > e.clientWidth).length,
    curves: all(".curve-card svg").filter(e => e.getClientRects().length)
      .map(e => box(e).width / e.viewBox.baseVal.width),
    strips: all(".strip").map(e => [box(e).width, box(e).height, box(e.closest("li")).height]),
    outside: all(".card").filter(e => e.getClientRects().length)
      .filter(e => box(e).left < 0 || box(e).right > frame.contentWindow.innerWidth).length,
    bars: all(".bars").map(list => new Set([...list.querySelectorAll("li > :nth-child(2)")]
      .map(e => Math.round(box(e).left) + ":" + Math.round(box(e).width))).size),
    active: inside.querySelectorAll("script, img, iframe, a").length,
    background: getComputedStyle(inside.body).backgroundColor,
    text: inside.body.textContent,
  }});
}});
</script>"""


def measured(report: Report, width: int, folder: Path, *flags: str) -> dict[str, Any]:
    """The page inside a frame of this width, into what the browser found there."""
    _, page, _ = write_report(report, folder)
    wrapper = folder / "wrapper.html"
    wrapper.write_text(MEASURE.format(width=width, page=html.escape(page.read_text("utf-8"))), "utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", "--dump-dom", *flags, wrapper.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stdout[:300]
    found: dict[str, Any] = json.loads(html.unescape(title.group(1)))
    return found


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    ("make", "curves", "strips"), [(sample_report, 1, 1), (full_report, 2, 4 + 2 + 4 + 4 * 3), (bare_report, 0, 1)]
)
def test_page_fits_its_width(make: Callable[[], Report], curves: int, strips: int, width: int, tmp_path: Path) -> None:
    found = measured(make(), width, tmp_path)
    assert found["viewport"] == found["width"] == width
    assert found["wideTables"] == found["outside"] == 0
    assert len(found["curves"]) == curves
    assert all(scale > 0.85 for scale in found["curves"])  # letters of 12 px stay legible
    assert len(found["strips"]) == strips
    for wide, high, row in found["strips"]:
        assert wide > 250
        assert 20 <= high <= row <= 110
    assert set(found["bars"]) <= {1}


@pytest.mark.parametrize("width", [390, 1280])
def test_long_and_hostile_texts_neither_widen_the_page_nor_become_elements(width: int, tmp_path: Path) -> None:
    found = measured(hostile_report("x" * 3000 + HOSTILE), width, tmp_path)
    assert found["width"] == width
    assert found["outside"] == 0
    assert found["active"] == 0
    assert "x" * 3000 + HOSTILE[:60] in found["text"]


@pytest.mark.parametrize(("scheme", "background"), [(0, "rgb(21, 24, 27)"), (1, "rgb(251, 251, 249)")])
def test_page_is_dark_or_light_as_the_reader_asks(scheme: int, background: str, tmp_path: Path) -> None:
    found = measured(sample_report(), 390, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert found["background"] == background
