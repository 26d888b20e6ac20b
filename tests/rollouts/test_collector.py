"""Owns: requests become rewarded episodes, and whatever goes wrong with one is a row with a reason.

- A plan gives every request its own seed, keeps groups together and is the same every time.
- Failures and limits of time and tokens are outcomes; a run in which most episodes fail stops with the reason.
- A run that one of its limits cut short earns what that is said to be worth, from the moment when it is stored on;
  nothing else that ends before its time does.
- What failed for a passing reason is tried again with the same seed, each attempt a row, the last one counting.
- An episode counts as finished only with its reward on disk; what is finished is not run again.
- A node that never ends holds neither later episodes nor the end of the run and of the process, and is said.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from support.duo_rig import COMMON, TASKS, Rig, right_answer
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT, TESTS

from graphs import math_duo
from marft_bridge.common.errors import EpisodesFailedError, GraphError, ServingError
from marft_bridge.common.loop_threads import LoopThreads
from marft_bridge.common.retries import is_connection_error, pause_s
from marft_bridge.common.run_limits import is_limit
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.rewards.limit_reward import LimitReward
from marft_bridge.rollouts import collector as rollouts
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.rollouts.episode_plan import plan_episodes, task_order, unfinished_requests
from marft_bridge.rollouts.graph_loop import open_graph_loop
from marft_bridge.rollouts.user_code import UserCode
from trace_store.journal import journal_of
from trace_store.records import OF_LIMIT, Trajectory
from trace_store.store import TraceStore


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
        assert unfinished_requests(store, plan) == plan[5:]
        assert unfinished_requests(store, plan_episodes(TASKS, 8, 1, seed=0, round=1, **COMMON)) != []


def test_a_crash_at_any_byte_leaves_an_episode_all_of_its_rewards_or_none_and_then_it_is_played_again(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "whole")
    plan = plan_episodes(TASKS, 1, 1, seed=0, **COMMON)
    rig.run(plan)
    (segment,) = journal_of(rig.path).glob("*.segment")
    written = segment.read_bytes()
    root_end = written.index(b'"marft.outcome"')  # the episode itself is whole from the end of this line on
    left = Counter[tuple[str, ...]]()
    for end in (*range(written.index(b"\n", root_end) + 1, len(written), 9), len(written)):
        path = tmp_path / f"{end}.duckdb"
        journal_of(path).mkdir()
        (journal_of(path) / segment.name).write_bytes(written[:end])
        with TraceStore.open(path) as store:
            store.take_in()
            ((count,),) = store.sql("SELECT count(*) FROM episodes")
            names = tuple(name for (name,) in store.sql("SELECT name FROM rewards ORDER BY name"))
            assert count == 1
            assert (unfinished_requests(store, plan) == []) == (names == ("correct", "reward"))
        left[names] += 1
        path.unlink()
    assert left.keys() == {(), ("correct", "reward")}


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
        assert [request.task["id"] for request in unfinished_requests(store, plan)] == ["t3"]


def test_a_run_in_which_most_episodes_fail_stops_with_the_reason(tmp_path: Path) -> None:
    def script(*_: Any) -> str:
        raise ConnectionResetError("cut")

    rig = Rig(tmp_path, script)
    rig.collector._wait_for_dying_server = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(GraphError, match=r"8 of 8 episodes failed, 8 of them with: ConnectionResetError: cut"):
        rig.run(plan_episodes(TASKS, 100, 1, seed=0, **COMMON))


def test_a_resumed_run_is_stopped_by_the_share_of_the_run_and_not_by_what_it_repeats(tmp_path: Path) -> None:
    fails = {f"{number} + 1?" for number in (1, 3)}

    def script(node: str, prompt: str, random: Any) -> str:
        if any(question in prompt for question in fails):
            raise ValueError("this task always fails")
        return right_answer(node, prompt, random)

    rig = Rig(tmp_path, script)
    rig.collector._wait_for_dying_server = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    plan = plan_episodes(TASKS, 80, 1, seed=0, **COMMON)
    assert rig.run(plan).outcomes == Counter(terminated=60, failed=20)
    with rig.store() as store:
        remaining = unfinished_requests(store, plan)
    tally = rig.run(remaining, finished_before=60)
    assert tally.outcomes == Counter(failed=20)
    assert tally.failure_lines()[0].startswith("20 of 80 episodes failed: ValueError: this task always fails (")
    tally.refuse_if_all_failed()  # 60 did not
    with pytest.raises(EpisodesFailedError, match=r"13 of 25 episodes failed, 13 of them with: ValueError: this task"):
        rig.run(remaining, finished_before=12)


def test_a_dead_server_is_named_instead_of_the_calls_that_it_refused(tmp_path: Path) -> None:
    def script(*_: Any) -> str:
        raise ConnectionResetError("cut")

    def dead() -> None:
        raise ServingError("the model server ended with exit code 1")

    with pytest.raises(ServingError, match="exit code 1"):
        Rig(tmp_path, script, check=dead).run(plan_episodes(TASKS, 4, 1, seed=0, **COMMON))


def test_an_episode_over_its_time_is_truncated_and_not_run_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timeout_s=0.2, delay_s=1.0)
    plan = plan_episodes(TASKS, 2, 1, seed=0, **COMMON)
    assert rig.run(plan).outcomes == Counter(truncated=2)
    with rig.store() as store:
        assert {(e.outcome, e.reason) for e in store.episodes(run_id="run")} == {("truncated", "longer than 0.2 s")}
        assert unfinished_requests(store, plan) == []


def one_node(node: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """Builds a graph of this node alone, which calls no model."""

    def build(_: Any) -> Any:
        graph = StateGraph(math_duo.DuoState)
        graph.add_node("reasoner", node)
        graph.add_edge(START, "reasoner")
        return graph.compile()

    return build


def test_sync_nodes_that_never_return_hold_neither_later_nodes_nor_the_end(tmp_path: Path) -> None:
    released, said = threading.Event(), list[str]()

    def hangs(state: dict[str, Any]) -> dict[str, Any]:
        if state["question"] != "7 + 1?":
            released.wait()
        return {}

    rig = Rig(tmp_path, build=one_node(hangs), timeout_s=0.5, in_flight=1, reward=lambda *_: 1.0)
    plan = plan_episodes(TASKS, 8, 1, seed=0, **COMMON)
    began = time.monotonic()
    with open_graph_loop(LoopThreads(3, grace_s=0.1), UserCode(None), said.append, grace_s=0.1) as loop:
        outcomes = rig.run(plan, loop).outcomes  # the last of them runs when seven have hung in a pool of three
    assert time.monotonic() - began < 60
    released.set()
    assert outcomes == Counter(truncated=7, terminated=1)
    (line,) = said
    # On a busy machine a thread that was released at once may be through by then.
    assert re.fullmatch(r"[1-7] threads of the app go on after its episodes, because what they run .*", line)
    with rig.store() as store:
        assert unfinished_requests(store, plan) == []


def test_an_async_node_that_catches_its_cancellation_is_left_behind_and_its_episode_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "CANCEL_GRACE_S", 0.2)
    said: list[str] = []

    async def stubborn(state: dict[str, Any]) -> dict[str, Any]:
        while state["question"] != "3 + 1?":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        return {}

    rig = Rig(tmp_path, build=one_node(stubborn), timeout_s=0.3, in_flight=1, reward=lambda *_: 1.0)
    plan = plan_episodes(TASKS[2:4], 2, 1, seed=0, **COMMON)
    with open_graph_loop(LoopThreads(3), UserCode(None), said.append, grace_s=0.1) as loop:
        outcomes = rig.run(plan, loop).outcomes
    assert outcomes == Counter(truncated=1, terminated=1)
    (line,) = said
    assert line.startswith("1 tasks of the app go on after its episodes, because what they run does not end: tests/")
    with rig.store() as store:
        rows = {(e.task_id, e.outcome, e.reason) for e in store.episodes(run_id="run")}
        assert rows == {("t2", "truncated", "longer than 0.3 s"), ("t3", "terminated", None)}
        assert unfinished_requests(store, plan) == []


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["itself", "a pool of its own"])
def test_a_node_that_never_returns_does_not_keep_the_process(tmp_path: Path, waits_for: str) -> None:
    code = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from marft_bridge.common.loop_threads import LoopThreads
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.rollouts.graph_loop import open_graph_loop
from marft_bridge.rollouts.user_code import UserCode
from rollouts.test_collector import one_node
from support.duo_rig import COMMON, TASKS, Rig

never = threading.Lock()
never.acquire()

def hangs(state):
    if {waits_for!r} == "itself":
        never.acquire()
    with ThreadPoolExecutor() as pool:
        pool.submit(never.acquire).result()

rig = Rig(Path({str(tmp_path)!r}), build=one_node(hangs), timeout_s=0.5)
with open_graph_loop(LoopThreads(8, grace_s=0.1), UserCode(None), print) as loop:
    print(dict(rig.run(plan_episodes(TASKS, 2, 1, seed=0, **COMMON), loop).outcomes))
print("over")
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    outcomes, line, over = process.stdout.splitlines()
    assert (process.returncode, outcomes, over) == (0, "{'truncated': 2}", "over"), process.stderr
    assert line.startswith("2 threads of the app go on after its episodes, because what they run does not end")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: {"reward": float("nan")}, "gave nan as 'reward', not a finite number"),
        (lambda *_: "high", "gave 'high' as 'reward'"),
        (lambda *_: {}["nothing"], "failed: KeyError: 'nothing'"),
    ],
    ids=["nan", "text", "raises"],
)
def test_a_broken_reward_fails_its_episode_by_name(tmp_path: Path, reward: Any, message: str) -> None:
    tally = Rig(tmp_path, reward=reward).run(plan_episodes(TASKS, 4, 1, seed=0, **COMMON))
    assert tally.outcomes == Counter(failed=4)
    assert tally.retried == 0
    (reason,) = tally.failures
    assert "test:reward" in reason
    assert message in reason
    with pytest.raises(EpisodesFailedError, match="4 of 4 episodes failed, 4 of them with: the reward 'test:reward'"):
        tally.refuse_if_all_failed()


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_reward_raises_ends_its_episode_alone(
    tmp_path: Path, error: type[BaseException], is_async: bool
) -> None:
    def reward(task: Any, _result: Any) -> float:
        if task["id"] == TASKS[1]["id"]:
            raise error("over")
        return 0.5

    async def async_reward(task: Any, result: Any) -> float:
        await asyncio.sleep(0)
        return reward(task, result)

    rig = Rig(tmp_path, reward=async_reward if is_async else reward)
    tally = rig.run(plan_episodes(TASKS[:3], 3, 1, seed=0, **COMMON))
    assert tally.outcomes == Counter(terminated=2, failed=1)
    assert list(tally.failures) == [f"the reward 'test:reward' failed: {error.__name__}: {error('over')}"]
    with rig.store() as store:
        assert sorted((t.team_reward("reward") or 0.0) for t in store.trajectories()) == [0.0, 0.5, 0.5]


def test_a_reward_may_be_async_and_a_bare_number(tmp_path: Path) -> None:
    async def reward(_task: Any, _result: Any) -> float:
        await asyncio.sleep(0)
        return 0.25

    rig = Rig(tmp_path, reward=reward)
    rig.run(plan_episodes(TASKS, 3, 1, seed=0, **COMMON))
    with rig.store() as store:
        assert [t.team_reward("reward") for t in store.trajectories()] == [0.25] * 3


def limited(
    folder: Path, limit: int, answers: dict[str, str], **changes: Any
) -> tuple[Rig, FakeVllm, list[Trajectory]]:
    """One episode of the duo on a server that counts tokens as bytes and one more, with a limit on all of them."""
    with running(FakeVllm()) as server:
        server.answer = lambda body: answers[body["model"]]
        server.adapters["actor@3"] = "there"
        model = NodeChat(model="base", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        rig = Rig(folder, model=model, max_tokens_per_episode=limit, **changes)
        rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON))
    with rig.store() as store:
        return rig, server, list(store.trajectories())


@pytest.mark.parametrize("limit", [11 + 9, 1000])
def test_an_episode_within_its_limit_of_tokens_is_as_without_one(tmp_path: Path, limit: int) -> None:
    _, _, (episode,) = limited(tmp_path, limit, {"base": "ten bytes.", "actor@3": "8 bytes."})
    assert (episode.episode.outcome, len(episode.actions), episode.team_reward("correct")) == ("terminated", 2, 0.0)
    assert [action.finish_reason for action in episode.actions] == ["stop", "stop"]


def test_the_call_that_would_pass_the_limit_gets_what_is_left_and_the_episode_is_truncated(tmp_path: Path) -> None:
    rig, _, (episode,) = limited(tmp_path, 15, {"base": "ten bytes.", "actor@3": "8 bytes."})
    reason = "its limit of 15 sampled tokens is used up"
    assert (episode.episode.outcome, episode.episode.reason) == ("truncated", reason)
    first, cut = episode.actions
    assert (first.max_tokens, len(first.sampled_ids or ()), first.finish_reason) == (15, 11, "stop")
    assert (cut.max_tokens, len(cut.sampled_ids or ()), cut.finish_reason) == (4, 4, "length")
    assert episode.rewards == ()
    with rig.store() as store:
        assert unfinished_requests(store, plan_episodes(TASKS, 1, 1, seed=0, **COMMON)) == []


def test_no_call_starts_when_nothing_is_left(tmp_path: Path) -> None:
    _, server, (episode,) = limited(tmp_path, 11, {"base": "ten bytes.", "actor@3": "8 bytes."})
    assert (episode.episode.outcome, len(server.asked)) == ("truncated", 1)
    assert [(a.node, a.trainable, a.sampled_ids is None) for a in episode.actions] == [
        ("reasoner", True, False),
        ("actor", False, True),  # a call that was refused
    ]


def test_a_graph_that_goes_on_after_the_limit_is_stopped(tmp_path: Path) -> None:
    def build(model: Any) -> Any:
        async def stubborn(state: dict[str, Any]) -> dict[str, Any]:
            while True:
                with suppress(Exception):  # as an app may
                    await model.ainvoke("again")

        graph = StateGraph(math_duo.DuoState)
        graph.add_node("reasoner", stubborn)
        graph.add_edge(START, "reasoner")
        return graph.compile()

    with running(FakeVllm()) as server:
        server.answer = lambda body: "ten bytes."
        model = NodeChat(model="base", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        rig = Rig(tmp_path, build=build, model=model, max_tokens_per_episode=25)
        began = time.monotonic()
        tally = rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON | {"adapters": {"reasoner": 0}}))
    assert time.monotonic() - began < 20  # its time limit is 30 s
    assert dict(tally.outcomes) == {"truncated": 1}
    assert (tally.sampled_tokens, len(server.asked)) == (25, 3)


# -- what a limit is worth --------------------------------------------------------------------------------------------

LIMIT = LimitReward("reward", -0.5)


def endless(model: Any) -> Any:
    """One node that goes round in circles, four times at most."""
    graph = StateGraph(math_duo.DuoState)
    graph.add_node("reasoner", lambda state: {})
    graph.add_edge(START, "reasoner")
    graph.add_edge("reasoner", "reasoner")
    return graph.compile().with_config(recursion_limit=4)


def asks_a_person(model: Any) -> Any:
    def ask(state: dict[str, Any]) -> dict[str, Any]:
        return {"answer": interrupt("sure?")}

    graph = StateGraph(math_duo.DuoState)
    graph.add_node("reasoner", ask)
    graph.add_edge(START, "reasoner")
    return graph.compile(checkpointer=InMemorySaver())


def crashes(*_: Any) -> str:
    raise ValueError("a bug of the app")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"build": endless}, "recursion limit reached"),
        ({"timeout_s": 0.2, "delay_s": 1.0}, "longer than 0.2 s"),
    ],
)
def test_a_run_that_a_limit_cuts_short_earns_what_that_is_worth_and_has_come_to_its_end(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    rig = Rig(tmp_path, limit_reward=LIMIT, **changes)
    plan = plan_episodes(TASKS, 2, 1, seed=0, **COMMON)
    tally = rig.run(plan)
    assert (tally.outcomes, tally.mean("reward")) == (Counter(truncated=2), -0.5)
    with rig.store() as store:
        runs = list(store.trajectories())
        assert unfinished_requests(store, plan) == []
    assert [(run.episode.outcome, run.episode.reason) for run in runs] == [("truncated", reason)] * 2
    for run in runs:
        assert [(r.name, r.value, r.scope, r.source) for r in run.rewards] == [("reward", -0.5, "episode", OF_LIMIT)]
        assert not run.is_unfinished("reward")


def test_a_run_that_its_limit_of_tokens_cuts_short_earns_it_too(tmp_path: Path) -> None:
    answers = {"base": "ten bytes.", "actor@3": "8 bytes."}
    _, _, (run,) = limited(tmp_path, 15, answers, limit_reward=LIMIT)
    assert (run.team_reward("reward"), run.episode.outcome, len(run.rewards)) == (-0.5, "truncated", 1)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"script": crashes}, "failed", "ValueError: a bug of the app"),
        ({"build": asks_a_person}, "truncated", "interrupted"),
        (
            {"timeout_s": 0.2, "delay_s": 1.0, "came_back": lambda began: True},
            "truncated",
            "longer than 0.2 s, in which the model server was out",
        ),
    ],
    ids=["crash", "interrupt", "outage"],
)
def test_what_ends_before_its_time_for_another_reason_earns_nothing(
    tmp_path: Path, changes: dict[str, Any], outcome: str, reason: str
) -> None:
    rig = Rig(tmp_path, limit_reward=LIMIT, **changes)
    tally = rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON))
    with rig.store() as store:
        (run,) = store.trajectories()
    assert (run.episode.outcome, run.episode.reason, run.rewards) == (outcome, reason, ())
    assert tally.mean("reward") is None
    assert run.is_unfinished("reward") == (outcome == "truncated")


def test_a_run_over_its_time_says_that_the_server_was_out_whether_limits_are_paid_or_not(tmp_path: Path) -> None:
    """`score` may pay for the limits of stored runs later."""
    rig = Rig(tmp_path, timeout_s=0.2, delay_s=1.0, came_back=lambda _: True)
    rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON))
    with rig.store() as store:
        (run,) = store.trajectories()
    assert run.episode.reason == "longer than 0.2 s, in which the model server was out"
    assert not is_limit(run.episode.reason)


def test_a_run_that_was_cancelled_earns_nothing_and_runs_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limit_reward=LIMIT, delay_s=1.5)
    plan = plan_episodes(TASKS, 1, 1, seed=0, **COMMON)

    async def cancelled() -> None:
        running = asyncio.ensure_future(rig.collector.requests_to_episodes(plan))
        await asyncio.sleep(0.3)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    with rig.store() as store:
        (run,) = store.trajectories()
        assert (run.episode.reason, run.rewards) == ("cancelled", ())
        assert unfinished_requests(store, plan) == plan


def test_a_run_over_its_time_that_ends_while_the_server_is_looked_at_is_a_whole_one(tmp_path: Path) -> None:
    """The server is asked about first: what ends meanwhile has come to its end."""

    def slow_look(_began: float) -> bool:
        time.sleep(1.5)
        return False

    rig = Rig(tmp_path, limit_reward=LIMIT, timeout_s=0.5, delay_s=0.4, came_back=slow_look)  # two calls
    assert rig.run(plan_episodes(TASKS, 1, 1, seed=0, **COMMON)).outcomes == Counter(terminated=1)
    with rig.store() as store:
        (run,) = store.trajectories()
    assert run.team_reward("reward") not in (None, -0.5)


def test_wherever_a_command_is_killed_no_run_of_a_limit_is_stored_without_what_it_earned(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "whole", build=endless, limit_reward=LIMIT)
    plan = plan_episodes(TASKS, 1, 1, seed=0, **COMMON)
    rig.run(plan)
    (segment,) = journal_of(rig.path).glob("*.segment")
    written = segment.read_bytes()
    counts = set[tuple[int, int]]()
    for number, end in enumerate(at for at, byte in enumerate(written) if byte == ord("\n")):
        path = tmp_path / f"{number}.duckdb"
        journal_of(path).mkdir()
        (journal_of(path) / segment.name).write_bytes(written[: end + 1])
        with TraceStore.open(path) as store:
            store.take_in()
            ((count,),) = store.sql("SELECT count(*) FROM episodes")
            counts.add((count, sum(len(run.rewards) for run in store.trajectories())))
            assert (unfinished_requests(store, plan) == []) == (count == 1)
    assert counts == {(0, 0), (1, 1)}


def failing(times: int, error: Exception) -> Any:
    """A script whose first `times` calls of the actor about t3 fail."""
    left = [error] * times

    def script(node: str, prompt: str, random: Any) -> str:
        if node == "actor" and "3 + 1?" in prompt and left:
            raise left.pop()
        return right_answer(node, prompt, random)

    return script


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "pause_s", lambda *_: 0.0)


@pytest.mark.usefixtures("no_pauses")
def test_a_failed_episode_is_tried_again_with_its_seed_and_the_last_attempt_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, failing(2, ConnectionResetError("cut")), retries=2)
    plan = plan_episodes(TASKS, 8, 1, seed=0, **COMMON)
    tally = rig.run(plan)
    assert (tally.finished, tally.retried, dict(tally.outcomes)) == (8, 2, {"terminated": 8})
    with rig.store() as store:
        rows = [e for e in store.episodes(run_id="run") if e.task_id == "t3"]
        assert [(e.outcome, e.reason, e.tags) for e in rows] == [
            ("failed", "ConnectionResetError: cut", {}),
            ("failed", "ConnectionResetError: cut", {"attempt": "2"}),
            ("terminated", None, {"attempt": "3"}),
        ]
        calls = [store.trajectory(e.episode_id).actions[0] for e in rows]  # type: ignore[union-attr]
        assert len({action.seed for action in calls}) == 1  # of the reasoner, which answered in all three
        assert unfinished_requests(store, plan) == []
    assert "2 tried again" in tally.figures("correct")


@pytest.mark.usefixtures("no_pauses")
def test_an_episode_that_fails_at_every_attempt_is_counted_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, failing(99, ConnectionResetError("cut")), retries=3)
    tally = rig.run(plan_episodes(TASKS, 8, 1, seed=0, **COMMON))
    assert (tally.finished, tally.retried, dict(tally.outcomes)) == (8, 3, {"terminated": 7, "failed": 1})
    ((reason, count),) = tally.reasons.items()
    assert (reason.partition(" (")[0], count) == ("ConnectionResetError: cut", 1)
    assert "test_collector.py:" in reason  # the line of the app


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("asked", "retried"), [(False, 0), (True, 1)])
def test_what_the_graph_does_wrong_is_tried_again_only_where_that_is_asked_for(
    tmp_path: Path, asked: bool, retried: int
) -> None:
    rig = Rig(tmp_path, failing(1, KeyError("answer")), retries=5, retry_graph_errors=asked)
    tally = rig.run(plan_episodes(TASKS, 8, 1, seed=0, **COMMON))
    assert (tally.retried, tally.outcomes["failed"]) == (retried, 1 - retried)


REQUEST = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")


def answered(status: int) -> openai.APIStatusError:
    return openai.APIStatusError("no", response=httpx.Response(status, request=REQUEST), body=None)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def from_another(cause: Exception) -> Exception:
    return caused(RuntimeError("the planner failed"), cause)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionRefusedError("no"), True),
        (TimeoutError(), True),
        (httpx.ReadError("cut"), True),
        (caused(openai.APIConnectionError(request=REQUEST), httpx.ConnectError("refused")), True),  # as its client does
        (answered(500), True),
        (answered(503), True),
        (answered(429), True),
        (answered(400), False),
        (answered(404), False),
        (from_another(answered(502)), True),
        (from_another(ValueError("no")), False),
        (ExceptionGroup("two nodes", [ValueError("no"), from_another(httpx.ConnectError("no"))]), True),
        (KeyError("answer"), False),
    ],
    ids=repr,
)
def test_what_a_connection_did_is_told_from_what_the_graph_did(error: Exception, passing: bool) -> None:
    assert is_connection_error(error) == passing


def test_pauses_double_up_to_half_a_minute_and_differ_between_episodes() -> None:
    for attempt, longest in [(0, 0.5), (1, 1.0), (4, 8.0), (6, 30.0), (19, 30.0)]:
        pauses = [pause_s(attempt, seed) for seed in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
        assert len(set(pauses)) == 50
    assert pause_s(3, 7) == pause_s(3, 7)
