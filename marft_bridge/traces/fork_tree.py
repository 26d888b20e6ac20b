"""An episode of a store -> the forks of its forks, to the leaves with their rewards, and what it was forked from.

Invariants: one query walks all levels, whichever way, and nothing recurses, so that neither a deep chain nor records
that name each other as parents break it; of several attempts at a sample the one that counts is followed, and what is
left out of its forks is counted. Texts are returned as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.traces.forks import ForkOrigin, ids_to_rewards, sample_attempts
from trace_store.records import Episode
from trace_store.store import TraceStore

MAX_DEEPER_FORKS = 200  # drawn below the forks of one episode
MAX_NESTED_LEVELS = 16  # a fork further down is drawn no deeper, and its level is written
MAX_ANCESTORS = 16

_BELOW = """
WITH RECURSIVE below AS (
    SELECT episode_id FROM episodes WHERE parent_episode IN (SELECT unnest(?::VARCHAR[])) AND fork_action IS NOT NULL
    UNION
    SELECT e.episode_id FROM below b JOIN episodes e ON e.parent_episode = b.episode_id WHERE e.fork_action IS NOT NULL
)
SELECT e.fork_action, e.run_id, e.variant, e."round", e.episode_id, e.sample, e.outcome, e.reason, e.parent_episode
FROM below b JOIN episodes e USING (episode_id) ORDER BY e.started_ns, e.episode_id
"""
_ABOVE = """
WITH RECURSIVE above AS (
    SELECT episode_id, parent_episode, fork_action FROM episodes WHERE episode_id = ? AND fork_action IS NOT NULL
    UNION
    SELECT e.episode_id, e.parent_episode, e.fork_action FROM above a JOIN episodes e ON e.episode_id = a.parent_episode
    WHERE e.fork_action IS NOT NULL
)
SELECT episode_id, parent_episode, fork_action FROM above WHERE parent_episode IS NOT NULL
"""
_CALLS = """
SELECT episode_id, action_id, node, "index", number FROM (
    SELECT episode_id, action_id, node, "index",
           row_number() OVER (PARTITION BY episode_id, node ORDER BY "index") AS number
    FROM actions WHERE episode_id IN (SELECT unnest($1::VARCHAR[]))
) WHERE action_id IN (SELECT unnest($2::VARCHAR[]))
"""


@dataclass(frozen=True, slots=True)
class DeeperFork:
    """A fork of a fork, and where it left that one. Node, call and index are None where that is no longer stored."""

    episode_id: str
    parent_id: str
    level: int  # 2: a fork of a fork of the episode
    node: str | None
    call: int | None  # among those of its node, from 1
    index: int | None  # among all calls of the parent, from 0
    run_id: str
    round: int | None
    variant: str | None
    sample: int
    outcome: str
    reason: str | None
    rewards: dict[str, float]

    @property
    def depth(self) -> int:
        """The level at which it is drawn."""
        return min(self.level, MAX_NESTED_LEVELS)


@dataclass(frozen=True, slots=True)
class DeeperForks:
    """Fork of an episode -> those below it, each before its own, in the order of the calls that they leave."""

    by_branch: dict[str, list[DeeperFork]]  # a fork without forks is absent
    omitted: int  # forks of forks that are in none of the lists


@dataclass(frozen=True, slots=True)
class ForkAncestors:
    """What a fork was forked from, the whole run first, each with the call at which it was left."""

    origins: list[ForkOrigin]
    omitted: int  # between the first and the second


def branches_to_deeper_forks(store: TraceStore, branch_ids: Sequence[str], root_id: str) -> DeeperForks:
    """What leaves the forks of an episode, and what leaves that, the upper levels first, up to MAX_DEEPER_FORKS.

    Args:
        root_id: the episode itself, which is not drawn again where records make it a fork of its own forks.
    """
    rows = store.sql(_BELOW, (list(branch_ids),)) if branch_ids else []
    if not rows:
        return DeeperForks({}, omitted=0)
    rewards = ids_to_rewards(store, [row[4] for row in rows])
    rows_by_parent: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        rows_by_parent.setdefault(row[8], []).append(row)
    drawn: list[tuple[int, tuple[Any, ...]]] = []
    met_ids, level, parents, count = {root_id, *branch_ids}, 1, list(branch_ids), 0
    while parents:
        level += 1
        children = []
        for parent in parents:
            for samples in sample_attempts(rows_by_parent.get(parent, []), rewards).values():
                children += [row for _, row in sorted(samples.items()) if row[4] not in met_ids]
        met_ids.update(row[4] for row in children)
        drawn += [(level, row) for row in children[: MAX_DEEPER_FORKS - len(drawn)]]
        count += len(children)
        parents = [row[4] for row in children]
    calls = _actions_to_calls(store, [(row[8], row[0]) for _, row in drawn])
    children_by_parent: dict[str, list[DeeperFork]] = {}
    for depth, (action_id, run_id, variant, round_number, fork_id, sample, outcome, reason, parent) in drawn:
        node, index, number = calls.get((parent, action_id), (None, None, None))
        children_by_parent.setdefault(parent, []).append(
            DeeperFork(
                fork_id,
                parent,
                depth,
                node=node,
                call=number,
                index=index,
                run_id=run_id,
                round=round_number,
                variant=variant,
                sample=sample,
                outcome=outcome,
                reason=reason,
                rewards=rewards.get(fork_id, {}),
            )
        )
    by_branch = {key: list(_in_order(children_by_parent, key)) for key in branch_ids if key in children_by_parent}
    return DeeperForks(by_branch, omitted=count - len(drawn))


def episode_to_ancestors(store: TraceStore, episode: Episode) -> ForkAncestors:
    """The way from the whole run to an episode; empty for one that is no fork."""
    if episode.fork_action is None:
        return ForkAncestors([], omitted=0)
    left = {key: (parent, action) for key, parent, action in store.sql(_ABOVE, (episode.episode_id,))}
    way: dict[str, str] = {}  # parent -> the action at which it was left
    key = episode.episode_id
    while key in left and left[key][0] not in way:
        key, action = left[key]
        way[key] = action
    pairs = list(way.items())[::-1]
    omitted = max(0, len(pairs) - MAX_ANCESTORS)
    if omitted:
        pairs = [pairs[0], *pairs[omitted + 1 :]]
    calls = _actions_to_calls(store, pairs)
    origins = []
    for parent, action in pairs:
        node, _, number = calls.get((parent, action), (None, None, None))
        origins.append(ForkOrigin(parent, action, node=node, call=number))
    return ForkAncestors(origins, omitted=omitted)


def _in_order(children_by_parent: dict[str, list[DeeperFork]], branch_id: str) -> Iterator[DeeperFork]:
    waiting = _last_call_first(children_by_parent[branch_id])
    while waiting:
        fork = waiting.pop()
        yield fork
        waiting += _last_call_first(children_by_parent.get(fork.episode_id, []))


def _last_call_first(forks: Iterable[DeeperFork]) -> list[DeeperFork]:
    by_call = sorted(forks, key=lambda fork: (fork.index is None, fork.index or 0))  # stable: else as they are
    return by_call[::-1]


def _actions_to_calls(
    store: TraceStore, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Episode and action -> the action's node, its index, and its number among those of its node, from 1."""
    if not pairs:
        return {}
    rows = store.sql(_CALLS, (sorted({key for key, _ in pairs}), sorted({action for _, action in pairs})))
    return {(key, action): (node, index, number) for key, action, node, index, number in rows}
