"""Owns: a watched state is, for the node, the state; and what the node read of it is never missed silently.

- Values, types of access, copies, merges, pickles and JSON are those of the plain state.
- A key that was read is noted; a state that left as a whole, or of which nothing was seen, is a bound.
- Nothing is noted before the node begins or after it ends; classes get their own attribute access back.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, computed_field

from marft_bridge.recording.state_reads import Reads, WatchedState, release_state, watch_state, watched_reads


class Model(BaseModel):
    a: int = 1
    b: list[str] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return self.a * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    a: int = 1
    b: tuple[str, ...] = ()


def begun(state: Any) -> tuple[Any, Reads]:
    reads = Reads()
    watched = watch_state(state, reads)
    reads.begin()
    return watched, reads


ONE_KEY: dict[str, Callable[[Any], Any]] = {
    "index": lambda s: s["a"],
    "get": lambda s: s.get("a"),
    "in": lambda s: "a" in s,
    "itemgetter": lambda s: operator.itemgetter("a")(s),
    "pop": lambda s: s.pop("a"),
    "setdefault": lambda s: s.setdefault("a", 5),
    "format_map": lambda s: "{a}".format_map(s),
}


@pytest.mark.parametrize("how", ONE_KEY)
def test_reading_one_key_of_a_dict_notes_that_key(how: str) -> None:
    watched, reads = begun({"a": 1, "b": [2]})
    assert ONE_KEY[how](watched) == ONE_KEY[how]({"a": 1, "b": [2]})
    assert (reads.keys, reads.is_inexact) == ({"a"}, False)


def test_a_match_statement_notes_the_keys_that_it_names() -> None:
    watched, reads = begun({"a": 1, "b": [2]})
    match watched:
        case {"a": value}:
            assert value == 1
        case _:
            pytest.fail("the watched state did not match")
    assert (reads.keys, reads.is_inexact) == ({"a"}, False)


WHOLE: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "unpack": lambda s: {**s},
    "arguments": lambda s: (lambda **kwargs: kwargs)(**s),
    "list": list,
    "items": lambda s: list(s.items()),
    "values": lambda s: list(s.values()),
    "keys": lambda s: list(s.keys()),
    "reversed": lambda s: list(reversed(s)),
    "repr": repr,
    "str": str,
    "f-string": lambda s: f"{s}",
    "json": json.dumps,
    "equal": lambda s: s == {"a": 1, "b": [2]},
    "unequal": lambda s: s != {"a": 1, "b": [2]},
    "or": lambda s: s | {"c": 3},
    "ror": lambda s: {"c": 3} | s,
    "copy": lambda s: s.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),  # noqa: S301  our own bytes
    "popitem": lambda s: s.popitem(),
}


@pytest.mark.parametrize("how", WHOLE)
def test_a_dict_that_leaves_as_a_whole_is_a_bound_and_what_leaves_is_plain(how: str) -> None:
    watched, reads = begun({"a": 1, "b": [2]})
    gone, expected = WHOLE[how](watched), WHOLE[how]({"a": 1, "b": [2]})
    assert gone == expected
    assert type(gone) is type(expected)
    assert reads.is_inexact


def test_a_key_read_before_the_whole_left_stays_exact_and_none_after_it_becomes_so() -> None:
    watched, reads = begun({"a": 1, "b": [2]})
    _ = watched["a"]
    _ = dict(watched)  # CPython copies key by key, which must not look like reads of single keys
    assert (reads.keys, reads.whole_state_read) == ({"a"}, True)


def test_writing_to_a_watched_dict_is_no_read() -> None:
    watched, reads = begun({"a": 1})
    watched["c"] = 3
    watched.update(d=4)
    del watched["a"]
    assert len(watched) == 2
    assert reads.keys == set()


def test_a_watched_dict_is_stored_by_langgraph_as_a_plain_one() -> None:
    watched, _ = begun({"a": 1, "b": [2]})
    serde = JsonPlusSerializer()
    back = serde.loads_typed(serde.dumps_typed({"kept": watched}))
    assert back == {"kept": {"a": 1, "b": [2]}}
    assert type(back["kept"]) is dict


@pytest.mark.parametrize("state", [Model(), Data()], ids=["pydantic", "dataclass"])
def test_reading_a_field_of_an_object_notes_it_and_the_object_stays_what_it_is(state: Any) -> None:
    watched, reads = begun(state)
    try:
        assert watched is state
        assert watched.a == 1
        assert (reads.keys, reads.is_inexact) == ({"a"}, False)
        assert watched == type(state)()
    finally:
        release_state(watched)


def test_a_property_notes_what_it_reads() -> None:
    watched, reads = begun(Model())
    try:
        assert watched.twice == 2
        assert reads.keys == {"a"}
    finally:
        release_state(watched)


WHOLE_MODEL: dict[str, Callable[[Any], Any]] = {
    "model_dump": lambda m: m.model_dump(),
    "model_dump_json": lambda m: m.model_dump_json(),
    "model_copy": lambda m: m.model_copy(),
    "vars": vars,
    "dict": dict,
    "repr": repr,
    "str": str,
    "equal": lambda m: m == Model(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),  # noqa: S301
}


@pytest.mark.parametrize("how", WHOLE_MODEL)
def test_a_model_that_leaves_as_a_whole_is_a_bound(how: str) -> None:
    expected = WHOLE_MODEL[how](Model())
    watched, reads = begun(Model())
    try:
        assert WHOLE_MODEL[how](watched) == expected
        assert reads.is_inexact
    finally:
        release_state(watched)


WHOLE_DATA: dict[str, Callable[[Any], Any]] = {
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "replace": lambda d: dataclasses.replace(d, a=2),
    "repr": repr,
    "equal": lambda d: d == Data(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),  # noqa: S301
}


@pytest.mark.parametrize("how", WHOLE_DATA)
def test_what_is_taken_from_a_dataclass_is_noted_or_a_bound(how: str) -> None:
    expected = WHOLE_DATA[how](Data())
    watched, reads = begun(Data())
    try:
        assert WHOLE_DATA[how](watched) == expected
        assert reads.is_inexact or reads.keys >= {"b"}
    finally:
        release_state(watched)


def test_only_the_watched_instance_is_noted_and_its_class_gets_its_own_access_back() -> None:
    before = {cls: cls.__getattribute__ for cls in (Model, Data)}
    one, reads = begun(Model())
    two, other_reads = begun(Model(a=2))
    bystander = Model(a=3)
    assert (two.a, bystander.a) == (2, 3)
    assert (reads.keys, other_reads.keys) == (set(), {"a"})
    release_state(one)
    assert two.b == []
    assert other_reads.keys == {"a", "b"}
    release_state(two)
    assert {cls: cls.__getattribute__ for cls in (Model, Data)} == before
    assert "__getattribute__" not in vars(Model)
    assert watched_reads(two) is None


def test_a_class_with_attribute_access_of_its_own_keeps_it() -> None:
    @dataclasses.dataclass
    class Loud:
        a: int = 1

        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)
            return found + 100 if name == "a" else found

    watched, reads = begun(Loud())
    assert watched.a == 101
    assert reads.keys == {"a"}
    release_state(watched)
    assert Loud().a == 101


def test_nothing_is_noted_before_the_node_begins_after_it_ends_or_while_paused() -> None:
    reads = Reads()
    watched = watch_state({"a": 1, "b": 2}, reads)
    _ = watched["a"]
    reads.begin()
    with reads.paused():
        _ = dict(watched)
    _ = watched["b"]
    release_state(watched)
    _ = watched["a"]
    assert (reads.keys, reads.whole_state_read) == ({"b"}, False)


def test_a_retry_forgets_what_the_lost_attempt_read() -> None:
    watched, reads = begun({"a": 1, "b": 2})
    _ = watched["a"], repr(watched)
    reads.begin()
    _ = watched["b"]
    assert (reads.keys, reads.is_inexact) == ({"b"}, False)


def test_other_states_are_handed_on_unwatched() -> None:
    for state in ([1], "text", None, 3, object()):
        reads = Reads()
        assert watch_state(state, reads) is state
        assert watched_reads(state) is None
        release_state(state)


def test_a_watched_dict_is_a_dict_of_the_same_values() -> None:
    inner = [2]
    watched, _ = begun({"a": 1, "b": inner})
    assert isinstance(watched, dict)
    assert isinstance(watched, WatchedState)
    assert watched["b"] is inner
    with pytest.raises(KeyError):
        _ = watched["zzz"]
