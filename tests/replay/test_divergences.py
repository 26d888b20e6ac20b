"""Owns: what a replay does otherwise is named: the first difference, by node, call and place, whatever it is.

- A changed prompt, another order, a call less or more, a changed tool, other edges, another result, the clock and
  random numbers in a prompt: each is named as what it is. What is unchanged comes out the same.
- No model is asked and no connection opened during a replay; what stands outside is not touched.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import importlib
import json
import operator
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
import requests
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy, Send
from pydantic import BaseModel
from support.edge_rig import SaysNext, recorded_traces, says, source_to_function
from support.replay_rig import differences, record_runs, replay_all

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.replay import pins
from marft_bridge.replay.recorded_models import RecordedChat
from marft_bridge.replay.recorded_run import spans_to_run, tool_to_key
from marft_bridge.replay.replayed_run import GIVEN_UP, ReplayOptions, replay_run
from trace_store import conventions as c
from trace_store.journal import Journal


class State(TypedDict, total=False):
    question: str
    plan: str
    notes: list[str]
    answer: str
    messages: Annotated[list[Any], add_messages]


class Question(TypedDict):
    question: str


class Answer(TypedDict):
    answer: str


class Noted(Question, Answer, total=False):
    note: str


class NeverAsked(SaysNext):
    """A model of whose calls there must be none."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a live call")


def team(
    model: Any,
    *,
    profile: str = "You plan the work in short steps.",
    order: tuple[str, str] = ("first", "second"),
    asks: int = 2,
    extra: Callable[[], object] = lambda: None,
    suffix: Callable[[], str] = lambda: "",
) -> Any:
    """planner -> worker (two calls, one after the other) -> writer."""

    async def planner(state: State) -> State:
        reply = await model.ainvoke([SystemMessage(profile), HumanMessage(state["question"] + suffix())])
        return {"plan": str(reply.text)}

    async def worker(state: State) -> State:
        return {"notes": [(await model.ainvoke(f"{name}: {state['question']}")).text for name in order[:asks]]}

    def writer(state: State) -> State:
        answer = str(model.invoke(f"{state['plan']} / {len(state['notes'])} notes").text)
        if extra() == "call":
            model.invoke("are you sure?")
        return {"answer": answer}

    return chain(planner=planner, worker=worker, writer=writer)


def chain(**nodes: Any) -> Any:
    graph = StateGraph(State)
    for name, node in nodes.items():
        graph.add_node(name, node)
    for edge in zip((START, *nodes), (*nodes, END), strict=True):
        graph.add_edge(*edge)
    return graph.compile()


QUESTION = {"question": "What do three apples and four pears cost?"}
ANSWERS = ("count them", "three", "four", "seven")


def replayed(tmp_path: Path, graph: Any, options: ReplayOptions | None = None, **original: Any) -> str | None:
    """What the replay of a recorded team on `graph` does otherwise."""
    (run,) = record_runs(team(says(*ANSWERS), **original), [QUESTION], tmp_path)
    return differences([replay_run(graph, run, options=options or ReplayOptions())])[0]


def test_lists_in_lists_without_end_are_arguments_as_a_text_and_no_run_to_play_again(tmp_path: Path) -> None:
    deep = "[" * 3_000
    assert deep in tool_to_key({c.TOOL_NAME: "search", c.TOOL_ARGUMENTS: deep})
    (run,) = record_runs(team(says(*ANSWERS)), [QUESTION], tmp_path)
    for key, operation in ((c.INPUT_MESSAGES, c.CHAT), (c.OUTPUT_MESSAGES, c.CHAT), (c.RUN_CONFIG, c.INVOKE_WORKFLOW)):
        spans = [
            replace(span, attributes=dict(span.attributes) | {key: deep}) if span.operation == operation else span
            for span in run.spans
        ]
        with pytest.raises(GraphError, match="replay: "):
            spans_to_run(spans)


def test_an_unchanged_app_comes_out_the_same_without_asking_its_model(tmp_path: Path) -> None:
    (run,) = record_runs(team(says(*ANSWERS)), [QUESTION], tmp_path)
    one = replay_run(team(NeverAsked()), run)
    assert (one.divergence, one.call_count, one.note) == (None, 4, None)
    assert run.output["answer"] == "seven"


def test_a_changed_prompt_is_named_by_message_and_word(tmp_path: Path) -> None:
    changed = replayed(tmp_path, team(NeverAsked(), profile="You plan the work in long steps."))
    assert changed == (
        'planner, call 1: message 0 (system) differs at word 5: recorded "short steps.", now "long steps."'
    )


def test_another_order_of_calls_in_one_node_is_named(tmp_path: Path) -> None:
    changed = replayed(tmp_path, team(NeverAsked(), order=("second", "first")))
    assert changed == "worker, call 2: it comes before worker, call 1, which came before it"


def test_another_order_of_nodes_is_named(tmp_path: Path) -> None:
    def asks(name: str) -> Any:
        return lambda _: {"answer": says("ok").invoke(f"I am {name}").text}

    (run,) = record_runs(chain(a=asks("a"), b=asks("b")), [QUESTION], tmp_path)
    (changed,) = differences([replay_run(chain(b=asks("b"), a=asks("a")), run)])
    assert changed == "b, call 1: it comes before a, call 1, which came before it"


def test_a_call_that_is_not_made_any_more_is_named(tmp_path: Path) -> None:
    quiet = chain(
        planner=team(NeverAsked()).nodes["planner"].bound,
        worker=lambda _: {"notes": ["a", "b"]},
        writer=team(NeverAsked()).nodes["writer"].bound,
    )
    assert replayed(tmp_path, quiet) == "worker, call 1: this call is not made any more"


def test_one_call_less_is_named_before_the_prompt_that_it_leads_to(tmp_path: Path) -> None:
    changed = replayed(tmp_path, team(NeverAsked(), asks=1))
    assert changed == "worker, call 2: this call is not made any more"
    skips_first = replayed(tmp_path / "skips", team(NeverAsked(), order=("second", "third"), asks=1))
    assert skips_first == "worker, call 1: this call is not made any more"


