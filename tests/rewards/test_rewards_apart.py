"""Owns: that a reward can harm no other reward, no other episode and no run.

- Each reward has a copy of the task of its own, and so has each sample.
- Whatever a reward raises carries its name and is an error of its episode; a real Ctrl-C and a cancellation go through.
- A reward that hangs is ended at its limit: its threads and those that these start, and a coroutine that catches its
  cancellation. Threads of others, and of pools, are not ended. What is stuck in C holds nothing up, and is counted.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.paths import ROOT
from support.reward_rig import example_run, score, table

from marft_bridge.common.errors import RewardFailedError
from marft_bridge.rewards import contract, registry
from marft_bridge.rewards.call_threads import Leftovers, RewardCall
from marft_bridge.rewards.contract import Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.scoring import Scorer

OWN_ERRORS = [
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
    GeneratorExit,
    MemoryError,
    StopIteration,
    KeyError,
]


def test_each_reward_has_a_task_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def change(task, state):\n    value = task['answer']\n    task['answer'] = 999\n"
        "    task['tools'].append('x')\n    task['new'] = 1\n    return value\n"
        "def read(task, state):\n    return task['answer'] + 100 * len(task['tools']) + 1000 * ('new' in task)\n"
    )
    task = {"id": "t1", "answer": 12, "tools": ["search", "calc"]}
    module = tmp_path / "mine.py"
    names = ("change", "read")
    tables = [table(kind="python", name=name, function=f"{module}:{name}") for name in names]

    def function(task: Any, _state: Any, run: RunView) -> float:
        assert run.task is task
        task["tools"].clear()
        task["answer"] -= 1
        return float(task["answer"])

    for _ in range(2):
        found = score(example_run(task), *tables, function=(function, "mine:reward"))
        assert found.team == {"reward": 11.0, "change": 12.0, "read": 212.0}
    assert task == {"id": "t1", "answer": 12, "tools": ["search", "calc"]}


def test_what_a_reward_changes_in_the_final_state_no_other_reward_sees() -> None:
    def change(_task: Any, state: Any) -> float:
        state["answer"] = "12"
        state["steps"][0]["done"].append(2)
        state["seen"].add(3)
        return 1.0

    marker = object()
    state: dict[str, Any] = {"answer": "wrong", "steps": ({"done": [1]},), "seen": {1}, "client": marker}
    state["itself"] = state
    right = table(kind="exact", answer_from="answer", expected_from="answer")
    assert score(example_run(result=state), right, function=(change, "mine:reward")).team == {"reward": 1.0, "exact": 0}
    assert (state["answer"], state["steps"], state["seen"]) == ("wrong", ({"done": [1]},), {1})

    def shares(_task: Any, given: Any) -> float:
        return float(given["client"] is marker and given["itself"] is given)

    assert score(example_run(result=state), function=(shares, "mine:reward")).team == {"reward": 1.0}


def test_a_number_that_is_not_finite_ends_its_episode_whatever_the_kind() -> None:
    great = table(kind="composite", name="great", weights={"step_count": 1e308, "tokens": 1e308})
    with pytest.raises(RewardFailedError, match="the reward 'great' is inf, not a finite number"):
        score(example_run(), table(kind="step_count", budget=1), table(kind="tokens"), great)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "composite", "weights": {"a": float("nan")}},
        {"kind": "code", "answer_from": "a", "wall_s": float("inf")},
        {"kind": "math", "answer_from": "a", "expected_from": "b", "limit_s": float("inf")},
        {"kind": "task_completion", "rewards": {"a": float("nan")}},
        {"kind": "cost", "per_million": {"prompt": float("inf"), "sampled": 1}},
        {"kind": "step_count", "budget": 3, "timeout_s": float("inf")},
    ],
    ids=str,
)
def test_an_option_that_is_not_finite_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        table(**options)


@pytest.mark.parametrize("error", OWN_ERRORS)
@pytest.mark.parametrize("form", ["plain", "async", "awaitable"])
def test_whatever_a_function_raises_carries_its_name(error: type[BaseException], form: str) -> None:
    def plain(*_: Any) -> float:
        raise error("over")

    async def raises(*_: Any) -> float:
        raise error("over")

    def awaitable(*_: Any) -> Any:
        return raises()

    function = {"plain": plain, "async": raises, "awaitable": awaitable}[form]
    # Python turns a StopIteration that leaves a coroutine into a RuntimeError.
    name = "RuntimeError" if error is StopIteration and form != "plain" else error.__name__
    with pytest.raises(RewardFailedError, match=f"the reward 'mine:reward' failed: {name}: "):
        score(example_run(), function=(function, "mine:reward"))


@pytest.mark.parametrize("error", [e for e in OWN_ERRORS if e is not StopIteration])
def test_whatever_a_kind_raises_carries_the_name_of_its_table(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenOptions(RewardOptions):
        kind: str = "broken"

    async def broken(_: RewardOptions, __: RunView) -> list[Earned]:
        raise error("over")

    monkeypatch.setitem(registry._KINDS, BrokenOptions, Kind(BrokenOptions, broken))
    with pytest.raises(RewardFailedError, match=rf"rewards\.mine failed: {error.__name__}: "):
        score(example_run(), BrokenOptions(name="mine"), table(kind="tokens"))


def test_a_cancelled_run_is_cancelled() -> None:
    began = asyncio.Event()

    async def waits(*_: Any) -> float:
        began.set()
        await asyncio.sleep(60)
        return 1.0

    async def cancel() -> None:
        task = asyncio.create_task(Scorer(function=(waits, "f")).run_to_score(example_run()))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 10))


@pytest.mark.parametrize("form", ["def slow(*_): time.sleep(60)", "async def slow(*_): await asyncio.sleep(60)"])
@pytest.mark.parametrize("presses", [1, 2])
def test_a_ctrl_c_of_the_user_ends_the_run(form: str, presses: int) -> None:
    code = f"""
