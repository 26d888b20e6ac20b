"""Owns: packed lists come back equal to the bit, and a damaged one is refused, never half read."""

from __future__ import annotations

import base64
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_store.packed import FLOATS, INTS, floats_to_text, ints_to_text, text_to_values


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integers_come_back(values: list[int]) -> None:
    assert text_to_values(ints_to_text(values), INTS) == tuple(values)


@given(st.lists(st.floats(allow_nan=False)))
def test_floats_come_back_to_the_bit(values: list[float]) -> None:
    back = text_to_values(floats_to_text(values), FLOATS)
    assert back is not None
    assert struct.pack(f"{len(values)}d", *back) == struct.pack(f"{len(values)}d", *values)


def test_the_format_is_the_one_that_is_documented() -> None:
    assert ints_to_text([1, -2]) == "i4:" + base64.b64encode(struct.pack("<2i", 1, -2)).decode()
    assert floats_to_text([-0.5]) == "f8:" + base64.b64encode(struct.pack("<d", -0.5)).decode()


def test_a_log_prob_that_is_no_number_stays_one_that_is_no_number() -> None:
    (back,) = text_to_values(floats_to_text([math.nan]), FLOATS) or ()
    assert math.isnan(back)


@pytest.mark.parametrize("text", ["i4:AQAAAA", "i4:AQA=", "i4:****", "i4:AQAAAA==junk"])
def test_a_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        text_to_values(text, INTS)


def test_another_text_is_not_taken_for_a_packed_one() -> None:
    assert text_to_values("[1, 2]", INTS) is None
    assert text_to_values("f8:AAAAAAAA4L8=", INTS) is None


def test_a_token_id_beyond_32_bits_is_not_packed() -> None:
    with pytest.raises(OverflowError):
        ints_to_text([2**31])
