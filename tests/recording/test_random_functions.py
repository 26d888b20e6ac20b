"""Owns: for random functions, what the code says of the reads at a call is what happens: keys that are certain were
read in every run, and keys that were read in a run are possible.

A drawn function is a tree of statements whose branches are decided from outside, so that all its ways can be run. The
truth is what a watched dict saw in them; it shares no code with the analysis. With the forms that are fully understood
the two are equal, call by call.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.edge_rig import source_to_function

from marft_bridge.recording.function_reads import callable_to_reads
from marft_bridge.recording.node_bytecode import ReadKeys
from marft_bridge.recording.state_reads import Reads

KEYS = ("a", "b", "c")
Lines = list[str]


class Watched(dict[str, Any]):
    """Notes which of its first values are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()
        self.first = dict(values)

    def note(self, key: Any) -> None:
        if key in self.first and dict.get(self, key) is self.first[key]:
            self.seen.add(key)

    def note_all(self) -> None:
        for key in self.first:
            self.note(key)

    def __getitem__(self, key: str) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.note(key)
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self.note(key)
        return super().pop(key, *default)

    def __iter__(self) -> Any:
        self.note_all()
        return super().__iter__()

    def keys(self) -> Any:
        self.note_all()
        return super().keys()

    def copy(self) -> Any:
        self.note_all()
        return dict(super().items())

    def __repr__(self) -> str:
        self.note_all()
        return "state"

    def __len__(self) -> int:
        return super().__len__()


def indented(lines: Lines) -> Lines:
    return [f"    {line}" for line in lines]


@st.composite
def functions(draw: st.DrawFn, understood_only: bool) -> str:
    """The source of a function `node(state)`. `understood_only`: its reads follow exactly from its code."""
    calls = itertools.count()
    depth_limit = 3

    def key() -> str:
        return draw(st.sampled_from(KEYS))

    def call() -> str:
        return f"ask({next(calls)})"

    def read() -> Lines:
        forms = ["use(state[{k!r}])", "use(state.get({k!r}))", "use({k!r} in state)", "use(state.get({k!r}, []))"]
        forms += ["use(1, state[{k!r}][0])", 'text = f"{{state[{k!r}]}}"', "use([0, *state[{k!r}]])"]
        return [draw(st.sampled_from(forms)).format(k=key())]

    def other() -> Lines:
        """Statements of which the analysis knows only a bound, or that change the state."""
        k, other_key = key(), key()
        return draw(
            st.sampled_from(
                [
                    ["use(state)"],
                    ["use({**state})"],
                    ["use(*state)"],
                    ["use(state.copy())"],
                    ["use(f'{state}')"],
                    ["alias = state", f"use(alias[{k!r}])"],
                    [f"state[{k!r}] = ['own']"],
                    [f"state.update({k}=['own'])"],
                    [f"change(state, {k!r})"],
                    [f"use(state.pop({k!r}, None))"],
                    [f"state = {{**state, {k!r}: ['own']}}"],
                    [f"name = {k!r}", "use(state.get(name))"],
                    [f"later = lambda: state.get({k!r})", call(), "use(later())"],
                    ["def later():", f"    return state.get({k!r})", f"use(state.get({other_key!r}))", "use(later())"],
                    [f"use([state.get({k!r}) for _ in range(decide())])"],
                    [f"use(state.get({k!r}) if decide() else state.get({other_key!r}))"],
                    [f"use((state if decide() else {{{k!r}: ['x']}}).get({k!r}))"],
                    ["for name in state:", "    use(name)", f"    {call()}"],
                    ["use(len(state), isinstance(state, dict))"],
                    [f"use(decide() and state.get({k!r}))"],
                    ["del state", "state = {}"],
                    ["use(**state)"],
                ]
            )
        )

    def block(depth: int, in_loop: bool) -> Lines:
        lines: Lines = []
        for _ in range(draw(st.integers(1, 3))):
            lines += statement(depth, in_loop)
        return lines

    def statement(depth: int, in_loop: bool) -> Lines:
        kinds = ["read", "read", "call", "call"]
        kinds += [] if understood_only else ["other", "other"]
        kinds += ["if", "if_else", "for", "while"] if depth < depth_limit else []
        # The analysis must take any instruction to fail; in these runs only `fail` does.
        kinds += ["try", "finally", "with"] if depth < depth_limit and not understood_only else []
        kinds += ["break", "continue"] if in_loop else []
        kinds += ["return", "raise"]
        kind = draw(st.sampled_from(kinds))
        if kind == "read":
            return read()
        if kind == "call":
            return [call()]
        if kind == "other":
            return other()
        if kind == "if":
            return ["if decide():", *indented(block(depth + 1, in_loop))]
        if kind == "if_else":
            return [
                "if decide():",
                *indented(block(depth + 1, in_loop)),
                "else:",
                *indented(block(depth + 1, in_loop)),
            ]
        if kind == "for":
            return ["for _ in iter(decide, False):", *indented(block(depth + 1, in_loop=True))]
        if kind == "while":
            return ["while decide():", *indented(block(depth + 1, in_loop=True))]
        if kind == "try":
            raises = ["if decide():", "    fail()"]
            return ["try:", *indented([*block(depth + 1, in_loop), *raises]), "except OSError:", *indented(read())]
        if kind == "finally":
            return ["try:", *indented(block(depth + 1, in_loop)), "finally:", *indented([*read(), call()])]
        if kind == "with":
            return ["with swallow(OSError):", *indented(["fail() if decide() else None", *block(depth + 1, in_loop)])]
        # Decided, so that what follows can be reached.
        return {
            "break": ["if decide():", "    break"],
            "continue": ["if decide():", "    continue"],
            "return": ["if decide():", "    return"],
            "raise": ["if decide():", "    fail()"],
        }[kind]

    body = [*block(0, in_loop=False), call()]
    return "\n".join(["def node(state):", *indented(body)]) + "\n"


