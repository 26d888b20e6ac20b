"""Episodes -> what each of them goes on with, and the number of its turn on its thread.

Invariant: a link is the checkpoint that a run loaded, never the name of its thread alone; a turn has a number only
where every run before it on its way was recorded.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trace_store.store import TraceStore
from trace_store.views import links_of

LinkKind = Literal["turn", "resume", "fork", "replay"]
_MAX_RUNS = 10_000  # of one thread, on the way to its first
_MAX_NEXT = 20

# The threads of some episodes, and these episodes themselves.
_LINKS = f"""
links AS MATERIALIZED ({
    links_of(
        "(SELECT * FROM episodes WHERE episode_id = ANY($1) OR episode_id IN"
        " (SELECT parent_episode FROM episodes WHERE episode_id = ANY($1)) OR thread_id IN"
        " (SELECT thread_id FROM episodes WHERE episode_id = ANY($1)))"
    )
})
"""


@dataclass(frozen=True, slots=True)
class EpisodeLink:
    """The place of one episode on its thread. `kind` and `linked_episode`: None where it goes on with nothing known."""

    kind: LinkKind | None = None
    linked_episode: str | None = None
    turn: int | None = None  # from 1; a resume has that of the run that it resumes


def episodes_to_links(store: TraceStore, episode_ids: Sequence[str]) -> dict[str, EpisodeLink]:
    """The links of the episodes with these ids, by id; an id that is not stored is absent."""
    rows = store.sql(
        f"""
        WITH RECURSIVE {_LINKS}, way AS (
            SELECT episode_id, episode_id AS before, 0 AS turns, 0 AS runs FROM links WHERE episode_id = ANY($1)
            UNION ALL
            SELECT w.episode_id, l.linked_episode, w.turns + (l.begins = 'turn')::INTEGER, w.runs + 1
            FROM way w JOIN links l ON l.episode_id = w.before
            WHERE l.linked_episode IS NOT NULL AND l.begins IS NOT NULL AND w.runs < {_MAX_RUNS}
        ), numbered AS (
            SELECT w.episode_id, min(w.turns + (l.begins = 'turn')::INTEGER) AS turn
            FROM way w JOIN links l ON l.episode_id = w.before WHERE l.is_first GROUP BY w.episode_id
        )
        SELECT l.episode_id, l.link, l.linked_episode, n.turn
        FROM links l LEFT JOIN numbered n USING (episode_id) WHERE l.episode_id = ANY($1)
        """,
        (list(episode_ids),),
    )
    return {
        episode_id: EpisodeLink(None if linked is None else kind, linked, turn)
        for episode_id, kind, linked, turn in rows
    }


def episode_to_next(store: TraceStore, episode_id: str) -> list[tuple[str, LinkKind]]:
    """(id, kind) of the episodes that go on with one, oldest first; the first twenty.

    Episodes that fork it at a call (`fork_action`) are none of them, unless they run on its thread.
    """
    rows = store.sql(
        f"WITH {_LINKS} SELECT l.episode_id, l.link FROM links l JOIN episodes e USING (episode_id)"
        f" WHERE l.linked_episode = $2 ORDER BY e.started_ns, l.episode_id LIMIT {_MAX_NEXT}",
        ([episode_id], episode_id),
    )
    replays = store.sql(
        "SELECT episode_id, 'replay' FROM episodes WHERE parent_episode = ? AND thread_id IS NULL"
        " AND fork_action IS NULL"
        f" ORDER BY started_ns LIMIT {_MAX_NEXT}",
        (episode_id,),
    )
    return [(str(other_id), kind) for other_id, kind in (*rows, *replays)]