import asyncio, time
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer
{form}
async def main():
    print("began", flush=True)
    await Scorer(function=(slow, "f")).run_to_score(RunView({{}}, {{}}))
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        time.sleep(0.3)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode in (-signal.SIGINT, 130)
        # with a colon where the second signal met the loop that was closing for the first
        assert stderr.strip().splitlines()[-1].rstrip(":") == "KeyboardInterrupt"
    finally:
        process.kill()


def test_a_thread_that_runs_on_is_ended_at_its_limit() -> None:
    threads: list[threading.Thread] = []

    def stubborn(*_: Any) -> float:
        threads.append(threading.current_thread())
        while True:
            try:
                while True:
                    time.sleep(0.001)
            except Exception:  # noqa: BLE001, S112 - it does not want to end
                continue

    scorer = Scorer(function=(stubborn, "mine:reward"), timeout_s=0.1)
    for _ in range(12):  # more than may be late at a time
        assert asyncio.run(scorer.run_to_score(example_run())).absent == {"graph.reward": "took longer than 0.1 s"}
        threads[-1].join(10)
        assert not threads[-1].is_alive()


def runs_on() -> None:
    """Does not want to end."""
    while True:
        try:
            time.sleep(0.001)
        except Exception:  # noqa: BLE001, S112
            continue


def wait_until_ended(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(10)
    assert [thread for thread in threads if thread.is_alive()] == []


def started(threads: list[threading.Thread], target: Callable[[], Any], **options: Any) -> threading.Thread:
    threads.append(threading.Thread(target=target, **options))
    threads[-1].start()
    return threads[-1]


@pytest.mark.parametrize("form", ["plain", "async"])
@pytest.mark.parametrize("ending", ["limit", "return", "error"])
def test_threads_of_a_reward_are_ended_with_it_and_those_that_these_started(form: str, ending: str) -> None:
    threads: list[threading.Thread] = []

    def starts_more() -> None:
        started(threads, runs_on, daemon=False)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: (threads.append(threading.current_thread()), runs_on()), range(2)))

    def start() -> None:
        started(threads, starts_more)
        deadline = time.monotonic() + 5
        while len(threads) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)

    def leave() -> float:
        if ending == "error":
            raise ValueError("over")
        return 1.0

    def plain(*_: Any) -> float:
        start()
        if ending == "limit":
            threads[0].join()
        return leave()

    async def waits(*_: Any) -> float:
        start()
        while ending == "limit" and threads[0].is_alive():
            await asyncio.sleep(0.01)
        return leave()

    scorer = Scorer(function=(plain if form == "plain" else waits, "mine:reward"), timeout_s=1.0)
    if ending == "error":
        with pytest.raises(RewardFailedError, match="ValueError: over"):
            asyncio.run(scorer.run_to_score(example_run()))
    else:
        score = asyncio.run(scorer.run_to_score(example_run()))
        assert score.absent == ({"graph.reward": "took longer than 1 s"} if ending == "limit" else {})
    assert len(threads) == 4
    wait_until_ended(threads)


