"""`train.traces`: folders of Parquet files and DuckLake catalogs -> episodes to learn from, besides the run's own.

Invariants: nothing is imported or written; an episode that lies in several places is learned from once; what was held
out there is not read; token ids of another base model are refused, since they would mean other words. What is held out
here (`heldout`) and how episodes are learned from is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.errors import ConfigError
from marft_bridge.progress import Reporter
from trace_store.readers import path_to_reader
from trace_store.records import SpanRow, Trajectory

LEARNED_SPLITS = ("train", "live")

Read = Callable[[Trajectory, Callable[[str], Sequence[SpanRow]]], Trajectory]
"""A stored episode, and the way to the spans of a trace -> the episode to learn from."""


def traces_to_episodes(
    places: Sequence[str],
    known: Collection[str],
    model: str,
    reporter: Reporter,
    read: Read = lambda trajectory, _: trajectory,
) -> list[Trajectory]:
    """The episodes in these places, place by place, each place by (start, id).

    Args:
        places: as `train.traces` names them.
        known: ids of the episodes that are there already.
        model: of the configuration; the runs in a place have to have used the same.
        read: what becomes of each of them while its place is open.

    Raises:
        ConfigError: a place holds runs of another model, or nothing to learn from.
        StoreError: a place cannot be read.
    """
    seen = set(known)
    found: list[Trajectory] = []
    for place in places:
        with path_to_reader(Path(place)) as reader:
            other = next((m for run in reader.runs() if (m := _model_of(run.config)) not in (None, model)), None)
            if other is not None:
                raise ConfigError(
                    f"train.traces: {place} holds runs of the model {other}, not {model};"
                    " its token ids mean other words"
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


def _model_of(config: dict[str, Any]) -> str | None:
    """The name of the model that a run was configured with; None where it does not say, as for an app's own runs."""
    path = config.get("model", {}).get("path") if isinstance(config.get("model"), dict) else None
    return Path(path).name if isinstance(path, str) else None
