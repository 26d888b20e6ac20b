"""Owns: an input or context with objects of the app's, dates, sets or tuples is replayed as what it was, not as its
JSON; where that cannot be, the divergence says what was lost."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage, message_to_dict
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel
from support.replay_rig import record_runs, replay_all

from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.run_facts import value_to_text
from marft_bridge.recording.value_forms import PLAIN_DICT, class_to_form, forms_to_value, value_to_forms
from marft_bridge.replay.declared_classes import graph_to_classes
from marft_bridge.replay.recorded_run import json_to_value


class Pace(enum.Enum):
    SLOW = "slow"


class Tone(enum.StrEnum):
    DRY = "dry"


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Leg:
    to: str
    on: datetime.date
    note: str | None = None


class Traveller(BaseModel):
    name: str
    born: datetime.datetime


@dataclass
class Trip:
    legs: list[Leg]
    budget: Decimal = Decimal(0)
    tags: set[str] = field(default_factory=set)


CLASSES = {class_to_form(kind): kind for kind in (Pace, Tone, Point, Leg, Traveller, Trip)}
TRAVELLER = Traveller(name="Ada", born=datetime.datetime(1990, 5, 6, 7, 8, tzinfo=datetime.UTC))
TRIP = Trip([Leg("Oslo", datetime.date(2026, 1, 2)), Leg("Rome", datetime.date(2026, 1, 5), "late")], Decimal("9.50"))

plain = st.none() | st.booleans() | st.integers() | st.text()
odd = (
    st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.binary()
    | st.sampled_from(
        [Pace.SLOW, Tone.DRY, Point(1, 2), TRAVELLER, TRIP, PurePosixPath("a/b"), PureWindowsPath("c:/d"), Path("e/f")]
    )
)
values = st.recursive(
    plain | odd,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=8,
)


@given(values)
def test_a_value_comes_back_from_its_json_and_its_forms(value: Any) -> None:
    forms = json.loads(json.dumps(value_to_forms(value)))
    made, lost = forms_to_value(json.loads(value_to_text(value)), forms, CLASSES)
    assert (made, lost) == (value, [])
    assert type(made) is type(value)


def test_what_json_says_needs_no_form() -> None:
    assert value_to_forms({"messages": [HumanMessage("hi")], "n": 1, "x": [None, 0.5, {"a": "b"}]}) == []
    assert value_to_forms(Command(resume="yes", goto=[Send("a", {"n": 1})])) == []
    assert value_to_forms(Command(resume="yes")) == []  # its goto is the empty tuple that it is made with


def test_what_cannot_be_made_again_stays_as_its_json_and_is_told() -> None:
    value = {"trip": TRIP, "model": object(), "when": datetime.date(2026, 1, 2)}
    text = json.loads(value_to_text(value))
    made, lost = forms_to_value(text, json.loads(json.dumps(value_to_forms(value))), {})
    assert made["when"] == datetime.date(2026, 1, 2)
    assert made["trip"]["legs"][0] == {"to": "Oslo", "on": datetime.date(2026, 1, 2)}
    assert [line.partition(": ")[0] for line in lost] == ["trip", "model"]


def test_a_date_that_is_none_is_told_and_not_raised() -> None:
    assert forms_to_value(["[redacted]"], [[[0], "date"], [[1, 2], "date"], [["a"], "date"]], {}) == (
        ["[redacted]"],
        ["0: date", "1.2: date", "a: date"],
    )


class TripState(TypedDict, total=False):
    trip: Trip
    traveller: Traveller
    pair: tuple[str, str]
    pace: Pace
    id: uuid.UUID
    plan: str


@dataclass
class Settings:
    home: Leg


def build(policy: Any, state: type = TripState, settings: type | None = Settings) -> Any:
    async def plan(state: Any, runtime: Runtime[Any]) -> dict[str, Any]:
        first = state["trip"].legs[0]
        text = f"{state['traveller'].name} to {first.to} {first.on:%A}, {state['pair']}, {state['pace']}, {state['id']}"
        home = runtime.context.home.to if runtime.context else "nowhere"
        return {"plan": str((await policy.ainvoke(f"{text}, from {home}")).text)}

    graph = StateGraph(state, context_schema=settings)
    graph.add_node("plan", plan)
    graph.add_edge(START, "plan")
    return graph.compile()


INPUT = {
    "trip": TRIP,
    "traveller": TRAVELLER,
    "pair": ("a", "b"),
    "pace": Pace.SLOW,
    "id": uuid.UUID(int=7),
}


def says(node: str, prompt: str, rng: Any) -> str:
    return "go"


def test_a_run_with_objects_in_input_and_context_comes_out_the_same(tmp_path: Path) -> None:
    graph = build(ScriptedPolicy(script=says))
    context = Settings(Leg("Bonn", datetime.date(2026, 1, 1)))
    runs = record_runs(graph, [INPUT], tmp_path, context=context)
    assert [replayed.divergence for replayed in replay_all(graph, runs)] == [None]


def test_only_classes_that_the_graph_is_declared_with_are_made_again(tmp_path: Path) -> None:
    class Loose(TypedDict, total=False):
        trip: Any
        traveller: Any
        pair: Any
        pace: Any
        id: Any
        plan: str

    graph = build(ScriptedPolicy(script=says), state=Loose, settings=None)
    assert graph_to_classes(graph) == {}
    runs = record_runs(graph, [INPUT], tmp_path)
    (replayed,) = replay_all(graph, runs)
    assert "its input was given as JSON, where it had" in str(replayed.divergence)
    assert f"trip: {class_to_form(Trip)}" in str(replayed.divergence)
    assert "id:" not in str(replayed.divergence)


def test_the_classes_of_a_graph_are_those_of_its_schemas_however_deep() -> None:
    found = graph_to_classes(build(ScriptedPolicy(script=says)))
    assert set(found.values()) == {Trip, Leg, Traveller, Pace, Settings}


class Event(BaseModel):
    """What an app declares, of which it is given others."""


class Asked(Event):
    what: str
    at: datetime.date


def test_an_object_of_a_subclass_stands_where_the_graph_declares_the_class(tmp_path: Path) -> None:
    class Inbox(TypedDict, total=False):
        events: list[Event]
        reply: str

    policy = ScriptedPolicy(script=says)

    def answer(state: Inbox) -> Inbox:
        (event,) = state["events"]
        assert isinstance(event, Asked)
        return {"reply": str(policy.invoke(f"{event.what} on a {event.at:%A}").text)}

    builder = StateGraph(Inbox)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph = builder.compile()
    assert graph_to_classes(graph) == {class_to_form(kind): kind for kind in (Event, Asked)}
    runs = record_runs(graph, [{"events": [Asked(what="swim", at=datetime.date(2026, 1, 2))]}], tmp_path)
    assert [replayed.divergence for replayed in replay_all(graph, runs)] == [None]


LOOKS_LIKE_MESSAGE = message_to_dict(HumanMessage("hi"))
MAIL = {"type": "email", "data": {"content": "hi", "subject": "a"}}


@pytest.mark.parametrize("event", [MAIL, LOOKS_LIKE_MESSAGE, HumanMessage("hi"), [MAIL, HumanMessage("hi")]])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_data_that_looks_like_a_message_is_no_message(tmp_path: Path, event: Any, is_resumed: bool) -> None:
    class Events(TypedDict, total=False):
        event: Any
        reply: str

    seen = []

    def answer(state: Events) -> Events:
        seen.append(interrupt("what?") if is_resumed else state["event"])
        return {"reply": str(ScriptedPolicy(script=says).invoke("say").text)}

    builder = StateGraph(Events)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph = builder.compile(checkpointer=MemorySaver())
    inputs = [{"event": "none"}, Command(resume=event)] if is_resumed else [{"event": event}]
    runs = record_runs(graph, inputs, tmp_path, config={"configurable": {"thread_id": "t"}})
    assert [replayed.divergence for replayed in replay_all(graph, runs)] == [None] * len(runs)
    assert seen == [event, event]


def test_an_older_record_tells_a_message_by_its_form_alone() -> None:
    assert value_to_forms({"a": LOOKS_LIKE_MESSAGE, "b": MAIL}) == [(["a"], PLAIN_DICT)]
    assert json_to_value([LOOKS_LIKE_MESSAGE, MAIL], forms=[]) == [HumanMessage("hi"), MAIL]


@pytest.mark.parametrize("is_async", [True, False])
def test_an_input_that_sends_is_sent_again(is_async: bool, tmp_path: Path) -> None:
    class Words(TypedDict, total=False):
        word: str

    policy = ScriptedPolicy(script=says)

    def ask(state: Words) -> Words:
        return {"word": str(policy.invoke(f"say {state['word']}").text)}

    builder = StateGraph(Words)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=MemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    inputs = [{"word": "a"}, Command(goto=[Send("ask", {"word": "b"})])]
    runs = record_runs(graph, inputs, tmp_path, config=config, is_async=is_async)
    assert [len(run.calls) for run in runs][1] >= 1
    assert [replayed.divergence for replayed in replay_all(graph, runs)] == [None, None]
