"""mkdocs.yml and the pages as they stand in the repository -> as they stand on the site.

A hook of mkdocs (`hooks` in mkdocs.yml). Pages that nobody listed stand at the end of the how-to guides; a link to a
file outside docs/, which a forge can follow and the site cannot, becomes its text. Invariant: every page of docs/ is in
the navigation once, so that adding one needs no other edit. It does not know what the pages say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOR_THE_REST = "How to"
_LINK = re.compile(r"\[([^][\n]+)\]\((\.\./[^)\s]*)\)")


def on_config(config: Any) -> Any:
    """Called by mkdocs once the file is read."""
    folder = Path(config["docs_dir"])
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    listed = set(_pages(config["nav"]))
    (section,) = (entry[FOR_THE_REST] for entry in config["nav"] if FOR_THE_REST in entry)
    section += [page for page in pages if page not in listed]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page before it is rendered."""
    folder = Path(config["docs_dir"]).resolve()
    here = (folder / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        inside = (here / link[2].split("#")[0]).resolve().is_relative_to(folder)
        return link[0] if inside else link[1]

    return _LINK.sub(kept, markdown)


def _pages(entries: Any) -> Iterator[str]:
    """Every page below some entries of the navigation."""
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from _pages(entry)
