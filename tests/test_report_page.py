"""Owns: what a browser makes of report.html.

- no horizontal scrolling at phone width, whatever the texts are, and the tables fit
- each drawing shows once, in the size made for the width
- texts from models never become elements
- the scheme is the one that the reader asks for
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sample_report import sample_report
from test_report import HOSTILE, hostile_report

from marft_bridge.report import NodeOutput, Report, changed_tasks, write_report

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
  document.title = JSON.stringify({{
    viewport: frame.contentWindow.innerWidth,
    width: root.scrollWidth,
    wideTables: [...inside.querySelectorAll(".card.scroll")].filter(e => e.scrollWidth > e.clientWidth).length,
    drawings: [...inside.querySelectorAll("svg")].filter(e => e.getClientRects().length)
      .map(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width),
    active: inside.querySelectorAll("script, img, iframe").length,
    background: getComputedStyle(inside.body).backgroundColor,
    text: inside.body.textContent,
  }});
}});
</script>"""


def measured(report: Report, width: int, folder: Path, *flags: str) -> dict[str, object]:
    """The page inside a frame of this width, into what the browser found there."""
    _, page = write_report(report, folder)
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
    found: dict[str, object] = json.loads(html.unescape(title.group(1)))
    return found


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_its_width(width: int, tmp_path: Path) -> None:
    found = measured(sample_report(), width, tmp_path)
    assert found["viewport"] == width
    assert found["width"] == width
    assert found["wideTables"] == 0
    drawings = found["drawings"]
    assert isinstance(drawings, list)
    assert len(drawings) == 2  # the interval and the curve, each once
    assert all(scale > 0.85 for scale in drawings)  # letters of 12 px stay legible


def test_long_and_hostile_texts_neither_widen_the_page_nor_become_elements(tmp_path: Path) -> None:
    report = hostile_report()
    change = report.tasks.improved[0]
    long = NodeOutput(node="n" * 300, text="x" * 5000 + HOSTILE)
    change = change.model_copy(update={"outputs_a": (long,), "task_id": "t" * 300})
    report = report.model_copy(update={"tasks": changed_tasks([change])})
    found = measured(report, 390, tmp_path)
    assert found["width"] == 390
    assert found["active"] == 0
    assert "x" * 5000 + HOSTILE in str(found["text"])


@pytest.mark.parametrize(("scheme", "background"), [(0, "rgb(21, 24, 27)"), (1, "rgb(251, 251, 249)")])
def test_page_is_dark_or_light_as_the_reader_asks(scheme: int, background: str, tmp_path: Path) -> None:
    found = measured(sample_report(), 390, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert found["background"] == background
