"""Owns: what a browser makes of `marft-bridge view`, over real HTTP.

- links lead from the runs to a run, from it to an episode and its coloured tokens; a wrong token leads nowhere
- no horizontal scrolling of a page at the width of a phone or a laptop, whatever the texts are
- hostile texts neither run nor load anything, even where no policy forbids it
- shades are on the screen, in the scheme that the reader asks for
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sample_report import hostile_report
from support.view_rig import EPISODE, SEEN, TOKEN, Served, hostile_run, serving

from marft_bridge.comparison.page import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the pages were not rendered"),
]

MEASURE = """<!doctype html><title></title>
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const frame = document.querySelector("iframe"), inside = frame.contentDocument, root = inside.documentElement;
  const all = (selector) => [...inside.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  const paint = (selector) => all(selector).map(e => getComputedStyle(e).backgroundColor);
  document.title = JSON.stringify({{
    viewport: frame.contentWindow.innerWidth,
    width: root.scrollWidth,
    outside: all(".card, h1, pre").filter(e => e.getClientRects().length)
      .filter(e => box(e).left < 0 || box(e).right > frame.contentWindow.innerWidth).length,
    ran: Boolean(frame.contentWindow.owned || window.owned) || inside.title === "owned",
    active: all("script:not([src^='/static/']), img, iframe, object").length,
    nodes: all(".d-action rect").map(e => [box(e).width, box(e).height]),
    letters: all(".d-action text").map(e => parseFloat(getComputedStyle(e).fontSize)),
    worse: paint("pre .a-n4"), better: paint("pre .a-p4"), fills: all(".d-action.a-0 rect").length,
    background: getComputedStyle(inside.body).backgroundColor,
    curves: all(".curve-card svg").filter(e => e.getClientRects().length).length,
  }});
}});
</script>"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run = hostile_run(tmp_path_factory.mktemp("hostile"))
    write_report(hostile_report(), run.path)
    with serving(run.path) as server:
        yield server


def rendered(address: str, profile: Path, *flags: str) -> str:
    """What a browser holds once it has loaded an address."""
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={profile}", "--hide-scrollbars", "--dump-dom", *flags, address),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def measured(served: Served, path: str, width: int, folder: Path, *flags: str) -> dict[str, Any]:
    """A page, with its style and without its policy, inside a frame of this width -> what the browser found there."""
    style = f"<style>{served.text('/style.css')}</style>"
    page = served.text(path).replace('<link rel="stylesheet" href="/style.css">', style)
    assert style in page
    wrapper = folder / "wrapper.html"
    wrapper.write_text(MEASURE.format(width=width, page=html.escape(page)), "utf-8")
    dumped = rendered(wrapper.as_uri(), folder / "profile", *flags)
    title = re.search(r"<title>(.*?)</title>", dumped, re.DOTALL)
    assert title is not None, dumped[:300]
    found: dict[str, Any] = json.loads(html.unescape(title.group(1)))
    return found


@pytest.mark.slow
def test_links_lead_from_the_runs_to_coloured_tokens(served: Served, tmp_path: Path) -> None:
    path, seen = "/", []
    for title, lead in (("Runs", r"/run\?[^\"]*"), ("train", r"/episode\?[^\"]*"), (f"Episode {EPISODE[:12]}", None)):
        joined = "&" if "?" in path else "?"
        page = rendered(f"{served.url}{path}{joined}token={TOKEN}", tmp_path)
        found = re.search(r"<title>(.*?)</title>", page)
        assert found is not None, page[:300]
        assert found[1] == f"{title} · marft-bridge"
        assert TOKEN not in page
        seen.append(page)
        if lead is not None:
            link = re.search(rf'<a href="({lead})"', page)
            assert link is not None, page
            path = html.unescape(link[1])
    assert re.search(r'<span class="t a-n4" title="token 0, id 4; [^"]*normalised −2.000', seen[-1])
    assert html.unescape(seen[-1]).count(SEEN) >= 12
    refused = rendered(f"{served.url}/?token=wrong", tmp_path)
    assert "The token is wrong" in refused
    assert "train" not in refused


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "path",
    ["/", "/run?id=train", f"/episode?id={EPISODE}", f"/pair?a={EPISODE}&b={EPISODE}", "/training", "/comparison"],
)
def test_a_page_fits_its_width_and_hostile_texts_do_nothing(
    served: Served, path: str, width: int, tmp_path: Path
) -> None:
    found = measured(served, path, width, tmp_path)
    assert found["viewport"] == found["width"] == width
    assert found["outside"] == 0
    assert found["ran"] is False
    assert found["active"] == 0
    if path.startswith("/episode"):
        assert len(found["nodes"]) == 2
        assert all(wide >= 90 and high >= 40 for wide, high in found["nodes"])
        assert min(found["letters"]) >= 11
        assert found["fills"] == 1  # the node of the first action, whose tokens average to nothing
    assert found["curves"] == (1 if path.startswith("/training") else 0)


@pytest.mark.parametrize(
    ("scheme", "background", "worse", "better"),
    [
        (0, "rgb(21, 24, 27)", "rgb(150, 84, 15)", "rgb(32, 106, 155)"),
        (1, "rgb(251, 251, 249)", "rgb(232, 146, 74)", "rgb(98, 163, 212)"),
    ],
)
def test_shades_are_on_the_screen_in_the_readers_scheme(
    served: Served, scheme: int, background: str, worse: str, better: str, tmp_path: Path
) -> None:
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    found = measured(served, f"/episode?id={EPISODE}", 390, tmp_path, flag)
    assert (found["background"], found["worse"], found["better"]) == (background, [worse], [better])
