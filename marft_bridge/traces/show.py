"""`marft-bridge traces show`: the first digits of an episode's id -> a drawing, its matrix D, or all of it as JSON.

Invariant: digits that fit several episodes are refused, never resolved. How it looks is in `drawing`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.traces.advantages import episode_to_group, trajectory_to_advantages
from marft_bridge.traces.drawing import KIND_LETTERS, Shown, dependencies_to_rows, episode_to_tree
from marft_bridge.traces.opening import store_to_read
from marft_bridge.traces.plain import print_line, print_table, text_to_line, value_to_json
from trace_store.store import TraceStore

_UNBOUNDED = 1_000_000  # characters in a line
_NAMED = 5  # candidates in an error


def prefix_to_episode(store: TraceStore, prefix: str) -> str:
    """The one episode whose id is, or begins with, `prefix`. Raises ConfigError when there is none or several."""
    rows = store.sql(
        "SELECT episode_id FROM episodes WHERE starts_with(episode_id, ?) ORDER BY episode_id <> ?, episode_id LIMIT ?",
        (prefix, prefix, _NAMED + 1),
    )
    found = [row[0] for row in rows]
    if len(found) == 1 or prefix in found:
        return str(found[0])
    shown = text_to_line(prefix, 40)
    if found:
        some = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
        raise ConfigError(f"traces show: several episodes begin with '{shown}': {some}; give more digits")
    others = store.sql(
        "SELECT s.trace_id, f.reason FROM spans s LEFT JOIN refusals f USING (trace_id)"
        " WHERE starts_with(s.trace_id, ?) LIMIT 1",
        (prefix,),
    )
    if others:
        why = "its spans have not all arrived" if others[0][1] is None else text_to_line(others[0][1])
        raise ConfigError(f"traces show: trace {others[0][0]} is no episode: {why}")
    raise ConfigError(f"traces show: no episode begins with '{shown}'; `traces list` names them")


def show(
    path: Path,
    prefix: str,
    console: Console,
    *,
    matrix: bool,
    as_json: bool,
    text: int | None,
    gamma: float,
    lam: float,
) -> None:
    """Prints one episode of the store at `path`.

    Args:
        prefix: the first digits of its id.
        matrix: D as a table, instead of the tree.
        text: characters of each prompt message and answer; 0 for none, None for all.
        gamma, lam: for the advantages, see `trajectory_to_advantages`.
    """
    with store_to_read(path) as store:
        episode_id = prefix_to_episode(store, prefix)
        trajectory = store.trajectory(episode_id)
        assert trajectory is not None  # found a moment ago, and a reader keeps writers out
        spans = store.spans(episode_id)
        group = episode_to_group(store, trajectory.episode)
    advantages = trajectory_to_advantages(trajectory, group, gamma, lam)
    if as_json:
        parts = {**asdict(trajectory), "advantages": [asdict(estimate) for estimate in advantages]}
        print_line(console, value_to_json({**parts, "spans": [asdict(span) for span in spans]}))
    elif matrix:
        columns, rows = dependencies_to_rows(trajectory)
        print_table(console, columns, rows)
        letters = ", ".join(f"{letter} {kind}" for kind, letter in KIND_LETTERS.items())
        print_line(console, f"an action depends on those whose column is marked: {letters}; ? is an upper bound")
    else:
        tree = episode_to_tree(Shown(trajectory, spans, advantages, text))
        if not console.is_terminal:
            console = Console(file=console.file, highlight=False, width=_UNBOUNDED)  # no line is cut or wrapped
        console.print(tree)
