"""Scores of a team and of the teams with agents replaced -> the credit of each agent, and of each pair of agents.

Agents: the contribution with its interval, and a finding. Pairs, where the teams without both were run: whether one
covers for the other, whether each is needed for what the other adds, whether they harm together.
Invariants: all intervals and tests of one call are one family, so a long table finds no more by chance; `lazy` is
found only where the interval excludes the smallest contribution that matters, never because too few tasks were run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from marft_bridge.statistics import Contrast, FamilyMember, compare_family
from marft_bridge.statistics.decided_variance import unseen_share
from marft_bridge.statistics.shapley import (
    Team,
    Weights,
    difference_weights,
    interaction_weights,
    shapley_weights,
    shared_keys,
    weighted_sums,
)

ALPHA = 0.05  # of the family

SampleKey = tuple[str, int]
"""(task id, sample number): one episode of each team."""
Scores = Mapping[Team, Mapping[SampleKey, float]]
"""Team -> (task id, sample) -> score."""
Method = Literal["leave-one-out", "shapley"]
Finding = Literal["adds", "harmful", "lazy", "did not act", "not settled"]
PairFinding = Literal["only together", "cover for each other", "colluding", "not settled"]


@dataclass(frozen=True, slots=True)
class AgentCredit:
    """The credit of one agent, over the episodes whose task and sample all teams with a weight have a score on."""

    agent: str
    contribution: float  # mean difference reward, or Shapley value
    interval: tuple[float, float] | None  # simultaneous 95%; None where every score is the same
    episodes: int
    tasks: int
    improved_episodes: int  # that scored more because the agent was there
    worsened_episodes: int  # that scored less because the agent was there
    calls: float  # of the agent, per episode of the full team
    finding: Finding


@dataclass(frozen=True, slots=True)
class PairCredit:
    """The credit of two agents: the full team's score less that without both, and their interaction.

    `interaction` is that of `shapley.interaction_weights`; the intervals are simultaneous ones.
    """

    agents: tuple[str, str]
    joint: float
    joint_interval: tuple[float, float]
    interaction: float
    interaction_interval: tuple[float, float]
    finding: PairFinding


def contribution_weights(agent: str, agents: Sequence[str], method: Method) -> Weights:
    """The weights of the agent's Shapley value, or of its difference reward."""
    return shapley_weights(agent, agents) if method == "shapley" else difference_weights([agent], agents)


def share_by_sample(scores: Scores, share: Weights) -> dict[SampleKey, float]:
    """The value of a share for each task and sample that every team with a weight has a score on."""
    keys = shared_keys({team: scores[team] for team in share})
    return dict(zip(keys, weighted_sums(scores, share, keys), strict=True))


def scores_to_credits(
    agents: Sequence[str],
    scores: Scores,
    calls: Mapping[str, float],
    method: Method,
    min_contribution: float,
    seed: int,
) -> tuple[list[AgentCredit], list[PairCredit]]:
    """Teams' scores into the credit of each agent, and of each pair where the teams without both were run.

    Args:
        agents: that were replaced, in turn or in all combinations.
        scores: team (the agents that act themselves) -> (task id, sample) -> score. Every team shares some with the
            full one.
        calls: of each agent, per episode of the full team.
        min_contribution: an agent that is shown to add less is lazy.
        seed: of bootstrap and permutations.

    Raises:
        ValueError: two teams have fewer than two tasks in common.
    """
    shares: dict[tuple[str, ...], Weights] = {
        ("share", agent): contribution_weights(agent, agents, method) for agent in agents
    }
    pairs = [p for p in itertools.combinations(agents, 2) if set(interaction_weights(p, agents)) <= set(scores)]
    if pairs:  # whether an agent harms by itself is one of the questions about its pairs
        shares |= {("alone", agent): difference_weights([agent], agents) for agent in agents}
    for pair in pairs:
        shares["joint", *pair] = difference_weights(pair, agents)
        shares["interaction", *pair] = interaction_weights(pair, agents)
    measured = {name: share_by_sample(scores, share) for name, share in shares.items()}
    family = [
        Contrast(
            variant="/".join(name),
            metric="score",
            base=[0.0] * len(by_sample),
            values=list(by_sample.values()),
            clusters=[task for task, _ in by_sample],
        )
        for name, by_sample in measured.items()
    ]
    members = dict(zip(shares, compare_family(family, seed=seed), strict=True))
    score_range = _score_range(scores)
    return (
        [
            _estimate_agent(
                agent,
                measured["share", agent],
                members["share", agent],
                calls=calls[agent],
                min_contribution=min_contribution,
                score_range=score_range,
                family_size=len(members),
            )
            for agent in agents
        ],
        [_estimate_pair(pair, members) for pair in pairs],
    )


def _score_range(scores: Scores) -> float:
    values = [value for by_sample in scores.values() for value in by_sample.values()]
    return max(values) - min(values)


def _estimate_agent(
    agent: str,
    by_sample: Mapping[SampleKey, float],
    member: FamilyMember,
    calls: float,
    min_contribution: float,
    score_range: float,
    family_size: int,
) -> AgentCredit:
    tasks = len({task for task, _ in by_sample})
    interval: tuple[float, float] | None = member.simultaneous
    # A share q of tasks on which the agent matters goes unseen with probability (1 - q)^tasks; alpha / family_size
    # bounds q. No resample holds what was not seen, so that the bootstrap alone may end at the largest value seen.
    unseen_fraction = unseen_share(tasks, ALPHA / family_size)
    upper_bound = (
        (1 - unseen_fraction) * member.simultaneous[1] + unseen_fraction * score_range if score_range else None
    )
    if not any(by_sample.values()):  # the bootstrap has no variance at all
        interval = (-unseen_fraction * score_range, unseen_fraction * score_range) if score_range else None
    return AgentCredit(
        agent=agent,
        contribution=member.result.diff,
        interval=interval,
        episodes=len(by_sample),
        tasks=tasks,
        improved_episodes=sum(value > 0 for value in by_sample.values()),
        worsened_episodes=sum(value < 0 for value in by_sample.values()),
        calls=calls,
        finding=_agent_finding(member, upper_bound, calls, min_contribution=min_contribution),
    )


def _agent_finding(member: FamilyMember, upper_bound: float | None, calls: float, min_contribution: float) -> Finding:
    """`upper_bound`: what the agent may be worth at most, with what was not seen; None: nothing tells."""
    if member.verdict != "not settled":
        return "adds" if member.verdict == "higher" else "harmful"
    if not calls:
        return "did not act"
    return "lazy" if upper_bound is not None and upper_bound < min_contribution else "not settled"


def _estimate_pair(pair: tuple[str, str], members: Mapping[tuple[str, ...], FamilyMember]) -> PairCredit:
    joint, interaction = members["joint", *pair], members["interaction", *pair]
    return PairCredit(
        agents=pair,
        joint=joint.result.diff,
        joint_interval=joint.simultaneous,
        interaction=interaction.result.diff,
        interaction_interval=interaction.simultaneous,
        finding=_pair_finding(joint, interaction, [members["alone", agent] for agent in pair]),
    )


def _pair_finding(joint: FamilyMember, interaction: FamilyMember, solo_members: Sequence[FamilyMember]) -> PairFinding:
    """Colluding: the team does better without both, and replacing either one alone does not show it."""
    if joint.verdict == "lower" and all(member.verdict != "lower" for member in solo_members):
        return "colluding"
    if interaction.verdict == "higher" and joint.verdict == "higher":
        return "only together"
    return "cover for each other" if interaction.verdict == "lower" and joint.verdict == "higher" else "not settled"
