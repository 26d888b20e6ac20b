"""A round to who is a sibling of whom: calls that answer one and the same prompt in one and the same situation.

Two kinds: a call that was forked and those that were made anew in its place; and the first calls of the samples of a
task. Invariant: a call that has no sibling is in a group of its own. A detached fork's siblings are the others of its
fork point, not the call that it left: how that went on decided that it was left (`trainers.forest`).

Shape: _A one entry per action of the round.
"""

# ruff: noqa: N802 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable

from trainers.batch import Round


def siblings_A(data: Round) -> list[Hashable]:
    """The group of each action: equal keys are siblings."""
    keys: list[Hashable] = []
    row = 0
    for episode in data.episodes:
        later = {i for dependents in episode.successors for i in dependents}
        for i, item in enumerate(episode.actions):
            key: Hashable = ("alone", row)
            if episode.fork is None and i not in later and item.turn == 0:
                key = ("first", episode.task_id, item.agent, item.prompt_ids)
            elif episode.fork is not None and episode.fork.remakes and i == 0:
                key = ("fork", episode.fork.point)
            keys.append(key)
            row += 1
    if data.forest is None:
        return keys
    # a call that was forked joins those that were made in its place; or they join its group, if it has one already
    joined: dict[Hashable, Hashable] = {}
    row = 0
    for e, episode in enumerate(data.episodes):
        for action_id in episode.action_ids:
            point = (episode.episode_id, action_id)
            if any(point == passed and branch == e for passed, branch in data.forest.path_A[row]):
                if isinstance(keys[row], tuple) and keys[row][0] == "alone":  # type: ignore[index]
                    keys[row] = ("fork", point)
                else:
                    joined["fork", point] = keys[row]
            row += 1

    def resolve(key: Hashable) -> Hashable:
        while key in joined and joined[key] != key:
            key = joined[key]
        return key

    return [resolve(key) for key in keys]
