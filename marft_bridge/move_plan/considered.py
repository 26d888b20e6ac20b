"""A store -> the calls that a plan looks at, as SQL that other modules of this folder begin with.

Invariant: sides of a comparison, forks and held-out episodes are left out, and counted; a call is hosted where no
adapter of ours answered it.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

from trace_store.store import TraceStore

EPISODES = "(FROM episodes WHERE split IN ('train', 'live') AND fork_action IS NULL AND variant IS NULL)"
"""The episodes of an app as it runs."""
CALLS = f"""
(SELECT a.* FROM actions a SEMI JOIN {EPISODES} e USING (episode_id) WHERE a.node <> '' AND a.replayed_from IS NULL)
"""
"""Their calls, of named agents."""
HOSTED = f"(FROM {CALLS} WHERE adapter IS NULL)"
"""Those that a hosted model answered, as far as the record tells."""

_LEFT_OUT = f"""
SELECT CASE WHEN fork_action IS NOT NULL THEN 'forks' WHEN variant IS NOT NULL THEN 'sides of a comparison'
            ELSE 'of the split ' || split END AS kind, count(*)
FROM episodes ANTI JOIN {EPISODES} e USING (episode_id) GROUP BY ALL ORDER BY ALL
"""


def count_episodes(store: TraceStore) -> tuple[int, dict[str, int]]:
    """The episodes that a plan looks at, and those that it leaves out, by kind."""
    ((count,),) = store.sql(f"SELECT count(*) FROM {EPISODES}")
    return int(count), {str(kind): int(left_out) for kind, left_out in store.sql(_LEFT_OUT)}