def test_one_call_more_is_named(tmp_path: Path) -> None:
    changed = replayed(tmp_path, team(NeverAsked(), extra=lambda: "call"))
    assert changed == (
        "writer, call 2: the record has 1 call of this node, and no answer for one more: "
        'recorded nothing, now "are you sure?"'
    )


def test_a_node_that_did_not_ask_and_now_asks_is_named(tmp_path: Path) -> None:
    (run,) = record_runs(chain(a=lambda _: {"answer": "x"}), [QUESTION], tmp_path)
    (changed,) = differences([replay_run(chain(a=lambda _: {"answer": NeverAsked().invoke("hm").text}), run)])
    assert changed == (
        'a, call 1: the record has no call of this node, and no answer for one more: recorded nothing, now "hm"'
    )


def test_the_clock_in_a_prompt_is_named_and_can_be_stopped(tmp_path: Path) -> None:
    def today() -> str:
        return f" It is {datetime.datetime.now():%Y-%m-%d %H:%M} and {int(time.time() // 60)}."

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(days=1)

    (run,) = record_runs(team(says(*ANSWERS), suffix=today), [QUESTION], tmp_path)
    graph = team(NeverAsked(), suffix=today)
    (stopped,) = differences([replay_run(graph, run, options=ReplayOptions(freeze_time=True))])
    assert stopped is None
    was, datetime.datetime = datetime.datetime, Tomorrow  # type: ignore[misc]
    try:
        (changed,) = differences([replay_run(graph, run)])
    finally:
        datetime.datetime = was  # type: ignore[misc]
    assert changed is not None
    assert changed.startswith('planner, call 1: message 1 (user) differs at word 10: recorded "20')


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_that_was_streamed_gives_out_the_keys_that_its_output_schema_leaves_out(
    streamed: bool, tmp_path: Path
) -> None:
    def app(model: Any, note: str) -> Any:
        graph = StateGraph(Noted, input_schema=Question, output_schema=Answer)
        graph.add_node("a", lambda _: {"answer": model.invoke("hm").text, "note": note})
        graph.add_edge(START, "a")
        return graph.compile()

    recorder = Recorder(Journal(tmp_path / "journal"))
    recorded = wrap(app(says("ok"), "kept"), recorder)
    if streamed:
        assert list(recorded.stream(QUESTION, stream_mode="values"))[-1]["note"] == "kept"
    else:
        assert recorded.invoke(QUESTION) == {"answer": "ok"}
    (run,) = [spans_to_run(spans) for spans in recorded_traces(recorder)]
    assert differences([replay_run(app(NeverAsked(), "kept"), run)]) == [None]
    (changed,) = differences([replay_run(app(NeverAsked(), "other"), run)])
    assert changed == ('the result differs at note: recorded "kept", now "other"' if streamed else None)


@pytest.mark.parametrize("form", ["iso", "utc", "seconds", "minutes"])
def test_a_moment_of_the_run_in_a_prompt_is_the_same_while_the_clock_stands(form: str, tmp_path: Path) -> None:
    def moment() -> str:
        now = datetime.datetime.now(datetime.UTC if form == "utc" else None)
        return now.isoformat(sep=" ", timespec=form) if form in ("seconds", "minutes") else now.isoformat()

    def asks(model: Any, before: str) -> Any:
        def ask(_: Any) -> Any:
            time.sleep(0.02)
            asked = f"It is {moment()}, before {before}."
            return {"answer": f"{model.invoke(asked).text} {moment()}"}

        return chain(a=ask)

    before = "2020-01-02 03:04:05"
    (run,) = record_runs(asks(says("ok"), before), [QUESTION], tmp_path)
    stopped = ReplayOptions(freeze_time=True)
    assert differences([replay_run(asks(NeverAsked(), before), run, options=stopped)]) == [None]
    (changed,) = differences([replay_run(asks(NeverAsked(), "2020-01-02 03:04:06"), run, options=stopped)])
    assert changed is not None
    assert changed.startswith("a, call 1: message 0 (user) differs at word")
    assert '"03:04:05.", now "03:04:06."' in changed


NODE_WITH_CLOCK = """
import datetime


def moment():
    return datetime.datetime.now().isoformat()


def asks(_):
    return {"answer": model.invoke(f"{moment()}").text}
"""
CLOCK = """
import time
from datetime import datetime


def moment():
    return datetime.fromtimestamp(time.time()).isoformat()
"""


@pytest.mark.parametrize("place", ["site-packages", "notebook"])
def test_the_clock_stands_wherever_the_nodes_are_defined(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "installed_app"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "clock.py").write_text(CLOCK)
    nodes = f"from installed_app import clock\n{NODE_WITH_CLOCK}"
    (package / "nodes.py").write_text(nodes.replace("{moment", "{clock.moment"))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    if place == "site-packages":
        names = vars(importlib.import_module("installed_app.nodes"))
    else:
        names = {"__name__": "__main__"}
        exec(NODE_WITH_CLOCK, names)  # noqa: S102 - written above
    names["model"] = says("ok", "ok")
    try:
        (run,) = record_runs(chain(a=names["asks"]), [QUESTION], tmp_path)
        time.sleep(0.01)
        assert replay_run(chain(a=names["asks"]), run).divergence is not None
        stopped = replay_run(chain(a=names["asks"]), run, options=ReplayOptions(freeze_time=True))
    finally:
        for name in [name for name in sys.modules if name.startswith("installed_app")]:
            del sys.modules[name]
    assert (stopped.divergence, stopped.note) == (None, None)


def test_the_clock_of_the_frameworks_packages_goes_on_whatever_of_them_a_node_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "langchain_partner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CLOCK)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    partner = importlib.import_module("langchain_partner")
    try:
        graph = chain(a=lambda _: {"answer": says("ok").invoke("?").text}, b=partner.moment)
        assert not any(names is vars(partner) for names in pins._names_of_app(graph))
    finally:
        del sys.modules["langchain_partner"]


