"""Episodes of which some fork others -> trees: what each run counts, which runs lie beneath a call, who are siblings.

A fork repeats the calls of the run that it left up to one that it makes anew. A repeated call stands in the batch once,
in the run that sampled it; its return is the mean over the runs beneath it, each by its weight. At a fork point the
weight of a run is shared out equally among it and its forks, so a task, or a call, counts no more for having been
forked, and the estimate of the policy gradient is that of independent runs in expectation, with less spread.

That holds where a fork was chosen without a look at how the run that it left went on (`blind`). One that was chosen by
that outcome says nothing of the calls above it: the mean over "failures, run again" is no return of a policy. Such
forks are detached: a group of them counts as one run that begins at the fork point, compared with each other only.
Invariant: the weights of a tree add up to 1, those of a detached group too.

Shapes: _E one entry per episode, _A per sampled action of the round, _B per action of the unrolled runs, which have
repeated calls once for each run that they stand in.
"""

# ruff: noqa: N802, N803, N806, N815 (shape suffixes)
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
EpisodeItem = Any
"""Of `trainers.batch`, which stands above: an episode holds its fork, and a round its forest."""
Round = Any
"""Likewise."""
Point = tuple[str, str]
"""A fork point: the episode that sampled a call, and the call."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a run left another one."""

    point: Point
    depth: int  # position of that call in the run that it left, in a topological order
    blind: bool  # chosen without a look at how that run went on
    repeats: frozenset[str]  # the calls that were not made anew, trained or not, by who sampled them
    remakes: bool  # whether the call that was made anew is trained, so that it is the first of the fork's own actions
    whole: EpisodeItem | None  # with the repeated calls among its actions; None where there are none to train on


@dataclass(frozen=True)
class Forest:
    """The trees of a round."""

    unrolled: Round  # every run from its beginning; a detached fork from where it was forked
    row_B: tuple[int, ...]  # where each action of `unrolled` stands in the round
    weight_E: tuple[float, ...]
    root_E: tuple[int, ...]  # runs with one number share a beginning, detached ones included
    path_A: tuple[tuple[tuple[Point, int], ...], ...]  # fork points at or above each call, and its branch: an episode

    @property
    def weight_B(self) -> Floats:
        """The weight of each unrolled action's run."""
        return np.array([self.weight_E[e] for e in self.unrolled.episode_A], dtype=np.float64)

    @property
    def weight_A(self) -> Floats:
        """The weight of all runs that a call stands in."""
        weight_A: Floats = np.bincount(self.row_B, weights=self.weight_B, minlength=len(self.path_A)).astype(np.float64)
        return weight_A

    @cached_property
    def stands_A(self) -> list[list[tuple[int, float]]]:
        """The runs that a call stands in, with their weights."""
        stands: list[list[tuple[int, float]]] = [[] for _ in self.path_A]
        for row, e in zip(self.row_B, self.unrolled.episode_A, strict=True):
            stands[row].append((e, self.weight_E[e]))
        return stands

    def fold(self, values_B: Floats) -> Floats:
        """What was computed along every run to one value per call: the mean over the runs beneath it, by weight.

        A run in which the value is not known (NaN) does not count; NaN where no run knows it. [B] to [A].
        """
        known_B = ~np.isnan(values_B)
        weight_B = self.weight_B * known_B
        total_A = np.bincount(self.row_B, weights=weight_B, minlength=len(self.path_A))
        sum_A = np.bincount(self.row_B, weights=weight_B * np.nan_to_num(values_B), minlength=len(self.path_A))
        mean_A: Floats = np.divide(sum_A, total_A, out=np.full(len(total_A), np.nan), where=total_A > 0)
        return mean_A

    def fold_parts(self, parts_B: Sequence[Floats]) -> list[Floats]:
        """`fold` of one array per action, whose entries are its units."""
        folded: list[Floats | None] = [None] * len(self.path_A)
        total_A = self.weight_A
        for row, weight, part in zip(self.row_B, self.weight_B, parts_B, strict=True):
            share = part * (weight / total_A[row])
            so_far = folded[row]
            folded[row] = share if so_far is None else so_far + share
        return [np.zeros(0) if part is None else part for part in folded]


