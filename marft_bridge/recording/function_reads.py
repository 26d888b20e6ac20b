"""What LangGraph calls as a node -> the Python function in it, and what that one reads of a state.

Functions, methods, objects with a `__call__` in Python and `functools.partial` of these are seen through, and so are
the functions that they call with the state by a global name; of anything else (functions in C, wrappers that take
`*args`, runnables) nothing is known. Invariants: a function is analysed once for each kind of state; what its global
names mean is looked up again for each run; the app's callables are never called here.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from pydantic import BaseModel

from marft_bridge.recording.node_bytecode import CallEffect, CodeReads, Keys, code_to_reads

log = logging.getLogger("marft_bridge")
_CACHED = 4096
_MAX_DEPTH = 4  # functions that call each other with the state
_PLACEHOLDER = getattr(functools, "Placeholder", object())  # since Python 3.14
_NO_KEYS: frozenset[str] = frozenset()
# Builtins that leave a dict as it is: those that do not look into it, and those that may read all of it.
_BLIND_BUILTINS = ("isinstance", "type", "id")
_WHOLE_BUILTINS = ("len", "bool", "str", "repr", "dict", "list", "tuple", "set", "sorted", "print")
_OWN_BUILTINS = {name: getattr(builtins, name) for name in (*_BLIND_BUILTINS, *_WHOLE_BUILTINS)}


@dataclass(frozen=True, slots=True)
class FunctionReads:
    """The function of a node, and what it reads of its state."""

    code: CodeType
    reads: CodeReads


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a global name meant when a function was analysed: a function of the app, or a builtin of Python's own."""

    code: CodeType | None  # None: the builtin
    inner: Mapping[str, _Meaning]  # of the names in that function

    def holds(self, name: str, function: FunctionType) -> bool:
        """Whether the name means the same in `function` now."""
        if self.code is None:
            return _is_own_builtin(name, function)
        meant = function.__globals__.get(name)
        return type(meant) is FunctionType and meant.__code__ is self.code and _all_hold(self.inner, meant)


@dataclass(frozen=True, slots=True)
class _Analysis:
    """What is known of the state of a function, as long as its names mean the same."""

    code: CodeType
    reads: CodeReads | None  # None: the code cannot be read
    meanings: Mapping[str, _Meaning]


_analyses: dict[tuple[int, str, Keys], _Analysis] = {}  # by the identity of the code, which the analysis keeps alive


def callable_to_reads(function: Callable[..., Any] | None, state: Any) -> FunctionReads | None:
    """What a callable reads of `state`, its first argument; None where that is not known."""
    cls: Any = type(state)
    fields = None if cls is dict else plain_fields(cls)
    if fields == _NO_KEYS:
        return None
    resolved = _callable_to_function(function, 0)
    if resolved is None:
        return None
    python_function, position = resolved
    reads = _function_to_analysis(python_function, position, fields, depth=0).reads
    return None if reads is None else FunctionReads(python_function.__code__, reads)


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


def _function_to_analysis(function: FunctionType, position: int, fields: Keys, depth: int) -> _Analysis:
    """What the function does with its argument `position`."""
    code = function.__code__
    if position >= code.co_argcount:
        return _Analysis(code, None, {})  # the state is one of `*args`
    variable = code.co_varnames[position]
    key = (id(code), variable, fields)
    analysis = _analyses.get(key)
    if analysis is not None and analysis.code is code and _all_hold(analysis.meanings, function):
        return analysis
    analysis = _analyse(function, variable, fields, depth=depth)
    if len(_analyses) >= _CACHED:
        _analyses.clear()
    _analyses[key] = analysis
    return analysis


def _analyse(function: FunctionType, variable: str, fields: Keys, depth: int) -> _Analysis:
    meanings: dict[str, _Meaning] = {}

    def resolve(name: str) -> CallEffect | None:
        if fields is None and _is_own_builtin(name, function):
            meanings[name] = _Meaning(None, {})
            return CallEffect(_NO_KEYS, _NO_KEYS if name in _BLIND_BUILTINS else None, _NO_KEYS)
        called = function.__globals__.get(name)
        if type(called) is not FunctionType or depth >= _MAX_DEPTH:
            return None
        inner = _function_to_analysis(called, 0, fields, depth=depth + 1)
        if inner.reads is None or inner.reads.returns_state:
            return None
        meanings[name] = _Meaning(inner.code, inner.meanings)
        # A coroutine has read nothing when it is made.
        has_read = _NO_KEYS if inner.code.co_flags & inspect.CO_COROUTINE else inner.reads.at_return.certain
        return CallEffect(has_read, inner.reads.anywhere.possible, inner.reads.changes)

    try:
        reads = code_to_reads(function.__code__, variable, fields, resolve=resolve)
    except Exception as error:  # noqa: BLE001 - code that cannot be read is a bound, not a failure of the app
        log.debug("the code of %s cannot be analysed: %s", function.__qualname__, error)
        return _Analysis(function.__code__, None, {})
    used = {name: meaning for name, meaning in meanings.items() if name in reads.resolved_names}
    return _Analysis(function.__code__, reads, used)


def _all_hold(meanings: Mapping[str, _Meaning], function: FunctionType) -> bool:
    return all(meaning.holds(name, function) for name, meaning in meanings.items())


def _is_own_builtin(name: str, function: FunctionType) -> bool:
    """Whether this name is one of Python's own builtins in a function, at this moment, and one that is known here."""
    seen: dict[str, Any] = getattr(function, "__builtins__", {})
    return name in _OWN_BUILTINS and name not in function.__globals__ and seen.get(name) is _OWN_BUILTINS[name]


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
