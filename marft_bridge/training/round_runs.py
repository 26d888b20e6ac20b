"""The episodes of one round, while it is played -> what forks are planned by, without their tokens.

A round is looked at before each wave, and only what came since the last look is read. Invariant: what is given is what
the store has now: an episode that is erased since is none of them, and one whose rewards are others is read again.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from marft_bridge.training.planned_forks import sampled_count
from trace_store.records import Action, Trajectory
from trace_store.store import TraceStore

# Rewards are added and erased, and never changed: their number says whether they are the same.
_REWARD_COUNTS = """
SELECT e.episode_id, count(r.episode_id) FROM episodes e LEFT JOIN rewards r ON r.episode_id = e.episode_id
WHERE e.run_id = ? AND e.round = ? GROUP BY e.episode_id
"""


class RoundRuns:
    """The attempts at a round's episodes, its forks among them. Keep it from one wave of the round to the next."""

    def __init__(self, run_id: str, number: int) -> None:
        self._run_id, self.number = run_id, number
        self._entries: dict[str, tuple[int, Trajectory]] = {}  # by id, with the number of their rewards

    def read(self, store: TraceStore) -> list[Trajectory]:
        """Those that are stored, by their start. Their actions lack ids, log-probs and text; they have no edges."""
        counts: dict[str, int] = dict(store.sql(_REWARD_COUNTS, (self._run_id, self.number)))
        self._entries = {name: entry for name, entry in self._entries.items() if counts.get(name) == entry[0]}
        if new_ids := counts.keys() - self._entries.keys():
            for trajectory in store.trajectories(episode_ids=list(new_ids), forks=True):
                episode_id = trajectory.episode.episode_id
                self._entries[episode_id] = (counts[episode_id], _without_tokens(trajectory))
        runs = [trajectory for _, trajectory in self._entries.values()]
        return sorted(runs, key=attrgetter("episode.started_ns", "episode.episode_id"))


def _without_tokens(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, actions=tuple(map(_action_without_tokens, trajectory.actions)), edges=())


def _action_without_tokens(action: Action) -> Action:
    tokens = action.sampled_tokens if action.replayed_from is not None else sampled_count([action])
    return replace(action, prompt_ids=None, sampled_ids=None, logprobs=None, completion=None, sampled_tokens=tokens)
