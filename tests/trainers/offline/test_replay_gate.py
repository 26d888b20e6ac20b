"""Owns: what may be replayed is decided by lineage, staleness and effective sample size, and what is not is counted.

- A hash that differs is refused; one that is not recorded is refused by `same` only; `any` looks at none.
- Tools are those of a node: they count where it acted, and an episode with a lineage that has none of them had none.
- Staleness is that of the oldest action that is learned from, and no matter to imitation.
- Every episode that is left out is counted once, and reasons do not multiply with the data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trace_store.records import Action, Episode, Trajectory
from trainers.config import ReplayOptions
from trainers.offline.replay_gate import TOO_STALE, gate_episodes
from trainers.scoring.effective_sample_size import NO_WEIGHT, TOO_FEW, gate_actions

TODAY = {"base": "b1", "tokenizer": "k1", "template": "t1"}
NEWEST = {"planner": 7, "solver": 7}
Acted = tuple[str, int | None]


def trajectory(*acted: Acted, **lineage: str) -> Trajectory:
    """An episode in which these nodes acted, each call by an adapter of this version."""
    episode = Episode(
        *("e", "run", "task", "train", 0, None, None, None, {}, "terminated", None, 0, 1, 1),
        lineage=lineage,
    )
    common: dict[str, Any] = dict.fromkeys(
        ("step", "prompt_ids", "sampled_ids", "logprobs", "model", "adapter", "temperature", "top_p", "top_k")
    )
    common |= dict.fromkeys(("max_tokens", "seed", "finish_reason", "completion"))
    actions = tuple(
        Action(str(i), "e", node, i, adapter_version=version, started_ns=0, ended_ns=0, trainable=True, **common)
        for i, (node, version) in enumerate(acted)
    )
    return Trajectory(episode, actions, (), ())


def refused(given: Trajectory, today: dict[str, str] | None = None, **options: Any) -> list[str]:
    """The reasons why one episode is left out; none when it is kept."""
    gated = gate_episodes([given], TODAY if today is None else today, ReplayOptions(**options), NEWEST, True)
    kept, drops = gated.kept, gated.drops
    assert kept == ([] if drops else [given])
    assert set(drops.values()) <= {1}
    return list(drops)


FRESH: tuple[Acted, ...] = (("planner", 7), ("solver", 7))


def test_an_episode_of_the_same_lineage_is_kept_by_every_option() -> None:
    for lineage in ("same", "known", "any"):
        assert refused(trajectory(*FRESH, **TODAY), lineage=lineage) == []


@pytest.mark.parametrize("name", sorted(TODAY))
def test_a_hash_that_differs_is_refused_unless_lineage_is_not_looked_at(name: str) -> None:
    other = trajectory(*FRESH, **(TODAY | {name: "another"}))
    for lineage in ("same", "known"):
        assert refused(other, lineage=lineage) == [f"replay: lineage: {name} differs from today's"]
    assert refused(other, lineage="any") == []


@pytest.mark.parametrize("name", sorted(TODAY))
def test_a_hash_that_is_not_recorded_is_refused_by_same_only(name: str) -> None:
    unknown = trajectory(*FRESH, **{key: value for key, value in TODAY.items() if key != name})
    (reason,) = refused(unknown, lineage="same")
    assert reason.startswith(f"replay: lineage: {name} is not recorded")
    assert refused(unknown, lineage="known") == []
    assert refused(unknown, lineage="any") == []


def test_a_hash_that_today_does_not_know_is_not_looked_at() -> None:
    assert refused(trajectory(*FRESH, **TODAY, **{"tools/solver": "x"}), lineage="same") == []
    assert refused(trajectory(*FRESH, **TODAY), today={}, lineage="same") == []


@pytest.mark.parametrize("lineage", ["same", "known"])
def test_tools_must_be_those_of_today_where_the_node_acted(lineage: str) -> None:
    today = TODAY | {"tools/solver": "s1"}
    same, other = TODAY | {"tools/solver": "s1"}, TODAY | {"tools/solver": "s2"}
    reason = ["replay: lineage: tools/solver differs from today's"]
    assert refused(trajectory(*FRESH, **same), today, lineage=lineage) == []
    assert refused(trajectory(*FRESH, **other), today, lineage=lineage) == reason
    assert refused(trajectory(*FRESH, **TODAY), today, lineage=lineage) == reason  # it offered none then
    assert refused(trajectory(("planner", 7), **TODAY), today, lineage=lineage) == []  # the solver did not run


def test_of_an_episode_without_any_lineage_the_tools_are_unknown_too() -> None:
    today = {"tools/solver": "s1"}
    (reason,) = refused(trajectory(*FRESH), today, lineage="same")
    assert "tools/solver is not recorded" in reason
    assert refused(trajectory(*FRESH), today, lineage="known") == []


@pytest.mark.parametrize(
    ("acted", "behind"),
    [
        ((("planner", 7), ("solver", 7)), 0),
        ((("planner", 7), ("solver", 4)), 3),
        ((("planner", 2), ("solver", 7)), 5),  # the oldest action decides
        ((("solver", 7), ("solver", 1)), 6),
        ((("planner", None),), 7),  # no adapter: the base model, version 0
        ((("planner", 9),), 0),  # of another run
        ((("judge", 0),), 0),  # not trained
        ((("judge", None), ("solver", 5)), 2),
        ((), 0),
    ],
)
def test_staleness_is_that_of_the_oldest_action_of_a_trained_agent(acted: tuple[Acted, ...], behind: int) -> None:
    given = trajectory(*acted, **TODAY)
    for limit in range(1, 9):
        assert refused(given, max_staleness=limit) == ([TOO_STALE] if behind > limit else [])


def test_a_call_that_is_not_learned_from_has_no_staleness() -> None:
    """As those of an opponent of the league, which any version may play."""
    given = trajectory(("planner", 6), ("solver", 2), **TODAY)
    assert refused(given, max_staleness=2) == [TOO_STALE]
    own, opponent = given.actions
    opponent = replace(opponent, trainable=False, untrainable_reason="frozen")
    assert refused(replace(given, actions=(own, opponent)), max_staleness=2) == []
    own = replace(own, adapter_version=4)
    assert refused(replace(given, actions=(own, opponent)), max_staleness=2) == [TOO_STALE]


def test_imitation_is_not_gated_by_staleness_but_by_lineage() -> None:
    old, strange = trajectory(("planner", None), **TODAY), trajectory(("planner", None), base="b2")
    gated = gate_episodes([old, strange], TODAY, ReplayOptions(max_staleness=1), NEWEST, False)
    kept, drops = gated.kept, gated.drops
    assert kept == [old]
    assert drops == {"replay: lineage: base differs from today's": 1}


def test_each_episode_is_counted_once_and_reasons_do_not_multiply() -> None:
    stale = [trajectory(("planner", -version), **TODAY) for version in range(50)]
    both = [trajectory(("planner", -version), **(TODAY | {"base": str(version)})) for version in range(50)]
    fresh = [trajectory(*FRESH, **TODAY) for _ in range(3)]
    gated = gate_episodes([*stale, *fresh, *both], TODAY, ReplayOptions(), NEWEST, True)
    kept, drops = gated.kept, gated.drops
    assert kept == fresh
    assert drops == {TOO_STALE: 50, "replay: lineage: base differs from today's": 50}


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([2.0, 2.0], 1.0),  # a common factor says nothing
        ([1.0, 0.0, 0.0, 0.0], 0.25),  # one of four has everything
        ([2.0, 1.0, 1.0], 16 / 18),  # (2 + 1 + 1)^2 / (3 * (4 + 1 + 1))
        ([3.0, 1.0], 0.8),  # 4^2 / (2 * 10)
    ],
)
def test_actions_are_refused_below_the_effective_sample_size(weights: list[float], size: float) -> None:
    assert gate_actions(weights, size - 1e-9) is None
    if size < 1:
        assert gate_actions(weights, size + 1e-9) == TOO_FEW


def test_no_action_is_no_reason_and_no_weight_is_one() -> None:
    assert gate_actions([], 1.0) is None
    assert gate_actions([0.0, 0.0], 0.0) == NO_WEIGHT


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_none_is_an_error(broken: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        gate_actions([1.0, broken], 0.3)
