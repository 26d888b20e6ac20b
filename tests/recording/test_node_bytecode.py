"""Owns: what a node's code says of the reads of its state is right at every call, for each form of use that is known,
and the whole state, as a bound, for every other.

`a b | a b c`: a and b have been read for certain, c may have been; `*` is the whole state. One text for each call of
`ask`, and one for the end of the function. All of them were worked out by hand.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, computed_field
from support.function_rig import reads_at_calls, reads_to_text

from marft_bridge.recording.function_reads import callable_to_reads
from marft_bridge.recording.node_bytecode import code_to_reads

Case = Callable[[Any], Any]
CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}
OBJECT_CASES: dict[str, tuple[Case, tuple[str, ...]]] = {}


def case(*expected: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[function.__name__] = function, expected
        return function

    return add


def object_case(*expected: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        OBJECT_CASES[function.__name__] = function, expected
        return function

    return add


def ask(*values: Any) -> str:
    """Replaced where a case runs: the call at which is looked what has been read."""
    raise NotImplementedError


def opaque(*values: Any, **named: Any) -> Any:
    """A call of which nothing is known."""
    return None


options = SimpleNamespace(model={"name": 1}, size=2, ending="")


def title(state: Any, ending: str = "") -> str:
    return str(state["a"]) + (state["b"] if ending else "")


def titles(state: Any) -> str:
    return title(state) + str(state.get("c"))


def retitle(state: Any) -> None:
    state["a"] = state["b"]


def same(state: Any) -> Any:
    return state


def asks(state: Any) -> None:
    ask(state["a"])
    opaque(state["b"])


async def later_title(state: Any) -> Any:
    return state["a"]


def again(state: Any) -> None:
    if state["a"] != state["a"]:
        again(state)


def titles_later(state: Any) -> Any:
    return lambda: state["b"]


# -- plain reads ------------------------------------------------------------------------------------------------------


@case("|", "a | a", "a b | a b", "a b c | a b c")
def what_is_read_after_a_call_is_not_read_at_it(state: Any) -> None:
    ask()
    ask(state["a"])
    ask(state.get("b"))
    opaque(state["c"])


@case("a | a", "a b | a b", "a b c | a b c", "a b c d | a b c d", "a b c d | a b c d")
def get_with_a_default_that_is_worked_out(state: Any) -> Any:
    ask(state.get("a", options.size))
    ask(state.get("b", options.model["name"]))
    ask(state.get("c", [options.size, 2 * options.size + 1]))
    return state.get("d", {"size": options.size > 1}), ask()


@case("b | *", "b | *")
def get_of_a_key_that_is_worked_out(state: Any) -> Any:
    state["b"]
    return ask(state.get("a" + options.ending))


@case("| *", "| *")
def get_with_a_default_that_something_unknown_makes(state: Any) -> Any:
    return ask(state.get("a", options.model.get("b")))


@case("a b c d | a b c d", "a b c d | a b c d")
def every_plain_form(state: Any) -> None:
    first, second = state["a"], state.get("b", 3)
    third = state.get("c", [])
    ask(first, second, third, "d" in state, f"{state['a']}", state["b"])


@case("|", "a | a", "a | a")
def arguments_are_evaluated_from_the_left(state: Any) -> None:
    ask(ask(), state["a"])


@case("|", "|")
def a_state_that_is_not_used(state: Any) -> None:
    ask()


@case("a | a", "a | a")
def a_read_of_what_was_read(state: Any) -> None:
    ask(state["a"]["nested"][0].upper())


# -- ways -------------------------------------------------------------------------------------------------------------


@case("a | a b", "a | a b")
def one_of_two_ways(state: Any) -> None:
    if state["a"]:
        opaque(state["b"])
    ask()


@case("a b | a b c", "a b | a b c")
def a_key_on_both_ways(state: Any) -> None:
    if state["a"]:
        text = state["b"]
    else:
        text = state["c"] + state["b"]
    ask(text)


@case("a | a b c", "a | a b c")
def a_conditional_key(state: Any) -> None:
    text = state["b"] if state["a"] else state["c"]
    for _ in text:
        ask()


@case("a | a b", "a | a b")
def what_a_short_circuit_may_skip(state: Any) -> None:
    ask(state["a"] or state["b"])


@case("a | a b", "a | a b")
def a_loop_may_run_no_time(state: Any) -> None:
    for _ in state["a"]["nested"]:
        opaque(state["b"])
    ask()


@case("a | a b", "a | a b", "a | a b")
def a_later_turn_has_read_what_an_earlier_one_may_have_read(state: Any) -> None:
    for _ in state["a"]["two"]:
        ask()
        opaque(state["b"])


@case("|", "|", "| a")
def a_way_that_returned_is_no_way_to_what_follows(state: Any) -> None:
    if ask():
        return
    ask()
    opaque(state["a"])


@case("| a", "| a", "| a")
def what_failed_may_not_have_been_read(state: Any) -> None:
    try:
        opaque(state["a"]["nothing"])
    except KeyError:
        ask()
    ask()


@case("a b | a b", "a b | a b")
def a_finally_has_read_for_certain(state: Any) -> None:
    try:
        opaque(state["a"])
    finally:
        opaque(state["b"])
    ask()


@case("| a", "| a")
def a_context_may_swallow_what_failed(state: Any) -> None:
    with pytest.raises(KeyError):
        opaque(state["a"]["nothing"])
    ask()


@case("a | a b", "| a b c")
def what_it_raised_from_is_not_known_afterwards(state: Any) -> None:
    if state["a"]:
        opaque(state["b"])
    ask()
    opaque(state["c"])
    raise KeyError


# -- closures ---------------------------------------------------------------------------------------------------------


@case("a | a b", "a | a b")
def a_comprehension_may_run_no_time(state: Any) -> None:
    ask([(number, state["b"]) for number in state["a"]["nested"]])


@case("a | a b", "a c | a b c", "a c | a b c")
def a_function_inside_may_be_called_at_any_time(state: Any) -> None:
    def later() -> Any:
        return state["b"]

    ask(state["a"])
    ask(state["c"], later)


@case("| *", "| *")
def a_function_inside_that_gives_it_away(state: Any) -> None:
    def later() -> Any:
        return opaque(state)

    ask(later, state["a"])


@case("| a b", "| a b")
def a_function_inside_that_changes_it(state: Any) -> None:
    def later() -> None:
        nonlocal state
        state = {"a": state["b"]}

    later()
    ask(state["a"])


@case("| b", "| b")
def a_function_in_a_function(state: Any) -> None:
    ask(lambda: lambda: state["b"])


@case("a | a b", "a | a b")
def a_generator_inside(state: Any) -> None:
    ask(opaque(number for number in state["a"]["nested"] if state["b"]))


@case("| *", "| *")
def a_class_inside(state: Any) -> None:
    class Inner:
        kept = state["a"]

    ask(Inner)


# Since Python 3.12 a comprehension is part of the function, and takes the variable from it for the while.
@case(*(["a | a"] * 2 if sys.version_info < (3, 12) else ["a | *"] * 2))
def a_name_of_a_comprehension_is_another_variable(state: Any) -> None:
    text = state["a"]
    ask([len([state]) for state in "ab"], text)


# -- what the node changed itself -------------------------------------------------------------------------------------


@case("| a", "| a")
def what_it_wrote_itself_is_not_what_it_was_given(state: Any) -> None:
    state["a"] = "own"
    ask(state["a"])


@case("a | a", "a | a")
def what_it_read_before_it_wrote(state: Any) -> None:
    text = state["a"]
    state["a"] = "own"
    ask(text, state["a"])


@case("b | a b", "b | a b")
def what_one_way_wrote(state: Any) -> None:
    if state["b"]:
        state["a"] = "own"
    ask(state["a"])


@case("c | a c", "c | a c")
def what_it_deleted(state: Any) -> None:
    del state["a"]
    ask(state.get("a"), state["c"])


@case("c | c", "c | c")
def what_it_added_to(state: Any) -> None:
    state["c"] += "!"
    ask(state["c"])


@case("a b | a b c", "a b | a b c")
def what_it_popped(state: Any) -> None:
    for _ in state.pop("a"), opaque(state.get("c") if state.setdefault("b", 2) else 0):
        opaque()
    ask(state.get("b"))


@case("| a b", "| a b")
def a_variable_of_another_value(state: Any) -> None:
    state = {"a": 1, "b": 2}
    ask(state["a"], state["b"])


@case("| *", "| *")
def a_state_that_was_given_away_may_have_been_changed(state: Any) -> None:
    opaque(state)
    ask(state["a"])


@case("a | *", "a | *")
def what_was_read_before_it_was_given_away(state: Any) -> None:
    text = state["a"]
    opaque(state)
    ask(text, state["b"])


@case("| *", "| *")
def an_alias(state: Any) -> None:
    alias = state
    alias["a"] = "own"
    ask(state["a"])


@case("| *", "| *")
def an_update(state: Any) -> None:
    state.update(a="own")
    ask(state["a"])


@case("| *", "| *")
def a_method_that_is_kept(state: Any) -> None:
    read = state.get
    ask(read("a"), state["b"])


# -- the whole state --------------------------------------------------------------------------------------------------


@case("| *", "a | *", "a | *")
def a_whole_read_leaves_it_as_it_is(state: Any) -> None:
    ask({**state})
    ask(f"{state}", state["a"])


@case("a | *", "a | *")
def every_way_of_reading_all(state: Any) -> None:
    opaque(**state)
    opaque(f"{state!r}", [*state], state.copy(), list(state.items()), state.keys(), state.values())
    for key in state:
        opaque(state[key])
    if state:
        opaque()
    opaque([name for name in state])  # noqa: C416
    ask(state["a"])


@case("a | *", "a | *")
def builtins_of_pythons_own(state: Any) -> None:
    ask(len(state), str(state), dict(state), sorted(state), state["a"])


@case("a | a", "a | a")
def builtins_that_do_not_look_inside(state: Any) -> None:
    if isinstance(state, dict) and type(state) is dict:
        opaque(id(state))
    ask(state["a"])


@case("| *", "| *")
def a_computed_key(state: Any) -> None:
    for name in ("a", "b"):
        opaque(state[name])
    ask()


@case("| *", "| *")
def a_key_that_depends(state: Any) -> None:
    ask(state["a" if ask else "b"])


@case("| *", "| *")
def one_of_two_dicts(state: Any) -> None:
    other = {"a": 1}
    ask((state if ask else other)["a"])


@case("| *", "| *")
def the_other_of_two_dicts(state: Any) -> None:
    other = {"a": 1}
    ask((other if ask else state)["a"])


@case("| *", "| *")
def a_default_that_is_computed(state: Any) -> None:
    ask(state.get("a", opaque(1)))


@case("| *", "| *")
def a_joined_key(state: Any) -> None:
    ask(state.get("a" + state.__class__.__name__[:0]))


@case("| *", "| *")
def all_variables(state: Any) -> None:
    ask("{state}".format(**locals()))


@case("| *", "| *")
def a_pattern(state: Any) -> None:
    match state:
        case {"a": text}:
            ask(text)


@case("| *", "| *")
def a_union(state: Any) -> None:
    ask(state | {"z": 1})


@case("| *", "| *")
def a_tuple_of_it(state: Any) -> None:
    ask((1, state))


@case("| *", "| *")
def a_comparison(state: Any) -> None:
    ask(state == {}, state["a"])


# -- functions that are given the state -------------------------------------------------------------------------------


@case("a | a b", "a | a b")
def a_function_by_its_name(state: Any) -> None:
    ask(title(state))


@case("a c | a b c", "a c | a b c")
def a_function_that_calls_another(state: Any) -> None:
    text = titles(state)
    ask(f"{text}{title(state, text)}")


@case("| a b", "a b | a b")
def a_call_inside_it(state: Any) -> None:
    # What it has read so far itself is no more than a bound; when it has returned, it has.
    asks(state)


@case("b c | a b c", "b c | a b c")
def a_function_that_changes_it(state: Any) -> None:
    retitle(state)
    ask(state["a"], state["c"])


@case("| *", "| *")
def a_function_that_gives_it_back(state: Any) -> None:
    alias = same(state)
    alias["a"] = "own"
    ask(state["a"])


@case("b | a b", "b | a b")
def a_coroutine_that_may_run_later(state: Any) -> None:
    coroutine = later_title(state)
    coroutine.close()
    ask(state["b"])


@case("| *", "| *")
def a_function_that_calls_itself(state: Any) -> None:
    again(state)
    ask()


@case("c | b c", "c | b c")
def a_function_that_gives_back_what_reads_it_later(state: Any) -> None:
    later = titles_later(state)
    ask(later, state["c"])


@case("| *", "| *")
def a_function_by_a_keyword(state: Any) -> None:
    ask(title(state=state))


@case("| *", "| *")
def a_function_by_its_second_argument(state: Any) -> None:
    ask(opaque(title, state))


STATE = {"a": {"nested": ["x"], "two": "xy"}, "b": "2", "c": "3", "d": "4"}


@pytest.mark.parametrize("name", CASES)
def test_the_reads_of_a_dict_are_those_worked_out_by_hand(name: str) -> None:
    function, expected = CASES[name]
    assert tuple(map(reads_to_text, reads_at_calls(function, dict(STATE)))) == expected


# -- objects ----------------------------------------------------------------------------------------------------------


class Model(BaseModel):
    a: dict[str, Any] = {}
    b: str = ""
    c: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def both(self) -> str:
        return self.b + self.c

    def method(self) -> str:
        return self.b


@dataclasses.dataclass
class Data:
    a: dict[str, Any] = dataclasses.field(default_factory=dict)
    b: str = ""
    c: str = ""

    @property
    def both(self) -> str:
        return self.b + self.c

    def method(self) -> str:
        return self.b


@dataclasses.dataclass(slots=True)
class Slots:
    a: dict[str, Any] = dataclasses.field(default_factory=dict)
    b: str = ""
    c: str = ""

    @property
    def both(self) -> str:
        return self.b + self.c

    def method(self) -> str:
        return self.b


@object_case("|", "a | a", "a b | a b", "a b | a b")
def fields(state: Any) -> None:
    ask()
    ask(state.a["nested"])
    ask(state.b.strip())


@object_case("a | a b c", "a | a b c")
def fields_on_some_ways(state: Any) -> None:
    if state.a:
        opaque(state.b)
    ask([state.c for _ in state.a])


@object_case("| *", "| *")
def a_property(state: Any) -> None:
    ask(state.both, state.a)


@object_case("| *", "| *")
def a_method(state: Any) -> None:
    ask(state.method(), state.a)


@object_case("| *", "| *")
def a_text(state: Any) -> None:
    ask(f"{state}", state.a)


@object_case("| *", "| *")
def getattr_by_name(state: Any) -> None:
    ask(getattr(state, "a"), state.a)  # noqa: B009


@object_case("a | *", "a | *")
def what_was_read_before_it_was_changed(state: Any) -> None:
    text = state.a
    object.__setattr__(state, "a", {})
    ask(text, state.b)


@pytest.mark.parametrize("kind", [Model, Data, Slots])
@pytest.mark.parametrize("name", OBJECT_CASES)
def test_the_reads_of_an_object_are_those_worked_out_by_hand(name: str, kind: Any) -> None:
    function, expected = OBJECT_CASES[name]
    state = kind(a={"nested": ["x"]}, b="2", c="3")
    assert tuple(map(reads_to_text, reads_at_calls(function, state))) == expected


def test_an_attribute_of_a_dict_and_a_key_of_an_object_are_unknown_uses() -> None:
    def by_attribute(state: Any) -> Any:
        return state.a

    def by_key(state: Any) -> Any:
        return state["a"]

    for function, state in ((by_attribute, {"a": 1}), (by_key, Data())):
        reads = callable_to_reads(function, state)
        assert reads is not None
        assert reads_to_text(reads.reads.at_return) == "| *"


# -- what is not understood -------------------------------------------------------------------------------------------


def test_generators_are_not_looked_into() -> None:
    def makes(state: Any) -> Any:
        yield state["a"]

    async def amakes(state: Any) -> Any:
        yield state["a"]

    for function in (makes, amakes):
        reads = code_to_reads(function.__code__, "state", fields=None, resolve=lambda _: None)
        assert reads_to_text(reads.at_return) == "| *"


def test_a_coroutine_is_followed_through_what_it_waits_for() -> None:
    async def waits(state: Any) -> Any:
        async with opaque(state["a"]) as found:
            async for _ in found:
                await opaque(state["b"])
        return state["c"]

    reads = code_to_reads(waits.__code__, "state", fields=None, resolve=lambda _: None)
    # The context may swallow an error of what is inside it.
    assert reads_to_text(reads.at_return) == "a c | a b c"


def test_code_with_prefixed_instructions_is_read_like_any_other() -> None:
    branches = "\n".join(f"    if state['a'] == {number}:\n        ask({number})" for number in range(400))
    source = f"def node(state):\n{branches}\n    return state['b']\n"
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102
    reads = code_to_reads(namespace["node"].__code__, "state", fields=None, resolve=lambda _: None)
    assert reads_to_text(reads.at_return) == "a b | a b"


def test_a_builtin_that_is_not_pythons_own_is_a_call_of_which_nothing_is_known() -> None:
    source = "def node(state):\n    return len(state), state['a']\n"
    plain: dict[str, Any] = {}
    shadowed: dict[str, Any] = {"len": opaque}
    for namespace in (plain, shadowed):
        exec(source, namespace)  # noqa: S102
    texts = []
    for namespace in (plain, shadowed):
        reads = callable_to_reads(namespace["node"], {"a": 1})
        assert reads is not None
        texts.append(reads_to_text(reads.reads.at_return))
    assert texts == ["a | *", "| *"]
    plain["len"] = opaque  # shadowed after it was analysed
    reads = callable_to_reads(plain["node"], {"a": 1})
    assert reads is not None
    assert reads_to_text(reads.reads.at_return) == "| *"