def episodes_to_forest(data: Round) -> Forest | None:
    """The trees of a round; None where no run is a fork."""
    episodes = data.episodes
    if all(episode.fork is None for episode in episodes):
        return None
    number_of = {episode.episode_id: e for e, episode in enumerate(episodes) if not episode.replayed}
    row_of = {
        action_id: row
        for row, (e, action_id) in enumerate(
            (e, action_id) for e, episode in enumerate(episodes) for action_id in episode.action_ids
        )
        if not episodes[e].replayed
    }
    attached = [_is_attached(episode, number_of, row_of) for episode in episodes]
    unrolled = _unroll(data, attached)
    row_B, start = [], 0
    for e, episode in enumerate(episodes):
        own = {action_id: start + i for i, action_id in enumerate(episode.action_ids)}
        row_B += [own[a] if a in own else row_of[a] for a in unrolled.episodes[e].action_ids]
        start += len(episode.actions)
    weights, roots, paths = _Trees(episodes, number_of, attached).read()
    return Forest(unrolled, tuple(row_B), weight_E=weights, root_E=roots, path_A=paths)


def _is_attached(episode: EpisodeItem, number_of: dict[str, int], row_of: dict[str, int]) -> bool:
    """Whether a fork hangs on the run that it left: that is in the round, and all that they share."""
    fork = episode.fork
    if fork is None or not fork.blind or episode.replayed or fork.point[0] not in number_of:
        return False
    shared = fork.whole.action_ids if fork.whole is not None else episode.action_ids
    return all(action_id in row_of for action_id in shared)


def _unroll(data: Round, attached: Sequence[bool]) -> Round:
    wholes = [
        episode.fork.whole if hangs and episode.fork is not None and episode.fork.whole is not None else episode
        for episode, hangs in zip(data.episodes, attached, strict=True)
    ]
    items = tuple(item for episode in wholes for item in episode.actions)
    episode_A = tuple(e for e, episode in enumerate(wholes) for _ in episode.actions)
    return replace(data, episodes=tuple(wholes), drops={}, items=items, episode_A=episode_A, forest=None)


class _Trees:
    """The fork points of a round, from the roots down."""

    def __init__(self, episodes: Sequence[EpisodeItem], number_of: dict[str, int], attached: Sequence[bool]) -> None:
        self.episodes, self.number_of, self.attached = episodes, number_of, attached
        # of each run, the points at which attached forks left it, the first first; and who left there
        self.branches: list[dict[Point, list[int]]] = [{} for _ in episodes]
        self.detached: dict[Point, list[int]] = defaultdict(list)
        for e in sorted(range(len(episodes)), key=self._depth):
            fork = episodes[e].fork
            if fork is not None and attached[e]:
                self.branches[number_of[fork.point[0]]].setdefault(fork.point, []).append(e)
            elif fork is not None:
                self.detached[fork.point].append(e)
        self.weights = [0.0] * len(episodes)
        self.roots = list(range(len(episodes)))
        self.bases: list[tuple[tuple[Point, int], ...]] = [()] * len(episodes)

    def _depth(self, e: int) -> int:
        fork = self.episodes[e].fork
        return -1 if fork is None else fork.depth

    def read(self) -> tuple[tuple[float, ...], tuple[int, ...], tuple[tuple[tuple[Point, int], ...], ...]]:
        """Weights and roots of the episodes, and the path of every action of theirs."""
        for e, episode in enumerate(self.episodes):
            if episode.fork is None:
                self._spread(e, 1.0, root=e, base=())
        for point, group in self.detached.items():
            for e in group:
                root = self.number_of.get(point[0], group[0])
                self._spread(e, 1 / len(group), root=root, base=((point, e),))
        roots = list(self.roots)
        for e in range(len(roots)):  # a detached fork may hang below a fork whose root is further up
            while roots[roots[e]] != roots[e]:
                roots[e] = roots[roots[e]]
        paths = [
            (*self.bases[e], *((point, e) for point in self.branches[e] if self._is_beneath(e, point, action_id)))
            for e, episode in enumerate(self.episodes)
            for action_id in episode.action_ids
        ]
        return tuple(self.weights), tuple(roots), tuple(paths)

    def _spread(self, e: int, weight: float, root: int, base: tuple[tuple[Point, int], ...]) -> None:
        """Shares a weight out over a run and what left it, point after point."""
        self.roots[e], self.bases[e] = root, base
        passed: tuple[tuple[Point, int], ...] = ()
        for point, forks in self.branches[e].items():
            weight /= 1 + len(forks)
            above = tuple((upper, e) for upper, _ in passed if self._is_beneath(e, upper, point[1]))
            for fork in forks:
                self._spread(fork, weight, root=root, base=(*base, *above, (point, fork)))
            passed = (*passed, (point, e))
        self.weights[e] = weight

    def _is_beneath(self, e: int, point: Point, action_id: str) -> bool:
        """Whether a call of a run is one that those who left it at a point did not repeat."""
        first = self.episodes[self.branches[e][point][0]].fork
        assert first is not None
        return action_id not in first.repeats
