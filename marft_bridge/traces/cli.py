"""The commands of `marft-bridge traces`: options of the command line -> a call of one function each.

The functions are in the other modules of this folder, which are imported only when their command runs. `erase`, which
looks into all that a run left behind, is in `marft_bridge.erasure`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_choice import RunChoice, run_folders_below

app = typer.Typer(
    name="traces",
    help="Look into a trace store, export it, erase from it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="A run folder, or a store.", show_default=False, autocompletion=run_folders_below
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="A bridge.toml, whose run folder it is; bridge.toml.")
]
Run = Annotated[
    str | None, typer.Option("--run", help="Run folder whose store it is.", autocompletion=run_folders_below)
]
Store = Annotated[Path | None, typer.Option("--store", help="The store itself.")]


def json_option(keys: str, each: str | None = None) -> Any:
    """`--json`, with the keys of the object that it prints, or of every object in a list."""
    return typer.Option("--json", help=f"Print JSON{'' if each is None else f', for each {each}'}: {keys}.")


_LIST_KEYS = (
    "episode_id, short_id, run_id, task_id, split, sample, round, variant, outcome, reason, started_ns, seconds, "
    "actions, trainable_actions, prompt_tokens, sampled_tokens, fork_of, thread_id, user_id, tags, rewards, link, "
    "nodes, input, output"
)
_ROWS_KEYS = "rows, seconds"


def _console() -> Console:
    return Console(highlight=False)


@app.command("list", epilog="Example: marft-bridge traces list --config examples/math_duo/bridge.toml --limit 5")
def list_(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    run_id: Annotated[str | None, typer.Option(help="Only of this run, such as collect or train.")] = None,
    split: Annotated[str | None, typer.Option(help="Only train, evaluation, heldout or live.")] = None,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    node: Annotated[str | None, typer.Option(help="Only those in which this node called a model.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Only those with a call of this adapter: NODE@VERSION.")] = None,
    version: Annotated[int | None, typer.Option(help="Only those with a call of an adapter's version.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only of this variant of a comparison.")] = None,
    search: Annotated[str | None, typer.Option(help="Only with these words in prompts, answers or tools.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only terminated, truncated or failed.")] = None,
    thread: Annotated[str | None, typer.Option(help="Only of this thread of the app's.")] = None,
    user: Annotated[str | None, typer.Option(help="Only of this user, as the app's metadata names them.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only with this tag.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only with such a team reward: 'name>0.5'.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 20,
    waiting: Annotated[bool, typer.Option("--waiting", help="Traces whose spans have not all arrived.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="Whole traces that are no episodes, and why.")] = False,
    as_json: Annotated[bool, json_option(_LIST_KEYS, each="episode")] = False,
) -> None:
    """List episodes, the newest first."""
    from marft_bridge.traces import listing

    filters = {"run_id": run_id, "split": split, "task": task, "node": node, "outcome": outcome, "reward": reward}
    filters |= {"thread": thread, "user": user, "tag": tag, "adapter": adapter, "variant": variant, "search": search}
    filters["version"] = None if version is None else str(version)
    path = RunChoice("traces list", run_folder, config=config, run=run, store=store).to_store()
    if waiting or refused:
        listing.refuse_flags(waiting, refused, filters)
        listing.list_unassembled(path, "waiting" if waiting else "refused", limit, as_json=as_json, console=_console())
        return
    chosen = listing.Filters(
        run_id=run_id,
        split=split,
        variant=variant,
        task=task,
        node=node,
        adapter=adapter,
        version=version,
        words=() if search is None else tuple(search.split()),
        outcome=outcome,
        thread=thread,
        user=user,
        tag=tag,
        reward=None if reward is None else listing.text_to_reward_filter(reward),
    )
    listing.list_episodes(path, chosen, limit, as_json=as_json, console=_console())


@app.command(epilog="Example: marft-bridge traces sql 'FROM episode_summary' --config examples/math_duo/bridge.toml")
def sql(
    question: Annotated[str, typer.Argument(help="One SELECT, or the name of a documented query (docs/store.md).")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: Annotated[bool, json_option("the columns", each="row")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many rows; 0 for all of them.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.1, help="Stop the query after so long.")] = 60.0,
) -> None:
    """Ask the store in SQL, read-only.

    Without other files, network or extensions.
    """
    if as_json and as_csv:
        raise ConfigError("traces sql: --json and --csv both say how to print; leave one out")
    from marft_bridge.traces.sql import show_sql

    form: Literal["table", "json", "csv"] = "json" if as_json else "csv" if as_csv else "table"
    show_sql(
        RunChoice("traces sql", run_folder, config=config, run=run, store=store).to_store(),
        question,
        form,
        limit=limit or None,
        seconds=seconds,
        console=_console(),
    )


@app.command(epilog="Example: marft-bridge traces doctor --config examples/math_duo/bridge.toml")
def doctor(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    limit: Annotated[int, typer.Option(min=0, help="Print at most so many faults of each law; 0 for all.")] = 20,
    as_json: Annotated[bool, json_option("episodes, counts, faults")] = False,
) -> None:
    """Check every law of a store.

    Says what is wrong with which episode; the exit code is 1 when something is.
    """
    from marft_bridge.traces.doctor import doctor as check

    if not check(
        RunChoice("traces doctor", run_folder, config=config, run=run, store=store).to_store(),
        limit or None,
        as_json,
        console=_console(),
    ):
        raise typer.Exit(1)


@app.command(epilog="Example: marft-bridge traces show 4be1 --config examples/math_duo/bridge.toml")
def show(
    episode: Annotated[str, typer.Argument(help="The first digits of an episode's id, as `traces list` prints it.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    text: Annotated[
        bool | None, typer.Option("--text/--no-text", help="Prompts and answers, cut short; unless told not to.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Prompts and answers, all of them.")] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Only D, as a matrix of the actions.")] = False,
    gamma: Annotated[float, typer.Option(min=0, max=1, help="Discount of the advantages.")] = 1.0,
    lam: Annotated[float, typer.Option("--lambda", min=0, max=1, help="Lambda of GAE.")] = 0.95,
    as_json: Annotated[
        bool,
        json_option(
            "episode, actions, edges, rewards, link, followers, fork_of, forks, deeper_forks, omitted_forks, "
            "advantages, spans"
        ),
    ] = False,
) -> None:
    """Draw one episode: its calls with their words, D, rewards.

    Supersteps, calls and tools, who depended on whom, rewards, advantages.
    """
    if full and text is not None:
        raise ConfigError("traces show: --full and --text or --no-text both say how much of the words; leave one out")
    if as_json and (matrix or text is not None or full):
        raise ConfigError("traces show: --json prints all there is; leave --matrix, --text and --full out")
    if matrix and (text is not None or full):
        raise ConfigError("traces show: --matrix has no room for prompts and answers; leave --text and --full out")
    from marft_bridge.traces.drawing import SHORT_TEXT
    from marft_bridge.traces.show import show as show_episode

    characters = None if full else 0 if text is False else SHORT_TEXT
    path = RunChoice("traces show", run_folder, config=config, run=run, store=store).to_store()
    show_episode(path, episode, _console(), matrix=matrix, as_json=as_json, text_limit=characters, gamma=gamma, lam=lam)


@app.command(epilog="Example: marft-bridge traces mark 4be1 --good --config examples/math_duo/bridge.toml")
def mark(
    episode: Annotated[str, typer.Argument(help="The first digits of an episode's id, as `traces list` prints it.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    good: Annotated[
        bool | None, typer.Option("--good/--bad", help="Its reward is 1, or 0.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="The team reward that the mark is stored as.")] = "marked",
    as_json: Annotated[bool, json_option("episode_id, reward, value")] = False,
) -> None:
    """Say of one episode whether it is good, as a reward.

    `offline.reward` of the trainer imitates by such marks. The newest mark of an episode counts.
    """
    if good is None:
        raise ConfigError("traces mark: say --good or --bad")
    from marft_bridge.traces.marks import mark_episode

    path = RunChoice("traces mark", run_folder, config=config, run=run, store=store).to_store()
    mark_episode(path, episode, good, name=name, as_json=as_json, console=_console())


@app.command(epilog="Example: marft-bridge traces export archive --config examples/math_duo/bridge.toml")
def export(
    target: Annotated[Path, typer.Argument(help="A folder for Parquet files, or a DuckLake catalog: NAME.ducklake.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: Annotated[bool, json_option(_ROWS_KEYS)] = False,
) -> None:
    """Add what a folder lacks of a store, as Parquet by run and day."""
    from marft_bridge.traces import exports

    exports.export(
        RunChoice("traces export", run_folder, config=config, run=run, store=store).to_store(),
        target,
        as_json,
        console=_console(),
    )


@app.command("import", epilog="Example: marft-bridge traces import archive --store other.duckdb")
def import_(
    folder: Annotated[Path, typer.Argument(help="A folder that `traces export` wrote.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: Annotated[bool, json_option(_ROWS_KEYS)] = False,
) -> None:
    """Add to a store what it lacks of an export."""
    from marft_bridge.traces import exports

    exports.import_(
        folder,
        RunChoice("traces import", run_folder, config=config, run=run, store=store).to_store(),
        as_json,
        console=_console(),
    )


@app.command("take-in", epilog="Example: marft-bridge traces take-in --store traces.duckdb")
def take_in(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: Annotated[bool, json_option(_ROWS_KEYS)] = False,
) -> None:
    """Put what was recorded into the store.

    Not needed to see it, but a long journal is read anew by each command.
    """
    from marft_bridge.traces.exports import take_in_journal

    take_in_journal(
        RunChoice("traces take-in", run_folder, config=config, run=run, store=store).to_store(),
        as_json,
        console=_console(),
    )


@app.command(epilog="Example: marft-bridge traces vacuum --config examples/math_duo/bridge.toml")
def vacuum(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    store: Store = None,
    as_json: Annotated[bool, json_option("before, after, seconds")] = False,
) -> None:
    """Rewrite a store's file without the space of deleted rows.

    Says its size before and after.
    """
    from marft_bridge.traces.vacuum import vacuum_store

    vacuum_store(
        RunChoice("traces vacuum", run_folder, config=config, run=run, store=store).to_store(), as_json, _console()
    )
