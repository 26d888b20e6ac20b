"""Owns: a function of the user's, and what is around any reward: time, errors, absence, and who may earn.

- Every shape that docs/rewards.md names becomes rewards of the right scope; any other is an error with the name.
- (task, state) or (task, state, run), plain or async, each called as it wants to be; a plain one beside the loop.
- Over its time a reward is absent and the others are there; eight threads that do not end are too many.
- When the final state is not known, whoever looks at it says so, whatever way it looks.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.reward_rig import TASK, example_run, score, table

from marft_bridge.common.errors import GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.rewards.contract import Absent, Earned, NeedsResult, RunView
from marft_bridge.rewards.function import MAX_LATE_CALLS, UnstoredState
from marft_bridge.rewards.scoring import FUNCTION, Score, Scorer


def given_by(function: Callable[..., Any], run: RunView | None = None, **scorer: Any) -> Score:
    """What graph.reward gives for the example run."""
    return score(run or example_run(), function=(function, "mine:reward"), **scorer)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (0.5, [("reward", 0.5, "episode", None, None)]),
        (True, [("reward", 1.0, "episode", None, None)]),
        ({"a": 1, "b": 0.25}, [("a", 1.0, "episode", None, None), ("b", 0.25, "episode", None, None)]),
        ({"agent:worker": 0.5}, [("reward", 0.5, "agent", None, "worker")]),
        (
            {"a": {"agent:worker": 0.5, "step:call2": -1}},
            [("a", 0.5, "agent", None, "worker"), ("a", -1.0, "step", "call2", None)],
        ),
        (Earned(2.0, "step", action_id="call1"), [("reward", 2.0, "step", "call1", None)]),
        (
            {"a": [Earned(2.0), Earned(3.0, "agent", node="planner")]},
            [("a", 2.0, "episode", None, None), ("a", 3.0, "agent", None, "planner")],
        ),
        ({"a": 1, "b": None}, [("a", 1.0, "episode", None, None)]),
        ({}, []),
    ],
    ids=str,
)
def test_every_shape_becomes_rewards(value: Any, rows: list[tuple[Any, ...]]) -> None:
    rewards = given_by(lambda *_: value).to_rewards("e", 7)
    assert [(r.name, r.value, r.scope, r.action_id, r.node) for r in rewards] == rows
    assert {(r.source, r.created_ns, r.episode_id) for r in rewards} <= {("mine:reward", 7, "e")}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "gave None as 'reward', not a finite number"),
        ("1", "gave '1' as 'reward'"),
        ({"a": float("inf")}, "gave inf as 'a'"),
        ({"a": {"worker": 1}}, "gave {'worker': 1} as 'a'"),
        ({"a": {}}, "gave {} as 'a'"),
        ([1.0], "gave [1.0] as 'reward'"),
        (10**400, "as 'reward', not a finite number"),
        (Earned(1.0, "step"), "level 'step' takes an action_id, level 'agent' a node"),
        (Earned(1.0, "episode", node="worker"), "level 'step' takes an action_id"),
        ({"a": {"agent:worker": float("nan")}}, "gave nan as 'a'"),
        ({"reward": 1.0, "agent:worker": 0.5}, "gave 'agent:worker' beside names of rewards; put it under a name"),
        ({"a": {"agent:nobody": 1}}, "is for node 'nobody', which called no model in the episode"),
        ({"a": {"step:call9": 1}}, "is for action 'call9', which the episode does not have"),
    ],
    ids=str,
)
def test_any_other_shape_is_an_error_that_names_the_function(value: Any, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        given_by(lambda *_: value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_function_on_the_page_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/rewards.md").read_text()
    (tmp_path / "page.py").write_text(page.split("```python\n")[1].split("```")[0])
    function = load_name(f"{tmp_path / 'page.py'}:reward", "k")
    found = given_by(function, example_run(result={"answer": 12}), agents=("reasoner",))
    assert found.team == {"reward": 1.0}
    assert [one.action_id for one in found.earned["short"]] == [f"call{n}" for n in range(1, 6)]
    assert found.earned["helped"] == [Earned(0.5, "agent", node="reasoner")]


class Judge:
    """A callable object whose call is async."""

    async def __call__(self, task: Any, state: Any) -> float:
        return float(task["answer"] + state)


def takes_a_run(_task: Any, _state: Any, run: RunView) -> float:
    return float(len(run.game().actions))


def has_a_run(_task: Any, _state: Any, run: RunView | None = None) -> float:
    return 0.0 if run is None else 1.0


def has_an_option(_task: Any, _state: Any, scale: float = 3.0) -> float:
    return scale


async def is_async(task: Any, state: Any, _run: RunView) -> float:
    await asyncio.sleep(0)
    return float(task["answer"] + state)


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (takes_a_run, 5.0),
        (has_a_run, 1.0),
        (has_an_option, 3.0),
        (is_async, 42.0),
        (Judge(), 42.0),
        (lambda task, state: is_async(task, state, None), 42.0),  # a plain function that gives an awaitable
        (max, None),
    ],
)
def test_a_function_is_called_as_it_wants_to_be(function: Any, value: float | None) -> None:
    if value is None:
        with pytest.raises(GraphError, match=r"'mine:reward' failed: TypeError"):
            given_by(function, example_run(result=30))
    else:
        assert given_by(function, example_run(result=30)).team == {"reward": value}


def test_a_plain_function_runs_beside_the_loop_in_the_context_of_its_episode() -> None:
    here: ContextVar[str] = ContextVar("here", default="nowhere")
    seen: list[tuple[str, bool]] = []

    pair = threading.Barrier(2, timeout=30)  # passed two at a time: one after the other none would pass it

    def slow(*_: Any) -> float:
        pair.wait()
        seen.append((here.get(), threading.current_thread() is threading.main_thread()))
        return 1.0

    async def twenty() -> None:
        scorer = Scorer(function=(slow, "mine:reward"))
        here.set("episode")
        await asyncio.gather(*(scorer.run_to_score(example_run()) for _ in range(20)))

    asyncio.run(twenty())
    assert seen == [("episode", False)] * 20


def test_a_thread_that_is_held_up_after_its_function_returned_is_not_called_left_running() -> None:
    async def twice() -> list[str]:
        loop = asyncio.get_running_loop()
        hand_over = loop.call_soon_threadsafe

        def held_up(*arguments: Any, **names: Any) -> Any:
            hand_over(*arguments, **names)
            if threading.current_thread().name == "reward":
                time.sleep(0.3)  # as on a machine with more to do: longer than what is left behind may take to end

        loop.call_soon_threadsafe = held_up  # type: ignore[assignment]
        scorer = Scorer(function=(lambda *_: 1.0, "mine:reward"))
        for _ in range(2):
            assert (await scorer.run_to_score(example_run())).team == {"reward": 1.0}
        await asyncio.sleep(0.2)
        return scorer.take_thread_lines()

    assert asyncio.run(twice()) == []


@pytest.mark.parametrize("how", ["plain", "async"])
def test_over_its_time_a_reward_is_absent_and_the_others_are_there(how: str) -> None:
    ended = threading.Event()

    async def waits(*_: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    function = waits if how == "async" else lambda *_: float(ended.wait(60))
    try:
        found = given_by(function, timeout_s=0.1)
        assert found.earned == {}
        assert found.absent == {FUNCTION: "took longer than 0.1 s"}
        beside = score(example_run(), table(kind="tokens"), function=(function, "f"), timeout_s=0.1)
        assert beside.team == {"tokens": 25.0}
    finally:
        ended.set()


def test_a_time_limit_of_the_functions_own_is_its_error_not_ours() -> None:
    def gives_up(*_: Any) -> float:
        raise TimeoutError("no answer")

    with pytest.raises(GraphError, match="failed: TimeoutError: no answer"):
        given_by(gives_up)


def test_threads_that_do_not_end_are_too_many_at_some_point() -> None:
    ended = threading.Event()
    scorer = Scorer(function=(lambda *_: float(ended.wait(60)), "mine:reward"), timeout_s=0.02)

    async def again() -> Score:
        return await scorer.run_to_score(example_run())

    try:
        for _ in range(MAX_LATE_CALLS):
            assert asyncio.run(again()).earned == {}
        with pytest.raises(GraphError, match="'mine:reward': 8 calls of it still run after their time limit"):
            asyncio.run(again())
    finally:
        ended.set()
    time.sleep(0.2)
    assert asyncio.run(again()).team == {"reward": 1.0}  # they did end


def test_a_thread_that_does_not_end_does_not_keep_the_process_from_ending() -> None:
    code = """
