"""What one span says, in the project's own terms, whoever recorded it: the noun that every dialect is turned into.

Also the small tools that dialects share: JSON inside attributes, lists flattened into dotted keys, values of the
wrong type. Absent is None; a value that cannot be read is absent, and its name is noted in `unreadable`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trace_store import conventions as c

Kind = Literal["llm", "tool", "agent", "other"]

_INTEGERS = {c.REQUEST_TOP_K, c.REQUEST_SEED, c.REQUEST_MAX_TOKENS, c.USAGE_INPUT_TOKENS, c.USAGE_OUTPUT_TOKENS}
_NUMBERS = {c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P}
_TEXTS = {c.PROVIDER, c.REQUEST_MODEL, c.RESPONSE_MODEL, c.RESPONSE_ID, c.TOOL_NAME, c.TOOL_CALL_ID}

CALL_NAMES = frozenset(
    {*_INTEGERS, *_NUMBERS, *_TEXTS, c.FINISH_REASONS, c.INPUT_MESSAGES, c.OUTPUT_MESSAGES}
    | {c.TOOL_ARGUMENTS, c.TOOL_RESULT, c.LOGPROBS}
)
"""What `call_attributes` decides on: of these names, a finished call has what was read, not what was sent."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One span as its dialect means it."""

    dialect: str
    kind: Kind
    name: str  # of the run that the span stands for, without what the dialect puts around it
    node: str | None = None  # LangGraph node that the span belongs to, innermost
    checkpoint_ns: str | None = None
    step: int | None = None
    agent: str | None = None  # of an agent span
    session: str | None = None
    subject: str | None = None
    task: Mapping[str, Any] | None = None  # the input, when it is a JSON object
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of a call or a tool, under our names
    unreadable: tuple[str, ...] = ()
    answer_ids: tuple[str, ...] = ()  # ids of the messages that an LLM call answered with
    prompt_ids: tuple[str, ...] = ()  # ids of earlier answers that are messages of its prompt


def call_attributes(found: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Attributes under our names, None where absent -> those that have the type that the store wants, and the
    names of those that do not. A whole number written as a float is a number of tokens all the same."""
    good: dict[str, Any] = {}
    bad: list[str] = []
    for key, value in found.items():
        if value is None or value in ("", []):
            continue
        if key in _INTEGERS:
            value = whole_number(value)
        elif key in _NUMBERS:
            value = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        elif key in _TEXTS:
            value = text(value)
        elif key == c.FINISH_REASONS:
            value = value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None
        elif key == c.LOGPROBS:
            value = value if all(isinstance(item, (int, float)) for item in items(value)) else None
        if value is None:
            bad.append(key)
        else:
            good[key] = value
    return good, tuple(bad)


def request_attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call, as LangChain and OpenAI name them -> attributes under our names."""
    return {
        c.REQUEST_MODEL: first(settings, "model", "model_name"),
        c.REQUEST_TEMPERATURE: settings.get("temperature"),
        c.REQUEST_TOP_P: settings.get("top_p"),
        c.REQUEST_TOP_K: settings.get("top_k"),
        c.REQUEST_SEED: settings.get("seed"),
        c.REQUEST_MAX_TOKENS: first(settings, "max_tokens", "max_completion_tokens", "max_output_tokens"),
    }


def first(holder: Mapping[str, Any], *keys: str) -> Any:
    """The first value that is there; None when there is none."""
    return next((holder[key] for key in keys if holder.get(key) is not None), None)


def text(value: Any) -> str | None:
    """The value when it is a text with something in it."""
    return value if isinstance(value, str) and value else None


def whole_number(value: Any) -> int | None:
    """The value when it is a whole number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parsed(value: Any) -> Any:
    """The JSON value that an attribute holds as text; None when it is no JSON. Other values are what they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object, given as text or as it is; empty when it is none."""
    found = parsed(value)
    return found if isinstance(found, dict) else {}


def items(value: Any) -> list[Any]:
    """The value when it is a list; empty otherwise."""
    return value if isinstance(value, list) else []


def unflattened(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """`prefix.0.a.b = 1, prefix.1.c = 2` -> `[{"a": {"b": 1}}, {"c": 2}]`; inner lists are unflattened too."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix + "."):
            continue
        *path, leaf = key[len(prefix) + 1 :].split(".")
        place: Any = tree
        for step in path:
            place = place.setdefault(step, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.setdefault(leaf, value)
    found = _listed(tree)
    return [item for item in items(found) if isinstance(item, dict)]


def _listed(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _listed(value) for key, value in tree.items()}
    if values and _all_numbers(values):
        return [values[key] for key in sorted(values, key=int)]
    return values


def _all_numbers(keys: Iterable[str]) -> bool:
    return all(key.isascii() and key.isdigit() and len(key) < 10 for key in keys)
