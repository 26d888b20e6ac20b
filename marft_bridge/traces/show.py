"""`marft-bridge traces show`: the first digits of an episode's id -> a drawing, its matrix D, or all of it as JSON.

The drawing is made in `drawing`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from marft_bridge.common.terminal_text import print_line, print_table, print_uncut, value_to_json
from marft_bridge.traces.advantages import episode_to_group, trajectory_to_advantages
from marft_bridge.traces.drawing import KIND_LETTERS, EpisodeParts, dependencies_to_rows, episode_to_tree
from marft_bridge.traces.episode_prefix import prefix_to_episode
from marft_bridge.traces.fork_tree import branches_to_deeper_forks, episode_to_ancestors
from marft_bridge.traces.forks import episode_to_forks, episode_to_origin
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.threads import episode_to_next, episodes_to_links


def show(
    path: Path,
    prefix: str,
    console: Console,
    *,
    matrix: bool,
    as_json: bool,
    text_limit: int | None,
    gamma: float,
    lam: float,
) -> None:
    """Prints one episode of the store at `path`.

    Args:
        prefix: the first digits of its id.
        matrix: D as a table, instead of the tree.
        text_limit: characters of each prompt message and answer; 0 for none, None for all.
        gamma, lam: for the advantages, see `trajectory_to_advantages`.
    """
    with open_for_reading(path) as store:
        episode_id = prefix_to_episode(store, prefix)
        trajectory = store.trajectory(episode_id)
        assert trajectory is not None  # found a moment ago, and a reader keeps writers out
        spans = store.spans(episode_id)
        group = episode_to_group(store, trajectory.episode)
        link, followers = episodes_to_links(store, [episode_id])[episode_id], episode_to_next(store, episode_id)
        origin = episode_to_origin(store, trajectory.episode)
        ancestors = episode_to_ancestors(store, trajectory.episode)
        forks = episode_to_forks(store, trajectory.episode)
        branch_ids = [branch.episode_id for point in forks for branch in point.branches]
        deeper = branches_to_deeper_forks(store, branch_ids, episode_id)
    advantages = trajectory_to_advantages(trajectory, group, gamma, lam=lam)
    if as_json:
        links = {"link": asdict(link), "followers": [{"episode_id": key, "kind": kind} for key, kind in followers]}
        fork_parts = {
            "fork_of": None if origin is None else asdict(origin),
            "forks": [asdict(point) for point in forks],
            "deeper_forks": [asdict(fork) for below in deeper.by_branch.values() for fork in below],
            "omitted_forks": deeper.omitted,
        }
        parts = {**asdict(trajectory), **links, **fork_parts, "advantages": [asdict(each) for each in advantages]}
        print_line(console, value_to_json({**parts, "spans": [asdict(span) for span in spans]}))
    elif matrix:
        columns, rows = dependencies_to_rows(trajectory)
        print_table(console, columns, rows)
        letters = ", ".join(f"{letter} {kind}" for kind, letter in KIND_LETTERS.items())
        print_line(console, f"an action depends on those whose column is marked: {letters}; ? is an upper bound")
    else:
        tree = episode_to_tree(
            EpisodeParts(
                trajectory,
                spans,
                advantages,
                text_limit=text_limit,
                link=link,
                followers=followers,
                origin=origin,
                ancestors=ancestors,
                forks=forks,
                deeper=deeper,
            )
        )
        print_uncut(console, tree)
