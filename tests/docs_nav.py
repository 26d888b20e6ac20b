"""mkdocs.yml's navigation -> the one that is built: pages that nobody listed stand at the end of the how-to guides.

A hook of mkdocs (`hooks` in mkdocs.yml). Invariant: every page of docs/ is in the navigation once, so that none can be
reached by search alone, and adding a page needs no other edit. It does not know what the pages say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOR_THE_REST = "How to"


def on_config(config: Any) -> Any:
    """Called by mkdocs once the file is read."""
    folder = Path(config["docs_dir"])
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    listed = set(_pages(config["nav"]))
    (section,) = (entry[FOR_THE_REST] for entry in config["nav"] if FOR_THE_REST in entry)
    section += [page for page in pages if page not in listed]
    return config


def _pages(entries: Any) -> Iterator[str]:
    """Every page below some entries of the navigation."""
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from _pages(entry)
