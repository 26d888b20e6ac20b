"""Owns: JSON of whatever depth is read or raises ValueError, and what was read is no deeper than a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_store.json_text import MAX_NESTING, TooDeepError, read_json


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":', " [ "])
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("count", [MAX_NESTING + 1, 900, 5_000, 200_000])
@pytest.mark.parametrize("form", [str, str.encode])
def test_lists_in_lists_without_end_are_a_value_error(opening: str, closes: bool, count: int, form: Any) -> None:
    closing = "".join({"[": "]", "{": "}"}.get(letter, "") for letter in reversed(opening))
    text = opening * count + ("1" + closing * count if closes else "")
    with pytest.raises(ValueError):
        read_json(form(text))


@pytest.mark.parametrize("frames", [0, 300])
def test_how_deep_a_text_may_be_does_not_depend_on_who_reads_it(frames: int) -> None:
    if frames:
        return test_how_deep_a_text_may_be_does_not_depend_on_who_reads_it(frames - 1)
    text = "[" * MAX_NESTING + "]" * MAX_NESTING
    assert json.dumps(read_json(text)) == text
    with pytest.raises(TooDeepError):
        read_json(f"[{text}]")
    assert read_json(json.dumps("[" * 5_000)) == "[" * 5_000  # brackets in a text are no lists
    return None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_VALUES)
def test_any_other_json_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value)
    for form in (text, text.encode(), bytearray(text.encode("utf-16"))):
        assert read_json(form) == json.loads(text)


def test_what_is_no_text_is_no_json() -> None:
    with pytest.raises(TypeError):
        read_json(["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid control character"):
        read_json('"a\nb"')
    assert read_json('"a\nb"', strict=False) == "a\nb"
