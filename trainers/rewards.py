"""Recorded rewards to what each trained action of an episode earned, by the name of the reward.

Three kinds reach the loss, and they are credited differently:

    team      of the whole run: the recorded team reward, and shaping of level `episode`. The critic predicts it.
    step      arrives with one action. That action and everything that it depended on share it, each once,
              discounted per link of D between them.
    private   one agent's own, once per episode: it reaches that agent's actions only.

Invariant: an absent reward adds nothing, and a term of which an episode has none at all is reported as absent;
weights of shaping terms are in the values. In a game with sides no reward crosses from one side to another: there the
team reward is a measure that nobody earns. It knows nothing of tokens, values or estimators.

Shapes: _A one entry per recorded action of an episode.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trace_store.records import Reward, Trajectory
from trainers.dependencies import links_to
from trainers.errors import TrainError


class ShapingTerm(BaseModel):
    """A recorded reward that is added to the team reward of the game."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    reward: str = Field(min_length=1)
    """Its name in the store."""
    level: Literal["episode", "step", "agent"]
    """`episode`: added to the team reward. `step`: arrives with the action that it points at, and everything
    before it in D shares it. `agent`: the private reward of one node, which reaches that node's actions only."""
    weight: float
    """Factor; negative for a penalty."""


@dataclass(frozen=True, slots=True)
class StepReward:
    """A reward that arrived with one action. `links`: trained action -> links of D between it and that action."""

    value: float
    links: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """All that an episode earned, by the name of the reward."""

    team: Mapping[str, float]
    step: Mapping[str, tuple[StepReward, ...]] = field(default_factory=dict)
    private: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # name -> agent -> value

    @property
    def total(self) -> float:
        """The team reward with its shaping."""
        return sum(self.team.values())

    @property
    def figures(self) -> Hashable:
        """All of it as one value: episodes of equal ones earned the same, whatever float64 leaves of equal sums."""
        steps = [(name, *(without_rounding(step.value) for step in part)) for name, part in sorted(self.step.items())]
        private = [
            (name, *((agent, without_rounding(value)) for agent, value in sorted(part.items())))
            for name, part in sorted(self.private.items())
        ]
        return (without_rounding(self.total), *steps, *private)


def without_rounding(value: float) -> float:
    """A value without what float64 leaves of equal sums."""
    return float(f"{value:.12g}")


def trajectory_to_rewards(
    trajectory: Trajectory,
    team: tuple[str, float],
    shaping: Sequence[ShapingTerm],
    edges: Sequence[tuple[int, int]],
    is_kept_A: Sequence[bool],
    side_of: Mapping[str, str] | None = None,
) -> tuple[EpisodeRewards, list[ShapingTerm]]:
    """Recorded rewards to an episode's, and the shaping terms of which it has no finite value.

    Of several rewards with one name and one target the latest counts. One that points at an action which the trajectory
    does not have counts as absent.

    Args:
        team: name and value of the team reward; where there are sides, of what is measured of the game.
        edges: D over all actions of the trajectory, by position, without what follows from other edges (else a
            shortcut would make a step reward count as nearer than a team reward that arrives with the same action).
        is_kept_A: which actions are trained.
        side_of: agent -> the side that it is of, in a game of several interests. A step reward then reaches no action
            of another side; its discount still counts every link of D, those over the other side's moves too.

    Raises:
        TrainError: a shaping term is of the whole episode, or of an agent of no side: it would reach every side.
    """
    totals: dict[str, float] = dict([team]) if side_of is None else {}
    steps, private = {}, {}
    kept_nodes = [action.node for action, keep in zip(trajectory.actions, is_kept_A, strict=True) if keep]
    absent = []
    position = {action.action_id: i for i, action in enumerate(trajectory.actions)}
    for term in shaping:
        term_rewards = [r for r in _latest(trajectory, term) if r.action_id is None or r.action_id in position]
        if side_of is not None:
            _refuse_shared(trajectory, term, term_rewards, side_of=side_of)
        if not term_rewards:
            absent.append(term)
        elif term.level == "episode":
            totals[term.reward] = term_rewards[0].value * term.weight
        elif term.level == "agent":
            private[term.reward] = {r.node: r.value * term.weight for r in term_rewards if r.node is not None}
        else:
            arrivals = [(r.value * term.weight, position[r.action_id]) for r in term_rewards if r.action_id is not None]
            steps[term.reward] = tuple(
                StepReward(
                    value,
                    {
                        i: links
                        for i, links in links_to(at, edges, is_kept_A).items()
                        if side_of is None or side_of.get(kept_nodes[i]) == side_of[trajectory.actions[at].node]
                    },
                )
                for value, at in arrivals
            )
    return EpisodeRewards(totals, steps, private), absent


def _latest(trajectory: Trajectory, term: ShapingTerm) -> list[Reward]:
    """The newest reward of the term for each of its targets, without those that are not finite."""
    newest: dict[tuple[str | None, str | None], Reward] = {}
    for reward in sorted(trajectory.rewards, key=lambda r: r.created_ns):
        if reward.scope == term.level and reward.name == term.reward:
            newest[reward.action_id, reward.node] = reward
    return [reward for reward in newest.values() if math.isfinite(reward.value)]


def _refuse_shared(
    trajectory: Trajectory, term: ShapingTerm, term_rewards: Sequence[Reward], *, side_of: Mapping[str, str]
) -> None:
    """Refuses a reward that is not one side's own."""
    node_of = {action.action_id: action.node for action in trajectory.actions}
    for reward in term_rewards:
        agent = reward.node if reward.action_id is None else node_of[reward.action_id]
        if term.level == "episode" or agent not in side_of:
            earner = "the whole episode" if term.level == "episode" else f"{agent!r}, which is of no side"
            raise TrainError(
                f"episode {trajectory.episode.episode_id}: the reward {term.reward!r} is of {earner}, and would reach "
                "every side: give each side's own to its agents (train.trainer.sides)"
            )
