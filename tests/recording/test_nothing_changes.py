"""Owns: whatever a node does with its state, it does the same with and without recording: results, prompts, exceptions
and side effects, types included.

Each use runs in a node of a real graph, plain and recorded, as a function, as a coroutine, and as a function on an
event loop; what it gave is the node's result, the text of the node's prompt, and is looked at after the run as well.
"""

from __future__ import annotations

import asyncio
import builtins
import collections
import copy
import ctypes
import dataclasses
import functools
import gc
import importlib
import io
import itertools
import json
import marshal
import operator
import pickle
import pprint
import reprlib
import string
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import jinja2
import orjson
import ormsgpack
import pytest
import yaml
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from support.edge_rig import SaysNext

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.journal import Journal


class Dict(TypedDict, total=False):
    q: str
    log: Annotated[list[str], operator.add]
    out: Any


class Messages(MessagesState, total=False):
    q: str
    log: Annotated[list[str], operator.add]
    out: Any


class Model(BaseModel):
    q: str = ""
    log: Annotated[list[str], operator.add] = []
    out: Any = None


@dataclass
class Data:
    q: str = ""
    log: Annotated[list[str], operator.add] = field(default_factory=list)
    out: Any = None


SCHEMAS = {"TypedDict": Dict, "MessagesState": Messages, "pydantic": Model, "dataclass": Data}
START_VALUES = {"q": "tides?", "log": ["one", "two"], "out": None}


class Hears(SaysNext):
    """Keeps its prompts."""

    heard: list[str] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.heard.append(str(messages[-1].content))
        return super()._generate(messages, stop, run_manager)


# -- what nodes do with their state -----------------------------------------------------------------------------------

Use = Callable[[Any], Any]
USES: dict[str, Use] = {}


def use(function: Use) -> Use:
    USES[function.__name__] = function
    return function


def value_of(state: Any, key: str = "q") -> Any:
    return state[key] if isinstance(state, dict) else getattr(state, key)


