"""`train.traces`: folders of Parquet files and DuckLake catalogs -> episodes to learn from, besides the run's own.

Invariants: nothing is imported or written; an episode that lies in several places is learned from once; what was held
out there is not read; token ids of another base model are refused, since they would mean other words. What is held out
here (`heldout`) and how episodes are learned from is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.errors import ConfigError
from marft_bridge.model_options import config_to_paths
from marft_bridge.progress import Reporter
from trace_store.readers import path_to_reader
from trace_store.records import SpanRow, Trajectory

LEARNED_SPLITS = ("train", "live")

Read = Callable[[Trajectory, Callable[[str], Sequence[SpanRow]]], Trajectory]
"""A stored episode, and the way to the spans of a trace -> the episode to learn from."""


def traces_to_episodes(
    places: Sequence[str],
    known: Collection[str],
    models: Mapping[str, str],
    reporter: Reporter,
    read: Read = lambda trajectory, _: trajectory,
) -> list[Trajectory]:
    """The episodes in these places, place by place, each place by (start, id).

    Args:
        places: as `train.traces` names them.
        known: ids of the episodes that are there already.
        models: of the configuration, see `config_to_names`; the runs in a place have to have used the same.
        read: what becomes of each of them while its place is open.

    Raises:
        ConfigError: a place holds runs of another model, or nothing to learn from.
        StoreError: a place cannot be read.
    """
    seen = set(known)
    found: list[Trajectory] = []
    for place in places:
        with path_to_reader(Path(place)) as reader:
            for run in reader.runs():
                if (other := _other(config_to_names(run.config), models)) is not None:
                    raise ConfigError(
                        f"train.traces: {place} holds runs of the {other}; its token ids mean other words"
                    )
            before = len(found)
            for split in LEARNED_SPLITS:
                for trajectory in reader.trajectories(split=split):
                    episode = trajectory.episode
                    if episode.episode_id not in seen:
                        seen.add(episode.episode_id)
                        found.append(read(trajectory, reader.spans))
            if reader.sql("SELECT count(*) FROM episodes WHERE split = ANY(?)", (list(LEARNED_SPLITS),)) == [(0,)]:
                raise ConfigError(f"train.traces: {place} holds no episode of the split train or live")
        reporter.say(f"{len(found) - before} episodes from {place}")
    return found


def config_to_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The names of the models that a run was configured with; see `config_to_paths`."""
    return {node: Path(path).name for node, path in config_to_paths(config).items()}


def _other(found: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """The first model that is another one than ours, and whose; None where all are the same or nothing is said."""
    if not found:
        return None
    for node in sorted({*found, *ours}):
        here, there = ours.get(node, ours[""]), found.get(node, found[""])
        if here != there:
            return f"model {there}{f' for node {node!r}' if node else ''}, not {here}"
    return None
