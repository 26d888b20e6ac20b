"""What JSON has no form for in a recorded value -> where it stands and what it was; and back again from the two.

Invariants: an object is made again without running the app's code, and only of a class that the caller names; what
cannot be made again stays as the JSON has it, and is told.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import enum
import uuid
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.types import Command, Send
from pydantic import BaseModel

ValuePath = tuple[str | int, ...]
"""Keys and positions in the JSON, from the outside in."""
INT_KEYS = "dict of int keys"
PLAIN_DICT = "dict"
"""Of a dict whose JSON has the form of a message, and that is none."""
_MESSAGE_FIELDS = {"content", "additional_kwargs", "response_metadata"}


def _text_to_timedelta(text: str) -> datetime.timedelta:
    """The text of a timedelta, `-1 day, 23:59:59.5`, -> the timedelta."""
    days, _, clock = text.rpartition(", ")
    hours, minutes, seconds = clock.split(":")
    return datetime.timedelta(
        days=int(days.split(" ")[0]) if days else 0, hours=int(hours), minutes=int(minutes), seconds=float(seconds)
    )


_OF_TEXT: dict[type, Callable[[str], Any]] = {
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
    datetime.timedelta: _text_to_timedelta,
    uuid.UUID: uuid.UUID,
    Decimal: Decimal,
    Fraction: Fraction,
    complex: complex,
    bytes: ast.literal_eval,
    type(Path()): Path,
    PurePosixPath: PurePosixPath,
    PureWindowsPath: PureWindowsPath,
}
_OF_LIST: dict[type, Callable[[Any], Any]] = {tuple: tuple, set: set, frozenset: frozenset}
_OF_CLASS: dict[type, Callable[[Any], Any]] = _OF_TEXT | _OF_LIST
_OF_NAME = {kind.__qualname__: make for kind, make in _OF_CLASS.items()}
_OF_NAME |= {"PosixPath": Path, "WindowsPath": Path, "pathlib.PosixPath": Path}  # of another system, of older records


def value_to_forms(value: Any) -> list[tuple[list[str | int], str]]:
    """Path and form of each part of a value that its JSON text does not say, outermost first; see `value_to_text`.

    Messages and LangGraph's commands are none of these: they are known by their fields. A dict that only looks like a
    message is.
    """
    try:
        return [(list(path), form) for path, form in _forms(value, ())]
    except Exception:  # noqa: BLE001 - an app's own objects may raise anything
        return [([], class_to_form(type(value)))]


def class_to_form(value_class: type) -> str:
    """The name of a class, with its module where it is none of Python's own that are made again here."""
    name = value_class.__qualname__
    return name if value_class in _OF_CLASS else f"{value_class.__module__}.{name}"


def _forms(value: Any, path: ValuePath) -> Iterator[tuple[ValuePath, str]]:
    kind = type(value)
    if value is None or kind in (str, int, float, bool) or isinstance(value, BaseMessage):
        return
    if kind is dict:
        if is_message_form(value):
            yield path, PLAIN_DICT
        if value and not all(isinstance(key, str) for key in value):
            yield path, INT_KEYS if all(type(key) is int for key in value) else "dict whose keys are no text"
    elif kind is not list and kind not in (Command, Send):
        yield path, class_to_form(kind)
    if isinstance(value, Send):
        yield from _forms(value.arg, (*path, "arg"))
    elif (fields := value_to_fields(value)) is not None:
        for name, item in fields.items():
            if not (type(item) is tuple and not item and name in _empty_by_default(kind)):  # as a Command's goto
                yield from _forms(item, (*path, name))
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        for number, item in enumerate(items):
            yield from _forms(item, (*path, number))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _forms(item, (*path, str(key)))


def _empty_by_default(kind: type) -> frozenset[str]:
    """Fields of a dataclass that are empty tuples unless somebody fills them: JSON has none, and they come back so."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return frozenset(field.name for field in fields if type(field.default) is tuple and not field.default)


def is_message_form(value: Any) -> bool:
    """Whether a value of JSON has the form that `value_to_text` gives a message, which no less than all of it tells."""
    if not isinstance(value, dict) or set(value) != {"type", "data"} or not isinstance(value["data"], dict):
        return False
    data = value["data"]
    return bool(value["type"] == data.get("type") and data.keys() >= _MESSAGE_FIELDS)


def value_to_fields(value: Any) -> dict[str, Any] | None:
    """Field -> value of a model or dataclass, without those that it was made without; None for anything else, a class
    among it."""
    if isinstance(value, BaseModel):
        names = list(type(value).model_fields)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def forms_to_value(json_value: Any, forms: list[Any], classes: Mapping[str, type]) -> tuple[Any, list[str]]:
    """JSON and its forms -> the value, and what could not be made again, as `path: form`, the outermost only.

    Args:
        json_value: of `value_to_text`; it is not changed.
        forms: of `value_to_forms`.
        classes: by their forms, those that may be made anew.
    """
    lost: list[Any] = []
    # From the inside out, so that the path to an outer value still leads through JSON when an inner one is made.
    for path, form in sorted(forms, key=lambda entry: -len(entry[0])):
        try:
            json_value = _replace_at(json_value, path, partial(_make, form=form, classes=classes))
        except (LookupError, TypeError, ValueError, ArithmeticError, SyntaxError):
            lost.append([path, form])
    outermost = [
        entry for entry in forms if entry in lost and not any(_is_inside(entry[0], outer) for outer, _ in lost)
    ]
    return json_value, [f"{'.'.join(map(str, path)) or 'the whole'}: {form}" for path, form in outermost]


def _is_inside(path: list[str | int], outer: list[str | int]) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _replace_at(value: Any, path: list[Any], make: Callable[[Any], Any]) -> Any:
    """The value with what stands at `path` made anew; containers on the way are copied."""
    if not path:
        return make(value)
    copied = value.copy()
    copied[path[0]] = _replace_at(value[path[0]], path[1:], make)
    return copied


def _make(value: Any, *, form: str, classes: Mapping[str, type]) -> Any:
    """Raises LookupError, TypeError or ValueError where there is no way back."""
    if form == INT_KEYS:
        return {int(key): item for key, item in value.items()}
    if form == PLAIN_DICT:
        return value
    if form in _OF_NAME:
        return _OF_NAME[form](value)
    kind = classes[form]
    if issubclass(kind, enum.Enum):
        return kind[value.rpartition(".")[2]] if _is_member_name(kind, value) else kind(value)
    if issubclass(kind, BaseModel):
        return kind.model_construct(**value)
    if dataclasses.is_dataclass(kind):
        return _make_dataclass(kind, value)
    if issubclass(kind, PurePath):
        return kind(value)
    if issubclass(kind, tuple):
        return kind._make(value)  # type: ignore[attr-defined]
    raise LookupError(form)


def _is_member_name(kind: type[enum.Enum], value: Any) -> bool:
    return isinstance(value, str) and value.startswith(f"{kind.__name__}.")


def _make_dataclass(kind: type, fields: Mapping[str, Any]) -> Any:
    """An instance with these fields. `run_facts` leaves out those that are None or an empty tuple."""
    instance: Any = object.__new__(kind)
    for field in dataclasses.fields(kind):
        absent = () if field.default == () else None
        object.__setattr__(instance, field.name, fields.get(field.name, absent))
    return instance
