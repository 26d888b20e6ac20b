"""Scores of a team and of the teams with agents replaced -> what may be said of each agent, and of each two.

Agents: the contribution with its interval, and a finding. Pairs, where the teams without both were run: whether one
covers for the other, whether each is needed for the other's, whether together they harm.
Invariants: all intervals and tests of one call are one family, so nothing is found by looking often; `lazy` is said
only where the interval excludes a contribution worth having, never because too few tasks were run to see one. It knows
neither episodes nor models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from marft_bridge.contribution.games import Team, Weights, complete, difference, interaction, shapley, weighted
from marft_bridge.statistics import Contrast, FamilyMember, compare_family

ALPHA = 0.05

Run = tuple[str, int]
"""Task and sample."""
Scores = Mapping[Team, Mapping[Run, float]]
Method = Literal["leave-one-out", "shapley"]
Finding = Literal["adds", "harmful", "lazy", "did not act", "not settled"]
PairFinding = Literal["only together", "cover for each other", "colluding", "not settled"]


@dataclass(frozen=True, slots=True)
class AgentCredit:
    """One agent, over the runs that all teams which its share weighs have a score on."""

    agent: str
    contribution: float  # mean difference reward, or Shapley value
    interval: tuple[float, float] | None  # holds with all others of its table; None where the scores tell nothing
    runs: int
    tasks: int
    up: int  # runs that scored more because the agent was there,
    down: int  # and less
    calls: float  # of the agent, per run of the full team
    finding: Finding


@dataclass(frozen=True, slots=True)
class PairCredit:
    """Two agents. `joint`: the full team less the one without both; `interaction`: see `games.interaction`."""

    agents: tuple[str, str]
    joint: float
    joint_interval: tuple[float, float]
    interaction: float
    interaction_interval: tuple[float, float]
    finding: PairFinding


def share_of(agent: str, agents: Sequence[str], method: Method) -> Weights:
    """The weights of an agent's contribution."""
    return shapley(agent, agents) if method == "shapley" else difference([agent], agents)


def share_per_run(scores: Scores, share: Weights) -> dict[Run, float]:
    """A share for each run that every team which it weighs has a score on."""
    runs = complete({team: scores[team] for team in share})
    return dict(zip(runs, weighted(scores, share, runs), strict=True))


def scores_to_credits(
    agents: Sequence[str],
    scores: Scores,
    calls: Mapping[str, float],
    method: Method,
    worth: float,
    seed: int,
) -> tuple[list[AgentCredit], list[PairCredit]]:
    """Teams' scores into what may be said of each agent, and of each two where the teams without both are there.

    Args:
        agents: that were replaced, in turn or in all combinations.
        scores: agents that play themselves -> run -> score. Every team has a run in common with the full one.
        calls: of each agent, per run of the full team.
        worth: a contribution below this is not worth an agent's calls.
        seed: of the statistics.

    Raises:
        ValueError: two teams have fewer than two tasks in common.
    """
    shares: dict[tuple[str, ...], Weights] = {("share", agent): share_of(agent, agents, method) for agent in agents}
    pairs = [p for p in itertools.combinations(agents, 2) if set(interaction(p, agents)) <= set(scores)]
    if pairs:  # whether an agent harms by itself is one of the questions about its pairs
        shares |= {("alone", agent): difference([agent], agents) for agent in agents}
    for pair in pairs:
        shares["joint", *pair] = difference(pair, agents)
        shares["interaction", *pair] = interaction(pair, agents)
    measured = {name: share_per_run(scores, share) for name, share in shares.items()}
    family = [
        Contrast("/".join(name), "score", [0.0] * len(by_run), list(by_run.values()), [task for task, _ in by_run])
        for name, by_run in measured.items()
    ]
    members = dict(zip(shares, compare_family(family, seed=seed), strict=True))
    span = _span(scores)
    return (
        [
            _agent(agent, measured["share", agent], members["share", agent], calls[agent], worth, span, len(members))
            for agent in agents
        ],
        [_pair(pair, members) for pair in pairs],
    )


def _span(scores: Scores) -> float:
    values = [value for by_run in scores.values() for value in by_run.values()]
    return max(values) - min(values)


def _agent(
    agent: str,
    by_run: Mapping[Run, float],
    member: FamilyMember,
    calls: float,
    worth: float,
    span: float,
    looks: int,
) -> AgentCredit:
    tasks = len({task for task, _ in by_run})
    interval: tuple[float, float] | None = member.simultaneous
    if not any(by_run.values()):
        # A share q of tasks on which the agent matters would have gone unseen with probability (1 - q)^tasks.
        bound = span * (1 - (ALPHA / looks) ** (1 / tasks))
        interval = (-bound, bound) if span else None
    return AgentCredit(
        agent=agent,
        contribution=member.result.diff,
        interval=interval,
        runs=len(by_run),
        tasks=tasks,
        up=sum(value > 0 for value in by_run.values()),
        down=sum(value < 0 for value in by_run.values()),
        calls=calls,
        finding=_finding(member, interval, calls, worth),
    )


def _finding(member: FamilyMember, interval: tuple[float, float] | None, calls: float, worth: float) -> Finding:
    if member.verdict != "not settled":
        return "adds" if member.verdict == "higher" else "harmful"
    if not calls:
        return "did not act"
    return "lazy" if interval is not None and interval[1] < worth else "not settled"


def _pair(pair: tuple[str, str], members: Mapping[tuple[str, ...], FamilyMember]) -> PairCredit:
    joint, both = members["joint", *pair], members["interaction", *pair]
    return PairCredit(
        agents=pair,
        joint=joint.result.diff,
        joint_interval=joint.simultaneous,
        interaction=both.result.diff,
        interaction_interval=both.simultaneous,
        finding=_pair_finding(joint, both, [members["alone", agent] for agent in pair]),
    )


def _pair_finding(joint: FamilyMember, both: FamilyMember, alone: Sequence[FamilyMember]) -> PairFinding:
    """Colluding is what replacing one of them does not show: only without both the team does better."""
    if joint.verdict == "lower" and all(member.verdict != "lower" for member in alone):
        return "colluding"
    if both.verdict == "higher" and joint.verdict == "higher":
        return "only together"
    return "cover for each other" if both.verdict == "lower" and joint.verdict == "higher" else "not settled"
