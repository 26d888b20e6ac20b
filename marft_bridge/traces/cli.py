"""The commands of `marft-bridge traces`: parse, call one function, print.

What they do is in the modules named after them, which are imported when their command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.traces.where import flags_to_store

app = typer.Typer(
    name="traces",
    help="Look into a trace store, take it elsewhere, take somebody out of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Config = Annotated[Path | None, typer.Option("--config", "-c", help="A bridge.toml: its run folder.")]
Run = Annotated[str | None, typer.Option("--run", help="Run folder whose store it is.")]
Store = Annotated[Path | None, typer.Option("--store", help="The store itself.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _console() -> Console:
    return Console(highlight=False)


@app.command("list", epilog="Example: marft-bridge traces list --config examples/math_duo/bridge.toml --limit 5")
def list_(
    config: Config = None,
    run: Run = None,
    store: Store = None,
    run_id: Annotated[str | None, typer.Option(help="Only of this run, such as collect or train.")] = None,
    split: Annotated[str | None, typer.Option(help="Only train, heldout or live.")] = None,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    node: Annotated[str | None, typer.Option(help="Only those in which this node called a model.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only terminated, truncated or failed.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only with such a team reward: 'name>0.5'.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 20,
    waiting: Annotated[bool, typer.Option("--waiting", help="Traces whose spans have not all arrived.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="Whole traces that are no episodes, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """List episodes, the newest first."""
    from marft_bridge.traces import listing

    filters = {"run_id": run_id, "split": split, "task": task, "node": node, "outcome": outcome, "reward": reward}
    path = flags_to_store(config, run, store)
    if waiting or refused:
        listing.refuse_flags(waiting, refused, filters)
        listing.list_unassembled(path, "waiting" if waiting else "refused", limit, as_json, _console())
        return
    chosen = listing.Filters(
        run_id, split, task, node, outcome, None if reward is None else listing.text_to_reward_filter(reward)
    )
    listing.list_episodes(path, chosen, limit, as_json, _console())


@app.command(epilog="Example: marft-bridge traces sql 'FROM episode_summary' --config examples/math_duo/bridge.toml")
def sql(
    question: Annotated[str, typer.Argument(help="One SELECT, or the name of a documented query (docs/store.md).")],
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many rows; 0 for all of them.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.1, help="Stop the query after so long.")] = 60.0,
) -> None:
    """Ask the store in SQL: read-only, without other files, network or extensions."""
    if as_json and as_csv:
        raise ConfigError("traces sql: --json and --csv both say how to print; leave one out")
    from marft_bridge.traces.sql import show_sql

    form: Literal["table", "json", "csv"] = "json" if as_json else "csv" if as_csv else "table"
    show_sql(flags_to_store(config, run, store), question, form, limit or None, seconds, _console())


@app.command(epilog="Example: marft-bridge traces doctor --config examples/math_duo/bridge.toml")
def doctor(
    config: Config = None,
    run: Run = None,
    store: Store = None,
    limit: Annotated[int, typer.Option(min=0, help="Print at most so many faults of each law; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Check every law of a store, and say what is wrong with which episode; exit code 1 when something is."""
    from marft_bridge.traces.doctor import doctor as check

    if not check(flags_to_store(config, run, store), limit or None, as_json, _console()):
        raise typer.Exit(1)
