"""Owns: recording loses no run that had ended, and never harms the app that it watches.

- An app that is killed at any moment leaves every run that it had reported as a whole episode, and no other.
- A disk that is full, gone or refusing, and a recorder that breaks in every callback, change no result; what was
  lost is said, what comes later is recorded again.
- An odd value among a call's parameters, in its answer, or in what the app hands to the recorder costs that value at
  most, and it is said which; a span that cannot be written costs no other span, and is no failure of the disk.
- A disk that is slow stalls no event loop, and the app's seeded random numbers stay what they were.
- Calls from threads, executors and nested loops belong to the run that made them, wherever Python lets us know
  it; a call whose run cannot be known is mixed into no other run.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

import numpy
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from pydantic import Field
from support.edge_rig import edges_of
from support.paths import ROOT

from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording import recorder as recorder_module
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.errors import StoreError
from trace_store.journal import read_segment
from trace_store.records import Action, SpanRow, Trajectory
from trace_store.store import TraceStore

APP = """
import asyncio, resource, sys
from typing import TypedDict
from langgraph.graph import END, START, StateGraph
import marft_bridge
from marft_bridge.model_calls.scripted_model import ScriptedPolicy

class State(TypedDict):
    number: int
    text: str

model = ScriptedPolicy(script=lambda node, prompt, _: f"{node} {prompt.split()[1]}", delay_s=0.001)

async def speak(state):
    return {"text": (await model.ainvoke(str(state["number"]))).text}

graph = StateGraph(State)
graph.add_node("draft", speak)
graph.add_node("edit", speak)
graph.add_edge(START, "draft")
graph.add_edge("draft", "edit")
graph.add_edge("edit", END)
app = graph.compile()
"""

ENDLESS = """
recorder = marft_bridge.instrument(sys.argv[1])

async def one_after_another(first):
    for number in range(first, first + 100_000):
        result = await app.ainvoke({"number": number})
        sys.stdout.write(f"{number} {result['text']}\\n")
        sys.stdout.flush()

async def main():
    await asyncio.gather(*(one_after_another(k * 100_000) for k in range(4)))

asyncio.run(main())
"""

FULL_DISK = """
recorder = marft_bridge.instrument(sys.argv[1])
unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

def run(number):
    return asyncio.run(app.ainvoke({"number": number}))["text"]

results = [run(0)]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
results += [run(number) for number in range(1, 6)]
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
results += [run(6)]
print(results, recorder.failure)
"""


def trajectories_in(path: Path) -> list[Trajectory]:
    with TraceStore.open(path) as store:
        store.take_in()
        return list(store.trajectories())


def completions(trajectory: Trajectory) -> list[str]:
    return sorted(str(action.completion) for action in trajectory.actions)


# Killed


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_every_run_that_a_killed_app_had_reported_is_a_whole_episode(tmp_path: Path, how: signal.Signals) -> None:
    rng, reported_in_all = random.Random(int(how)), 0
    for trial in range(3):
        store = tmp_path / f"{trial}.duckdb"
        app = subprocess.Popen(
            [sys.executable, "-c", APP + ENDLESS, str(store)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert app.stdout is not None
        first = app.stdout.readline()
        time.sleep(rng.random() * 0.5)
        app.send_signal(how)
        lines = (first + app.stdout.read()).split("\n")[:-1]  # a last line without its end reports nothing
        app.stdout.close()
        assert app.wait() == -how
        reported = {int(line.split()[0]) for line in lines}
        stored = trajectories_in(store)
        numbers = [int(completions(trajectory)[0].split()[1]) for trajectory in stored]
        assert reported <= set(numbers)
        assert len(numbers) == len(set(numbers)) <= len(reported) + 4  # one run of each task may have just ended
        for trajectory, number in zip(stored, numbers, strict=True):
            assert completions(trajectory) == [f"draft {number}", f"edit {number}"]
        reported_in_all += len(reported)
    assert reported_in_all >= 3


# The disk


@pytest.mark.slow
def test_a_full_disk_changes_no_result_and_costs_only_the_runs_that_met_it(tmp_path: Path) -> None:
    def run_with(limit: int) -> tuple[str, list[Trajectory]]:
        store = tmp_path / f"{limit}.duckdb"
        done = subprocess.run(
            [sys.executable, "-c", APP + FULL_DISK, str(store), str(limit)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout.strip(), trajectories_in(store)

    results = str([f"edit {number}" for number in range(7)])
    said, stored = run_with(2**30)
    assert said == f"{results} None"
    assert [completions(one)[0] for one in stored] == [f"draft {number}" for number in range(7)]

    for limit in (2_000, 9_000, 12_000):  # bytes: in the middle of some run
        said, stored = run_with(limit)
        assert said.startswith(results)
        assert "File too large; free space" in said
        numbers = [int(completions(one)[0].split()[1]) for one in stored]
        assert len(numbers) < 7
        assert numbers[-1] == 6  # the disk had room again
        for trajectory, number in zip(stored, numbers, strict=True):
            assert completions(trajectory) == [f"draft {number}", f"edit {number}"]


class Number(TypedDict):
    number: int


def speaker(model: ScriptedPolicy) -> Callable[[Number], Number]:
    def node(state: Number) -> Number:
        model.invoke(str(state["number"]))
        return state

    return node


def numbered_graph() -> Any:
    """START -> draft -> END; the call's completion is the number."""
    model = ScriptedPolicy(script=lambda node, prompt, _: f"{node} {prompt.split()[1]}")
    graph = StateGraph(Number)
    graph.add_node("draft", speaker(model))
    graph.add_edge(START, "draft")
    graph.add_edge("draft", END)
    return graph.compile()


