"""Owns: the documentation as a site.

- It builds without a warning: no broken link or anchor, no docstring that misleads.
- What a page loads and links to is there; nothing is loaded from another host, and the browser would refuse to.
- Every page has its place in the navigation, once, under a short title.
- Every word of a page is shown: none is taken for an element of HTML.
- Links between pages hold in the repository, too, where no site is built, and lead to no file outside docs/.
- In a browser the pages fit a phone and a laptop, their scripts run under the policy, their pictures show, the search
  finds, and no option is broken across lines.
"""

from __future__ import annotations

import functools
import http.server
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support import docs_site
from support.browser import CHROMIUM, Browser, browsing
from support.docs_site import CONFIG, build_site
from support.paths import ROOT

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
# The elements of HTML that the theme, Markdown and our pages make; of SVG, what icons are drawn with.
ELEMENT = re.compile(
    "a|article|aside|b|body|br|button|code|dd|del|details|dialog|div|dl|dt|em|figcaption|figure|footer|form|h[1-6]|head"
    "|header|hr|html|i|img|input|ins|kbd|label|li|link|main|mark|meta|nav|ol|p|picture|pre|script|section|small|source"
    "|span|strong|sub|summary|sup|table|tbody|td|th|thead|title|tr|u|ul|svg|path|circle|rect|line|g"
)
LONGEST_TITLE = 24  # letters that the side bar shows in one line


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    return build_site(tmp_path_factory.mktemp("docs"))


