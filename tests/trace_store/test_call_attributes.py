"""Owns: what of a call's attributes passes into a span, so that no value of a caller's refuses its trace.

- What passes is read again without fault, as the same value; what does not is named; nothing raises.
- A number comes through as exactly that number, from whichever form, or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_store import conventions as c
from trace_store.attributes import SpanAttributes
from trace_store.call_attributes import check_call_attributes
from trace_store.journal import line_of, record_of
from trace_store.records import SpanRow

READ: dict[str, Callable[[SpanAttributes, str], Any]] = {
    **dict.fromkeys((c.REQUEST_TOP_K, c.REQUEST_MAX_TOKENS, c.USAGE_INPUT_TOKENS), SpanAttributes.int32),
    c.REQUEST_SEED: SpanAttributes.integer,
    **dict.fromkeys((c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P), SpanAttributes.number),
    **dict.fromkeys((c.RESPONSE_MODEL, c.RESPONSE_ID, c.PROVIDER, c.TOOL_CALL_ID), SpanAttributes.text),
    c.FINISH_REASONS: lambda attributes, _: attributes.finish_reason(),
    c.REQUEST_STOP: SpanAttributes.texts,
    c.LOGPROBS: SpanAttributes.numbers,
}


class Word(enum.Enum):
    STOP = "stop"


class Number(enum.IntEnum):
    TWO = 2


NUMBERS = st.integers() | st.floats() | st.decimals() | st.fractions() | st.booleans() | st.floats(width=32)
SINGLE = NUMBERS | NUMBERS.map(str) | st.text(st.characters(codec="utf-8")) | st.sampled_from([*Word, *Number])
VALUES = SINGLE | st.floats(width=32).map(numpy.float32) | st.lists(SINGLE, max_size=3)


@given(st.dictionaries(st.sampled_from(sorted(READ)), VALUES))
def test_what_passes_is_read_again_without_fault_and_what_does_not_is_named(attributes: dict[str, Any]) -> None:
    checked, unreadable = check_call_attributes(attributes)
    empty = {key for key, value in attributes.items() if isinstance(value, (str, list)) and not value}
    assert checked.keys() | set(unreadable) | empty == attributes.keys()
    assert not checked.keys() & set(unreadable)
    record = record_of(line_of(SpanRow("t", "s", None, "n", c.CHAT, 1, 2, "ok", None, c.CONVENTION_VERSION, checked)))
    assert isinstance(record, SpanRow)
    for key in checked:
        READ[key](SpanAttributes(record), key)  # raises nothing
        is_text = READ[key] is SpanAttributes.text  # of an int enum's member, the name
        if isinstance(attributes[key], (int, float, Fraction, Decimal)) and not is_text:
            assert float(attributes[key]) == checked[key]


@pytest.mark.parametrize(
    ("given_value", "held"),
    [
        ("9007199254740993", 2**53 + 1),  # no float holds it
        ("9007199254740993.0", 2**53 + 1),
        (" 40 ", 40),
        ("4e1", 40),
        (numpy.int32(40), 40),
        (numpy.float32(40), 40),
        (Number.TWO, 2),
        (Fraction(80, 2), 40),
        ("1e999999999", None),
        (Decimal("-1e999999999"), None),
        ("9" * 5000, None),
        (Fraction(1, 3), None),
        (True, None),
        (object(), None),
    ],
)
def test_a_whole_number_is_exactly_that_or_nothing(given_value: Any, held: int | None) -> None:
    checked, unreadable = check_call_attributes({c.REQUEST_SEED: given_value})
    assert checked.get(c.REQUEST_SEED) == held
    assert type(checked.get(c.REQUEST_SEED, 0)) is int
    assert unreadable == (() if held is not None else (c.REQUEST_SEED,))
