"""The first digits of an episode's id -> the episode of a store.

Invariant: digits that fit several episodes are refused, never resolved.
"""

from __future__ import annotations

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.terminal_text import text_to_line
from trace_store.store import TraceStore

_MAX_CANDIDATES = 5  # in an error


def prefix_to_episode(store: TraceStore, prefix: str, *, command: str = "traces show") -> str:
    """The one episode whose id is, or begins with, `prefix`. Raises ConfigError when there is none or several, in the
    name of the command."""
    rows = store.sql(
        "SELECT episode_id FROM episodes WHERE starts_with(episode_id, ?) ORDER BY episode_id <> ?, episode_id LIMIT ?",
        (prefix, prefix, _MAX_CANDIDATES + 1),
    )
    episode_ids = [row[0] for row in rows]
    if len(episode_ids) == 1 or prefix in episode_ids:
        return str(episode_ids[0])
    printed_prefix = text_to_line(prefix, 40)
    if episode_ids:
        candidates = ", ".join(episode_ids[:_MAX_CANDIDATES]) + (", ..." if len(episode_ids) > _MAX_CANDIDATES else "")
        raise ConfigError(f"{command}: several episodes begin with '{printed_prefix}': {candidates}; give more digits")
    trace_rows = store.sql(
        "SELECT s.trace_id, f.reason FROM spans s LEFT JOIN refusals f USING (trace_id)"
        " WHERE starts_with(s.trace_id, ?) LIMIT 1",
        (prefix,),
    )
    if trace_rows:
        reason = "its spans have not all arrived" if trace_rows[0][1] is None else text_to_line(trace_rows[0][1])
        raise ConfigError(f"{command}: trace {trace_rows[0][0]} is no episode: {reason}")
    raise ConfigError(f"{command}: no episode begins with '{printed_prefix}'; `traces list` names them")