class Page(HTMLParser):
    """What a built page loads, links to and is made of, its anchors, and its Content-Security-Policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.elements: set[str] = set()
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.add(tag)
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if LOADING.get(tag) in given and given.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(given[LOADING[tag]])
        if "srcset" in given:
            self.loads += [part.split()[0] for part in given["srcset"].split(",")]


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    """Every built page, but the one for addresses that are not there: its links begin at the root of the host."""
    return {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def on_other_hosts(addresses: list[str]) -> list[str]:
    """Those that another host would have to answer."""
    return [address for address in addresses if urlsplit(address).netloc or address.startswith("//")]


def test_every_page_is_built(site: Path) -> None:
    assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []


@pytest.mark.parametrize("text", ["[a](#two)", "[a](two.md)", "::: marft_bridge.nobody"])
def test_what_the_build_warns_of_fails_it(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tmp_path / "docs"
    (docs / "theme").mkdir(parents=True)
    nav = re.compile(r"^nav = \[.*?^\]\n", re.DOTALL | re.MULTILINE)
    (docs / "zensical.toml").write_text(nav.sub("", CONFIG.read_text()))
    monkeypatch.setattr(docs_site, "CONFIG", docs / "zensical.toml")
    for page, is_right in (("# One\n\n[a](#one)\n", True), (f"# One\n\n{text}\n", False)):
        (docs / "index.md").write_text(page)
        scratch = tmp_path / str(is_right)
        scratch.mkdir()
        if is_right:
            assert (build_site(scratch) / "index.html").is_file()
        else:
            with pytest.raises(RuntimeError, match="the documentation was not built"):
                build_site(scratch)


def test_a_page_loads_nothing_from_another_host_and_its_policy_would_refuse_it(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Page(path.read_text())
        assert page.loads, path
        assert on_other_hosts(page.loads) == [], path
        sources = {word for rule in page.policy.split(";") for word in rule.split()[1:]}
        assert "'self'" in sources, path
        assert sources <= {"'self'", "'none'", "'unsafe-inline'", "data:", "blob:"}, path


def test_what_a_page_loads_and_links_to_is_there(built: dict[Path, Page]) -> None:
    missing = []
    for path, page in built.items():
        for address in page.loads + page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor_is_there = not parts.fragment or unquote(parts.fragment) in built[target].anchors
            if not target.is_file() or not anchor_is_there:
                missing.append((path.name, address))
    assert missing == []


def without_code(text: str) -> str:
    """A page without what is shown as it stands: fenced blocks, and code in a line."""
    return re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL)


def words_taken_for_elements(page: Page) -> list[str]:
    """Those that no browser knows: it shows nothing in their place."""
    return sorted(element for element in page.elements if not ELEMENT.fullmatch(element))


def test_no_word_of_a_page_is_taken_for_an_element(built: dict[Path, Page]) -> None:
    taken = {path.name: words_taken_for_elements(page) for path, page in built.items()}
    assert {name: words for name, words in taken.items() if words} == {}, "write `<word>` as code"


def test_a_word_in_angle_brackets_that_is_no_code_is_seen() -> None:
    assert words_taken_for_elements(Page("<p>The run folder is runs/<name>.</p>")) == ["name"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_written_with_the_elements_of_pictures_cards_and_lines_only(page: Path) -> None:
    text = re.sub(r"^ {4}.*$", "", without_code((DOCS / page).read_text()), flags=re.MULTILINE)  # set in: code
    words = set(re.findall(r"<([a-zA-Z][\w -]*)[^>\n]*>", text))
    assert {word.split()[0] for word in words} <= {"br", "div", "img", "picture", "source"}, "write `<word>` as code"


def test_style_sheets_load_nothing_from_another_host(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for path in sheets:
        loaded = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", path.read_text())
        assert on_other_hosts([address or imported for address, imported in loaded]) == [], path


@pytest.mark.parametrize(
    "address", ["https://cdn.example/x.js", "//cdn.example/x.css", "http://127.0.0.1.example/font.woff2"]
)
def test_an_address_on_another_host_is_seen(address: str) -> None:
    assert on_other_hosts([address, "assets/x.js", "../x.css", "data:image/png;base64,AA"]) == [address]


def test_every_page_can_be_reached_from_the_first_one(built: dict[Path, Page], site: Path) -> None:
    index = (site / "index.html").resolve()
    linked = {(index.parent / urlsplit(address).path).resolve() for address in built[index].links}
    assert set(built) - {index} <= linked


def navigation() -> list[tuple[str, str, str]]:
    """Group, title and page of every entry of the side bar."""
    groups = tomllib.loads(CONFIG.read_text())["project"]["nav"]
    return [
        (group, title, page)
        for entry in groups
        for group, pages in entry.items()
        for titled in pages
        for title, page in titled.items()
    ]


def test_every_page_stands_in_the_side_bar_once_under_a_short_title_of_its_group() -> None:
    entries = navigation()
    assert sorted(page for _, _, page in entries) == [page.as_posix() for page in PAGES], "docs/zensical.toml: nav"
    assert [title for _, title, _ in entries if len(title) > LONGEST_TITLE] == []
    assert len({(group, title) for group, title, _ in entries}) == len(entries)


def relative_links(page: Path) -> Iterator[str]:
    for address in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not urlsplit(address).scheme and not address.startswith("#"):
            yield address


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / page for page in PAGES)], ids=lambda page: page.name)
def test_a_link_leads_to_a_file_of_the_repository(page: Path) -> None:
    for address in relative_links(page):
        assert (page.parent / address.split("#")[0]).exists(), address


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_file_outside_the_site_is_named_by_its_path(page: Path) -> None:
    text = (DOCS / page).read_text()
    for address in relative_links(DOCS / page):
        is_inside = (DOCS / page.parent / address).resolve().is_relative_to(DOCS)
        assert is_inside, f"write {address} as `path`, not as a link"
    for path in re.findall(r"`((?:examples|graphs|tests|requirements)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as where:
        yield where


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no `chromium` on PATH: the pages were not rendered")
    with browsing(tmp_path) as tab:
        yield tab


WIDTHS = pytest.mark.parametrize("width", [390, 1280])
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.browser
@WIDTHS
@pytest.mark.parametrize("page", ["index", "concepts", "commands", "view", "reference/records"])
def test_a_page_fits_and_works_in_a_browser(address: str, browser: Browser, width: int, page: str) -> None:
    grounds = set()
    for dark in (False, True):
        browser.look(width, dark=dark)
        browser.open(f"{address}/{page}.html")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("document.documentElement.classList.contains('js')")
        browser.run("document.querySelectorAll('img').forEach(picture => picture.loading = 'eager')")
        browser.wait("[...document.images].every(picture => picture.complete)")
        assert browser.run("[...document.images].every(picture => picture.naturalWidth > 0)")
        grounds.add(browser.run(GROUND))
    assert len(grounds) == 2, "light and dark look the same"
    assert browser.errors == []


# Options of tables and of text whose code is on more than one line.
BROKEN_OPTIONS = """[...document.querySelectorAll('td code, p code, li code')]
  .filter(code => /^--[a-z-]+( [A-Z]+)?$/.test(code.textContent))
  .filter(code => {
    const text = document.createRange();
    text.selectNodeContents(code);
    return new Set([...text.getClientRects()].map(line => line.top)).size > 1;
  })
  .map(code => code.textContent)"""
BARE_OPTIONS = r"""[...document.querySelectorAll('td, p, li')].flatMap(element => [...element.childNodes])
  .filter(node => node.nodeType === Node.TEXT_NODE)
  .flatMap(node => node.textContent.match(/(^|\s)--[a-z][a-z-]+/g) ?? [])"""


@pytest.mark.browser
@WIDTHS
def test_an_option_stands_in_one_line_on_every_page(address: str, browser: Browser, width: int) -> None:
    browser.look(width)
    broken = {}
    for page in PAGES:
        browser.open(f"{address}/{page.with_suffix('.html')}")
        if options := browser.run(BROKEN_OPTIONS) + browser.run(BARE_OPTIONS):
            broken[str(page)] = options
    assert broken == {}, "an option in text is written as code"


SEARCH = "[...document.querySelectorAll('*')].find(element => element.shadowRoot).shadowRoot"


@pytest.mark.browser
def test_the_search_finds_an_option_under_the_policy(address: str, browser: Browser) -> None:
    browser.look(1280)
    browser.open(f"{address}/index.html")
    browser.wait("document.querySelector('.md-search__button')")
    browser.run("document.querySelector('.md-search__button').click()")
    browser.wait(f"{SEARCH}.activeElement?.matches('input')")
    browser.call("Input.insertText", text="keep_advantages")
    browser.wait(f"[...{SEARCH}.querySelectorAll('ol a')].some(link => link.href.includes('/config.html'))")
    assert browser.errors == []
