"""A call's request and its answer -> whether the answer has the form that the request declared.

A request can declare tools with schemas of their arguments, and a response format (JSON, or JSON of a schema).
Invariant: what was not declared is not judged: None, which is not True. A schema's `pattern`s are not checked, because
a model's text could make one run for ever, and references out of a schema are never fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from trace_store.json_text import read_json

_MAX_ANSWER_CHARS = 200_000  # characters of an answer; a longer one is not judged
_OPTIONAL_CHOICES = (None, "auto", "none")


@dataclass(frozen=True, slots=True)
class DeclaredFormat:
    """The form that one call declares for its answer."""

    tools: Mapping[str, Any]  # name -> schema of its arguments; None where it is not known
    must_call: bool  # whether an answer without a tool call is wrong
    response: Any  # schema of the text; True for any JSON object; None where no format was declared


def request_to_format(parameters: Mapping[str, Any]) -> DeclaredFormat | None:
    """The form that a call's parameters, as LangChain reports them, declare; None where they declare none."""
    if not parameters.get("tools") and parameters.get("response_format") is None:
        return None
    tools = dict(
        named_schema for tool in parameters.get("tools") or () if (named_schema := _tool_to_schema(tool)) is not None
    )
    response = _response_to_schema(parameters.get("response_format"))
    if not tools and response is None:
        return None
    return DeclaredFormat(tools, bool(tools) and parameters.get("tool_choice") not in _OPTIONAL_CHOICES, response)


def answer_fits(declared_format: DeclaredFormat | None, answer: LLMResult) -> bool | None:
    """Whether an answer has the declared form; None where no form was declared, or none applies to this answer.

    A tool call fits when the tool was offered, its arguments are JSON and they fit the tool's schema. A plain text,
    where tools were merely offered, is not judged; nor is a tool call that the server passed on as text.
    """
    if declared_format is None:
        return None
    generation = answer.generations[0][0]
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if not isinstance(message, AIMessage):
        return None
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    return _message_fits(declared_format, message.text, calls, is_broken=bool(message.invalid_tool_calls))


def openai_message_fits(declared_format: DeclaredFormat | None, message: Mapping[str, Any]) -> bool | None:
    """As `answer_fits`, of a whole message in the form of OpenAI's API."""
    if declared_format is None:
        return None
    calls, is_broken = [], False
    for call in message.get("tool_calls") or ():
        try:
            calls.append((call["function"]["name"], read_json(call["function"]["arguments"])))
        except ValueError:
            is_broken = True
    return _message_fits(declared_format, message.get("content") or "", calls, is_broken=is_broken)


def _message_fits(
    declared_format: DeclaredFormat, text: str, calls: Sequence[tuple[str, Any]], *, is_broken: bool
) -> bool | None:
    """Whether text and tool calls have the form. `is_broken`: arguments of a call are no JSON."""
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    if is_broken:
        return False
    if calls:
        verdicts = [_call_fits(declared_format, name, arguments) for name, arguments in calls]
        return None if None in verdicts else all(verdicts)
    if declared_format.must_call:
        return False
    return None if declared_format.response is None else _text_fits(text, declared_format.response)


def _tool_to_schema(tool: Any) -> tuple[str, Any] | None:
    """(name, schema) of a tool in the form of OpenAI's API, or of Anthropic's; None for any other."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    return function["name"], function.get("parameters", function.get("input_schema"))


def _response_to_schema(response_format: Any) -> Any:
    if not isinstance(response_format, Mapping):
        return None
    if response_format.get("type") == "json_object":
        return True
    json_schema = response_format.get("json_schema")
    if response_format.get("type") == "json_schema" and isinstance(json_schema, Mapping):
        return json_schema.get("schema")
    return None


def _call_fits(declared_format: DeclaredFormat, name: str, arguments: Any) -> bool | None:
    if name not in declared_format.tools:
        return False
    schema = declared_format.tools[name]
    return isinstance(arguments, dict) if schema is None else _value_fits(arguments, schema)


def _text_fits(text: str, schema: Any) -> bool | None:
    try:
        value = read_json(text)
    except ValueError:
        return False
    return isinstance(value, dict) if schema is True else _value_fits(value, schema)


def _value_fits(value: Any, schema: Any) -> bool | None:
    """Whether a value fits a JSON schema; None for an invalid schema, or one that refers to another document."""
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

    unchecked_keywords = {"pattern": None, "patternProperties": None}
    checked_keywords = {
        k: v for k, v in validators.Draft202012Validator.VALIDATORS.items() if k not in unchecked_keywords
    }
    return validators.create(
        meta_schema=validators.Draft202012Validator.META_SCHEMA,
        validators=checked_keywords,
        type_checker=validators.Draft202012Validator.TYPE_CHECKER,
    )
