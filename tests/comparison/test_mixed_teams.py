"""Owns: scores of mixed teams become shares of the difference, node by node.

- Shapley values are the hand-worked ones; they sum to the difference, treat like nodes alike, give a null node nothing.
- Two nodes that each harm alone and help together are shown as that.
- Which teams are run; what was not run is None; tasks that a team lacks count for no team.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from marft_bridge.comparison.mixed import differing_nodes, mixed_teams, scores_to_mixed
from marft_bridge.comparison.records import Mixed, NodeShare
from marft_bridge.statistics.shapley import (
    all_teams,
    interaction_weights,
    shapley_weights,
    values_to_share,
    weighted_sums,
)

TASKS = tuple(f"t{n}" for n in range(12))
Value = Callable[[frozenset[str]], float]


def mixed(nodes: Sequence[str], value: Value, teams: Sequence[frozenset[str]] | None = None) -> Mixed:
    """Every task scores `value` of the team, and one thing more that it scores in every team."""
    scores = {team: {task: [value(team) + n % 3] for n, task in enumerate(TASKS)} for team in teams or all_teams(nodes)}
    found = scores_to_mixed("after", scores, nodes, seed=0)
    assert found is not None
    return found


def shares(found: Mixed) -> dict[str, NodeShare]:
    return {share.node: share for share in found.shares}


def table(values: Mapping[str, float]) -> Value:
    """Scores by the first letters of the nodes that are on."""
    return lambda team: values["".join(sorted(team))]


def test_shapley_of_two_nodes_is_the_hand_worked_one() -> None:
    # v: nobody 1, a 3, b 2, both 7. a joins first: 2, second: 5, so 3.5; b: (1 + 4) / 2 = 2.5; together 7 - 1 = 6.
    found = mixed("ab", table({"": 1, "a": 3, "b": 2, "ab": 7}))
    assert found.complete
    assert [team.on for team in found.teams] == [(), ("a",), ("b",), ("a", "b")]
    assert [team.variant for team in found.teams] == ["none", "a", "b", "a+b"]
    a, b = shares(found)["a"], shares(found)["b"]
    assert [a.alone, a.without, a.shapley] == pytest.approx([2, -5, 3.5])
    assert [b.alone, b.without, b.shapley] == pytest.approx([1, -4, 2.5])


def test_shapley_of_three_nodes_is_the_hand_worked_one() -> None:
    # The glove game: a holds a left glove, b and c a right one each; a pair is worth 1. Known: 2/3, 1/6, 1/6.
    pair: Value = lambda team: float("a" in team and bool(team & {"b", "c"}))  # noqa: E731
    found = shares(mixed("abc", pair))
    assert [found[node].shapley for node in "abc"] == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert [found[node].alone for node in "abc"] == pytest.approx([0, 0, 0])
    assert [found[node].without for node in "abc"] == pytest.approx([-1, 0, 0])


def by_orders(node: str, nodes: Sequence[str], value: Value) -> float:
    """The definition: what the node adds, averaged over all orders of arrival."""
    gains = []
    for order in itertools.permutations(nodes):
        before = frozenset(order[: order.index(node)])
        gains.append(value(before | {node}) - value(before))
    return sum(gains) / len(gains)


@pytest.mark.parametrize("nodes", ["ab", "abc", "abcd"])
def test_shapley_is_the_mean_over_all_orders_and_sums_to_the_difference(nodes: str) -> None:
    drawn = random.Random(len(nodes))
    values = {team: drawn.uniform(-1, 1) for team in all_teams(nodes)}
    found = mixed(nodes, values.__getitem__)
    for node in nodes:
        assert shares(found)[node].shapley == pytest.approx(by_orders(node, nodes, values.__getitem__))
    total = sum(share.shapley or 0 for share in found.shares)
    assert total == pytest.approx(values[frozenset(nodes)] - values[frozenset()])


def test_nodes_that_do_the_same_get_the_same_and_a_node_that_does_nothing_gets_nothing() -> None:
    found = shares(mixed("abcd", lambda team: float(len(team & {"a", "b"})) ** 2 + 3 * ("c" in team)))
    assert found["a"].shapley == pytest.approx(found["b"].shapley)
    assert found["c"].shapley == pytest.approx(3)
    assert found["d"].shapley == pytest.approx(0)
    assert found["d"].shapley_ci95 == pytest.approx((0, 0))


def test_two_nodes_that_miscoordinate_each_harm_alone_and_help_together() -> None:
    value = table({"": 0.5, "a": 0.2, "b": 0.1, "ab": 0.9})
    found = shares(mixed("ab", value))
    assert [found["a"].alone, found["b"].alone] == pytest.approx([-0.3, -0.4])
    assert [found["a"].without, found["b"].without] == pytest.approx([-0.8, -0.7])
    assert found["a"].shapley == pytest.approx(0.25)  # (-0.3 + 0.8) / 2
    together = weighted_sums(
        {t: {"x": value(t)} for t in all_teams("ab")}, interaction_weights(("a", "b"), "ab"), ["x"]
    )
    assert together == pytest.approx([0.9 - 0.1 - 0.2 + 0.5])


def test_what_every_team_shares_cancels_and_what_tasks_differ_in_widens_the_interval() -> None:
    """The constant per task in `mixed` is as large as all shares; paired by task it leaves no trace."""
    narrow = shares(mixed("ab", table({"": 0, "a": 1, "b": 0, "ab": 1})))["a"]
    assert narrow.alone_ci95 == pytest.approx((1, 1))
    scores = {team: {task: [float("a" in team) * (n % 2)] for n, task in enumerate(TASKS)} for team in all_teams("ab")}
    found = scores_to_mixed("after", scores, "ab", seed=0)
    assert found is not None
    a = shares(found)["a"]
    assert [a.alone, a.shapley] == pytest.approx([0.5, 0.5])
    assert a.alone_ci95 is not None
    # t interval of six 0s and six 1s: 0.5 +- 2.201 x 0.5222 / sqrt(12); the bootstrap's is near it.
    assert a.alone_ci95 == pytest.approx((0.168, 0.832), abs=0.06)
    score = next(team.score for team in found.teams if team.on == ("a",))
    assert (score.low, score.high) == pytest.approx((0.168, 0.832), abs=0.001)


def test_beyond_four_nodes_each_is_swapped_in_and_out_by_itself() -> None:
    nodes = ["a", "b", "c", "d", "e"]
    teams = mixed_teams(nodes)
    assert len(teams) == 12
    assert (teams[0], teams[-1]) == (frozenset(), frozenset(nodes))
    found = mixed(nodes, lambda team: float(len(team)) ** 2, teams)
    assert not found.complete
    for share in found.shares:
        assert [share.alone, share.without, share.shapley] == pytest.approx([1, 16 - 25, None])


@pytest.mark.parametrize(("count", "teams"), [(1, 2), (2, 4), (3, 8), (4, 16), (6, 14)])
def test_up_to_four_nodes_are_combined_in_every_way(count: int, teams: int) -> None:
    assert len(set(mixed_teams("abcdef"[:count]))) == len(mixed_teams("abcdef"[:count])) == teams


def test_a_share_whose_teams_were_not_run_is_none() -> None:
    base, full, a = frozenset[str](), frozenset("ab"), frozenset("a")
    found = shares(mixed("ab", lambda team: float(len(team)), [base, a, full]))
    assert [found["a"].alone, found["a"].without, found["a"].shapley] == pytest.approx([1, None, None])
    assert [found["b"].alone, found["b"].without, found["b"].shapley] == pytest.approx([None, -1, None])


def test_a_task_that_one_team_has_no_score_on_counts_for_no_team() -> None:
    scores = {team: {task: [float(len(team))] for task in TASKS} for team in all_teams("ab")}
    scores[frozenset("a")]["t0"] = []
    del scores[frozenset("b")]["t1"]
    for team in scores.values():
        team["t2"] = [100.0, 0.0]  # two samples are one task
    found = scores_to_mixed("after", scores, "ab", seed=0)
    assert found is not None
    assert {team.n for team in found.teams} == {10}
    assert next(team.score.mean for team in found.teams if team.on == ()) == pytest.approx(5.0)
    del scores[frozenset("b")]
    for task in TASKS:
        scores[frozenset("a")][task] = []
    assert scores_to_mixed("after", scores, "ab", seed=0) is None


def test_one_task_gives_no_interval() -> None:
    assert values_to_share("it", [1.0, 2.0], ["t", "t"], 0).ci95 is None
    assert values_to_share("it", [1.0, 2.0], ["t", "u"], 0).ci95 is not None


def test_the_weights_of_a_shapley_value_are_those_of_a_mean_of_differences() -> None:
    weights = shapley_weights("a", "abc")
    joins = {team: weight for team, weight in weights.items() if "a" in team}
    assert sum(joins.values()) == pytest.approx(1)
    assert sum(weights.values()) == pytest.approx(0)
    assert joins[frozenset("a")] == pytest.approx(1 / 3)
    assert joins[frozenset("ab")] == pytest.approx(1 / 6)


def test_nodes_differ_where_versions_do() -> None:
    assert differing_nodes({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 3, "d": 1}) == ("b", "d", "c")
