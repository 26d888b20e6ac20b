"""docs/commands.md: every command with its arguments and options, written from what `--help` is written from.

`make pages` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from support.pages.code_in_text import text_to_markdown
from support.paths import ROOT

PAGE = ROOT / "docs/commands.md"

LONGEST_LINE = 80
_KINDS = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}
INTRODUCTION = """\
# Commands

Every command with its options, as `--help` says it. This page is written from there (`make pages`).

Which run is meant is said in the same words everywhere. `RUN`, behind the command, is the folder that a run leaves its
files in; alone, it has the options of the `bridge.toml` here if that is its own, else those that its commands were
given last. `--config` names a configuration, and with it the run folder; without either it is `bridge.toml`. `--run`
puts another folder in the place of the configuration's own. Words that name two runs are refused.

With `--json`, standard output is one JSON value, whose keys the option names, and nothing else; progress, and what the
app prints, goes to standard error. After a user error, which is one line there and exit code 2, there is none.

Ctrl-C stops every command in order; those with `--resume` go on where they were. `marft-bridge --install-completion`
makes the shell complete commands, options and run folders.
"""


def page() -> str:
    """The whole page as the commands are declared now."""
    from marft_bridge.cli import app

    return INTRODUCTION + "".join(
        part for words, command in commands(typer.main.get_command(app)) for part in _section(words, command)
    )


def commands(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that can be given, by its words."""
    for name, inner in command.commands.items():
        words = (*before, name)
        if hasattr(inner, "commands"):
            yield from commands(inner, words)
        else:
            yield words, inner


def _section(words: tuple[str, ...], command: Any) -> Iterator[str]:
    yield f"\n## `{' '.join(words)}`\n\n{_plain(command.help)}\n"
    if command.epilog:
        yield f"\n{_example(command.epilog)}\n"
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    if shown:
        yield "\n| | default | meaning |\n|---|---|---|\n"
    for parameter in shown:
        yield f"| `{_cell(_name(parameter))}` | {_default(parameter)} | {_text_cell(parameter.help or '')} |\n"


def _plain(text: str) -> str:
    return text_to_markdown("\n".join(line.strip() for line in text.strip().splitlines()))


def _example(epilog: str) -> str:
    """A block of its own; a long one has an option a line, as in text it would be broken within one."""
    command = epilog.strip().removeprefix("Example: ")
    if len(command) > LONGEST_LINE:
        command = command.replace(" --", " \\\n    --")
    return f"```text\n{command}\n```"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    name = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return name if parameter.is_flag else f"{name} {parameter.metavar or _taken(parameter.type_descriptor.annotation)}"


def _taken(kind: Any) -> str:
    if get_origin(kind) is list:  # may be given several times
        (kind,) = get_args(kind)
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else _KINDS[kind]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "has to be given"
    if getattr(parameter, "is_flag", False) or parameter.default in (None, ()) or callable(parameter.default):
        return "–"
    return f"`{parameter.default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _text_cell(text: str) -> str:
    return _cell(text_to_markdown(text))


def write() -> None:
    """Writes docs/commands.md."""
    PAGE.write_text(page(), encoding="utf-8")
