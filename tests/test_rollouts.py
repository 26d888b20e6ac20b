"""Owns: requests become rewarded episodes, and whatever goes wrong with one is a row with a reason.

- A plan gives every request its own seed, keeps groups together and is the same every time.
- Failures and time limits are outcomes; a run in which most episodes fail stops with the reason.
- An episode counts as finished only with its reward on disk; what is finished is not run again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from duo_rig import COMMON, TASKS, Rig, right_answer

from marft_bridge.app import split_tasks
from marft_bridge.engine import still_to_run
from marft_bridge.errors import GraphError, ServingError
from marft_bridge.rollouts import plan_episodes, task_order


def test_a_plan_is_reproducible_and_every_request_has_its_own_seed() -> None:
    plan = plan_episodes(TASKS, 20, 2, seed=5, **COMMON)
    assert plan == plan_episodes(TASKS, 20, 2, seed=5, **COMMON)
    assert len({request.seed for request in plan}) == 20
    assert len({request.key for request in plan}) == 20
    assert [request.task["id"] for request in plan[:6]] == ["t0", "t0", "t1", "t1", "t2", "t2"]
    assert [(r.task["id"], r.sample) for r in plan[16:]] == [("t0", 2), ("t0", 3), ("t1", 2), ("t1", 3)]
    assert plan[0].seed != plan_episodes(TASKS, 20, 2, seed=6, **COMMON)[0].seed
    assert plan[0].seed != plan_episodes(TASKS, 20, 2, seed=5, round=1, **COMMON)[0].seed


def test_a_task_order_does_not_depend_on_the_order_of_the_file() -> None:
    assert task_order(TASKS, 3) == task_order(TASKS[::-1], 3)
    assert task_order(TASKS, 3) != task_order(TASKS, 4)


def test_a_task_keeps_its_side_whatever_else_is_in_the_file() -> None:
    tasks = [{"id": str(n)} for n in range(400)]
    train, heldout = split_tasks(tasks, 0.25)
    assert 60 < len(heldout) < 140
    again, _ = split_tasks(tasks[::3], 0.25)
    assert {task["id"] for task in again} <= {task["id"] for task in train}


def test_finished_episodes_are_stored_with_rewards_routes_and_seeds(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    plan = plan_episodes(TASKS, 8, 1, seed=0, **COMMON)
    tally = rig.run(plan)
    assert (tally.finished, dict(tally.outcomes), tally.mean("correct")) == (8, {"terminated": 8}, 1.0)
    with rig.store() as store:
        stored = list(store.trajectories(run_ids=["run"]))
    assert {t.episode.task_id: t.episode.seed for t in stored} == {r.task["id"]: r.seed for r in plan}
    for trajectory in stored:
        assert {r.name: r.value for r in trajectory.rewards} == {"correct": 1.0, "reward": 1.0}
        assert trajectory.episode.adapters == {"reasoner": 0, "actor": 3}
        reasoner, actor = trajectory.actions
        assert (reasoner.model, reasoner.adapter, reasoner.adapter_version) == ("base", None, 0)
        assert (actor.model, actor.adapter, actor.adapter_version) == ("actor@3", "actor@3", 3)
        assert (actor.temperature, actor.top_p, actor.max_tokens) == (0.7, 1.0, 16)
        assert len({reasoner.seed, actor.seed, trajectory.episode.seed}) == 3
    assert tally.sampled_tokens == sum(len(a.sampled_ids or ()) for t in stored for a in t.actions)


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    plan = plan_episodes(TASKS, 8, 1, seed=0, **COMMON)
    rig.run(plan[:5])
    with rig.store() as store:
        assert still_to_run(store, plan) == plan[5:]
        assert still_to_run(store, plan_episodes(TASKS, 8, 1, seed=0, round=1, **COMMON)) != []


def test_an_episode_that_fails_is_a_row_with_a_reason_and_the_others_go_on(tmp_path: Path) -> None:
    def script(node: str, prompt: str, random: Any) -> str:
        if "3 + 1?" in prompt:
            raise ConnectionResetError("cut")
        return right_answer(node, prompt, random)

    rig = Rig(tmp_path, script)
    plan = plan_episodes(TASKS, 8, 1, seed=0, **COMMON)
    tally = rig.run(plan)
    assert tally.outcomes == Counter(terminated=7, failed=1)
    with rig.store() as store:
        failed = [e for e in store.episodes(run_id="run") if e.outcome == "failed"]
        assert [(e.task_id, e.reason) for e in failed] == [("t3", "ConnectionResetError: cut")]
        assert [request.task["id"] for request in still_to_run(store, plan)] == ["t3"]


def test_a_run_in_which_most_episodes_fail_stops_with_the_reason(tmp_path: Path) -> None:
    def script(*_: Any) -> str:
        raise ConnectionResetError("cut")

    rig = Rig(tmp_path, script)
    rig.collector._wait_for_dying_server = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(GraphError, match=r"8 of 8 episodes failed, 8 of them with: ConnectionResetError: cut"):
        rig.run(plan_episodes(TASKS, 100, 1, seed=0, **COMMON))


def test_a_dead_server_is_named_instead_of_the_calls_that_it_refused(tmp_path: Path) -> None:
    def script(*_: Any) -> str:
        raise ConnectionResetError("cut")

    def dead() -> None:
        raise ServingError("the model server ended with exit code 1")

    with pytest.raises(ServingError, match="exit code 1"):
        Rig(tmp_path, script, check_server=dead).run(plan_episodes(TASKS, 4, 1, seed=0, **COMMON))


def test_an_episode_over_its_time_is_truncated_and_not_run_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timeout_s=0.2, delay_s=1.0)
    plan = plan_episodes(TASKS, 2, 1, seed=0, **COMMON)
    assert rig.run(plan).outcomes == Counter(truncated=2)
    with rig.store() as store:
        assert {(e.outcome, e.reason) for e in store.episodes(run_id="run")} == {("truncated", "longer than 0.2 s")}
        assert still_to_run(store, plan) == []


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: {"reward": float("nan")}, "gave nan as 'reward', not a finite number"),
        (lambda *_: "high", "gave 'high' as 'reward'"),
        (lambda *_: {}["nothing"], "failed: KeyError: 'nothing'"),
    ],
    ids=["nan", "text", "raises"],
)
def test_a_broken_reward_stops_the_run_by_name(tmp_path: Path, reward: Any, message: str) -> None:
    with pytest.raises(GraphError, match="test:reward") as caught:
        Rig(tmp_path, reward=reward).run(plan_episodes(TASKS, 4, 1, seed=0, **COMMON))
    assert message in str(caught.value)


def test_a_reward_may_be_async_and_a_bare_number(tmp_path: Path) -> None:
    async def reward(_task: Any, _result: Any) -> float:
        await asyncio.sleep(0)
        return 0.25

    rig = Rig(tmp_path, reward=reward)
    rig.run(plan_episodes(TASKS, 3, 1, seed=0, **COMMON))
    with rig.store() as store:
        assert [t.team_reward("reward") for t in store.trajectories()] == [0.25] * 3
