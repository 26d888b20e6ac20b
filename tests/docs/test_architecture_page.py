"""Owns: docs/architecture.md and its pictures show the imports that there are."""

from __future__ import annotations

from support.floors import arrows_between_rooms
from support.pages import architecture_page
from support.pages.architecture_page import DRAWN, PAGE, PICTURES, filled, links_of, pictures, reduced


def test_the_page_and_its_pictures_are_what_the_source_gives() -> None:
    assert filled(PAGE.read_text()) == PAGE.read_text(), "run `make pages`"
    drawn = {name: (PICTURES / name).read_text() for name in pictures()}
    assert drawn == pictures(), "run `make pages`"


def test_an_arrow_that_follows_from_others_is_left_out_and_no_other() -> None:
    diamond = {("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")}
    assert reduced(diamond | {("a", "d")}) == diamond
    assert reduced({("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d"), ("b", "d")}) == {
        ("a", "b"),
        ("b", "c"),
        ("c", "d"),
    }


def test_every_import_between_two_drawn_folders_can_be_followed_along_the_arrows() -> None:
    arrows = arrows_between_rooms()
    for package in DRAWN.values():
        links = links_of(package)
        boxes = set(architecture_page.folders_of(package))
        reachable = {box: reached(box, links) for box in boxes}
        for what, room, target in arrows:
            if room in boxes and target in boxes:
                assert target in reachable[room], what


def reached(start: str, links: set[tuple[str, str]]) -> set[str]:
    """Everything that arrows lead to from a folder."""
    seen, waiting = set[str](), [start]
    while waiting:
        node = waiting.pop()
        fresh = {target for source, target in links if source == node} - seen
        seen |= fresh
        waiting += fresh
    return seen