def test_a_thread_that_starts_another_before_it_ends_is_ended() -> None:
    threads: list[threading.Thread] = []

    def relay() -> None:
        try:
            time.sleep(0.01)
        finally:
            started(threads, relay)

    def reward(*_: Any) -> float:
        started(threads, relay)
        return 1.0

    assert score(example_run(), function=(reward, "f")).team == {"reward": 1.0}
    time.sleep(0.5)
    count = len(threads)
    assert threads[-1].ident is None  # it was refused
    wait_until_ended(threads[:-1])
    time.sleep(0.2)
    assert len(threads) == count


def test_threads_of_others_are_not_ended() -> None:
    """Of the run, of a reward that runs at the same time, and of pools, whoever had them start a thread."""
    stop, entered, errors = threading.Event(), threading.Event(), list[BaseException]()

    def until_stopped() -> float:
        entered.set()
        try:
            while not stop.is_set():
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)
            raise
        return 2.0

    threads: list[threading.Thread] = []
    pool = ThreadPoolExecutor(3)  # like one of a module: its threads start when a reward gives it work

    def other(*_: Any) -> float:
        started(threads, until_stopped).join()
        return 2.0

    def hangs(*_: Any) -> float:
        [pool.submit(runs_on) for _ in range(2)]
        pool.submit(runs_on).result()
        return 1.0

    async def play() -> tuple[Any, Any]:
        slow = asyncio.create_task(Scorer(function=(other, "other")).run_to_score(example_run()))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        late = await Scorer(function=(hangs, "hangs"), timeout_s=0.2).run_to_score(example_run())
        await asyncio.sleep(0.5)  # much longer than ending takes
        assert not slow.done()
        stop.set()
        return late, await slow

    started(threads, until_stopped)
    late, slow = asyncio.run(play())
    assert late.absent == {"graph.reward": "took longer than 0.2 s"}
    assert (slow.team, errors) == ({"reward": 2.0}, [])
    assert list(pool.map(lambda n: n + 1, range(20))) == list(range(1, 21))
    workers = {thread.ident for thread in pool._threads}
    assert score(example_run(), function=(lambda *_: pool.submit(pow, 2, 3).result(), "f")).team == {"reward": 8.0}
    assert workers == {thread.ident for thread in pool._threads if thread.is_alive()}
    pool.shutdown()
    wait_until_ended(threads)


def test_no_request_to_end_arrives_in_what_a_thread_does_next() -> None:
    """Pieces of calls that end at every moment, and of nobody's, in turns in the same threads of one pool."""
    pool, errors, ended = ThreadPoolExecutor(2), list[BaseException](), Counter[str]()

    def own(rng: random.Random) -> None:
        until_s = time.monotonic() + rng.random() * 0.1
        while time.monotonic() < until_s:
            pass

    def honest() -> None:
        try:
            until_s = time.monotonic() + 0.002
            while time.monotonic() < until_s:
                pass
        except BaseException as error:
            errors.append(error)
            raise

    rng = random.Random(1)
    for _ in range(60):
        call = RewardCall(Leftovers("f"))
        with call.entered():
            pieces = [pool.submit(own, rng) for _ in range(2)]
        honest_pieces = [pool.submit(honest) for _ in range(4)]
        time.sleep(rng.random() * 0.03)
        call.end(is_late=True)
        ended.update(type(piece.exception(10)).__name__ for piece in pieces if not piece.cancelled())
        assert [piece.exception(10) for piece in honest_pieces] == [None] * 4
    assert errors == []
    assert ended["PastLimit"] > 10
    pool.shutdown()


