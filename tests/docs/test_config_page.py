"""Owns: docs/config.md shows every option of bridge.toml as it is declared, with a sentence, and links that exist."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
from support.pages.config_page import ELSEWHERE, PAGE, page, tables

from marft_bridge.config.bridge import BridgeConfig

TEXT = PAGE.read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", TEXT, flags=re.MULTILINE))


def rows(section: str) -> dict[str, list[str]]:
    """Option -> default, what it takes and its meaning, of one section."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in section.splitlines() if "|" in line
    ]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_the_page_is_what_the_declarations_give() -> None:
    assert page() == TEXT, "run `make pages`"


def test_every_option_of_pydantics_own_schema_is_on_the_page_and_no_other() -> None:
    schema = BridgeConfig.model_json_schema()
    shown = {heading.strip("`[]") if "`" in heading else "": set(rows(text)) for heading, text in SECTIONS.items()}
    assert set(shown) == set(tables())
    for table, options in tables().items():
        declared = schema if not table else schema["$defs"][options.__name__]
        dotted = {name: f"{table}.{name}".removeprefix(".") for name in declared["properties"]}
        inside = {name for name, path in dotted.items() if {path, f"{path}.NAME"} & tables().keys()}
        listed = shown[table] | inside
        assert listed == set(declared["properties"]), table


def test_every_option_has_a_sentence_and_what_it_takes() -> None:
    for heading, text in SECTIONS.items():
        for option, (default, takes, meaning) in rows(text).items():
            assert default, (heading, option)
            assert takes, (heading, option)
            assert re.search(r"\w{2}.*[.)]$", meaning), (heading, option)


@pytest.mark.parametrize(
    ("table", "option", "default"),
    [("serve", "restarts", 2), ("collect", "engine", "local"), ("record", "redact", ["secrets", "card"])],
)
def test_a_default_is_written_as_the_file_would(table: str, option: str, default: Any) -> None:
    shown = rows(SECTIONS[f"`[{table}]`"])[option][0].strip("`")
    assert tomllib.loads(f"x = {shown}")["x"] == default


def test_what_is_declared_elsewhere_is_linked_to() -> None:
    links = re.findall(r"\]\(([\w-]+\.md)\)", json.dumps(list(ELSEWHERE.values())))
    assert links == ["rewards.md", "training.md"]
    assert all((PAGE.parent / link).is_file() for link in links)
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", TEXT)) == set(links)
