"""Owns: the documentation as a site.

- It builds without a warning: no broken link or anchor, no page that cannot be reached, no docstring that misleads.
- Nothing in it is loaded from another host, and the browser would refuse to.
- Every page has its place in the navigation, also one that mkdocs.yml does not name.
- Links between pages hold in the repository, too, where no site is built.
- In a browser the pages fit a phone and a laptop, their scripts run under the policy, and their pictures show.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from support import docs_nav
from support.paths import ROOT

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
CHROMIUM = shutil.which("chromium")
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Fails on any warning of mkdocs."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Page(HTMLParser):
    """What a built page loads, what it links to, and what its Content-Security-Policy is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if LOADING.get(tag) in given and given.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(given[LOADING[tag]])


def elsewhere(addresses: list[str]) -> list[str]:
    """Those that another host would have to answer."""
    return [address for address in addresses if urlsplit(address).netloc or address.startswith("//")]


def test_every_page_is_built(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []


def test_a_page_loads_nothing_from_another_host_and_its_policy_would_refuse_it(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Page(path.read_text())
        assert page.loads, path
        assert elsewhere(page.loads) == [], path
        sources = {word for rule in page.policy.split(";") for word in rule.split()[1:]}
        assert "'self'" in sources, path
        assert sources <= {"'self'", "'none'", "'unsafe-inline'", "data:", "blob:"}, path


def test_what_a_page_loads_is_there(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue  # its addresses begin at the root of wherever the site is put
        for address in Page(path.read_text()).loads:
            assert address.startswith("data:") or (path.parent / urlsplit(address).path).is_file(), (path, address)


def test_style_sheets_load_nothing_from_another_host(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for path in sheets:
        found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", path.read_text())
        assert elsewhere([one or other for one, other in found]) == [], path


@pytest.mark.parametrize(
    "address", ["https://cdn.example/x.js", "//cdn.example/x.css", "http://127.0.0.1.example/font.woff2"]
)
def test_an_address_on_another_host_is_seen(address: str) -> None:
    assert elsewhere([address, "assets/x.js", "../x.css", "data:image/png;base64,AA"]) == [address]


def test_every_page_can_be_reached_from_the_first_one(site: Path) -> None:
    linked = {urlsplit(address).path for address in Page((site / "index.html").read_text()).links}
    wanted = {page.with_suffix(".html").as_posix() for page in PAGES} - {"index.html"}
    assert wanted <= linked


def test_a_page_that_nobody_listed_stands_among_the_guides(tmp_path: Path) -> None:
    for name in ("index.md", "listed.md", "new.md", "deep/new.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    nav = [{"Start": ["index.md"]}, {"How to": ["listed.md"]}]
    config = {"docs_dir": str(tmp_path), "nav": nav}
    assert docs_nav.on_config(config)["nav"] == [
        {"Start": ["index.md"]},
        {"How to": ["listed.md", "deep/new.md", "new.md"]},
    ]


@pytest.mark.parametrize(
    ("src", "link", "shown"),
    [
        ("zoo.md", "[the graph](../graphs/math_duo.py)", "the graph"),
        ("reference/records.md", "[the store](../store.md)", "[the store](../store.md)"),
        ("reference/records.md", "[the graph](../../graphs/math_duo.py)", "the graph"),
        ("zoo.md", "[training](training.md#checkpoints)", "[training](training.md#checkpoints)"),
    ],
)
def test_a_link_out_of_the_site_is_its_text_there(src: str, link: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=src))
    assert docs_nav.on_page_markdown(f"See {link}.", page, {"docs_dir": str(DOCS)}) == f"See {shown}."


def relative_links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if not urlsplit(address).scheme and not address.startswith("#"):
            yield address


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=lambda page: page.name)
def test_a_link_leads_to_a_file_of_the_repository(page: Path) -> None:
    for address in relative_links(page):
        assert (page.parent / address.split("#")[0]).exists(), address


MEASURE = """<!doctype html><title></title>
<iframe style="width:{width}px;height:900px;border:0" src="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  document.title = JSON.stringify({{
    width: root.scrollWidth,
    scripted: root.classList.contains("js"),
    background: getComputedStyle(inside.body).backgroundColor,
    pictures: [...inside.images].map(picture => picture.naturalWidth > 0),
  }});
}});
</script>"""


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder on loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the pages were not rendered")
@pytest.mark.parametrize(
    ("width", "page", "pictures"), [(390, "concepts.html", 5), (1280, "reference/records.html", 0)]
)
def test_a_page_fits_and_works_in_a_browser(site: Path, width: int, page: str, pictures: int, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    (folder / "wrapper.html").write_text(MEASURE.format(width=width, page=page))
    with served(folder) as address:
        command = [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars", "--dump-dom"),
            f"{address}/wrapper.html",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stdout[:300]
    found = json.loads(html.unescape(title.group(1)))
    assert found["width"] <= width
    assert found["scripted"]
    assert found["background"] == "rgb(255, 255, 255)"  # of the theme's style sheet; without it there is none
    assert found["pictures"] == [True] * pictures