import asyncio, threading
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.scoring import Scorer
never = threading.Event()
scorer = Scorer(function=(lambda *_: never.wait(), "f"), timeout_s=0.1)
print(asyncio.run(scorer.run_to_score(RunView({}, {}))).absent)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "{'graph.reward': 'took longer than 0.1 s'}\n"


def test_a_function_may_say_that_it_has_no_reward() -> None:
    def cannot(*_: Any) -> float:
        raise Absent("the judge is on holiday")

    assert given_by(cannot).absent == {FUNCTION: "the judge is on holiday"}
    assert given_by(lambda *_: {"a": None}).absent == {"a": "does not apply to the episode"}


# -- beside declared rewards --------------------------------------------------------------------------------------


def test_declared_rewards_are_computed_from_what_the_function_gives() -> None:
    tables = [
        table(kind="composite", name="total", weights={"correct": 2.0, "tokens": -0.01}),
        table(kind="task_completion", name="done", rewards={"correct": 1.0}),
        table(kind="tokens"),
    ]
    found = score(example_run(), *tables, function=(lambda *_: {"correct": 1.0}, "f"))
    assert found.team == {"correct": 1.0, "tokens": 25.0, "total": 1.75, "done": 1.0}
    assert found.sources == {"correct": "f", "tokens": "tokens", "total": "composite", "done": "task_completion"}


