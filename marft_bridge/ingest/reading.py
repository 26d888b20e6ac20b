"""`Reading`: one span in the project's own terms, whichever semantic convention it was recorded in.

Also what the conventions share: JSON inside attributes, lists flattened into dotted keys, values of the wrong type.
Absent is None; a value that cannot be read is absent, and its name is noted in `unreadable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trace_store import conventions as c
from trace_store.json_text import read_json

Kind = Literal["llm", "tool", "agent", "other"]

CALL_ATTRIBUTES = frozenset(
    {c.REQUEST_TOP_K, c.REQUEST_SEED, c.REQUEST_MAX_TOKENS, c.USAGE_INPUT_TOKENS, c.USAGE_OUTPUT_TOKENS}
    | {c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P, c.FINISH_REASONS, c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.LOGPROBS}
    | {c.PROVIDER, c.REQUEST_MODEL, c.RESPONSE_MODEL, c.RESPONSE_ID}
    | {c.TOOL_NAME, c.TOOL_CALL_ID, c.TOOL_ARGUMENTS, c.TOOL_RESULT}
)
"""Names that the readers give to `check_call_attributes`: under these, a row has the value that was read, not the one
sent."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One span, normalised from its convention."""

    convention: str
    kind: Kind
    name: str  # of the run that the span stands for, without what the convention puts around it
    node: str | None = None  # LangGraph node that the span belongs to, innermost
    checkpoint_ns: str | None = None
    declared_name: str | None = None  # of the agent around it, as LangGraph hands it down
    step: int | None = None
    agent: str | None = None  # of an agent span
    session: str | None = None
    subject: str | None = None
    task: Mapping[str, Any] | None = None  # the input, when it is a JSON object
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of a call or a tool, under our names
    unreadable: tuple[str, ...] = ()
    answer_ids: tuple[str, ...] = ()  # ids of the messages that an LLM call answered with
    prompt_ids: tuple[str, ...] = ()  # ids of earlier answers that are messages of its prompt


def settings_to_attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Model settings under the names of LangChain and OpenAI -> attributes under our names."""
    return {
        c.REQUEST_MODEL: first_present(settings, "model", "model_name"),
        c.REQUEST_TEMPERATURE: settings.get("temperature"),
        c.REQUEST_TOP_P: settings.get("top_p"),
        c.REQUEST_TOP_K: settings.get("top_k"),
        c.REQUEST_SEED: settings.get("seed"),
        c.REQUEST_MAX_TOKENS: first_present(settings, "max_tokens", "max_completion_tokens", "max_output_tokens"),
    }


def first_present(source: Mapping[str, Any], *keys: str) -> Any:
    """The first value under `keys` that is not None; None when there is none."""
    return next((source[key] for key in keys if source.get(key) is not None), None)


def as_text(value: Any) -> str | None:
    """The value when it is a non-empty text, else None."""
    return value if isinstance(value, str) and value else None


def as_integer(value: Any) -> int | None:
    """The value when it is a whole number, else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_json(value: Any) -> Any:
    """The JSON value that an attribute holds as text; None when it is no JSON. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return None


def as_mapping(value: Any) -> dict[str, Any]:
    """A JSON object, given as text or as a dict; empty for any other value."""
    content = parse_json(value)
    return content if isinstance(content, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The value when it is a list; empty otherwise."""
    return value if isinstance(value, list) else []


def unflatten(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """`prefix.0.a.b = 1, prefix.1.c = 2` -> `[{"a": {"b": 1}}, {"c": 2}]`; inner lists are unflattened too."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix + "."):
            continue
        *path, leaf = key[len(prefix) + 1 :].split(".")
        branch: Any = tree
        for step in path:
            branch = branch.setdefault(step, {}) if isinstance(branch, dict) else None
        if isinstance(branch, dict):
            branch.setdefault(leaf, value)
    elements = _numbered_to_lists(tree)
    return [item for item in as_list(elements) if isinstance(item, dict)]


def _numbered_to_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _numbered_to_lists(value) for key, value in tree.items()}
    if values and _are_indices(values):
        return [values[key] for key in sorted(values, key=int)]
    return values


def _are_indices(keys: Iterable[str]) -> bool:
    return all(key.isascii() and key.isdigit() and len(key) < 10 for key in keys)
