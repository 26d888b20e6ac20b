"""The pages of the documentation -> every fenced block in them, and every command that they show.

Invariant: no block is skipped. One that is not closed, or that nothing says how to check, is an error; one that is
deliberately not checked stands below `<!-- not run: the reason -->`. It does not know what a block means.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.exceptions import TyperException

from marft_bridge.cli import app
from support.paths import ROOT

DOCS = ROOT / "docs"
PROGRAM = "marft-bridge"
_FENCE = re.compile(r"( *)(`{3,})(.*)")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_INDENTED = re.compile(rf"^ {{4}}({PROGRAM} .+)$", re.MULTILINE)
_SET_IN = re.compile(rf"^ {{4}}((?:{PROGRAM}|make|ray|python|pip|[A-Z_]+=\S+) .+)$", re.MULTILINE)
_INLINE = re.compile(rf"`+({PROGRAM} [^`]+)`+")
_PLACEHOLDERS = ("...", "…")


@dataclass(frozen=True)
class Snippet:
    """One fenced block: where it stands, what it says it is, and why it is not checked, if it says so."""

    page: str  # relative to the repository
    line: int  # of its first line
    kind: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """The README and every page of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def text_to_snippets(text: str, page: str) -> Iterator[Snippet]:
    """Every fenced block of a page, in order.

    Raises:
        ValueError: a block is not closed.
    """
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.fullmatch(lines[at])
        if opened is None:
            at += 1
            continue
        indent, fence, kind = opened.groups()
        ends = (n for n in range(at + 1, len(lines)) if lines[n].strip() == fence)
        if (end := next(ends, None)) is None:
            raise ValueError(f"{page}:{at + 1}: the block is not closed")
        above = _NOT_RUN.fullmatch(lines[at - 1].strip()) if at else None
        inside = "".join(line.removeprefix(indent) + "\n" for line in lines[at + 1 : end])
        yield Snippet(page, at + 2, kind.strip(), inside, above and above[1])
        at = end + 1


@cache
def snippets() -> tuple[Snippet, ...]:
    """Every fenced block of every page."""
    return tuple(
        snippet for page in pages() for snippet in text_to_snippets(page.read_text(), str(page.relative_to(ROOT)))
    )


def page_to_commands(text: str) -> Iterator[tuple[str, bool]]:
    """The commands of ours outside fenced blocks, and whether each is whole or only mentioned."""
    outside = _outside_blocks(text)
    for line in _INDENTED.findall(outside):
        yield line, True
    for mention in _INLINE.findall(outside):
        yield " ".join(mention.split()), False


def _outside_blocks(text: str) -> str:
    return re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)


def shown_commands(page: str) -> list[str]:
    """The lines of shell that a page shows, without their comments: those in blocks, then those that are set in."""
    blocks = [snippet.text for snippet in snippets() if snippet.page == page and snippet.kind == "sh"]
    lines = [line for text in blocks for line in text.splitlines()]
    lines += _SET_IN.findall(_outside_blocks((ROOT / page).read_text()))
    return [said for line in lines if (said := line.split(" #")[0].strip())]


def line_to_words(line: str) -> list[str]:
    """A line of shell without its comment and placeholders; optional parts are taken as given."""
    words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
    return [word for word in words if word not in _PLACEHOLDERS]


def command_problem(words: Sequence[str], whole: bool = True) -> str | None:
    """What the real command line says against a command, or None. One that is only mentioned may lack arguments."""
    command: Any = typer.main.get_command(app)
    rest = list(words[1:])
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-"):
            return None if not whole or rest == ["--help"] else "no command is named"
        name = rest.pop(0)
        if name not in command.commands:
            return None if not whole and name.isupper() else f"there is no command {name!r}"
        command = command.commands[name]
    rest = rest[: rest.index("--")] if "--" in rest else rest
    if not whole:
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        unknown = [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]
        return f"{command.name} has no {unknown[0]}" if unknown else None
    try:
        command.make_context(command.name, rest)
    except TyperException as error:
        return str(error.format_message() if hasattr(error, "format_message") else error)
    return None