@pytest.mark.parametrize("prompt", ["?", "!"])
def test_a_clock_that_no_module_holds_is_said(prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def node(_):\n    return {{'answer': model.invoke('{}').text}}"

    def build(prompt: str) -> Any:
        return chain(a=source_to_function(source.format(prompt), model=says("ok", "ok")))

    (run,) = record_runs(build("?"), [QUESTION], tmp_path)
    monkeypatch.setattr(pins, "_is_apps_own", lambda _: False)
    one = replay_run(build(prompt), run, options=ReplayOptions(freeze_time=True))
    assert pins.NO_CLOCK in (str(one.note) if prompt == "?" else str(one.divergence))


def test_moments_that_are_made_while_the_clock_stands_are_kept_by_checkpoints(tmp_path: Path) -> None:
    class Notes(TypedDict, total=False):
        question: str
        at: datetime.datetime
        on: datetime.date
        answer: str

    def asks(state: Notes) -> Notes:
        known = f"{state.get('at')!r} {state.get('on')!r} {isinstance(state.get('at'), datetime.datetime)}"
        at, on = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), datetime.date.fromisoformat("2020-01-03")
        return {"at": at, "on": on, "answer": str(says("ok").invoke(known).text)}

    graph = StateGraph(Notes)
    graph.add_node("a", asks)
    graph.add_edge(START, "a")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    runs = record_runs(app, [QUESTION, QUESTION], tmp_path, config=config)
    assert "datetime.datetime(2020, 1, 2" in str(runs[1].calls[0].prompt)
    assert differences(replay_all(app, runs, ReplayOptions(freeze_time=True))) == [None, None]


def test_random_numbers_in_a_prompt_are_named_and_can_be_seeded(tmp_path: Path) -> None:
    def drawn() -> str:
        return f" Example {random.randrange(10**9)}."

    random.seed(7)
    (run,) = record_runs(team(says(*ANSWERS), suffix=drawn), [QUESTION], tmp_path)
    graph = team(NeverAsked(), suffix=drawn)
    (changed,) = differences([replay_run(graph, run)])
    assert changed is not None
    assert changed.startswith("planner, call 1: message 1 (user) differs at word 9: recorded")
    state = random.getstate()
    assert differences([replay_run(graph, run, options=ReplayOptions(seed=7))]) == [None]
    assert random.getstate() == state  # the app's own go on where they were


def test_another_result_of_the_same_calls_is_named_by_its_place(tmp_path: Path) -> None:
    graph = team(NeverAsked())
    loud = chain(
        **{name: graph.nodes[name].bound for name in ("planner", "worker")},
        writer=lambda state: {
            "answer": NeverAsked().invoke(f"{state['plan']} / {len(state['notes'])} notes").text.upper()
        },
    )
    assert replayed(tmp_path, loud) == 'the result differs at answer: recorded "seven", now "SEVEN"'


def result_of(tmp_path: Path, recorded: Callable[[], Any], now: Callable[[], Any]) -> str | None:
    """How the replay differs of a node that gives `recorded` by one that gives `now`."""

    def build(result: Callable[[], Any]) -> Any:
        return chain(a=lambda _: {"plan": str(says("ok").invoke("?").text), "notes": result()})

    (run,) = record_runs(build(recorded), [QUESTION], tmp_path)
    return differences([replay_run(build(now), run)])[0]


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({"type": "score", "data": {"value": 1}}, {"type": "score", "data": {"value": 2}}),
        ({"type": "mail", "data": {"content": "a", "to": 1}}, {"type": "mail", "data": {"content": "a", "to": 2}}),
        ("d41d8cd98f00b204e9800998ecf8427e", "0cc175b9c0f1b6a831c399e269772661"),
        ("0xff0000", "0x00ff00"),
        (ToolMessage("c", tool_call_id="1", artifact=1), ToolMessage("c", tool_call_id="1", artifact=2)),
        (ToolMessage("c", tool_call_id="1"), ToolMessage("c", tool_call_id="1", status="error")),
    ],
)
def test_no_difference_of_a_result_is_taken_for_a_form(tmp_path: Path, recorded: Any, now: Any) -> None:
    assert str(result_of(tmp_path, lambda: [recorded], lambda: [now])).startswith("the result differs at notes[0]")


def test_ids_that_are_drawn_anew_are_the_same_where_the_same_ones_are_equal(tmp_path: Path) -> None:
    def drawn() -> Any:
        one, other = uuid.uuid4(), uuid.uuid4()
        return [str(one), one.hex, {other.hex: f"of {one}"}, repr(object()), str(one)]

    def drawn_otherwise() -> Any:
        notes = drawn()
        return [*notes[:-1], str(uuid.uuid4())]

    assert result_of(tmp_path / "same", drawn, drawn) is None
    assert str(result_of(tmp_path / "changed", drawn, drawn_otherwise)).startswith("the result differs at notes[4]")


class NamesIds(SaysNext):
    """Answers with the ids in its prompt, the last one first."""

    def _generate(self, messages: Any, *_: Any, **__: Any) -> Any:
        named = [word for word in str(messages[-1].content).split() if len(word) == 36]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(" ".join(reversed(named))))])


def keeps_notes(model: Any, *, given: str = "", swaps: bool = False) -> Any:
    """draws ids for two notes, asks for one of them, looks it up, and asks about what it found."""

    def asks(state: State) -> State:
        ids = [str(uuid.uuid4()), str(uuid.uuid4())]
        notes = dict(zip(ids, ("bread", "tea"), strict=True))
        shown = ids if not swaps else [ids[1], ids[0]]
        chosen = model.invoke(f"{given} {ids[0]} {ids[1]}").text.split()[0]
        found = notes[chosen]
        return {"answer": model.invoke(f"{found} of {shown[0]} and {shown[1]}").text}

    return chain(a=asks)


