"""The code of a function and the name of a variable in it -> which attributes the code takes of the variable's object.

Invariant: what is not listed is never taken. Where the object goes anywhere else (as an argument, into a list, to
`super()`), all of it counts as taken.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import TypeAlias

Uses: TypeAlias = "dict[str, Uses] | None"
"""Attribute -> what is taken of it in turn; None: all of it."""

_LOADS = {
    "LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_GLOBAL",
    "LOAD_NAME",
}
_NOT_A_USE = {"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS", "STORE_DEREF", "STORE_FAST", "STORE_GLOBAL", "STORE_NAME"}
_TAKES = {"LOAD_ATTR", "LOAD_METHOD"}
_SETS = {"STORE_ATTR", "DELETE_ATTR"}
_FILLERS = {"EXTENDED_ARG", "CACHE", "NOP"}
# By these, code reaches an object without naming it.
_REACHES_ALL = {"super", "locals", "__class__", "eval", "exec", "inspect"}


def variable_to_uses(code: CodeType, variable: str) -> Uses:
    """What the code, functions inside it included, takes of the object that the variable holds."""
    uses: Uses = {}
    for part in _code_parts(code):
        if not _REACHES_ALL.isdisjoint((*part.co_names, *part.co_freevars)):
            return None
        steps = [step for step in dis.get_instructions(part) if step.opname not in _FILLERS]
        for index, step in enumerate(steps):
            if _names(step, variable):
                uses = merge_uses(uses, _load_to_uses(steps, index, variable))
    return uses


def merge_uses(one: Uses, other: Uses) -> Uses:
    """What either takes."""
    if one is None or other is None:
        return None
    return one | {name: merge_uses(one[name], uses) if name in one else uses for name, uses in other.items()}


def _names(step: dis.Instruction, variable: str) -> bool:
    """Whether the instruction loads the variable. From Python 3.13 on one may load two, and stores one beside."""
    if isinstance(step.argval, tuple):
        return variable in step.argval and "LOAD_FAST" in step.opname
    return step.opname in _LOADS and step.argval == variable


def _load_to_uses(steps: Sequence[dis.Instruction], index: int, variable: str) -> Uses:
    """The attributes that are taken one of the other from a load on."""
    loaded = steps[index].argval
    if isinstance(loaded, tuple) and loaded[-1] != variable:
        return None  # the first of two: what is done with it comes later
    path: list[str] = []
    for step in steps[index + 1 :]:
        if step.opname in _SETS and not path:
            return {}
        if step.opname not in _TAKES:
            break
        path.append(str(step.argval))
    uses: Uses = None
    for name in reversed(path):
        uses = {name: uses}
    return uses


def _code_parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _code_parts(part)
