"""Owns: which calls forks before and after a call give again.

- In a chain the level after a call is that before the next one, and is named as it, so that its forks are run once.
- Beside each other: what was under way keeps its answers on both sides of a call; where no ordinary fork gives the same
  calls again the level has a name of its own, and its forks sample exactly the others.
- A prefix is made once, and a call is looked through for what is redacted once, however many levels give it again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks.test_recorded_prefix import State, Team, chain, fan_out, loop
from langgraph.graph import END, START, StateGraph

from marft_bridge.fork_credit.credit_plan import CreditPlan
from marft_bridge.fork_credit.run_levels import Level, RunLevels, run_to_levels
from marft_bridge.forks import recorded_prefix
from marft_bridge.forks.fork_plan import spans_to_parent


def levels_of(team: Team, *nodes: str) -> RunLevels:
    with team.rig.store() as store:
        return run_to_levels(spans_to_parent(store.spans(team.parent.episode.episode_id)), nodes)


def given(level: Level | None) -> set[str] | None:
    if level is None:
        return None
    return {f"{each.call.node}:{each.call.number}" for each in level.prefix.given}


def test_in_a_chain_a_level_is_after_one_call_and_before_the_next(tmp_path: Path) -> None:
    levels = levels_of(Team(tmp_path, chain, ("a", "b", "c")), "a", "b", "c")
    a, b, c = levels.calls
    assert [given(each.before) for each in levels.calls] == [set(), {"a:1"}, {"a:1", "b:1"}]
    assert (a.after, b.after, c.after) == (b.before, c.before, None)
    assert levels.beginning == a.before
    assert [level.variant for level in levels.levels] == [None, None, None]
    assert not any(levels.is_whole(node) for node in "abc")


def test_a_node_that_makes_all_calls_one_after_the_other_is_all_that_is_sampled(tmp_path: Path) -> None:
    levels = levels_of(Team(tmp_path, loop, ("a",)), "a")
    assert len(levels.calls) == 3
    assert levels.is_whole("a")
    assert not levels.is_whole("b")


def test_of_calls_beside_each_other_each_is_measured_with_the_answers_of_the_others(tmp_path: Path) -> None:
    team = Team(tmp_path, fan_out, ("work", "join"), delay_s=0.05)
    levels = levels_of(team, "work")
    assert [given(each.before) for each in levels.calls] == [
        {"work:2", "work:3"}, {"work:1", "work:3"}, {"work:1", "work:2"},
    ]  # fmt: skip
    assert {each.after.variant if each.after else "" for each in levels.calls} == {None}
    assert {each.after.prefix.forked.node if each.after else "" for each in levels.calls} == {"join"}
    assert (given(levels.beginning), levels.beginning.variant) == (set(), "from the beginning")
    assert len(levels.levels) == 1 + 3 + 1
    assert not levels.is_whole("work")
    plan = CreditPlan("credit-forks-1", 0, samples=2, nodes=("work",), substitute=None)
    requests = plan.requests(levels)
    assert len(requests) == plan.forks_of_run(levels) == 10
    team.rig.run(requests)
    assert team.sampled_since() == {"work": 2 * 3 + 3 * 2, "join": 2 * (1 + 3 + 1)}
    assert {each.episode.outcome for each in team.episodes("credit-forks-1")} == {"terminated"}


def late_pair(model: Any) -> Any:
    """left, and two that begin together when it has ended, though they read nothing of it."""
    graph = StateGraph(State)

    def call(name: str, wait_s: float) -> Callable[[State], dict[str, Any]]:
        def node(_: State) -> dict[str, Any]:
            time.sleep(wait_s)
            return {"words": [model.invoke(name).text]}

        return node

    for name, wait_s in (("left", 0.0), ("one", 0.3), ("two", 0.3)):
        graph.add_node(name, call(name, wait_s))
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return graph.compile()


def test_a_level_that_is_no_ordinary_fork_has_a_name_and_samples_all_others(tmp_path: Path) -> None:
    team = Team(tmp_path, late_pair, ("left", "one", "two"), delay_s=0.1)
    levels = levels_of(team, "left")
    (left,) = levels.calls
    assert (given(left.before), given(left.after)) == (set(), {"left:1"})
    assert left.after is not None
    assert (left.before.variant, left.after.variant) == (None, "after left:1")
    plan = CreditPlan("credit-forks-1", 0, samples=1, nodes=("left",), substitute=None)
    team.rig.run(plan.requests(levels))
    assert team.sampled_since() == {"left": 1, "one": 2, "two": 2}
    outcomes = {each.episode.variant: each.episode.outcome for each in team.episodes("credit-forks-1")}
    assert outcomes == {None: "terminated", "after left:1": "terminated"}


@pytest.mark.parametrize(
    ("build", "nodes"), [(chain, ("a", "b", "c")), (fan_out, ("work", "join"))], ids=["chain", "fan-out"]
)
def test_each_prefix_is_made_once_and_each_call_is_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Any], Any], nodes: tuple[str, ...]
) -> None:
    team = Team(tmp_path, build, nodes, delay_s=0.05)
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    count = Counter[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[name] += 1
            return original(*arguments, **options)

        return call

    for name in ("_to_prefix", "actions_to_dependents"):
        monkeypatch.setattr(recorded_prefix, name, counted(name, getattr(recorded_prefix, name)))
    monkeypatch.setattr(recorded_prefix, "json", SimpleNamespace(dumps=counted("looked through", json.dumps)))
    levels = run_to_levels(run, nodes)
    assert count["_to_prefix"] == len({id(level.prefix) for level in levels.levels})
    assert count["looked through"] == count["actions_to_dependents"] == len(run.calls)