def test_ids_that_a_run_draws_into_a_prompt_stand_for_each_other_and_answers_quote_those_of_the_replay(
    tmp_path: Path,
) -> None:
    given, other = str(uuid.uuid4()), str(uuid.uuid4())
    (run,) = record_runs(keeps_notes(NamesIds(), given=given), [{"question": given}], tmp_path)
    assert differences([replay_run(keeps_notes(NeverAsked(), given=given), run)]) == [None]
    (changed,) = differences([replay_run(keeps_notes(NeverAsked(), given=other), run)])
    assert changed is not None
    assert changed.startswith(f'a, call 1: message 0 (user) differs at word 0: recorded "{given}')
    (swapped,) = differences([replay_run(keeps_notes(NeverAsked(), given=given, swaps=True), run)])
    assert swapped is not None
    assert swapped.startswith("a, call 2: message 0 (user) differs at word 2: ")


def test_ids_that_a_run_draws_into_the_arguments_of_a_tool_stand_for_each_other_and_its_result_has_the_replays(
    tmp_path: Path,
) -> None:
    ran: list[str] = []

    def look(key: str, depth: int) -> str:
        ran.append(key)
        return f"shelf {depth} for {key}, ticket {uuid.uuid4()}"

    looks = tool("look", description="Looks.")(look)

    def build(depth: int = 1, *, swaps: bool = False) -> Any:
        def asks(_: State) -> State:
            keys = [str(uuid.uuid4()), str(uuid.uuid4())]
            says("ok").invoke(" ".join(keys))
            found = looks.invoke({"key": keys[swaps], "depth": depth})
            return {"notes": [found, keys[0]], "answer": str(says("ok").invoke(f"{found} of {keys[0]}").text)}

        return chain(a=asks)

    (run,) = record_runs(build(), [QUESTION], tmp_path)
    assert differences([replay_run(build(), run)]) == [None]
    assert len(ran) == 1
    assert differences([replay_run(build(), run, options=ReplayOptions(tools="run"))]) == [None]
    (changed,) = differences([replay_run(build(2), run)])
    assert changed == 'a: it runs the tool look with other arguments, at depth: recorded "1", now "2"'
    (swapped,) = differences([replay_run(build(swaps=True), run)])
    assert str(swapped).startswith('a: it runs the tool look with other arguments, at key: recorded "')


def test_other_edges_of_the_same_calls_are_named(tmp_path: Path) -> None:
    def reads_plan(state: State) -> State:
        return {"answer": NeverAsked().invoke(f"{state['plan']} / 2 notes").text}

    def reads_nothing(state: State) -> State:
        return {"answer": NeverAsked().invoke("count them / 2 notes").text}

    graph = team(NeverAsked())
    nodes = {name: graph.nodes[name].bound for name in ("planner", "worker")}
    assert replayed(tmp_path, chain(**nodes, writer=reads_plan)) is not None  # it no longer reads the notes
    changed = replayed(tmp_path / "second", chain(**nodes, writer=reads_nothing))
    assert changed == "writer, call 1: it no longer depends on planner, call 1 (data)"


def test_a_run_that_fails_now_is_named(tmp_path: Path) -> None:
    def fails(_: State) -> State:
        raise ValueError("no apples")

    graph = team(NeverAsked())
    nodes = {name: graph.nodes[name].bound for name in ("planner", "worker")}
    changed = replayed(tmp_path, chain(**nodes, writer=fails))
    assert changed == ('the run ends otherwise: recorded "terminated", now "failed ValueError: no apples"')


# -- tools ------------------------------------------------------------------------------------------------------------


def tool_team(model: Any, price: Callable[[str], Any], **arguments: Any) -> Any:
    """An agent with one tool in a loop."""
    prices = tool("price", description="The price of a fruit.")(lambda fruit: price(fruit))
    prices.func.__annotations__ = {"fruit": str}  # type: ignore[union-attr]

    def agent(state: State) -> State:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([prices]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "agent")
    return graph.compile(**arguments)


def asks_for(fruit: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "price", "args": {"fruit": fruit}, "id": "c1"}])


ASKED = {"messages": [("user", "What does an apple cost?")]}


@pytest.mark.parametrize("is_async", [True, False])
def test_recorded_results_stand_in_for_tools_which_run_again_by_choice(tmp_path: Path, is_async: bool) -> None:
    ran = []

    def price(fruit: str) -> str:
        ran.append(fruit)
        return f"{fruit}: {len(ran)}"

    graph = tool_team(says(asks_for("apple"), "1"), price)
    runs = record_runs(graph, [ASKED], tmp_path, is_async=is_async)
    assert differences(replay_all(graph, runs)) == [None]
    assert ran == ["apple"]
    (changed,) = differences(replay_all(graph, runs, ReplayOptions(tools="run")))
    assert ran == ["apple", "apple"]
    sides = 'recorded "1 (result of c1) [price]", now "2 (result of c1) [price]"'
    assert changed == f"agent, call 2: message 2 (tool) differs at word 1: {sides}"


def test_a_tool_that_failed_fails_again_without_running(tmp_path: Path) -> None:
    ran = []

    def price(fruit: str) -> str:
        ran.append(fruit)
        raise KeyError(fruit)

    def tries(state: State) -> State:
        prices = tool("price", description="The price of a fruit.")(price)
        try:
            prices.invoke({"fruit": "apple"})
        except KeyError as error:
            return {"answer": str(says("none").invoke(f"no price: {error!r}").text)}
        return {}

    graph = chain(a=tries)
    runs = record_runs(graph, [QUESTION], tmp_path)
    assert differences(replay_all(graph, runs)) == [None]
    assert ran == ["apple"]