USES |= {
    "type": lambda state: (type(state) is dict, type(state), state.__class__, type(state).__mro__),
    "isinstance": lambda state: [isinstance(state, kind) for kind in (dict, Mapping, MutableMapping, BaseModel)],
    "how its class reads attributes": lambda state: type(state).__getattribute__ is object.__getattribute__,
    "what its class defines": lambda state: sorted(vars(type(state)).keys() - {"__doc__"}),
    "index": value_of,
    "get": lambda state: (state.get("q"), state.get("nothing"), state.get("nothing", 3)),
    "a key that is not there": lambda state: state["nothing"],
    "an attribute that is not there": lambda state: state.nothing,
    "in": lambda state: ("q" in state, "nothing" in state),
    "len": len,
    "bool": bool,
    "iteration": list,
    "reversed": lambda state: list(reversed(state)),
    "items": lambda state: list(state.items()),
    "views": lambda state: (state.keys() & {"q"}, sorted(state.keys() | {"z"}), list(state.values())),
    "equality": lambda state: (state == copy.copy(state), state != {}, state == 1),
    "hash": hash,
    "order": lambda state: state < state,
    "call": lambda state: state(),
    "repr": repr,
    "str": str,
    "format": format,
    "f-string": lambda state: f"{state} {state!r}",
    "str.format": lambda state: "{0[q]} {0}".format(state),  # noqa: UP032
    "str.format_map": lambda state: "{q} of {log}".format_map(state),
    "percent": lambda state: "%(q)s" % state,  # noqa: UP031
    "string.Template": lambda state: string.Template("$q $log").substitute(state),
    "reprlib": reprlib.repr,
    "pprint": pprint.pformat,
    "pprint to a stream": lambda state: printed(lambda stream: pprint.pp(state, stream=stream, width=20)),
    "print": lambda state: printed(lambda stream: print(state, file=stream)),
    "or": lambda state: state | {"z": 1},
    "or from the right": lambda state: {"z": 1} | state,
    "or in place": lambda state: operator.ior(state, {"z": 1}),
    "unpacked": lambda state: {**state, "z": 1},
    "unpacked into arguments": lambda state: dict(**state),
    "dict": dict,
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "its own copy": lambda state: state.copy(),
    "fromkeys": lambda state: type(state).fromkeys(["a"], 1),
    "pickle": lambda state: (pickle.dumps(state), pickle.loads(pickle.dumps(state))),  # noqa: S301
    "pickle by protocol": lambda state: [pickle.dumps(state, protocol) for protocol in range(6)],
    "reduce": lambda state: repr(state.__reduce_ex__(2)[1]),
    "marshal": marshal.dumps,
    "json": json.dumps,
    "json with default": lambda state: json.dumps(state, default=repr, indent=1, sort_keys=True),
    "json by a class": lambda state: json.dumps([state], cls=ReprEncoder),
    "yaml.safe_dump": yaml.safe_dump,
    "yaml.dump": yaml.dump,
    "ormsgpack": lambda state: ormsgpack.packb(state),
    "ormsgpack without subclasses": lambda state: ormsgpack.packb(state, option=ormsgpack.OPT_PASSTHROUGH_SUBCLASS),
    "msgspec": lambda state: importlib.import_module("msgspec").json.encode(state),
    "langgraph's serialiser": lambda state: JsonPlusSerializer().loads_typed(JsonPlusSerializer().dumps_typed(state)),
    "pydantic strict": lambda state: TypeAdapter(dict[str, Any]).validate_python(state, strict=True),
    "pydantic": lambda state: TypeAdapter(dict[str, Any]).validate_python(state),
    "pydantic to a model": lambda state: Model.model_validate(state),
    "model_dump": lambda state: state.model_dump(),
    "model_dump_json": lambda state: state.model_dump_json(),
    "model_copy": lambda state: state.model_copy(update={"q": "b"}),
    "model_fields_set": lambda state: state.model_fields_set,
    "pydantic's private parts": lambda state: (state.__pydantic_fields_set__, state.__pydantic_extra__),
    "dataclasses.asdict": lambda state: dataclasses.asdict(state),
    "dataclasses.replace": lambda state: dataclasses.replace(state, q="b"),
    "dataclasses.fields": lambda state: [(part.name, getattr(state, part.name)) for part in dataclasses.fields(state)],
    "vars": vars,
    "__dict__": lambda state: state.__dict__,
    "dir": dir,
    "getattr": lambda state: (getattr(state, "q", None), hasattr(state, "log")),
    "__slots__": lambda state: state.__slots__,
    "setattr": lambda state: setattr(state, "q", "b") or state.q,
    "a new attribute": lambda state: setattr(state, "fresh", "b"),
    "size": sys.getsizeof,
    "tracked by the collector": gc.is_tracked,
    "weakref": lambda state: weakref.ref(state)() is state,
    "itemgetter": lambda state: operator.itemgetter("q", "log")(state),
    "attrgetter": lambda state: operator.attrgetter("q", "log")(state),
    "dict's own methods": lambda state: (dict.__getitem__(state, "q"), dict.get(state, "log"), dict.copy(state)),
    "PyDict_Copy": lambda state: c_copy(state),
    "PyDict_Size": lambda state: ctypes.pythonapi.PyDict_Size(ctypes.py_object(state)),
    "exec": lambda state: executed("seen = q + '!'", state),
    "exec with it as locals": lambda state: exec("seen = q + '!'", {}, state) or state["seen"],  # noqa: S102
    "eval": lambda state: eval("q * 2", {}, state),  # noqa: S307
    "a class of it": lambda state: type("Made", (), state).q,
    "a namespace of it": lambda state: types.SimpleNamespace(**state),
    "a read-only view": lambda state: types.MappingProxyType(state),
    "ChainMap": lambda state: collections.ChainMap({}, state),
    "UserDict": lambda state: collections.UserDict(state),
    "OrderedDict": lambda state: collections.OrderedDict(state),
    "Counter": lambda state: collections.Counter(state),
    "jinja2": lambda state: jinja2.Template("{{ q }} {{ log | length }} {{ s }}").render(**arguments(state), s=state),
    "zip": lambda state: list(zip(state, state.values(), strict=True)),
    "sorted": sorted,
    "itertools": lambda state: list(itertools.chain(state, state)),
    "singledispatch": lambda state: sort_of(state),
    "mutation": lambda state: (state.__setitem__("q", "b"), state.__delitem__("log"), state),
    "pop": lambda state: (state.pop("q"), state),
    "popitem": lambda state: (state.popitem(), state),
    "setdefault": lambda state: (state.setdefault("q", 1), state.setdefault("z", 2), state),
    "clear": lambda state: (state.clear(), state),
    "update": lambda state: (state.update(q="b"), state),
    "its lists": lambda state: (value_of(state, "log").append("three"), value_of(state, "log"), state),
    "itself": lambda state: state,
    "itself inside another": lambda state: {"kept": [state, (state,)]},
    "a runnable": lambda state: RunnableLambda(lambda given: {"again": given}).invoke(state),
    "a warning": lambda state: warned(),
    "a thread": lambda state: in_a_thread(lambda: (type(state), repr(state))),
    "a pool": lambda state: list(ThreadPoolExecutor(2).map(repr, [state, state])),
    "a closure that outlives the node": lambda state: lambda: state,
}
for _option in sorted(name for name in dir(orjson) if name.startswith("OPT_")):
    USES[f"orjson {_option}"] = functools.partial(
        lambda state, option: orjson.dumps(state, option=option), option=getattr(orjson, _option)
    )


