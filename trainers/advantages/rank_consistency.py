"""Agents' own rewards and the team's, over the samples of a task, to each agent's factor of the team's reward.

After CoMAM (Collaborative Multi-Agent Optimization for Personalized Memory System, arXiv 2603.12631): an agent's
contribution is quantified by how consistently its own rewards rank the samples of a group as the team's rewards do,
and these contributions weigh the global reward that is added to the agent's local one. What is ours, because the
paper's text at hand gives no formula: the measure (the share of pairs that are ordered alike, a tie counting half) and
the scale (weights have mean 1 over the agents that have one, so that the team's reward keeps its weight on the whole).

    consistency   c = pairs ordered alike / pairs,   over all pairs of samples of one task whose team rewards differ
    weight        w = c / mean of c over the agents

1 is an agent whose own reward always rises with the team's, 1/2 one whose reward says nothing of it, and 0 one that
does well exactly where the team does badly: of such an agent's advantage only its own reward is left.

Invariant: no state, and no randomness; weights are at least 0. It knows nothing of actions, advantages or models.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import numpy as np

from trainers.advantages.arrays import Floats, rows_by_key


def rank_consistency(own_E: Floats, team_E: Floats, group_E: Sequence[Hashable]) -> float | None:
    """The share of pairs of a group that `own_E` orders as `team_E` does, over all groups; each pair counts once.

    Args:
        own_E: an agent's own reward of each episode; NaN where it has none, and the episode takes no part.
        team_E: the team's reward of each episode.
        group_E: the task of each episode; only episodes of one task are compared.

    Returns:
        0 to 1, or None where no pair tells: fewer than two episodes, or all of the same team reward.
    """
    alike, pairs = 0.0, 0
    for rows in rows_by_key(group_E).values():
        for i, j in combinations([row for row in rows if not np.isnan(own_E[row])], 2):
            team_sign, own_sign = np.sign(team_E[i] - team_E[j]), np.sign(own_E[i] - own_E[j])
            if team_sign:
                pairs += 1
                alike += 0.5 if own_sign == 0 else float(own_sign == team_sign)
    return alike / pairs if pairs else None


def contribution_weights(
    own_rewards: Mapping[str, Floats], team_E: Floats, group_E: Sequence[Hashable]
) -> dict[str, float]:
    """Each agent's factor of the team's reward: its consistency over the mean of all agents that have one.

    An agent without a pair that tells has weight 1, and so have all where every consistency is 0: there is no mean to
    hold them against.
    """
    consistency_by_agent = {agent: rank_consistency(own_E, team_E, group_E) for agent, own_E in own_rewards.items()}
    consistencies = [value for value in consistency_by_agent.values() if value is not None]
    mean = sum(consistencies) / len(consistencies) if consistencies else 0.0
    return {agent: 1.0 if value is None or not mean else value / mean for agent, value in consistency_by_agent.items()}
