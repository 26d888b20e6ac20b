"""Scores of teams between a base and a candidate -> which node made the difference.

A mixed team runs some nodes (`on`) at the candidate's versions and the others as in the base. Invariants: teams are
compared on the tasks that all of them have a score on; a share that needs teams which were not run is None; the
Shapley values sum to the candidate's difference over those tasks. It knows neither episodes nor adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marft_bridge.comparison.records import Estimate, Mixed, MixedTeam, NodeShare
from marft_bridge.contribution.games import (
    Share,
    Team,
    Weights,
    all_teams,
    alone,
    complete,
    one_in_and_one_out,
    put_back,
    shapley,
    values_to_share,
    weighted,
)
from marft_bridge.statistics import mean_interval

ALL_UP_TO = 4  # nodes whose combinations are all run: 16 teams


def differing_nodes(base: Mapping[str, int], candidate: Mapping[str, int]) -> tuple[str, ...]:
    """The nodes whose versions are not the same in both, in the candidate's order."""
    return tuple(node for node in dict.fromkeys([*candidate, *base]) if base.get(node) != candidate.get(node))


def mixed_teams(nodes: Sequence[str]) -> tuple[Team, ...]:
    """The teams to run: all combinations of up to four nodes, beyond each node in and out by itself.

    The first is the base and the last the candidate.
    """
    return all_teams(nodes) if len(nodes) <= ALL_UP_TO else one_in_and_one_out(nodes)


def scores_to_mixed(
    candidate: str,
    teams: Mapping[Team, Mapping[str, Sequence[float]]],
    nodes: Sequence[str],
    seed: int,
    names: Mapping[Team, str] | None = None,
) -> Mixed | None:
    """Teams' scores into their means and each node's shares; None where no task has a score from every team.

    Args:
        candidate: the variant in which all of `nodes` are on.
        teams: nodes that are on -> task -> its scores, one for each sample. A task counts once, by its mean.
        nodes: that differ between base and candidate.
        seed: of the bootstrap.
        names: of the teams as variants; without it the nodes that are on, joined by "+".
    """
    # A sample that failed in one team would be missing in its mean only: task means pair what was run.
    scores = {on: {task: sum(s) / len(s) for task, s in by_task.items() if s} for on, by_task in teams.items()}
    tasks = sorted(complete(scores))
    if not tasks:
        return None
    named = names or {on: "+".join(node for node in nodes if node in on) or "none" for on in teams}
    everything = set(all_teams(nodes)) <= set(scores) if len(nodes) <= ALL_UP_TO else False

    def share(weights: Weights) -> Share | None:
        if not set(weights) <= set(scores):
            return None
        return values_to_share("mixed teams", weighted(scores, weights, tasks), tasks, seed)

    return Mixed(
        candidate=candidate,
        complete=everything,
        teams=tuple(
            MixedTeam(
                on=tuple(node for node in nodes if node in on),
                variant=named[on],
                n=len(tasks),
                score=Estimate(**mean_interval([by_task[task] for task in tasks])._asdict()),
            )
            for on, by_task in scores.items()
        ),
        shares=tuple(
            _node_share(
                node,
                share(alone(node)),
                share(put_back(node, nodes)),
                share(shapley(node, nodes)) if everything else None,
            )
            for node in nodes
        ),
    )


def _node_share(node: str, by_itself: Share | None, without: Share | None, value: Share | None) -> NodeShare:
    return NodeShare(
        node=node,
        alone=by_itself.mean if by_itself else None,
        alone_ci95=by_itself.ci95 if by_itself else None,
        without=without.mean if without else None,
        without_ci95=without.ci95 if without else None,
        shapley=value.mean if value else None,
        shapley_ci95=value.ci95 if value else None,
    )
