"""The commands of `marft-bridge traces`: parse, call one function, print.

What they do is in the modules named after them, which are imported when their command runs.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    name="traces",
    help="Look into a trace store, take it elsewhere, take somebody out of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