@pytest.mark.parametrize("value", [{"price": 3, "of": ["apple"]}, 3, [1, 2], None])
def test_a_tools_own_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    prices = tool("price", description="The price of a fruit.")(lambda: value)
    seen = []

    def asks(state: State) -> State:
        seen.append(prices.invoke({}))
        return {"answer": str(says("ok").invoke(f"{seen[-1]!r}").text)}

    graph = chain(a=asks)
    runs = record_runs(graph, [QUESTION], tmp_path)
    assert differences(replay_all(graph, runs)) == [None]
    assert seen == [value, value]


def test_a_tool_that_is_called_otherwise_is_named(tmp_path: Path) -> None:
    def asks(fruit: str) -> Any:
        prices = tool("price", description="The price of a fruit.")(lambda name: f"{name}: 1")
        prices.func.__annotations__ = {"name": str}  # type: ignore[union-attr]
        return lambda _: {"answer": prices.invoke({"name": fruit}) + says("!").invoke("?").text}

    (run,) = record_runs(chain(a=asks("apple")), [QUESTION], tmp_path)
    (changed,) = differences([replay_run(chain(a=asks("pear")), run)])
    assert changed == ('a: it runs the tool price with other arguments, at name: recorded "apple", now "pear"')


# -- nothing leaves -------------------------------------------------------------------------------------------------


