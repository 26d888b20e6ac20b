"""The attributes of a call or a tool, as whoever told of it had them -> as `SpanAttributes` reads them.

A single value that a typed column cannot hold would refuse the whole trace; here it is left out, and named. Invariants:
`SpanAttributes` accepts every value that passes; a number comes through only as exactly that number; nothing raises,
whatever an app passes as a parameter. A value of None, an empty text and an empty list are absent, and none of them is
named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any

from trace_store import conventions as c
from trace_store.attributes import BIGINT, INTEGER
from trace_store.packed import FLOATS

_MAX_DIGITS = 64  # of a number that is given as text


def check_call_attributes(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Attributes under our names -> those that are present, of the type and within the bounds that the store expects,
    and the names of those that cannot be read. Names without a type in the store are passed on as they are.

    A number may be given as text ("0.7"), or as a number of another type (40.0 for a whole number, numpy's, an int
    enum's); a text as an enum's member.
    """
    checked: dict[str, Any] = {}
    unreadable: list[str] = []
    for key, value in attributes.items():
        if value is None or (isinstance(value, (str, list, tuple)) and not value):
            continue
        read = _READERS.get(key)
        if read is not None:
            try:
                value = read(value)
            except Exception:  # noqa: BLE001 - an app's own types may raise anything
                value = None
        if value is None:
            unreadable.append(key)
        else:
            checked[key] = value
    return checked, tuple(unreadable)


def _to_integer(value: Any, bound: int) -> int | None:
    """The value as a whole number in [-bound, bound); None where it is none."""
    if type(value) is not int:
        number = _to_real(value)
        # The bound first: a number such as Decimal("1e999999999") must not be written out.
        if number is None or not -bound <= number < bound or int(number) != number:
            return None
        value = int(number)
    return value if -bound <= value < bound else None


def _to_number(value: Any) -> float | None:
    """The value as a finite number; None where it is none."""
    if type(value) is not float:
        real = _to_real(value)
        if real is None:
            return None
        value = float(real)
    return value if math.isfinite(value) else None


def _to_real(value: Any) -> Any:
    """The value as something that compares as a number does; None where it is no number. True is none."""
    if isinstance(value, str):
        try:
            return Decimal(value) if len(value) <= _MAX_DIGITS else None
        except InvalidOperation:
            return None
    if isinstance(value, bool):
        return None
    return value if isinstance(value, (Real, Decimal)) else None


def _to_text(value: Any) -> str | None:
    """The value when it is a text, or the text of an enum's member: its value, else its name."""
    if isinstance(value, Enum) and not isinstance(value, str):
        value = value.value if isinstance(value.value, str) else value.name
    return str.__str__(value) if isinstance(value, str) else None


def _to_texts(value: Any) -> list[str] | None:
    """The value as a list of texts; None where it is no list, or one of its elements no text."""
    texts = [_to_text(item) for item in value] if isinstance(value, (list, tuple)) else [None]
    known_texts = [text for text in texts if text is not None]
    return known_texts if len(known_texts) == len(texts) else None


def _to_logprobs(value: Any) -> Any:
    """The value as a list of numbers, which may be given as JSON; one that is packed already as it is."""
    if isinstance(value, str):
        if value.startswith(FLOATS):
            return value
        value = json.loads(value)
    numbers = [_to_real(item) for item in value] if isinstance(value, (list, tuple)) else [None]
    return [float(number) for number in numbers if number is not None] if None not in numbers else None


_to_int32, _to_int64 = partial(_to_integer, bound=INTEGER), partial(_to_integer, bound=BIGINT)
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((c.REQUEST_TOP_K, c.REQUEST_MAX_TOKENS, c.REQUEST_CHOICES), _to_int32),
    **dict.fromkeys((c.USAGE_INPUT_TOKENS, c.USAGE_OUTPUT_TOKENS, c.USAGE_REASONING_TOKENS), _to_int32),
    **dict.fromkeys((c.USAGE_CACHE_READ_TOKENS, c.USAGE_CACHE_WRITE_TOKENS), _to_int32),
    **dict.fromkeys((c.TEACHER_INPUT_TOKENS, c.TEACHER_OUTPUT_TOKENS), _to_int32),
    c.REQUEST_SEED: _to_int64,
    **dict.fromkeys((c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P), _to_number),
    **dict.fromkeys((c.PROVIDER, c.REQUEST_MODEL, c.RESPONSE_MODEL, c.RESPONSE_ID), _to_text),
    **dict.fromkeys((c.TOOL_NAME, c.TOOL_CALL_ID, c.TEACHER_FINISH_REASON, c.TEACHER_MODEL), _to_text),
    **dict.fromkeys((c.FINISH_REASONS, c.REQUEST_STOP), _to_texts),
    c.LOGPROBS: _to_logprobs,
}
