"""Rows of a store -> trajectories: a whole store in order and in bounded memory, or one episode at once.

Keys are read a stretch ahead, with the memory that each episode will need and with the rewards (whose table is not in
the order of episodes, so that it is scanned once a stretch); episodes, actions and edges follow a page at a time.
Invariants: trajectories come in the order (start, episode id); each page is one snapshot of the store; nothing is held
open between pages, so a slow reader blocks nobody and one that stops early leaves nothing behind. What is written
meanwhile may be seen or not, but every episode is seen at most once, and all that were there at the start are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import duckdb

from trace_store import schema
from trace_store.by_episode import RowsByEpisode
from trace_store.errors import StoreError
from trace_store.records import Action, Edge, Episode, Reward, Trajectory

Snapshot = Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]]
"""Opens a connection on one unchanging state of the store."""

EPISODES_PER_STRETCH = 16_384
PAGE = (8192, 24 << 20)  # at most so many episodes, and bytes of columns
# Fewer objects, as a rule, than Python makes before it looks for garbage: most of them are dropped unlooked at.
PIECE = (24, 1 << 20)

_FIRST_KEY = (-(2**63), "")  # stands before every key

# `started_ns >= ?` repeats what follows it, as a condition by which row groups are skipped.
_KEYS = """
SELECT started_ns, episode_id, strlen(task::VARCHAR) FROM episodes
WHERE {condition} AND started_ns >= ? AND (started_ns, episode_id) > (?, ?)
ORDER BY started_ns, episode_id LIMIT ?
"""
# Bytes of an action: its other columns, 4 for each prompt id, 12 for each sampled id with its log-prob, its text.
_SIZES = """
SELECT episode_id, sum(
    192 + 4 * coalesce(len(prompt_ids), 0) + 12 * coalesce(len(sampled_ids), 0) + coalesce(strlen(completion), 0)
)::BIGINT
FROM actions WHERE {condition} GROUP BY episode_id
"""
_REWARD_ORDER = "ORDER BY created_ns, name, scope, action_id, node, source"


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes to read; a field that is None does not restrict them."""

    run_ids: Sequence[str] | None = None
    split: str | None = None
    round: int | None = None
    variant: str | None = None
    episode_ids: Sequence[str] | None = None
    forks: bool = False  # whether forks of other episodes are among them

    def condition(self) -> tuple[str, tuple[Any, ...]]:
        """A condition on `episodes` and the values to bind."""
        conditions = {
            "run_id = ANY(?)": None if self.run_ids is None else list(self.run_ids),
            "split = ?": self.split,
            '"round" = ?': self.round,
            "variant = ?": self.variant,
            "episode_id IN (SELECT unnest(?::VARCHAR[]))": None if self.episode_ids is None else list(self.episode_ids),
        }
        active_conditions = {condition: value for condition, value in conditions.items() if value is not None}
        whole_episodes = [] if self.forks else ["fork_action IS NULL"]
        return " AND ".join(["true", *whole_episodes, *active_conditions]), tuple(active_conditions.values())


class _Key(NamedTuple):
    started_ns: int
    episode_id: str
    size: int  # bytes of columns, about


def stream_trajectories(
    snapshot: Snapshot, episode_filter: EpisodeFilter, limit: int | None = None
) -> Iterator[Trajectory]:
    """The trajectories of the episodes that match, by (start, id), at most `limit` of them.

    Raises StoreError at an edge whose actions are not there.
    """
    condition, values = episode_filter.condition()
    last_key: tuple[int, str] = _FIRST_KEY
    remaining = limit
    while remaining is None or remaining > 0:
        size = EPISODES_PER_STRETCH if remaining is None else min(remaining, EPISODES_PER_STRETCH)
        with snapshot() as con:
            key_rows = con.execute(
                _KEYS.format(condition=condition), [*values, last_key[0], *last_key, size]
            ).fetchall()
            if not key_rows:
                return
            keys = _with_sizes(con, key_rows)
            rewards = _rewards_of(con, keys)
        for page in _split(keys, *PAGE):
            with snapshot() as con:
                rows = _keys_to_page(con, page, rewards)
            for piece in _split(page, *PIECE):
                yield from rows.trajectories(piece)
        if len(keys) < size:
            return
        last_key = (keys[-1].started_ns, keys[-1].episode_id)
        remaining = None if remaining is None else remaining - size


def find_trajectory(con: duckdb.DuckDBPyConnection, episode_id: str) -> Trajectory | None:
    """The trajectory of one episode; None when there is no such episode."""
    # By the primary key; its start leads to the few row groups that hold the rest.
    episodes = RowsByEpisode(
        con, Episode, schema.EPISODES, condition="WHERE episode_id = ?", values=[episode_id], episode_ids=[episode_id]
    )
    (matches,) = episodes.read_records([episode_id])
    if not matches:
        return None
    keys = [_Key(matches[0].started_ns, episode_id, 0)]
    (trajectory,) = _keys_to_page(con, keys, _rewards_of(con, keys), episodes=episodes).trajectories(keys)
    return trajectory