@use
def match(state: Any) -> Any:
    match state:
        case {"q": text, "nothing": _}:
            return "wrong", text
        case {"q": text, **rest}:
            return text, rest
        case Model(q=text) | Data(q=text):
            return type(state), text
    return None


@use
def a_loop_that_deletes(state: Any) -> Any:
    for key in state:
        del state[key]
    return state


@use
def a_lookup_by_its_identity(state: Any) -> Any:
    return {id(state): "seen"}[id(state)], state is state


class ReprEncoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return repr(o)


@functools.singledispatch
def sort_of(state: object) -> str:
    return "something"


@sort_of.register
def _(state: dict) -> str:  # type: ignore[type-arg]
    return f"a dict, {type(state).__name__}"


@sort_of.register
def _(state: BaseModel) -> str:
    return "a model"


def printed(write: Callable[[Any], Any]) -> str:
    stream = io.StringIO()
    write(stream)
    return stream.getvalue()


def executed(source: str, state: Any) -> Any:
    exec(source, state)  # noqa: S102
    state.pop("__builtins__", builtins)
    return state["seen"], state


def arguments(state: Any) -> dict[str, Any]:
    return {"q": value_of(state), "log": value_of(state, "log")}


def c_copy(state: Any) -> Any:
    copies = ctypes.pythonapi.PyDict_Copy
    copies.restype, copies.argtypes = ctypes.py_object, [ctypes.py_object]
    return copies(state)


def warned() -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("look", stacklevel=4)  # as from the node's caller
    return [(str(warning.message), Path(warning.filename).name) for warning in caught]


def in_a_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join()
    return outcome


# -- the same with and without recording ------------------------------------------------------------------------------


def outcome_of(function: Callable[[Any], Any], state: Any) -> Any:
    try:
        return function(state)
    except Exception as error:  # noqa: BLE001 - the exception is the outcome
        # A key's address in an error's text differs from run to run; pydantic's texts differ by what they were given.
        return type(error), error.errors() if isinstance(error, ValidationError) else str(error)