def test_a_node_that_connects_past_its_models_and_tools_is_named_unless_it_may(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def asks(_: State) -> State:
            with socket.create_connection(("127.0.0.1", port)):
                return {"answer": str(says("ok").invoke("?").text)}

        graph = chain(a=asks)
        runs = record_runs(graph, [QUESTION], tmp_path)
        assert differences(replay_all(graph, runs)) == [
            f"a: it connects to 127.0.0.1:{port}, past its models and tools"
        ]
        assert differences(replay_all(graph, runs, ReplayOptions(allow_connections=True))) == [None]
        assert "connect" not in vars(socket.socket)


def test_the_apps_checkpointer_is_not_written_to(tmp_path: Path) -> None:
    saver = InMemorySaver()
    graph = tool_team(says(asks_for("apple"), "1"), lambda fruit: f"{fruit}: 1", checkpointer=saver)
    config = {"configurable": {"thread_id": "t"}}
    runs = record_runs(graph, [ASKED], tmp_path, config=config)
    before = [one.checkpoint["id"] for one in saver.list(None)]
    assert differences(replay_all(graph, runs)) == [None]
    assert [one.checkpoint["id"] for one in saver.list(None)] == before


def test_a_failed_call_fails_again_and_its_fallback_answers(tmp_path: Path) -> None:
    class Fails(SaysNext):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ConnectionError("the provider is down")

    model = Fails().with_fallbacks([says("second best")])
    graph = chain(a=lambda _: {"answer": model.invoke("?").text})
    runs = record_runs(graph, [QUESTION], tmp_path)
    assert [call.error is None for call in runs[0].calls] == [False, True]
    assert differences(replay_all(graph, runs)) == [None]
    assert runs[0].output["answer"] == "second best"


class BusyError(Exception):
    """An error of the app's own."""


class RefusedError(BusyError, ValueError):
    """One that takes more than a text, and makes its own of them."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__()
        self.code, self.why = code, why

    def __str__(self) -> str:
        return f"{self.code}: {self.why}"


class UnnamedError(KeyError):
    """One whose text is the representation of its key."""


class Missing(BaseModel):
    n: int


class BusyAnswer(BaseModel):
    n: str


def fail_with_local() -> None:
    class LocalError(BusyError):
        """No module has it."""

    raise LocalError("local")


def fail_to_validate() -> None:
    Missing.model_validate({})


def fail(error: Exception) -> None:
    raise error


FAILURES: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "own": (lambda: fail(BusyError("later")), BusyError),
    "fields": (lambda: fail(RefusedError(429, why="too many")), RefusedError),
    "above": (lambda: fail(RefusedError(429, why="too many")), ValueError),
    "key": (lambda: fail(UnnamedError("pear")), UnnamedError),
    "json": (lambda: json.loads("{"), json.JSONDecodeError),
    "local": (fail_with_local, BusyError),
    "unmakable": (fail_to_validate, ValueError),
    "unicode": (lambda: b"\xff".decode(), UnicodeDecodeError),
    "operating system": (lambda: fail(FileNotFoundError(2, "No such file")), OSError),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("what", ["model", "tool"])
def test_an_error_comes_back_under_the_classes_that_the_app_catches(tmp_path: Path, kind: str, what: str) -> None:
    failure, caught = FAILURES[kind]

    class Fails(SaysNext):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            failure()
            raise AssertionError

    fails = tool("fails", description="Fails.")(lambda: failure())

    def asks(_: State) -> State:
        try:
            Fails().invoke("?") if what == "model" else fails.invoke({})
        except caught as error:
            return {"answer": str(says("none").invoke(f"{type(error).__name__}: {error}").text)}
        return {}

    runs = record_runs(chain(a=asks), [QUESTION], tmp_path)
    assert runs[0].output["answer"] == "none"
    assert differences(replay_all(chain(a=asks), runs)) == [None]


def test_fallbacks_and_retries_for_an_error_of_the_apps_own_are_made_again(tmp_path: Path) -> None:
    class Fails(SaysNext):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            if not self.answers:
                self.answers.append(AIMessage("now"))
                raise BusyError("later")
            return super()._generate(*args, **kwargs)

    fails = Fails()
    fallback = Fails().with_fallbacks([says("second best")], exceptions_to_handle=(BusyError,))
    graph = StateGraph(State)
    policy = RetryPolicy(initial_interval=0.01, retry_on=BusyError)
    graph.add_node("a", lambda _: {"plan": str(fails.invoke("?").text)}, retry_policy=policy)
    graph.add_node("b", lambda _: {"answer": str(fallback.invoke("?").text)})
    graph.add_edge(START, "a")
    graph.add_edge("a", "b")
    app = graph.compile()
    runs = record_runs(app, [QUESTION], tmp_path)
    assert (runs[0].output["plan"], runs[0].output["answer"]) == ("now", "second best")
    assert differences(replay_all(app, runs)) == [None]


def httpx_error(status: int) -> Exception:
    request = httpx.Request("GET", "http://127.0.0.1/")
    return httpx.HTTPStatusError(f"status {status}", request=request, response=httpx.Response(status, request=request))


def requests_error(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"status {status}", response=response)


@pytest.mark.parametrize("status", [404, 503])
@pytest.mark.parametrize("make_error", [httpx_error, requests_error])
def test_the_default_retry_decides_by_the_status_of_an_error_as_it_did(
    make_error: Callable[[int], Exception], status: int, tmp_path: Path
) -> None:
    class Fails(SaysNext):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            if not self.answers:
                self.answers.append(AIMessage("now"))
                raise make_error(status)
            return super()._generate(*args, **kwargs)

    fails = Fails()
    graph = StateGraph(State)
    policy = RetryPolicy(initial_interval=0.01)
    graph.add_node("a", lambda _: {"answer": str(fails.invoke("?").text)}, retry_policy=policy)
    graph.add_edge(START, "a")
    inner = graph.compile()

    def around(_: State) -> State:
        try:
            return {"answer": inner.invoke({})["answer"]}
        except Exception as error:  # noqa: BLE001 - of either library
            return {"answer": str(error)}

    runs = record_runs(chain(a=around), [QUESTION], tmp_path)
    is_retried = status == 503 or make_error is requests_error  # it takes an answer of `requests` that failed for none
    assert runs[0].output["answer"] == ("now" if is_retried else "status 404")
    assert differences(replay_all(chain(a=around), runs)) == [None]


class Slow(SaysNext):
    """A model that answers after a while."""

    after_s: float = 5.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.after_s)
        return super()._generate(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.after_s)
        return super()._generate(*args, **kwargs)


def asks_with_timeout(slow: Any, fallback: str, timeout_s: float | None = 1.3) -> Any:
    """A node that asks another model where the first one has not answered in time."""

    async def asks(_: State) -> State:
        try:
            return {"answer": str((await asyncio.wait_for(slow.ainvoke("slow?"), timeout_s)).text)}
        except TimeoutError:
            return {"answer": str((await says("in time").ainvoke(fallback)).text)}

    return asks


def asks_in_thread(slow: Any, fallback: str) -> Any:
    """As `asks_with_timeout`, in a sync node."""

    def asks(_: State) -> State:
        context = contextvars.copy_context()
        asked = ThreadPoolExecutor(1).submit(context.run, lambda: str(slow.invoke("slow?").text))
        try:
            return {"answer": asked.result(timeout=1.3)}
        except FutureTimeoutError:
            return {"answer": str(says("in time").invoke(fallback).text)}

    return asks


@pytest.mark.parametrize("is_async", [True, False])
def test_a_run_whose_app_gave_a_call_up_is_replayed_to_its_end(tmp_path: Path, is_async: bool) -> None:
    node = asks_with_timeout if is_async else asks_in_thread

    def after(_: State) -> State:  # depends on the call that was given up
        return {"plan": str(says("done").invoke("and now?").text)}

    def build(fallback: str) -> Any:
        return chain(a=node(Slow(after_s=2.0), fallback), b=after)

    (run,) = record_runs(build("quick?"), [QUESTION], tmp_path, is_async=is_async)
    assert ([call.has_no_end for call in run.calls], run.was_cut) == ([True, False, False], False)
    same, changed = replay_run(build("quick?"), run), replay_run(build("hurry?"), run)
    assert (same.divergence, same.note) == (None, None)
    assert differences([changed]) == ['a, call 2: message 0 (user) differs at word 0: recorded "quick?", now "hurry?"']


def test_an_app_that_now_waits_for_a_call_that_it_gave_up_is_named(tmp_path: Path) -> None:
    def build(timeout_s: float | None) -> Any:
        return chain(a=asks_with_timeout(Slow(), "quick?", timeout_s))

    (run,) = record_runs(build(0.1), [QUESTION], tmp_path)
    (changed,) = differences([replay_run(build(None), run)])
    assert changed == f"a, call 1: {GIVEN_UP}"


def test_an_app_that_does_not_make_a_call_any_more_that_it_gave_up_is_named(tmp_path: Path) -> None:
    (run,) = record_runs(chain(a=asks_with_timeout(Slow(), "quick?", 0.1)), [QUESTION], tmp_path)
    (changed,) = differences([replay_run(chain(a=lambda _: {"answer": NeverAsked().invoke("quick?").text}), run)])
    assert changed == "a, call 1: this call is not made any more"


@pytest.mark.parametrize("second_after_s", [0.0, 0.3])
def test_of_two_calls_that_race_the_faster_one_wins_again(tmp_path: Path, second_after_s: float) -> None:
    """Also where the second one is asked a while later: the first one's answer is held back until then."""

    def build(last: str) -> Any:
        async def races(_: State) -> State:
            asked = [asyncio.ensure_future(Slow(answers=[AIMessage("one")], after_s=0.6).ainvoke("one?"))]
            await asyncio.wait(asked, timeout=second_after_s)
            if not asked[0].done():
                asked.append(asyncio.ensure_future(Slow().ainvoke("two?")))
            done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for each in pending:
                each.cancel()
            return {"answer": str((await says("ok").ainvoke(f"{last} {done.pop().result().text}")).text)}

        return chain(a=races)

    (run,) = record_runs(build("after"), [QUESTION], tmp_path)
    assert [call.has_no_end for call in run.calls] == [False, True, False]
    assert differences([replay_run(build("after"), run) for _ in range(5)]) == [None] * 5
    (changed,) = differences([replay_run(build("then"), run)])
    assert changed == 'a, call 3: message 0 (user) differs at word 0: recorded "after one", now "then one"'


def test_a_stream_that_the_app_stopped_reading_has_no_answer(tmp_path: Path) -> None:
    class Streams(SaysNext):
        def _stream(self, *args: Any, **kwargs: Any) -> Any:
            yield from (ChatGenerationChunk(message=AIMessageChunk(word)) for word in "abc")

    def reads_first(_: State) -> State:
        chunks = Streams().stream("?")
        first = next(chunks)
        chunks.close()
        return {"answer": str(first.text)}

    runs = record_runs(chain(a=reads_first), [QUESTION], tmp_path, is_async=False)
    assert [call.has_no_end for call in runs[0].calls] == [True]
    assert differences(replay_all(chain(a=reads_first), runs)) == [f"a, call 1: {GIVEN_UP}"]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("what", ["asks", "connects"])
def test_an_app_that_tries_again_for_ever_is_ended(tmp_path: Path, is_async: bool, what: str) -> None:
    tries = []

    def build(prompt: str) -> Any:
        def asks(_: State) -> State:
            for _ in range(100):  # the test's own end, where nothing else is
                tries.append(prompt)
                with suppress(Exception):
                    if prompt == "no?" and what == "connects":
                        with socket.socket() as client:
                            client.connect(("127.0.0.1", 9))
                    return {"answer": str(says("ok").invoke(prompt).text)}
            return {"answer": "never"}

        return chain(a=asks)

    (run,) = record_runs(build("yes?"), [QUESTION], tmp_path, is_async=is_async)
    (changed,) = differences([replay_run(build("no?"), run)])
    sides = "it connects to" if what == "connects" else "message 0 (user) differs at word 0"
    assert str(changed).startswith(f"a{', call 1' if what == 'asks' else ''}: {sides}")
    assert tries.count("no?") < 20


def test_calls_beside_each_other_come_back_in_the_order_in_which_they_ended(tmp_path: Path) -> None:
    class Waits(SaysNext):
        async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.05 * int(messages[0].text))
            self.answers.append(AIMessage(f"waited {messages[0].text}"))
            return self._generate(messages)

    model = Waits()

    async def races(_: State) -> State:
        asked = asyncio.as_completed([model.ainvoke(str(n)) for n in (3, 1, 2)])
        notes = [str((await reply).text) for reply in asked]
        return {"notes": notes, "answer": str((await model.ainvoke("0", note=", ".join(notes))).text)}

    graph = chain(a=races)
    runs = record_runs(graph, [QUESTION], tmp_path)
    assert runs[0].output["notes"] == ["waited 1", "waited 2", "waited 3"]
    for _ in range(5):
        assert differences(replay_all(graph, runs)) == [None]


