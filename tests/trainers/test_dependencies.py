"""Owns: edges of D among the trained actions, their reduction, and how many links lie before an action."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.dependencies import edges_to_successors, links_to, transitive_reduction

Edges = list[tuple[int, int]]

graphs = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] < e[1])),
    )
)


def _reach(count: int, edges: Edges) -> np.ndarray:
    """Reachability by matrix powers: independent of the bit sets."""
    step = np.zeros((count, count), dtype=bool)
    for src, dst in edges:
        step[src, dst] = True
    reach = step.copy()
    for _ in range(count):
        reach |= reach @ step
    return reach


def _ways_back(target: int, edges: Edges) -> list[list[int]]:
    """Every way from `target` to what it depends on, as lists of nodes from the target on."""
    ways = [[target]]
    for src, dst in edges:
        if dst == target:
            ways += [[target, *way] for way in _ways_back(src, edges)]
    return ways


@settings(deadline=None)  # the machine is shared
@given(graphs)
def test_the_reduction_keeps_reachability_and_no_edge_can_go(case: tuple[list[bool], Edges]) -> None:
    kept, edges = case
    count = len(kept)
    reduced = [(i, j) for i, after in enumerate(transitive_reduction(count, edges)) for j in after]
    assert (_reach(count, reduced) == _reach(count, edges)).all()
    for edge in reduced:
        rest = [e for e in reduced if e != edge]
        assert (_reach(count, rest) != _reach(count, edges)).any()


@settings(deadline=None)
@given(graphs)
def test_kept_actions_depend_on_each_other_as_they_did_with_the_others_between(case: tuple[list[bool], Edges]) -> None:
    kept, edges = case
    rows = np.flatnonzero(kept)
    among = [(i, j) for i, after in enumerate(edges_to_successors(len(kept), edges, kept)) for j in after]
    assert (_reach(len(rows), among) == _reach(len(kept), edges)[np.ix_(rows, rows)]).all()


def test_dependencies_pass_through_an_action_that_is_left_out() -> None:
    # 0 -> 1 -> 2 -> 3 without 1: 0 -> 2 -> 3, renumbered
    assert edges_to_successors(4, [(0, 1), (1, 2), (2, 3)], [True, False, True, True]) == ((1,), (2,), ())


def test_a_shortcut_beside_a_longer_way_is_no_link_of_its_own() -> None:
    # a loop of two agents that each read everything before them is one chain
    everything = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert edges_to_successors(4, everything) == ((1,), (2,), (3,), ())


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 1)])
def test_an_edge_that_does_not_point_forward_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not point forward"):
        edges_to_successors(2, [edge])


def test_links_are_counted_back_from_an_action_and_reach_only_what_it_depended_on() -> None:
    # 0 -> {1, 2} -> 3 -> 4, and 5 beside them all. From 3: itself 0, 1 and 2 one link away, 0 two.
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    assert links_to(3, edges, [True] * 6) == {3: 0, 1: 1, 2: 1, 0: 2}
    assert links_to(5, edges, [True] * 6) == {5: 0}
    # 0 -> 1 -> 2 -> 4 and 0 -> 3 -> 4: the shorter branch counts
    branches = [(0, 1), (1, 2), (2, 4), (0, 3), (3, 4)]
    assert links_to(4, branches, [True] * 5) == {4: 0, 2: 1, 3: 1, 1: 2, 0: 2}


def test_links_do_not_count_actions_that_are_left_out() -> None:
    # 0 -> 1 -> 2 -> 3 without 1: from 3 (now the third kept), 2 is one link away and 0 two.
    assert links_to(3, [(0, 1), (1, 2), (2, 3)], [True, False, True, True]) == {2: 0, 1: 1, 0: 2}
    # of a target that is left out itself, the last kept action before it is 0 links away
    assert links_to(3, [(0, 1), (1, 2), (2, 3)], [True, True, True, False]) == {2: 0, 1: 1, 0: 2}


@settings(deadline=None)
@given(graphs, st.data())
def test_links_are_those_of_the_shortest_of_all_ways_back(case: tuple[list[bool], Edges], data: st.DataObject) -> None:
    kept, edges = case
    edges = sorted(set(edges))
    target = data.draw(st.integers(0, len(kept) - 1))
    shortest: dict[int, int] = {}
    for way in _ways_back(target, edges):
        kept_before_the_end = sum(kept[node] for node in way[:-1])
        shortest[way[-1]] = min(shortest.get(way[-1], 99), kept_before_the_end)
    renumbered = {sum(kept[:node]): links for node, links in shortest.items() if kept[node]}
    assert links_to(target, edges, kept) == renumbered