def find_action(con: duckdb.DuckDBPyConnection, episode_id: str, action_id: str) -> Action | None:
    """One action of one episode; None when there is no such action."""
    condition = (
        "WHERE episode_started_ns = (SELECT started_ns FROM episodes WHERE episode_id = $1)"
        " AND episode_id = $1 AND action_id = $2"
    )
    rows = RowsByEpisode(
        con, Action, schema.ACTIONS, condition=condition, values=[episode_id, action_id], episode_ids=[episode_id]
    )
    (matches,) = rows.read_records([episode_id])
    return matches[0] if matches else None


def _with_sizes(con: duckdb.DuckDBPyConnection, keys: Sequence[tuple[int, str, int]]) -> list[_Key]:
    condition, values = _near_condition(con, keys[0][0], keys[-1][0], ids=[episode_id for _, episode_id, _ in keys])
    sizes = dict(con.execute(_SIZES.format(condition=condition.format("episode_started_ns")), values).fetchall())
    return [_Key(started_ns, episode_id, task + sizes.get(episode_id, 0)) for started_ns, episode_id, task in keys]


def _rewards_of(con: duckdb.DuckDBPyConnection, keys: Sequence[_Key]) -> RowsByEpisode[Reward]:
    ids = [key.episode_id for key in keys]
    condition, values = ("= ?", ids) if len(ids) == 1 else ("= ANY(?)", [ids])
    return RowsByEpisode(
        con,
        Reward,
        schema.REWARDS,
        condition=f"WHERE episode_id {condition} {_REWARD_ORDER}",
        values=values,
        episode_ids=ids,
    )


def _near_condition(con: duckdb.DuckDBPyConnection, first: int, last: int, ids: Sequence[str]) -> tuple[str, list[Any]]:
    """A condition on these episodes, with `{}` for the column of their start, by which DuckDB skips row groups."""
    if len(ids) == 1:
        return "{} = ? AND episode_id = ?", [first, ids[0]]
    # Nothing else started in between, as a rule: then there are no ids to compare, which takes as long as the rest.
    count_rows = con.execute("SELECT count(*) FROM episodes WHERE started_ns BETWEEN ? AND ?", [first, last]).fetchall()
    if count_rows == [(len(ids),)]:
        return "{} BETWEEN ? AND ?", [first, last]
    return "{} BETWEEN ? AND ? AND episode_id = ANY(?)", [first, last, list(ids)]


def _split(keys: Sequence[_Key], number: int, size: int) -> Iterator[list[_Key]]:
    """Keys in order -> groups within a number and a size; one that is too large has a group of its own."""
    group: list[_Key] = []
    total = 0
    for key in keys:
        if group and (len(group) == number or total + key.size > size):
            yield group
            group, total = [], 0
        group.append(key)
        total += key.size
    if group:
        yield group


def _keys_to_page(
    con: duckdb.DuckDBPyConnection,
    keys: Sequence[_Key],
    rewards: RowsByEpisode[Reward],
    episodes: RowsByEpisode[Episode] | None = None,
) -> _Page:
    """Keys in order -> their rows in all tables; rewards, and episodes where given, are read already."""
    ids = [key.episode_id for key in keys]
    condition, values = _near_condition(con, keys[0].started_ns, keys[-1].started_ns, ids=ids)
    episode_condition, row_condition = condition.format("started_ns"), condition.format("episode_started_ns")
    return _Page(
        episodes
        or RowsByEpisode(
            con, Episode, schema.EPISODES, condition=f"WHERE {episode_condition}", values=values, episode_ids=ids
        ),
        RowsByEpisode(con, Action, schema.ACTIONS, condition=f"WHERE {row_condition}", values=values, episode_ids=ids),
        RowsByEpisode(con, Edge, schema.EDGES, condition=f"WHERE {row_condition}", values=values, episode_ids=ids),
        rewards=rewards,
    )


@dataclass(frozen=True, slots=True)
class _Page:
    """The rows of consecutive episodes in all tables."""

    episodes: RowsByEpisode[Episode]
    actions: RowsByEpisode[Action]
    edges: RowsByEpisode[Edge]
    rewards: RowsByEpisode[Reward]

    def trajectories(self, keys: Sequence[_Key]) -> Iterator[Trajectory]:
        """Those of some episodes of the page, in the order of `keys`; an episode that was erased has none."""
        ids = [key.episode_id for key in keys]
        tables = (
            self.episodes.read_records(ids),
            self.actions.read_records(ids),
            self.edges.read_records(ids),
            self.rewards.read_records(ids),
        )
        for episode, actions, edges, rewards in zip(*tables, strict=True):
            if episode:
                yield _trajectory(episode[0], actions, edges, rewards=rewards)


def _trajectory(episode: Episode, actions: list[Action], edges: list[Edge], rewards: list[Reward]) -> Trajectory:
    actions.sort(key=attrgetter("index"))
    position = {action.action_id: action.index for action in actions}
    try:
        # Edges of one pair stay in the order in which they were written.
        edges.sort(key=lambda edge: (position[edge.dst], position[edge.src]))
    except KeyError as missing:
        raise StoreError(
            f"episode {episode.episode_id}: an edge names the action {missing}, which the store does not have;"
            " erase this episode or restore the file"
        ) from None
    return Trajectory(episode, tuple(actions), tuple(edges), rewards=tuple(rewards))