def test_a_name_that_the_function_does_not_give_or_gives_too_is_named() -> None:
    total = table(kind="composite", name="total", weights={"corect": 2.0})
    with pytest.raises(
        GraphError, match=r"rewards\.total: it is computed from 'corect', which graph\.reward did not give"
    ):
        score(example_run(), total, function=(lambda *_: {"correct": 1.0}, "f"))
    with pytest.raises(GraphError, match=r"rewards\.tokens: graph\.reward gives a reward of this name too"):
        score(example_run(), table(kind="tokens"), function=(lambda *_: {"tokens": 1.0}, "f"))


def test_what_is_computed_from_an_absent_reward_is_absent() -> None:
    total = table(kind="composite", name="total", weights={"correct": 2.0})
    assert score(example_run(), total, function=(lambda *_: {"correct": None}, "f")).absent == {
        "correct": "does not apply to the episode",
        "total": "'correct' is absent",
    }


def test_a_declared_function_is_loaded_before_any_episode_and_named_when_it_breaks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "LIST = []\ndef short(task, state, run):\n    return {'step:call3': 1.0}\n"
        "def broken(task, state):\n    return state['x']\n"
    )
    at = f"{tmp_path / 'mine.py'}"
    (reward,) = score(example_run(), table(kind="python", name="s", function=f"{at}:short")).to_rewards("e", 0)
    assert (reward.name, reward.scope, reward.action_id, reward.source) == ("s", "step", "call3", f"{at}:short")
    with pytest.raises(GraphError, match=r"rewards\.b: the reward .*mine\.py:broken' failed: KeyError: 'x'"):
        score(example_run(result={}), table(kind="python", name="b", function=f"{at}:broken"))
    with pytest.raises(GraphError, match=r"rewards\.n\.function: .* has no 'nothing'"):
        Scorer([table(kind="python", name="n", function=f"{at}:nothing")])
    with pytest.raises(GraphError, match=r"rewards\.n\.function: .*LIST' is a list, not a function"):
        Scorer([table(kind="python", name="n", function=f"{at}:LIST")])


# -- the final state is not known ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        lambda state: state["answer"],
        lambda state: state.answer,
        lambda state: state.get("answer"),
        lambda state: "answer" in state,
        lambda state: list(state),
        lambda state: isinstance(state, dict),
        lambda state: state == {},
        lambda state: float(state),
        lambda state: str(state),
        lambda state: f"{state}",
        lambda state: len(state) or bool(state),
        lambda state: {**state},
    ],
)
def test_whoever_looks_at_a_final_state_that_is_not_stored_says_so(look: Callable[[Any], Any]) -> None:
    with pytest.raises(NeedsResult):
        look(UnstoredState())
    found = given_by(lambda _task, state: look(state), example_run(rescoring=True))
    assert found.needs_result == {FUNCTION}
    assert found.earned == {}


def test_who_does_not_look_at_it_is_computed_and_a_table_that_does_is_named() -> None:
    tables = [
        table(kind="exact", answer_from="answer", expected_from="answer"),
        table(kind="tokens"),
        table(kind="composite", weights={"exact": 1.0, "tokens": 0.1}),
    ]
    found = score(example_run(TASK, rescoring=True), *tables, function=(takes_a_run, "f"))
    assert found.team == {"tokens": 25.0, "reward": 5.0}
    assert found.needs_result == {"exact"}
    assert found.absent["exact"] == "it reads 'answer' of the final state, which is not stored"
    known = score(example_run(TASK, rescoring=True), *tables, known={"exact": 1.0})
    assert known.team == {"tokens": 25.0, "composite": 3.5}
    stale = score(example_run(TASK, rescoring=True), *tables, known={"exact": 1.0, "tokens": 1000.0})
    assert stale.team == {"tokens": 25.0, "composite": 3.5}  # what is computed now, not what was stored
