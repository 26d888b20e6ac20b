"""`train.traces`: folders of Parquet files and DuckLake catalogs -> episodes to learn from, besides the run's own.

Invariants: nothing is imported or written; an episode that several of them hold is learned from once; episodes that
were held out there are not read; token ids of another base model are refused, since they would mean other words. The
caller drops the tasks that are held out here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import text_to_hub_name
from marft_bridge.common.progress import Reporter
from marft_bridge.config.models import config_to_paths
from trace_store.readers import path_to_reader
from trace_store.records import SpanRow, Trajectory

LEARNED_SPLITS = ("train", "live")
_LEARNABLE = "SELECT count(*) FROM episodes WHERE split = ANY(?) AND fork_action IS NULL"

EpisodeReader = Callable[[Trajectory, Callable[[str], Sequence[SpanRow]]], Trajectory]
"""A stored episode, and a function from a trace's id to its spans -> the episode to learn from."""


def traces_to_episodes(
    paths: Sequence[str],
    known_ids: Collection[str],
    models: Mapping[str, str],
    reporter: Reporter,
    read_episode: EpisodeReader = lambda trajectory, _: trajectory,
) -> list[Trajectory]:
    """The episodes under these paths, path by path, each path's by (start, id).

    Args:
        paths: as `train.traces` names them.
        known_ids: ids of the episodes that are read already.
        models: of the configuration, see `config_to_names`; the recorded runs must have used the same.
        read_episode: converts each episode while its store is open.

    Raises:
        ConfigError: a path holds runs of another model, or nothing to learn from.
        StoreError: a path cannot be read.
    """
    episode_ids = set(known_ids)
    episodes: list[Trajectory] = []
    for path in paths:
        with path_to_reader(Path(path)) as reader:
            for run in reader.runs():
                if (model := _different_model(config_to_names(run.config), models)) is not None:
                    raise ConfigError(f"train.traces: {path} holds runs of the {model}; its token ids mean other words")
            count_before = len(episodes)
            for split in LEARNED_SPLITS:
                for trajectory in reader.trajectories(split=split):
                    episode = trajectory.episode
                    if episode.episode_id not in episode_ids:
                        episode_ids.add(episode.episode_id)
                        episodes.append(read_episode(trajectory, reader.spans))
            if reader.sql(_LEARNABLE, (list(LEARNED_SPLITS),)) == [(0,)]:
                raise ConfigError(f"train.traces: {path} holds no episode of the split train or live")
        reporter.say(f"{len(episodes) - count_before} episodes from {path}")
    return episodes


def config_to_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Node -> the folder name of its model, "" for the default one, as a run was configured; see `config_to_paths`.

    Of a name of the Hub it is the part behind the owner: its tokens are looked at by `offline.lineage`.
    """
    return {node: _name_of_model(path) for node, path in config_to_paths(config).items()}


def _name_of_model(path: str) -> str:
    name = text_to_hub_name(path)
    return Path(path if name is None else name.repository).name


def _different_model(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """A phrase on the first model that differs from ours; None where all are the same or `theirs` is empty."""
    if not theirs:
        return None
    for node in sorted({*theirs, *ours}):
        our_model, their_model = ours.get(node, ours[""]), theirs.get(node, theirs[""])
        if our_model != their_model:
            return f"model {their_model}{f' for node {node!r}' if node else ''}, not {our_model}"
    return None