def content(value: Any) -> Any:
    """A value with the types of all its parts."""
    if isinstance(value, BaseMessage):
        return type(value), value.content, value.id
    if isinstance(value, BaseModel):
        return type(value), content(value.__dict__)
    if isinstance(value, (Data, types.SimpleNamespace)):
        return type(value), content(vars(value))
    if isinstance(value, (collections.ChainMap, collections.UserDict)):
        return type(value), content(value.maps if isinstance(value, collections.ChainMap) else value.data)
    if isinstance(value, (dict, types.MappingProxyType)):
        return type(value), [(key, content(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        children = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return type(value), [content(child) for child in children]
    if isinstance(value, types.FunctionType):
        return content(value())
    return type(value), value if isinstance(value, type) else repr(value)


def observe(schema: Any, function: Use, how: str, recorder: Recorder | None) -> dict[str, Any]:
    """What one run gave: its result, its prompts, and what the node kept, looked at after the run."""
    model, kept = Hears(), []

    def node(state: Any) -> dict[str, Any]:
        outcome = outcome_of(function, state)
        kept.extend([state, outcome])
        model.invoke(f"{content(outcome)}")
        return {"out": None if isinstance(outcome, types.FunctionType) else outcome}

    async def anode(state: Any) -> dict[str, Any]:
        outcome = outcome_of(function, state)
        kept.extend([state, outcome])
        await model.ainvoke(f"{content(outcome)}")
        return {"out": None if isinstance(outcome, types.FunctionType) else outcome}

    builder = StateGraph(schema)
    builder.add_node("does", anode if how == "coroutine" else node)
    builder.add_node("after", lambda state: {"log": [f"{type(value_of(state, 'out'))}"]})
    builder.add_edge(START, "does")
    builder.add_edge("does", "after")
    graph: Any = builder.compile()
    graph = wrap(graph, recorder) if recorder is not None else graph
    values = copy.deepcopy(START_VALUES)
    if schema is Messages:
        values["messages"] = [HumanMessage("hello", id="h"), AIMessage("hi", id="a")]
    try:
        result = graph.invoke(values) if how == "function" else asyncio.run(graph.ainvoke(values))
    except Exception as error:  # noqa: BLE001 - LangGraph refuses some states, the same ones
        result = type(error), str(error)
    state, outcome = kept
    left = [content(part) for part in (dict(state) if isinstance(state, dict) else vars(state)).items()]
    return {
        "result": content(result),
        "prompts": model.heard,
        "outcome": content(outcome),
        "what is left of the state": left,
        "input": content(values),
    }


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(Journal(tmp_path_factory.mktemp("journal")))


def check(how_used: str, kind: str, how: str, recorder: Recorder) -> None:
    plain = observe(SCHEMAS[kind], USES[how_used], how, recorder=None)
    assert observe(SCHEMAS[kind], USES[how_used], how, recorder=recorder) == plain
    assert len(plain["prompts"]) == 1
    assert recorder.failures == 0


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("how_used", USES)
def test_a_node_does_the_same_with_its_state_whether_it_is_recorded_or_not(
    how_used: str, kind: str, recorder: Recorder
) -> None:
    check(how_used, kind, "function", recorder=recorder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["coroutine", "function on a loop"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_node_on_an_event_loop_does_the_same_too(kind: str, how: str, recorder: Recorder) -> None:
    for how_used in USES:
        check(how_used, kind, how, recorder=recorder)


def test_the_table_has_at_least_thirty_uses_that_do_something_on_every_kind_of_state() -> None:
    values = {"q": "tides?", "log": ["one"], "out": None}
    states: dict[str, Callable[[], Any]] = {
        "TypedDict": lambda: dict(values),
        "MessagesState": lambda: dict(values, messages=[]),
        "pydantic": lambda: Model(**values),
        "dataclass": lambda: Data(**values),
    }
    for kind, make in states.items():
        outcomes = [outcome_of(function, make()) for function in USES.values()]
        raised = [o for o in outcomes if isinstance(o, tuple) and o and o[0] in (TypeError, AttributeError, KeyError)]
        assert len(USES) - len(raised) >= 30, kind


def test_a_state_that_is_stored_in_the_state_is_checkpointed_as_it_would_be(recorder: Recorder) -> None:
    def run(is_recorded: bool) -> Any:
        builder = StateGraph(Dict)
        builder.add_node("does", lambda state: {"out": state})
        builder.add_edge(START, "does")
        graph: Any = builder.compile(checkpointer=InMemorySaver())
        graph = wrap(graph, recorder) if is_recorded else graph
        config: Any = {"configurable": {"thread_id": "t"}}
        result = graph.invoke(dict(START_VALUES), config)
        return content(result), content(graph.get_state(config).values)

    assert run(is_recorded=True) == run(is_recorded=False)


def test_a_node_is_given_the_object_that_langgraph_made_and_no_frame_of_ours_calls_it(recorder: Recorder) -> None:
    def run(is_recorded: bool) -> tuple[bool, list[str]]:
        seen: list[Any] = []

        def node(state: Dict) -> dict[str, Any]:
            seen.append([sys._getframe(1).f_code.co_qualname, id(state)])
            return {}

        def listen(chunk: Any) -> None:
            if chunk["type"] == "task" and chunk["payload"]["name"] == "does":
                given.append(chunk["payload"]["input"])

        given: list[Any] = []
        builder = StateGraph(Dict)
        builder.add_node("does", node)
        builder.add_edge(START, "does")
        graph: Any = builder.compile()
        graph = wrap(graph, recorder) if is_recorded else graph
        for chunk in graph.stream(dict(START_VALUES), stream_mode="debug"):
            listen(chunk)
        (caller, state_id), (langgraphs_own,) = seen[0], given
        return state_id == id(langgraphs_own), caller

    assert run(is_recorded=True) == run(is_recorded=False) == (True, "RunnableCallable.invoke")


def test_a_runnable_that_a_node_returns_runs_on_the_same_state(recorder: Recorder) -> None:
    def run(is_recorded: bool, asynchronous: bool) -> Any:
        seen: list[Any] = []
        model = Hears()

        def later(state: Any) -> dict[str, Any]:
            seen.append(type(state))
            model.invoke(state["q"])
            return {"out": state}

        def node(state: Dict) -> Any:
            seen.append(state["log"])
            return RunnableLambda(later)

        builder = StateGraph(Dict)
        builder.add_node("does", node)
        builder.add_edge(START, "does")
        graph: Any = builder.compile()
        graph = wrap(graph, recorder) if is_recorded else graph
        values = dict(START_VALUES)
        result = asyncio.run(graph.ainvoke(values)) if asynchronous else graph.invoke(values)
        return content(result), seen, model.heard

    for asynchronous in (False, True):
        assert run(True, asynchronous) == run(False, asynchronous)


def test_recording_leaves_nothing_of_the_stack_alive(recorder: Recorder) -> None:
    model = Hears()

    def node(state: Dict) -> dict[str, Any]:
        large = Large()
        born.append(weakref.ref(large))
        model.invoke(state["q"])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(__import__("contextvars").copy_context().run, model.invoke, "from a thread").result()
        return {}

    class Large:
        pass

    born: list[weakref.ref[Large]] = []
    builder = StateGraph(Dict)
    builder.add_node("does", node)
    builder.add_edge(START, "does")
    graph = wrap(builder.compile(), recorder)
    gc.collect()
    gc.disable()
    try:
        graph.invoke(dict(START_VALUES))
        asyncio.run(graph.ainvoke(dict(START_VALUES)))
        assert [reference() for reference in born] == [None, None]
    finally:
        gc.enable()
