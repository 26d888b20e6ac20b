"""Options of a chat model, in the words of any provider that LangChain has a class for -> the same in OpenAI's words.

Tools, the choice of a tool, and the form of the answer, as Anthropic, Gemini, Bedrock's Converse, Ollama and Cohere say
them. Invariant: what OpenAI has no word for stays as it is, and `request_rules` refuses it by name; only hints to a
provider's cache go, because they change no answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from marft_bridge.common.errors import GraphError

CACHE_HINT = "cache_control"
_GEMINI_SCHEMAS, _GEMINI_FORMAT = ("response_json_schema", "response_schema"), "response_mime_type"
_ANTHROPIC_FORMATS = ("output_config", "output_format")
_OLLAMA_FORMAT = "format"
_JSON_OBJECT = {"type": "json_object"}
_CHOICES = {"any": "required", "auto": "auto", "none": "none"}


def options_to_openai(call_options: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Call options of `node` -> the same in OpenAI's form.

    Raises:
        GraphError: tools in a form that cannot be converted.
    """
    options = response_format_to_openai({name: value for name, value in call_options.items() if name != CACHE_HINT})
    if options.get("tools"):
        try:
            options["tools"] = [tool_to_openai(tool) for tool in options["tools"]]
        except Exception as error:
            reason = " ".join(str(error).split())
            raise GraphError(
                f"node {node!r} binds tools in a form that cannot be read as OpenAI's: {reason}"
            ) from error
    choice = options.get("tool_choice")
    if choice:
        options["tool_choice"] = _choice_to_openai(choice, options.get("tools") or ())
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    return options


def tool_to_openai(tool: Any) -> Any:
    """A tool in any provider's form -> in that of OpenAI's chat completions.

    A tool that a provider runs itself has a type and no schema: it is left as it is, and refused later by name.

    Raises:
        Exception: whatever LangChain says of a form that it does not know.
    """
    if isinstance(tool, BaseModel):
        tool = tool.model_dump(exclude_none=True)
    if isinstance(tool, dict) and "type" in tool and not {"input_schema", "properties"} & tool.keys():
        return {name: value for name, value in tool.items() if name != CACHE_HINT}
    return convert_to_openai_tool(tool)


def _choice_to_openai(choice: Any, tools: Any) -> Any:
    """Which tool is to be called: by Anthropic's `type`, by Converse's only key, or by the tool's bare name."""
    kind, name = choice, None
    if isinstance(choice, dict):
        kind, name = choice.get("type"), choice.get("name")
        if kind is None and len(choice) == 1:
            ((kind, details),) = choice.items()
            name = details.get("name") if isinstance(details, dict) else None
    if isinstance(choice, str) and any(tool.get("function", {}).get("name") == choice for tool in tools):
        return _named_choice(choice)
    if kind == "tool" and isinstance(name, str):
        return _named_choice(name)
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind]
    return choice


def _named_choice(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def response_format_to_openai(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call, or the fields of a model, with the form of the answer as `response_format`."""
    return _ollama_format_to_openai(_output_config_to_openai(_gemini_format_to_openai(options)))


def _gemini_format_to_openai(call_options: Mapping[str, Any]) -> dict[str, Any]:
    """Gemini: a schema, and the type of the answer."""
    options = dict(call_options)
    schema = next((options[name] for name in _GEMINI_SCHEMAS if options.get(name) is not None), None)
    kind = options.get(_GEMINI_FORMAT)
    if isinstance(schema, Mapping) and kind in (None, "application/json"):
        options["response_format"] = _schema_to_format(schema)
    elif schema is None and kind == "application/json":
        options["response_format"] = _JSON_OBJECT
    elif schema is not None or kind not in (None, "text/plain"):
        return options
    return {name: value for name, value in options.items() if name not in (*_GEMINI_SCHEMAS, _GEMINI_FORMAT)}


def _output_config_to_openai(call_options: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic and Converse: a table with the format, each its own; the effort, which has a name at OpenAI."""
    options = {name: value for name, value in call_options.items() if name not in _ANTHROPIC_FORMATS}
    table = call_options.get("output_config") or {}
    if not isinstance(table, Mapping):  # stays as it is, and is refused by its name
        return dict(call_options)
    config = {name: value for name, value in table.items() if value is not None}
    if call_options.get("output_format") is not None:  # as older releases of langchain-anthropic call it
        config.setdefault("format", call_options["output_format"])
    for name, read_schema in (("format", _anthropic_schema), ("textFormat", _converse_schema)):
        if (schema := read_schema(config.get(name))) is not None:
            options["response_format"] = _schema_to_format(schema)
            del config[name]
    if "effort" in config:
        options["reasoning_effort"] = config.pop("effort")
    return {**options, "output_config": config} if config else options


def _anthropic_schema(text_format: Any) -> Mapping[str, Any] | None:
    is_schema = isinstance(text_format, Mapping) and text_format.get("type") == "json_schema"
    schema = text_format.get("schema") if is_schema else None
    return schema if isinstance(schema, Mapping) else None


def _converse_schema(text_format: Any) -> Mapping[str, Any] | None:
    """Converse has the schema as a JSON text."""
    try:
        schema = json.loads(text_format["structure"]["jsonSchema"]["schema"])
    except (TypeError, KeyError, ValueError):
        return None
    return schema if isinstance(schema, Mapping) else None


def _ollama_format_to_openai(call_options: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama: a schema, or the word `json`."""
    text_format = call_options.get(_OLLAMA_FORMAT)
    options = {name: value for name, value in call_options.items() if name != _OLLAMA_FORMAT}
    if isinstance(text_format, Mapping) and text_format:
        options["response_format"] = _schema_to_format(text_format)
    elif text_format == "json":
        options["response_format"] = _JSON_OBJECT
    elif text_format:
        return dict(call_options)
    return options


def _schema_to_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    json_schema = {"name": str(schema.get("title", "answer")), "schema": dict(schema), "strict": True}
    return {"type": "json_schema", "json_schema": json_schema}
