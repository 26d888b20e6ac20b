"""What LangGraph calls as a node -> the Python function in it, and what that one reads of a state.

Functions, methods, objects with a `__call__` in Python and `functools.partial` of these are seen through; of anything
else (functions in C, wrappers that take `*args`, runnables) nothing is known. Invariant: a function is analysed once
for each kind of state, and the app's callables are never called here.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from pydantic import BaseModel

from marft_bridge.recording.node_bytecode import (
    BLIND_BUILTINS,
    WHOLE_BUILTINS,
    CodeReads,
    Keys,
    code_to_reads,
)

log = logging.getLogger("marft_bridge")
_CACHED = 4096
_PLACEHOLDER = getattr(functools, "Placeholder", object())  # since Python 3.14
_OWN_BUILTINS = {name: getattr(builtins, name) for name in BLIND_BUILTINS | WHOLE_BUILTINS}


@dataclass(frozen=True, slots=True)
class FunctionReads:
    """The function of a node, and what it reads of its state."""

    code: CodeType
    reads: CodeReads


def callable_to_reads(function: Callable[..., Any] | None, state: Any) -> FunctionReads | None:
    """What a callable reads of `state`, its first argument; None where that is not known."""
    cls: Any = type(state)
    fields = None if cls is dict else plain_fields(cls)
    if fields == frozenset():
        return None
    resolved = _callable_to_function(function, 0)
    if resolved is None:
        return None
    python_function, position = resolved
    code = python_function.__code__
    if position >= code.co_argcount:
        return None  # the state is one of `*args`
    reads = _code_to_reads(code, code.co_varnames[position], fields, trusts_builtins=True)
    if reads is not None and reads.builtins and not _has_own_builtins(python_function, reads.builtins):
        reads = _code_to_reads(code, code.co_varnames[position], fields, trusts_builtins=False)
    return None if reads is None else FunctionReads(code, reads)


def _callable_to_function(function: Any, position: int) -> tuple[FunctionType, int] | None:
    """The function that runs when `function` is called, and the position of its argument `position` in there."""
    if type(function) is FunctionType:
        return function, position
    if type(function) is MethodType:
        return _callable_to_function(function.__func__, position + 1)
    if type(function) is functools.partial:
        if any(argument is _PLACEHOLDER for argument in function.args):
            return None
        return _callable_to_function(function.func, position + len(function.args))
    if isinstance(function, type):
        return None
    call = next((vars(base)["__call__"] for base in type(function).__mro__ if "__call__" in vars(base)), None)
    return (call, position + 1) if type(call) is FunctionType else None


def _has_own_builtins(function: FunctionType, names: frozenset[str]) -> bool:
    """Whether these names are Python's own builtins in a function, at this moment."""
    seen: dict[str, Any] = getattr(function, "__builtins__", {})
    return all(name not in function.__globals__ and seen.get(name) is _OWN_BUILTINS[name] for name in names)


@functools.lru_cache(maxsize=_CACHED)
def _code_to_reads(code: CodeType, variable: str, fields: Keys, trusts_builtins: bool) -> CodeReads | None:
    try:
        return code_to_reads(code, variable, fields, trusts_builtins=trusts_builtins)
    except Exception as error:  # noqa: BLE001 - code that cannot be read is a bound, not a failure of the app
        log.debug("the code of %s cannot be analysed: %s", code.co_name, error)
        return None


def field_names(cls: type) -> tuple[str, ...]:
    """The state keys of an object state's class; none for a class that is neither pydantic nor a dataclass."""
    if issubclass(cls, BaseModel):
        return tuple(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return ()


@functools.lru_cache(maxsize=_CACHED)
def plain_fields(cls: Any) -> frozenset[str]:
    """The fields of a class whose reading runs no code of the app: no properties, no `__getattribute__`."""
    reads_attributes: Any = cls.__getattribute__
    if reads_attributes is not object.__getattribute__:
        return frozenset()
    return frozenset(name for name in field_names(cls) if _is_plain(cls, name))


def _is_plain(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if name in vars(base):
            attribute = vars(base)[name]
            return isinstance(attribute, MemberDescriptorType) or not hasattr(type(attribute), "__get__")
    return True
