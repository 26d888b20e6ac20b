"""The tools in a model call's parameters -> `gen_ai.tool.definitions`, in the form of the GenAI conventions.

Invariants: order and content of every schema stay as they were sent, since a chat template renders them so; a list that
is no JSON, or longer than `MAX_LENGTH`, is not recorded at all, and nothing is made up of a part of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

MAX_LENGTH = 1 << 16  # characters of the JSON list of a call


def request_to_definitions(parameters: Mapping[str, Any]) -> str | None:
    """The parameters of a call, as LangChain or an HTTP body has them -> a JSON list; None where none can be kept."""
    tools = [tool for name in ("tools", "functions") for tool in _as_list(parameters.get(name))]
    if not tools:
        return None
    try:
        sent = json.dumps(tools, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # classes, or a value that holds itself
        return None
    return _sent_to_definitions(sent) if len(sent) <= MAX_LENGTH else None


@functools.lru_cache(maxsize=64)  # a node offers the same tools in each of its calls
def _sent_to_definitions(sent: str) -> str:
    return json.dumps([_to_definition(tool) for tool in json.loads(sent)], ensure_ascii=False)


def _to_definition(tool: Any) -> Any:
    """OpenAI's chat form, with the function inside, and Anthropic's -> the conventions'; any other stays as it is."""
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") == "function" and isinstance(tool.get("function"), dict) and len(tool) == 2:
        return {"type": "function", **tool["function"]}
    if "type" not in tool and "name" in tool:  # `functions`, or Anthropic's
        return {"type": "function", **tool}
    return tool


def _as_list(tools: Any) -> list[Any]:
    return list(tools) if isinstance(tools, (list, tuple)) else [] if tools is None else [tools]
