"""Owns: every message that docs/troubleshooting.md explains is one that the program has, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from support.paths import ROOT

TEXT = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = [found[1] for found in re.findall(r"^- (`+)(.+?)\1$", TEXT, flags=re.MULTILINE)]


def texts_of(source: str) -> Iterator[str]:
    """Every text of a module, with … for what it fills in; adjacent literals are one text to the parser."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def messages() -> frozenset[str]:
    modules = (
        path for package in ("marft_bridge", "trace_store", "trainers") for path in (ROOT / package).rglob("*.py")
    )
    return frozenset(text for path in modules for text in texts_of(path.read_text()))


def test_a_text_is_read_as_it_is_printed() -> None:
    source = 'raise E(f"node {node!r} has no {what}; "\n    "name it")'
    assert "node … has no …; name it" in set(texts_of(source))


def test_the_messages_are_found_on_the_page() -> None:
    assert len(QUOTED) == len(set(QUOTED)) == TEXT.count("\n- `")
    assert len(QUOTED) > 40


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_on_the_page_is_in_the_source(message: str) -> None:
    assert message in messages()


def test_every_message_is_explained() -> None:
    for part in re.split(r"^- ", TEXT, flags=re.MULTILINE)[1:]:
        _, _, explanation = part.partition("\n")
        assert re.match(r"\n    \S.*[.?)]", explanation, flags=re.DOTALL), part