def test_another_schema_of_a_tool_that_is_offered_is_named(tmp_path: Path) -> None:
    def offers(description: str) -> Any:
        prices = tool("price", description=description)(lambda: "1")
        model = ScriptedPolicy(script=lambda *_: "none needed").bind_tools([prices])
        return chain(a=lambda _: {"answer": model.invoke("?").text})

    (run,) = record_runs(offers("The price of a fruit."), [QUESTION], tmp_path)
    assert differences([replay_run(offers("The price of a fruit."), run)]) == [None]
    (changed,) = differences([replay_run(offers("What a fruit costs."), run)])
    sides = 'recorded "The price of a fruit.", now "What a fruit costs."'
    assert changed == f"a, call 1: it offers its model another schema of the tool price, at description: {sides}"


def test_one_call_of_several_that_are_the_same_goes_to_the_execution_that_made_it(tmp_path: Path) -> None:
    """Three workers ask the same, and get different answers: the state is that of the record, whoever asks first."""

    class Sent(TypedDict, total=False):
        name: str
        notes: Annotated[list[str], operator.add]

    numbers = iter(range(100))
    model = ScriptedPolicy(script=lambda *_: f"answer {next(numbers)}")

    async def worker(state: Sent) -> Sent:
        await asyncio.sleep(0.01)
        return {"notes": [f"{state['name']}: {(await model.ainvoke('the same')).text}"]}

    graph = StateGraph(Sent)
    graph.add_node("worker", worker)
    graph.add_conditional_edges(START, lambda _: [Send("worker", {"name": name}) for name in "abc"], ["worker"])
    graph.add_edge("worker", END)
    app = graph.compile()
    runs = record_runs(app, [{"notes": []}], tmp_path)
    assert len({note.partition(": ")[2] for note in runs[0].output["notes"]}) == 3
    assert differences(replay_all(app, runs) * 2) == [None, None]


def test_a_completion_model_answers_from_the_record_too(tmp_path: Path) -> None:
    model = FakeListLLM(responses=["a poem", "another"])
    graph = chain(a=lambda _: {"answer": model.invoke("Write a poem.")})
    runs = record_runs(graph, [QUESTION], tmp_path)
    assert differences(replay_all(graph, runs)) == [None]
    assert (runs[0].output["answer"], model.i) == ("a poem", 1)


@pytest.mark.parametrize("is_async", [True, False])
def test_prompts_that_a_completion_model_is_asked_together_get_each_its_own_answer(
    tmp_path: Path, is_async: bool
) -> None:
    model = FakeListLLM(responses=["a poem", "a song"])

    async def asks(_: State) -> State:
        return {"notes": await model.abatch(["Write a poem.", "Write a song."])}

    graph = chain(a=asks if is_async else lambda _: {"notes": model.batch(["Write a poem.", "Write a song."])})
    runs = record_runs(graph, [QUESTION], tmp_path, is_async=is_async)
    assert runs[0].output["notes"] == ["a poem", "a song"]
    assert differences(replay_all(graph, runs)) == [None]


def test_prompts_that_failed_together_fail_together(tmp_path: Path) -> None:
    class Fails(FakeListLLM):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise BusyError("later")

    def asks(_: State) -> State:
        try:
            return {"notes": Fails(responses=[]).batch(["Write a poem.", "Write a song."])}
        except BusyError:
            return {"answer": str(says("none").invoke("and now?").text)}

    runs = record_runs(chain(a=asks), [QUESTION], tmp_path)
    assert len(runs[0].calls) == 3
    assert differences(replay_all(chain(a=asks), runs)) == [None]


