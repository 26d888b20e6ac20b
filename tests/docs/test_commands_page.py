"""Owns: docs/commands.md has the commands and options that `--help` has, and no others; its examples can be given."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from support.pages.commands_page import LONGEST_LINE, PAGE, commands, page
from support.snippets import command_problem
from typer.testing import CliRunner

from marft_bridge.cli import app

TEXT = PAGE.read_text()
SECTIONS = dict(re.findall(r"^## `(.+)`\n((?:(?!## ).*\n)*)", TEXT, flags=re.MULTILINE))
COMMANDS = [" ".join(words) for words, _ in commands(typer.main.get_command(app))]


def test_the_page_is_what_the_declarations_give() -> None:
    assert page() == TEXT, "run `make pages`"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_on_the_page_with_the_options_of_its_help_and_no_other(command: str) -> None:
    said = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    offered = set(re.findall(r"^\W*(?:-\w, )?(--[a-z][a-z-]*)", said, re.MULTILINE)) - {"--help"}
    shown = set(re.findall(r"^\| `(--[a-z][a-z-]*)", SECTIONS[command], re.MULTILINE))
    assert shown == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_can_be_given(command: str) -> None:
    (example,) = re.findall(r"^```text\n(.+?)\n```$", SECTIONS[command], re.MULTILINE | re.DOTALL)
    assert example.startswith(f"marft-bridge {command} ")
    assert max(map(len, example.splitlines())) <= LONGEST_LINE
    assert command_problem(shlex.split(example.replace("\\\n", ""))) is None
