"""Owns: in which order a run's episodes are read, and which of them count.

- Episodes are read in the order of the plan, whenever they ran; attempts at one request in theirs, what nobody planned
  at the end.
- An episode that a kill left without a reward does not count once another one finished its request; one that failed,
  or whose request nobody finished, stays.
- Sums over a run's rewards do not depend on the ids of its episodes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.growth_rig import fill, trace_id
from support.sample_spans import START, chain

from marft_bridge.rollouts.episode_plan import (
    EpisodeRequest,
    ForkPoint,
    in_planned_order,
    replaced_attempts,
    unfinished_requests,
)
from marft_bridge.runs.learning_curve import runs_to_points
from marft_bridge.training.round_plan import runs_of_rounds
from marft_bridge.training.task_draw import TaskReward
from marft_bridge.training.version_naming import store_to_named
from trace_store.records import Reward
from trace_store.store import TraceStore


def episode(name: str, at: int, reward: float | None, **root: Any) -> list[Any]:
    """The spans of an episode of the run `train`, and its reward."""
    spans: list[Any] = chain(name, START + at).spans(**{"RUN_ID": "train", "ROUND": 1, **root})
    return spans if reward is None else [*spans, Reward(trace_id(name), "reward", reward, "test", at)]


def request(task: str, sample: int = 0) -> EpisodeRequest:
    return EpisodeRequest("train", {"id": task}, "train", sample, seed=0, adapters={}, round=1)


def test_an_attempt_without_a_reward_is_replaced_by_the_one_that_finished_its_request(tmp_path: Path) -> None:
    t1 = {"TASK_ID": "t1"}
    fill(
        tmp_path / "s.duckdb",
        [
            episode("a1", 1, None, **t1),  # killed
            episode("a2", 2, None, **t1),  # and again
            episode("a3", 3, 0.5, **t1),
            episode("b1", 4, None, **t1, SAMPLE=1),  # its request is still to be finished
            episode("c1", 5, None, **t1, SAMPLE=2, OUTCOME="failed", OUTCOME_REASON="boom"),
            episode("c2", 6, 0.5, **t1, SAMPLE=2),
            episode("d1", 7, None, **t1, ROUND=None),
            episode("d2", 8, 0.5, **t1, ROUND=None),
            episode("e1", 9, None, **t1, SAMPLE=4, VARIANT="after"),
            episode("e2", 10, 0.5, **t1, SAMPLE=4, VARIANT="before"),
            episode("f1", 11, None, **t1, RUN_ID="collect"),  # of another run
            episode("g1", 12, None, **t1, SAMPLE=5, OUTCOME="truncated", OUTCOME_REASON="cancelled"),  # by Ctrl-C
            episode("g2", 13, 0.5, **t1, SAMPLE=5),
        ],
    )
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert store.counts()["episodes"] == 13
        assert replaced_attempts(store, "train") == {trace_id(name) for name in ("a1", "a2", "d1", "g1")}
        assert replaced_attempts(store, "collect") == set()


def test_episodes_are_read_in_the_order_of_the_plan_whenever_they_ran(tmp_path: Path) -> None:
    fill(
        tmp_path / "s.duckdb",
        [
            episode("a", 1, 0.5, TASK_ID="t3"),
            episode("b", 2, 0.5, TASK_ID="t1", SAMPLE=1),
            episode("c", 3, 0.5, TASK_ID="extra"),
            episode("d", 4, None, TASK_ID="t1", OUTCOME="failed", OUTCOME_REASON="boom"),
            episode("e", 5, 0.5, TASK_ID="t1"),
            episode("f", 6, 0.5, TASK_ID="earlier"),
        ],
    )
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        trajectories = list(store.trajectories(run_ids=["train"]))
    plan = [request("t2"), request("t1"), request("t1", 1), request("t3")]

    def ids(replaced: set[str]) -> str:
        ordered = in_planned_order(trajectories, plan, replaced)
        return "".join(trajectory.episode.episode_id.lstrip("0") for trajectory in ordered)

    assert ids(set()) == "debafc"
    assert ids({trace_id("b")}) == "deafc"


@pytest.mark.parametrize("names", ["abcdef", "fedcba", "cfadbe"])
def test_sums_over_rewards_do_not_depend_on_random_ids(tmp_path: Path, names: str) -> None:
    values = (0.1, 0.7, 1e-9, 0.3, 0.2, 0.9)  # which have another sum, in its last bits, in any other order
    assert sum(values) != sum(reversed(values))
    fill(
        tmp_path / "s.duckdb",
        [
            episode(name, at, value, TASK_ID=f"t{at // 2}", SAMPLE=at % 2, ADAPTERS=json.dumps({"a": 1}))
            for at, (name, value) in enumerate(zip(names, values, strict=True))
        ],
    )
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        (point,) = runs_to_points(store, ["train"], "reward")
        named = store_to_named(store, ["a"], 1, reward="reward")
        drawn_from = runs_of_rounds(store, "train", 1, reward="reward")
    assert point.reward_mean == sum(values) / 6
    assert named.evidence[0].mean == sum(values) / 6
    assert drawn_from == [TaskReward(f"t{at // 2}", 1, value) for at, value in enumerate(values)]


def test_a_fork_is_never_taken_for_the_sample_of_its_task_or_for_a_fork_elsewhere(tmp_path: Path) -> None:
    fork = {"PARENT_EPISODE": "p", "FORK_ACTION": "y"}
    fill(
        tmp_path / "s.duckdb",
        [episode("f1", 1, None, TASK_ID="t1", **fork), episode("f2", 2, 1.0, TASK_ID="t1", **fork)],
    )
    chain_request = request("t1")
    here, elsewhere = (replace(chain_request, fork=ForkPoint("p", action)) for action in ("y", "x"))
    of_another = replace(chain_request, fork=ForkPoint("q", "y"))
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        requests = [chain_request, here, elsewhere, of_another]
        assert unfinished_requests(store, requests) == [chain_request, elsewhere, of_another]
        assert replaced_attempts(store, "train") == {trace_id("f1")}
        assert runs_of_rounds(store, "train", 1, "reward") == []


def test_an_attempt_at_a_chain_is_not_replaced_by_a_fork_of_the_same_sample(tmp_path: Path) -> None:
    killed = episode("a1", 1, None, TASK_ID="t1")
    fork = episode("f1", 2, 1.0, TASK_ID="t1", PARENT_EPISODE="p", FORK_ACTION="y")
    fill(tmp_path / "s.duckdb", [killed, fork])
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert replaced_attempts(store, "train") == set()
