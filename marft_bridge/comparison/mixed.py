"""Scores of teams between a base and a candidate -> which node made the difference.

A mixed team runs some nodes (the swapped ones) at the candidate's versions and the others as in the base. Invariants:
teams are compared on the tasks that all of them have a score on; a share that needs teams which were not run is None;
the Shapley values sum to the candidate's difference over those tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marft_bridge.comparison.records import Estimate, Mixed, MixedTeam, NodeShare
from marft_bridge.statistics import mean_interval
from marft_bridge.statistics.shapley import (
    Share,
    Team,
    Weights,
    all_teams,
    removal_weights,
    shapley_weights,
    shared_keys,
    solo_and_leave_one_out_teams,
    solo_weights,
    values_to_share,
    weighted_sums,
)

MAX_NODES_FOR_ALL_TEAMS = 4  # 16 teams


def differing_nodes(base: Mapping[str, int], candidate: Mapping[str, int]) -> tuple[str, ...]:
    """The nodes whose versions are not the same in both, in the candidate's order."""
    return tuple(node for node in dict.fromkeys([*candidate, *base]) if base.get(node) != candidate.get(node))


def mixed_teams(nodes: Sequence[str]) -> tuple[Team, ...]:
    """The teams to run: all combinations of up to four nodes; of more, each node swapped alone and each left out.

    The first is the base and the last the candidate.
    """
    return all_teams(nodes) if len(nodes) <= MAX_NODES_FOR_ALL_TEAMS else solo_and_leave_one_out_teams(nodes)


def scores_to_mixed(
    candidate: str,
    teams: Mapping[Team, Mapping[str, Sequence[float]]],
    nodes: Sequence[str],
    seed: int,
    names: Mapping[Team, str] | None = None,
) -> Mixed | None:
    """Teams' scores into their means and each node's shares; None where no task has a score from every team.

    Args:
        candidate: the variant in which all of `nodes` are swapped.
        teams: swapped nodes -> task -> its scores, one for each sample. A task counts once, by its mean.
        nodes: that differ between base and candidate.
        seed: of the bootstrap.
        names: of the teams as variants; without it the swapped nodes, joined by "+".
    """
    # A sample that failed in one team is missing in that team only; task means pair the teams nevertheless.
    scores = {
        swapped: {task: sum(s) / len(s) for task, s in by_task.items() if s} for swapped, by_task in teams.items()
    }
    tasks = sorted(shared_keys(scores))
    if not tasks:
        return None
    team_names = names or {swapped: "+".join(node for node in nodes if node in swapped) or "none" for swapped in teams}
    has_all_teams = set(all_teams(nodes)) <= set(scores) if len(nodes) <= MAX_NODES_FOR_ALL_TEAMS else False

    def share(weights: Weights) -> Share | None:
        if not set(weights) <= set(scores):
            return None
        return values_to_share("mixed teams", weighted_sums(scores, weights, tasks), tasks, seed=seed)

    return Mixed(
        candidate=candidate,
        complete=has_all_teams,
        teams=tuple(
            MixedTeam(
                on=tuple(node for node in nodes if node in swapped),
                variant=team_names[swapped],
                n=len(tasks),
                score=Estimate(**mean_interval([by_task[task] for task in tasks])._asdict()),
            )
            for swapped, by_task in scores.items()
        ),
        shares=tuple(
            _node_share(
                node,
                share(solo_weights(node)),
                share(removal_weights(node, nodes)),
                shapley=share(shapley_weights(node, nodes)) if has_all_teams else None,
            )
            for node in nodes
        ),
    )


def _node_share(node: str, alone: Share | None, without: Share | None, shapley: Share | None) -> NodeShare:
    return NodeShare(
        node=node,
        alone=alone.mean if alone else None,
        alone_ci95=alone.ci95 if alone else None,
        without=without.mean if without else None,
        without_ci95=without.ci95 if without else None,
        shapley=shapley.mean if shapley else None,
        shapley_ci95=shapley.ci95 if shapley else None,
    )
