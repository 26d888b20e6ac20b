"""A call's request and its answer -> whether the answer has the form that the request declared.

What can be declared: tools with schemas of their arguments, and a response format (JSON, or JSON of a schema).
Invariant: what was not declared is not judged: None, which is not True. A schema's `pattern`s are not checked, because
text of a model could make one take for ever, and references out of a schema are never fetched. It knows nothing of
spans, episodes or rewards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

_LONGEST = 200_000  # characters of an answer; a longer one is not judged
_OPTIONAL_CALL = (None, "auto", "none")


@dataclass(frozen=True, slots=True)
class DeclaredFormat:
    """What the answer of one call is to look like."""

    tools: Mapping[str, Any]  # name -> schema of its arguments; None where it has none that is known
    must_call: bool  # whether an answer without a tool call is wrong
    response: Any  # schema of the text; True for any JSON object; None where no format was declared


def request_to_format(asked: Mapping[str, Any]) -> DeclaredFormat | None:
    """The parameters of a call, as LangChain tells them, to what they declare; None where that is nothing."""
    tools = dict(found for tool in asked.get("tools") or () if (found := _tool_to_schema(tool)) is not None)
    response = _response_to_schema(asked.get("response_format"))
    if not tools and response is None:
        return None
    return DeclaredFormat(tools, bool(tools) and asked.get("tool_choice") not in _OPTIONAL_CALL, response)


def answer_fits(declared: DeclaredFormat | None, answer: LLMResult) -> bool | None:
    """Whether an answer has the declared form; None where none was declared, or the answer did not come to it.

    A tool call fits when the tool was offered, its arguments are JSON and they fit the tool's schema. A text beside
    offered tools is no tool call, so nothing is said of it; a call that the server could not read as one is such a
    text.
    """
    generation = answer.generations[0][0]
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if declared is None or not isinstance(message, AIMessage) or len(message.text) > _LONGEST:
        return None
    if message.invalid_tool_calls:
        return False
    if message.tool_calls:
        fits = [_call_fits(declared, call["name"], call["args"]) for call in message.tool_calls]
        return None if None in fits else all(fits)
    if declared.must_call:
        return False
    return None if declared.response is None else _text_fits(message.text, declared.response)


def _tool_to_schema(tool: Any) -> tuple[str, Any] | None:
    """In the form of OpenAI's interface, or of Anthropic's."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    return function["name"], function.get("parameters", function.get("input_schema"))


def _response_to_schema(asked: Any) -> Any:
    if not isinstance(asked, Mapping):
        return None
    if asked.get("type") == "json_object":
        return True
    inner = asked.get("json_schema")
    return inner.get("schema") if asked.get("type") == "json_schema" and isinstance(inner, Mapping) else None


def _call_fits(declared: DeclaredFormat, name: str, arguments: Any) -> bool | None:
    if name not in declared.tools:
        return False
    schema = declared.tools[name]
    return isinstance(arguments, dict) if schema is None else _value_fits(arguments, schema)


def _text_fits(text: str, schema: Any) -> bool | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) if schema is True else _value_fits(value, schema)


def _value_fits(value: Any, schema: Any) -> bool | None:
    """None for a schema that is none, or that refers to another document."""
    from referencing import Registry

    validator = _validator_class()
    try:
        validator.check_schema(schema)
        return bool(validator(schema, registry=Registry()).is_valid(value))
    except Exception:  # noqa: BLE001 - a schema of the app's can fail in many ways, and none is the answer's fault
        return None


@cache
def _validator_class() -> Any:
    from jsonschema import validators

    unchecked = {"pattern": None, "patternProperties": None}
    kept = {k: v for k, v in validators.Draft202012Validator.VALIDATORS.items() if k not in unchecked}
    return validators.create(
        meta_schema=validators.Draft202012Validator.META_SCHEMA,
        validators=kept,
        type_checker=validators.Draft202012Validator.TYPE_CHECKER,
    )
