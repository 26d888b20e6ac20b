"""Owns: a bridge.toml of any shape is read, or refused in the project's own one line.

Any value of TOML at any key that the options have, and at keys that they have not; and files that are no sensible TOML.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from marft_bridge.common.errors import USER_ERRORS, ConfigError
from marft_bridge.config.bridge import BridgeConfig, toml_to_config

MINIMAL = '[graph]\napp = "a:b"\nnodes = ["x"]\ntasks = "t.jsonl"\nreward = "a:r"\n'


def is_one_line(message: str) -> bool:
    return message.isprintable() and 0 < len(message) <= 2_000


def refusal(folder: Path, text: str) -> str:
    (folder / "bridge.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        toml_to_config(folder / "bridge.toml")
    assert is_one_line(str(refused.value))
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = " + "[" * 5_000 + "]" * 5_000, "lists or tables too deep in each other"),
        ("x = " + "{a = " * 5_000 + "1" + "}" * 5_000, "lists or tables too deep in each other"),
        ("[" + "a." * 5_000 + "a]", "lists or tables in each other"),
        ("[graph.context]\nx = " + "[" * 150 + "]" * 150, "more than 100 lists or tables in each other"),
        ("x = " + "9" * 5_000, "is not valid TOML"),
        ("seed = 9223372036854775808", "an integer of more than 64 bits"),
        ('run = "a\\u0000b"', "a text with a NUL character"),
        ('"a\\u0000b" = 1', "a text with a NUL character"),
        ('"a\\nb" = 1\n' + MINIMAL, r"unknown key 'a\nb'"),
        ('"\\u001b[2J" = 1\n' + MINIMAL, r"unknown key '\x1b[2J'"),
        ("x = " + json.dumps("y" * 100_000), "unknown key 'x'"),
        ("y" * 100_000 + " = 1", "unknown key"),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_option_can_be_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refusal(tmp_path, text)


@pytest.mark.parametrize("name", ["../../../x", "/var/x", "a/b", "", ".", "..", "x" * 201])
def test_a_name_leads_nowhere_but_into_runs(tmp_path: Path, name: str) -> None:
    assert "is no folder name under runs/" in refusal(tmp_path, f"name = {json.dumps(name)}\n{MINIMAL}")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def key_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the options, and of the tables in them, of whatever kind."""
    for name, option in model.model_fields.items():
        yield (*prefix, name)
        for inner in models_in(option.annotation):
            yield from key_paths(inner, (*prefix, name))


def option_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The table and every table in it."""
    yield model
    for option in model.model_fields.values():
        for inner in models_in(option.annotation):
            yield from option_models(inner)


def holds_float(annotation: Any) -> bool:
    return annotation is float or any(holds_float(part) for part in get_args(annotation))


FLOATS = sorted(
    {
        (model, name)
        for model in option_models(BridgeConfig)
        for name, option in model.model_fields.items()
        if holds_float(option.annotation)
    },
    key=lambda each: (each[0].__module__, each[0].__name__, each[1]),
)
PATHS = sorted(set(key_paths(BridgeConfig)))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.sampled_from(sorted({path[-1] for path in PATHS})) | TEXTS
SCALARS = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXTS
    | st.sampled_from(["gsm8k", "newest", "base", "a:b", "jsonl", "python", "kind", "match", "1/0", "..", "~"])
    | st.dates()
    | st.datetimes(max_value=datetime.datetime(9000, 1, 1))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def to_toml(value: Any) -> str:
    """A value as TOML writes it inline."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return "nan" if math.isnan(value) else repr(value)
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f") if value.isascii() else _quote(value)
        case list():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_quote(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
        case datetime.date():
            return value.isoformat()
        case _:
            return str(value)


def _quote(text: str) -> str:
    return '"' + "".join(f"\\U{ord(letter):08x}" for letter in text) + '"'


def at_path(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("model", "name"), FLOATS, ids=lambda each: getattr(each, "__name__", each))
def test_no_option_is_infinite_or_no_number(model: type[BaseModel], name: str, value: float) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate({name: value})
    assert name in {error["loc"][0] for error in refused.value.errors() if error["loc"]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(st.data())
def test_any_value_at_any_key_is_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    raw: dict[str, Any] = {"graph": {"app": "a:b", "nodes": ["x"], "tasks": "t.jsonl", "reward": "a:r"}}
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(PATHS))
        value = data.draw(VALUES)
        if data.draw(st.booleans()):  # in a list of tables, as [[rewards]] are
            path, value = path[:-1], [{path[-1]: value}]
        raw = merged(raw, at_path(path, value)) if path else raw | value[0]
    (tmp_path / "bridge.toml").write_text("".join(f"{_quote(key)} = {to_toml(item)}\n" for key, item in raw.items()))
    try:
        config = toml_to_config(tmp_path / "bridge.toml")
        config.model_dump(mode="json")  # as the run folder keeps it
        message = "read"
    except USER_ERRORS as error:
        message = str(error)
    assert is_one_line(message)
