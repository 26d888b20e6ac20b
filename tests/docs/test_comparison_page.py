"""Owns: docs/comparison.md knows every option of [compare] and its tables, and shows a configuration that is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.paths import ROOT

from marft_bridge.comparison.records import Contrast, Report, Variant
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.compare import CompareOptions, VariantOptions

PAGE = (ROOT / "docs/comparison.md").read_text()
GRAPH = '[graph]\napp = "a:b"\nnodes = ["planner", "executor"]\ntasks = "t.jsonl"\nreward = "a:r"\n'


@pytest.mark.parametrize(
    ("heading", "model", "elsewhere"),
    [("## Options of [compare]", CompareOptions, {"variants"}), ("| key of a table", VariantOptions, set())],
    ids=["compare", "variants"],
)
def test_every_option_has_a_row(heading: str, model: type[BaseModel], elsewhere: set[str]) -> None:
    below = PAGE.index(heading)
    named = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in rows_from(below)))
    assert set(named) == set(model.model_fields) - elsewhere


def rows_from(place: int) -> list[str]:
    """The rows of the first table at or after a place of the page."""
    found = re.search(r"(?:^\|.*\n)+", PAGE[place:], flags=re.MULTILINE)
    assert found is not None
    return found.group().splitlines()[2:]


def test_the_defaults_are_those_of_the_options() -> None:
    written = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows_from(PAGE.index("## Options of"))}
    options = CompareOptions()
    assert written["`samples_per_task`"] == str(options.samples_per_task)
    assert written["`metric`"] == f'`"{options.metric}"`'
    assert written["`stop_early`, `looks`"] == f"false, {options.looks}"
    assert written["`mixed_teams`, `mixed_candidate`"].startswith(f'`"{options.mixed_teams}"`')
    assert written["`kl_actions`"] == str(options.kl_actions)
    assert not options.stop_early
    assert not options.allow_tool_change


def test_the_configuration_that_is_shown_is_valid(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "bridge.toml"
    path.write_text(GRAPH + shown)
    names = [variant.name for variant in toml_to_config(path).compare.variants]
    assert names == ["before", "after", "one agent", "larger", "hosted", "hosted, told how"]


def test_figures_are_called_as_in_the_report() -> None:
    rows = rows_from(PAGE.index("## What each figure means"))
    named = {name for row in rows for name in re.findall(r"`(?:variants\[\]\.)?(\w+)`", row.split("|")[1])}
    assert named <= {*Report.model_fields, *Contrast.model_fields, *Variant.model_fields}