class StopError(Exception):
    """The run took more decisions than were given."""


def run(source: str, decisions: tuple[bool, ...]) -> tuple[list[tuple[int, set[str], ReadKeys]], int]:
    """(call, keys that were read by then, what is said of that) of one run, and how many decisions it took."""
    state, noted, reads = Watched({key: [key] for key in KEYS}), [], Reads()
    pending = iter(decisions)
    taken = 0

    def ask(number: int) -> None:
        noted.append((number, set(state.seen), reads.so_far()))

    def decide() -> bool:
        nonlocal taken
        taken += 1
        for decision in pending:
            return decision
        raise StopError

    def change(given: Any, key: str) -> None:
        given[key] = ["changed"]

    def fail() -> None:
        raise OSError

    def use(*args: Any, **kwargs: Any) -> None:
        for value in args:
            if value is state:
                state.note_all()

    node: Callable[..., Any] = source_to_function(
        source, ask=ask, decide=decide, use=use, change=change, fail=fail, swallow=contextlib.suppress
    )
    reads.begin(callable_to_reads(node, {}))
    reads.runs_inside(sys._getframe())
    with contextlib.suppress(OSError, StopError, KeyError, RuntimeError):
        node(state)
    return noted, taken


def all_runs(source: str, limit: int) -> tuple[list[list[tuple[int, set[str], ReadKeys]]], bool]:
    """Runs by all decisions, and whether these were all: at most `limit` decisions in each."""
    runs, is_complete, pending = [], True, [()]
    while pending:
        decisions: tuple[bool, ...] = pending.pop()
        noted, taken = run(source, decisions)
        runs.append(noted)
        if taken > len(decisions):
            if len(decisions) < limit:
                pending += [(*decisions, False), (*decisions, True)]
            else:
                is_complete = False
    return runs, is_complete


def check(source: str, is_exact: bool) -> None:
    runs, is_complete = all_runs(source, limit=7)
    certain: dict[int, set[str]] = {}
    possible: dict[int, set[str]] = {}
    said: dict[int, ReadKeys] = {}
    for number, seen, reads in (entry for noted in runs for entry in noted):
        assert reads.certain <= seen, f"call {number} has not read {set(reads.certain) - seen}:\n{source}"
        assert reads.possible is None or seen <= reads.possible, f"call {number} has read {seen}:\n{source}"
        certain[number] = certain.get(number, set(KEYS)) & seen
        possible[number] = possible.get(number, set()) | seen
        said[number] = reads
    for number, reads in said.items() if is_exact else ():
        assert reads.possible is not None, source
        if is_complete:  # else a way of more decisions may add to what is possible, and take from what is certain
            assert reads == (certain[number], possible[number]), f"call {number} of\n{source}"


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=functions(understood_only=False))
def test_what_the_code_says_of_a_random_function_is_true_in_every_run_of_it(source: str) -> None:
    check(source, is_exact=False)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=functions(understood_only=True))
def test_what_the_code_says_of_a_function_of_plain_reads_is_all_that_its_runs_show(source: str) -> None:
    check(source, is_exact=True)