@pytest.mark.parametrize("form", ["thread", "pool", "to_thread", "loop_threads"])
def test_what_never_returns_from_c_keeps_neither_run_nor_process_and_is_counted(form: str) -> None:
    code = f"""
import asyncio, threading, time
from concurrent.futures import ThreadPoolExecutor
from marft_bridge.common.loop_threads import LoopThreads
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer

never = threading.Lock()
never.acquire()

def thread(*_):
    threading.Thread(target=never.acquire, name="left", daemon=False).start()
    time.sleep(0.1)
    return 1.0

def pool(*_):
    with ThreadPoolExecutor(1) as workers:
        workers.submit(never.acquire)

async def to_thread(*_):
    await asyncio.to_thread(never.acquire)

async def loop_threads(*_):
    asyncio.get_running_loop().set_default_executor(LoopThreads(2))
    await asyncio.to_thread(never.acquire)

scorer = Scorer(function=({form}, "f"), timeout_s=0.5)
score = asyncio.run(scorer.run_to_score(RunView({{}}, {{}})))
print(score.team, score.absent)
time.sleep(0.5)
for line in scorer.take_thread_lines():
    print(line)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    outcome, *lines = process.stdout.splitlines()
    goes_on = "of the reward 'f' go on after its calls, because what they run does not return to Python"
    piece = "a piece of work in a pool"
    assert (outcome, lines) == {
        "thread": (
            "{'reward': 1.0} {}",
            [
                "the reward 'f' left 1 threads or pieces of work running when its calls returned; they were ended",
                f"1 threads {goes_on}: left; nothing waits for them",
            ],
        ),
        "pool": (
            "{} {'graph.reward': 'took longer than 0.5 s'}",
            [f"2 threads {goes_on}: {piece}, reward; nothing waits for them"],
        ),
        "to_thread": (
            "{} {'graph.reward': 'took longer than 0.5 s'}",
            [f"1 threads {goes_on}: {piece}; nothing waits for them"],
        ),
    }["to_thread" if form == "loop_threads" else form]
    assert ("returned and left running: left" in process.stderr) == (form == "thread")


@pytest.mark.parametrize(
    "function",
    [
        "lambda *_: 1.0",
        "lambda *_: time.sleep(0.7)",  # takes the request when it returns
        "lambda *_: never.acquire()",
        "lambda *_: threading.Thread(target=never.acquire).start() or 1.0",
    ],
)
def test_calls_that_are_traced_come_to_their_end_after_a_call_of_a_reward(function: str) -> None:
    """An error that was to be raised in a thread and never arrived has CPython 3.11 hang in every traced call."""
    code = f"""
import asyncio, sys, threading, time
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer

never = threading.Lock()
never.acquire()
scorer = Scorer(function=({function}, "f"), timeout_s=0.3)
asyncio.run(scorer.run_to_score(RunView({{}}, {{}})))
time.sleep(1)

def work(number):
    return number + 1

began, number = time.monotonic(), 0
while time.monotonic() < began + 6:
    sys.settrace(lambda *_: None)
    number = work(number)
    sys.settrace(None)
    time.sleep(0.01)
print("traced", number > 20)
"""
    argv = [sys.executable, "-X", "faulthandler", "-c", code]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert process.stdout == "traced True\n"


def test_a_coroutine_that_catches_its_cancellation_is_ended() -> None:
    ended = []

    async def stubborn(*_: Any) -> float:
        try:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        finally:
            ended.append(True)

    began = time.monotonic()
    found = score(example_run(), table(kind="tokens"), function=(stubborn, "f"), timeout_s=0.1)
    assert found.absent == {"graph.reward": "took longer than 0.1 s"}
    assert found.team == {"tokens": 25.0}
    assert ended == [True]
    assert time.monotonic() - began < 10


def test_the_contract_says_what_ends_an_episode() -> None:
    assert "ends its episode" in " ".join(str(contract.__doc__).split())