def losses_said(recorder: Recorder) -> int:
    """What the recorder and its journal say about losses, after a sync that may find one itself."""
    try:
        recorder.journal.sync()
    except StoreError as error:
        assert "was deleted while it was written; its records are lost" in str(error)  # noqa: PT017
        return 1
    return recorder.failures + (recorder.failure is not None) + (recorder.journal.failure is not None)


def test_a_journal_that_is_deleted_under_the_recorder_is_said_and_begun_anew(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"
    graph = wrap(numbered_graph(), store)
    graph.invoke({"number": 1})
    assert losses_said(graph.recorder) == 0
    shutil.rmtree(tmp_path / "store.duckdb.journal")
    assert graph.invoke({"number": 2}) == {"number": 2}
    assert losses_said(graph.recorder) == 1
    assert graph.invoke({"number": 3}) == {"number": 3}
    assert [completions(one) for one in trajectories_in(store)] == [["draft 3"]]


def test_a_disk_that_turns_read_only_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store.duckdb"
    graph = wrap(numbered_graph(), store)
    graph.invoke({"number": 1})

    def refused(*_: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "pwrite", refused)
        assert graph.invoke({"number": 2}) == {"number": 2}
    assert graph.invoke({"number": 3}) == {"number": 3}
    assert "Read-only file system" in str(graph.recorder.failure)
    assert [completions(one) for one in trajectories_in(store)] == [["draft 1"], ["draft 3"]]


# A recorder that breaks


class Broken(dict[Any, Any]):
    """A dictionary of which every use raises."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = get = pop = setdefault = values = _refuse
    items = keys = _refuse


def test_a_recorder_that_breaks_in_every_callback_changes_no_result(tmp_path: Path) -> None:
    graph = wrap(numbered_graph(), tmp_path / "store.duckdb")
    graph.recorder._open_runs._runs = Broken()
    assert graph.invoke({"number": 1}) == {"number": 1}
    assert asyncio.run(graph.ainvoke({"number": 2})) == {"number": 2}
    assert list(graph.stream({"number": 3}, stream_mode="values"))[-1] == {"number": 3}
    # Three runs of: start and end of the run, of its node and of its call.
    assert graph.recorder.failures >= 3 * 6
    assert trajectories_in(tmp_path / "store.duckdb") == []


def test_a_run_of_which_one_callback_failed_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store.duckdb"
    graph = wrap(numbered_graph(), store)
    graph.invoke({"number": 1})

    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    for name in ("_open_call", "_open_node"):
        with monkeypatch.context() as once:
            once.setattr(graph.recorder, name, broken)
            assert graph.invoke({"number": 2}) == {"number": 2}
    graph.invoke({"number": 3})
    assert [completions(one) for one in trajectories_in(store)] == [["draft 1"], ["draft 3"]]


# Odd values of the app


class Stop(enum.Enum):
    WORD = "stop"


class StopNumber(enum.IntEnum):
    STOP = 1


class Unshowable:
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("broken on purpose")

    __repr__ = __str__


class OddModel(BaseChatModel):
    """Answers with these odd metadata, and says that it was called with these parameters."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    generation_info: dict[str, Any] = Field(default_factory=dict)
    metadata_of_answer: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "odd"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.parameters

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        answer = AIMessage("done", response_metadata=self.metadata_of_answer)
        return ChatResult(generations=[ChatGeneration(message=answer, generation_info=self.generation_info)])


def graph_that_runs(node: Callable[[Any], Any], *, schema: Any = Number, context_schema: Any = None) -> Any:
    graph = StateGraph(schema, context_schema=context_schema)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    return graph.compile()


def only_call(store: Path) -> tuple[Action, dict[str, Any]]:
    """The only call of the only run, and the attributes of its span."""
    with TraceStore.open(store) as opened:
        opened.take_in()
        (trajectory,) = opened.trajectories()
        (action,) = trajectory.actions
        (span,) = (each for each in opened.spans(trajectory.episode.episode_id) if each.operation == c.CHAT)
        return action, span.attributes


NOTHING = object()
PARAMETERS: list[tuple[str, Any, str, Any]] = [  # parameter, its value -> field of the action, what it holds
    ("temperature", "0.7", "temperature", 0.7),
    ("temperature", 1, "temperature", 1.0),
    ("temperature", numpy.float32(0.5), "temperature", 0.5),
    ("temperature", Decimal("0.25"), "temperature", 0.25),
    ("temperature", "hot", "temperature", NOTHING),
    ("temperature", math.nan, "temperature", NOTHING),
    ("temperature", 10**400, "temperature", NOTHING),
    ("temperature", True, "temperature", NOTHING),
    ("temperature", Unshowable(), "temperature", NOTHING),
    ("top_p", "inf", "top_p", NOTHING),
    ("top_k", 40.0, "top_k", 40),
    ("top_k", 40.5, "top_k", NOTHING),
    ("top_k", "40", "top_k", 40),
    ("seed", numpy.int64(3), "seed", 3),
    ("seed", 2**70, "seed", NOTHING),
    ("seed", "1e999999999", "seed", NOTHING),
    ("max_tokens", math.inf, "max_tokens", NOTHING),
    ("max_tokens", 2**31 - 1, "max_tokens", 2**31 - 1),
    ("max_tokens", 2**31, "max_tokens", NOTHING),
]


@pytest.mark.parametrize(
    ("name", "value", "field", "held"), PARAMETERS, ids=[f"{row[0]}-{number}" for number, row in enumerate(PARAMETERS)]
)
def test_a_parameter_is_recorded_as_the_number_that_it_is_or_left_out_and_said(
    name: str, value: Any, field: str, held: Any, tmp_path: Path
) -> None:
    model = OddModel().bind(**{name: value})
    graph = wrap(graph_that_runs(lambda state: model.invoke("x") and state), tmp_path / "store.duckdb")
    assert graph.invoke({"number": 1}) == {"number": 1}
    action, _ = only_call(tmp_path / "store.duckdb")
    assert getattr(action, field) == (None if held is NOTHING else held)
    said = f"1 values of gen_ai.request.{name} could not be read" if held is NOTHING else ""
    assert str(graph.recorder.losses) == said
    assert graph.recorder.failure is None


@pytest.mark.parametrize(
    ("odd", "attribute", "held"),
    [
        ({"parameters": {"model": object()}}, c.REQUEST_MODEL, None),
        ({"generation_info": {"finish_reason": Stop.WORD}}, c.FINISH_REASONS, ["stop"]),
        ({"generation_info": {"finish_reason": StopNumber.STOP}}, c.FINISH_REASONS, ["STOP"]),
        ({"generation_info": {"finish_reason": 1.5}}, c.FINISH_REASONS, None),
        ({"metadata_of_answer": {"model_name": 5}}, c.RESPONSE_MODEL, None),
        ({"metadata_of_answer": {"id": 17}}, c.RESPONSE_ID, None),
    ],
)
def test_what_an_answer_is_not_of_the_type_for_is_left_out_and_said(
    odd: dict[str, Any], attribute: str, held: Any, tmp_path: Path
) -> None:
    model = OddModel(**odd)
    graph = wrap(graph_that_runs(lambda state: model.invoke("x") and state), tmp_path / "store.duckdb")
    graph.invoke({"number": 1})
    _, attributes = only_call(tmp_path / "store.duckdb")
    assert attributes.get(attribute) == held
    assert graph.recorder.losses.unreadable == ({attribute: 1} if held is None else {})


def test_a_span_that_cannot_be_written_costs_no_other_and_is_no_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = wrap(numbered_graph(), tmp_path / "store.duckdb")
    with monkeypatch.context() as once:
        # What no check knows of yet.
        once.setattr(recorder_module, "answer_to_attributes", lambda _: {"someones.own": object()})
        assert graph.invoke({"number": 1}) == {"number": 1}
    assert (graph.recorder.losses.spans, graph.recorder.failure) == (1, None)
    graph.recorder.journal.sync()
    (segment,) = (tmp_path / "store.duckdb.journal").glob("*.segment")
    operations = [record.operation for record in read_segment(segment)[0] if isinstance(record, SpanRow)]
    assert operations == [c.INVOKE_AGENT, c.INVOKE_WORKFLOW]
    graph.invoke({"number": 2})
    assert [completions(one) for one in trajectories_in(tmp_path / "store.duckdb")] == [["draft 2"]]


@dataclass
class HalfMade:
    """Made without one of its fields."""

    number: int = 0
    client: Any = field(init=False)


@tool
def place(cells: dict) -> Any:  # type: ignore[type-arg]  # a schema of what is in it would refuse the keys
    """Puts something into cells."""
    return Unshowable()


@pytest.mark.parametrize("case", ["input", "context", "tool"])
def test_odd_values_of_the_app_tear_no_run(case: str, tmp_path: Path) -> None:
    def node(state: Any) -> dict[str, int]:
        if case == "tool":
            place.invoke({"cells": {(0, 1): "x"}})
        return {"number": 2}

    schema, context = (HalfMade if case == "input" else Number), (HalfMade(7) if case == "context" else None)
    graph = wrap(
        graph_that_runs(node, schema=schema, context_schema=HalfMade if context else None), tmp_path / "store.duckdb"
    )
    assert graph.invoke(HalfMade(1) if case == "input" else {"number": 1}, context=context)["number"] == 2
    assert graph.recorder.failures == 0
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        store.take_in()
        (trajectory,) = store.trajectories()
        spans = {span.operation: span.attributes for span in store.spans(trajectory.episode.episode_id)}
    if case == "input":
        assert json.loads(spans[c.INVOKE_WORKFLOW][c.INPUT]) == {"number": 1}
    if case == "context":
        assert json.loads(spans[c.INVOKE_WORKFLOW][c.RUN_CONFIG])["context"] == {"number": 7}
    if case == "tool":
        assert json.loads(spans[c.EXECUTE_TOOL][c.TOOL_ARGUMENTS]) == {"cells": {"(0, 1)": "x"}}
        assert spans[c.EXECUTE_TOOL][c.TOOL_RESULT] == "a Unshowable that cannot be shown"


# What the app would notice


def test_the_apps_random_numbers_stay_its_own_and_repeat_no_trace(tmp_path: Path) -> None:
    def dice(_: Number) -> Number:
        return {"number": random.getrandbits(64)}

    graph = StateGraph(Number)
    graph.add_node("dice", dice)
    graph.add_edge(START, "dice")
    plain = graph.compile()
    recorded = wrap(plain, tmp_path / "store.duckdb")
    results = []
    for each in (plain, recorded, recorded):
        random.seed(7)
        results.append(each.invoke({"number": 0}))
    assert results[0] == results[1] == results[2]
    assert len(trajectories_in(tmp_path / "store.duckdb")) == 2


def test_a_slow_disk_does_not_stall_the_apps_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wrap(numbered_graph(), tmp_path / "store.duckdb")
    were_over: list[bool] = []  # at the end of each sync
    over = threading.Event()

    def slow(fd: int) -> None:
        were_over.append(over.wait(30))

    async def run() -> None:
        for number in range(10):
            await graph.ainvoke({"number": number})

    asyncio.run(run())  # makes the segment
    graph.recorder.journal.sync()
    monkeypatch.setattr(os, "fsync", slow)
    asyncio.run(run())
    over.set()
    graph.recorder.journal.close()
    assert were_over
    assert all(were_over)


# Contexts


def call(model: ScriptedPolicy, label: str, config: RunnableConfig | None = None) -> None:
    model.invoke(label, config)


WAYS = ("plain", "copied", "to_thread", "explicit", "task", "nested_loop", "bare", "bare_executor", "bare_thread")
KNOWN = ("plain", "copied", "to_thread", "explicit", "task", "nested_loop")


def graph_that_calls_from_everywhere(pool: ThreadPoolExecutor) -> Any:
    """One async node that calls the model in every way that WAYS names, each call labelled `way number`."""
    model = ScriptedPolicy(script=lambda _, prompt, __: prompt.split("human: ")[1].split("\n")[0])

    async def node(state: Number, config: RunnableConfig) -> Number:
        loop, label = asyncio.get_running_loop(), {way: f"{way} {state['number']}" for way in WAYS}
        await model.ainvoke(label["plain"])
        copied = pool.submit(copy_context().run, call, model, label["copied"])
        explicit = pool.submit(call, model, label["explicit"], config)
        bare = pool.submit(call, model, label["bare"])
        thread = threading.Thread(target=call, args=(model, label["bare_thread"]))
        thread.start()
        await asyncio.gather(
            *(asyncio.wrap_future(future) for future in (copied, explicit, bare)),
            asyncio.to_thread(call, model, label["to_thread"]),
            asyncio.create_task(model.ainvoke(label["task"])),
            asyncio.to_thread(asyncio.run, model.ainvoke(label["nested_loop"])),
            loop.run_in_executor(None, call, model, label["bare_executor"]),
        )
        thread.join()
        return state

    graph = StateGraph(Number)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    return graph.compile()


def test_calls_belong_to_the_run_that_made_them_and_unknown_ones_to_none(tmp_path: Path) -> None:
    store = tmp_path / "store.duckdb"

    async def main() -> None:
        with ThreadPoolExecutor(8) as pool:
            graph = wrap(graph_that_calls_from_everywhere(pool), store)
            await asyncio.gather(*(graph.ainvoke({"number": number}) for number in range(20)))

    asyncio.run(main())
    found = sorted((completions(one) for one in trajectories_in(store)), key=lambda labels: int(labels[0].split()[1]))
    assert found == [sorted(f"{way} {number}" for way in KNOWN) for number in range(20)]


# Work that a node leaves behind


def say_later(model: ScriptedPolicy, release: threading.Event) -> None:
    release.wait(10)
    model.invoke("late")


@pytest.mark.parametrize("start", ["task", "thread"])
@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_call_that_begins_after_its_node_is_the_nodes_and_after_its_run_is_counted_as_lost(
    start: str, is_awaited: bool, tmp_path: Path
) -> None:
    model = ScriptedPolicy(script=lambda _, prompt, __: prompt.split("human: ")[1].split("\n")[0])
    release, left_behind = threading.Event(), []

    async def starter(state: Number) -> Number:
        model.invoke("first")
        if start == "task":
            left_behind.append(asyncio.create_task(asyncio.to_thread(say_later, model, release)))
        else:
            run_in_copy = copy_context().run
            left_behind.append(asyncio.get_running_loop().run_in_executor(None, run_in_copy, say_later, model, release))
        return state

    async def ender(state: Number) -> Number:
        model.invoke("last")
        if is_awaited:
            release.set()
            await left_behind[0]
        return state

    graph = StateGraph(Number)
    graph.add_node("starter", starter)
    graph.add_node("ender", ender)
    graph.add_edge(START, "starter")
    graph.add_edge("starter", "ender")
    recorded = wrap(graph.compile(), tmp_path / "store.duckdb")

    async def main() -> None:
        await recorded.ainvoke({"number": 1})
        release.set()
        await left_behind[0]

    asyncio.run(main())
    (trajectory,) = trajectories_in(tmp_path / "store.duckdb")
    edges = edges_of(trajectory)
    if is_awaited:
        assert completions(trajectory) == ["first", "last", "late"]
        # ender did not run because of the late call, and nothing says that it used its answer.
        assert edges == {"trigger": "starter1>ender", "data": "starter1?starter2"}
    else:
        assert completions(trajectory) == ["first", "last"]
        assert edges == {"trigger": "starter>ender"}
    assert recorded.recorder.losses.callbacks == (0 if is_awaited else 1)