def test_a_prompt_with_a_secret_is_compared_as_it_was_written(tmp_path: Path) -> None:
    secret = "sk-proj-" + "a1B2c3D4e5F6" * 4
    graph = team(says(*ANSWERS), profile=f"Your key is {secret} and nobody else's.")
    runs = record_runs(graph, [{"question": f"Is {secret} mine?"}], tmp_path)
    assert secret not in str(runs[0].spans)
    assert differences(replay_all(graph, runs)) == [None]


# -- what a call asks for besides its prompt ---------------------------------------------------------------------------


class Tuned(SaysNext):
    """A model with settings, of which it reports those that it was given."""

    served: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def _identifying_params(self) -> dict[str, Any]:
        settings = {"model_name": self.served, "temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: setting for name, setting in settings.items() if setting is not None}


def asks_with(settings: dict[str, Any], bound: dict[str, Any]) -> Any:
    return chain(a=lambda _: {"answer": Tuned(**settings).bind(**bound).invoke("?").text})


Options = tuple[dict[str, Any], dict[str, Any]]  # of the model, and of the call
OFFERED = {"tools": [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]}


def in_form(kind: str) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": kind}}}}


@pytest.mark.parametrize(
    ("recorded", "now", "sentence"),
    [
        (
            ({"temperature": 0.0}, {"stop": ["END"]}),
            ({"temperature": 1.9, "max_tokens": 3}, {}),
            'temperature: recorded "0.0", now "1.9"',
        ),
        (({}, {"temperature": 0.5}), ({}, {"temperature": 0.7}), 'temperature: recorded "0.5", now "0.7"'),
        (({}, {}), ({"max_tokens": 3}, {}), 'max_tokens: recorded nothing, now "3"'),
        (({}, {"stop": ["END", "!"]}), ({}, {}), "stop: recorded \"'END', '!'\", now nothing"),
        (
            ({}, {"response_format": {"type": "json_object"}}),
            ({}, {}),
            'response_format: recorded "{"type": "json_object"}", now nothing',
        ),
        (
            ({}, OFFERED | in_form("object")),
            ({}, OFFERED | in_form("array")),
            'response_format.json_schema.schema.type: recorded "object", now "array"',
        ),
        (
            ({}, {"response_format": Missing}),
            ({}, {"response_format": BusyAnswer}),
            'response_format.json_schema.name: recorded "Missing", now "BusyAnswer"',
        ),
        (
            ({}, OFFERED | {"tool_choice": "required"}),
            ({}, OFFERED),
            'tool_choice: recorded "required", now nothing',
        ),
        (({"served": "one"}, {}), ({"served": "two"}, {}), 'model: recorded "one", now "two"'),
        (({}, {"top_p": 0.5, "seed": 7}), ({}, {"top_p": 0.5, "seed": 8}), 'seed: recorded "7", now "8"'),
    ],
)
def test_a_call_that_asks_its_model_otherwise_is_named_by_the_option(
    recorded: Options, now: Options, sentence: str, tmp_path: Path
) -> None:
    (run,) = record_runs(asks_with(*recorded), [QUESTION], tmp_path)
    assert differences([replay_run(asks_with(*recorded), run)]) == [None]
    (changed,) = differences([replay_run(asks_with(*now), run)])
    assert changed == f"a, call 1: it asks its model for another {sentence}"


def test_what_others_put_in_the_place_of_the_apps_settings_is_not_compared(tmp_path: Path) -> None:
    """A command's route, and the model that a factory is given in a replay."""
    (run,) = record_runs(asks_with({"temperature": 0.5}, {}), [QUESTION], tmp_path)
    changed = asks_with({"temperature": 0.7}, {})

    def with_root(attributes: dict[str, Any]) -> Any:
        return spans_to_run(
            [
                replace(span, attributes={**span.attributes, **attributes}) if span.parent_span_id is None else span
                for span in run.spans
            ]
        )

    assert replay_run(changed, run).divergence is not None
    assert differences([replay_run(changed, with_root({c.SPLIT: "train"}))]) == [None]
    assert differences([replay_run(changed, with_root({c.ADAPTERS: json.dumps({"a": 1})}))]) == [None]
    built_with_none = chain(a=lambda _: {"answer": RecordedChat().invoke("?").text})
    assert differences([replay_run(built_with_none, run)]) == [None]


def test_equal_prompts_that_are_asked_with_other_options_keep_their_answers(tmp_path: Path) -> None:
    class Waits(Tuned):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.05)
            return self._generate(*args, **kwargs)

    def build(order: Sequence[float]) -> Any:
        async def asks(_: State) -> State:
            models = [Waits(answers=[AIMessage(f"at {heat}")], temperature=heat) for heat in order]
            answers = await asyncio.gather(*(model.ainvoke("?") for model in models))
            return {"notes": sorted(f"{heat}: {answer.text}" for heat, answer in zip(order, answers, strict=True))}

        return chain(a=asks)

    (run,) = record_runs(build([0.0, 1.0]), [QUESTION], tmp_path)
    assert run.output["notes"] == ["0.0: at 0.0", "1.0: at 1.0"]
    assert differences([replay_run(build([1.0, 0.0]), run)]) == [None]


def test_tools_that_another_call_of_the_node_offers_are_named(tmp_path: Path) -> None:
    prices = tool("price", description="The price of a fruit.")(lambda: "1")

    def build(offering: int) -> Any:
        plain = ScriptedPolicy(script=lambda *_: "none needed")
        models: list[Any] = [plain, plain]
        models[offering] = plain.bind_tools([prices])
        return chain(a=lambda _: {"notes": [model.invoke(f"{n}?").text for n, model in enumerate(models)]})

    (run,) = record_runs(build(0), [QUESTION], tmp_path)
    assert differences([replay_run(build(0), run)]) == [None]
    (changed,) = differences([replay_run(build(1), run)])
    assert changed == "a, call 1: it offers its model no longer the tool price"
