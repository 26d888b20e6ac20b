"""The tools that a node's calls offered to its model -> entries of an episode's lineage: names and SHA-256.

    tools/<node>        schemas of all tools that the node's calls offered to the model
    tool/<node>/<tool>  the schema of one of them, so that a difference can be named

Where these agree, the prompts of an old episode are those that today's graph would build; `serving.model_lineage` has
the entries of the base model. Invariants: a node that offered no tool is absent, never
hashed as empty; a tool has one hash, in whichever provider's form it was offered, since the same node calls its own
model at one time and the served one at another.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from marft_bridge.common.digests import canonical_json, text_sha256
from marft_bridge.model_calls.provider_options import tool_to_openai
from trace_store.records import ONE_TOOL_OF, TOOLS_OF


def request_to_tools(parameters: Mapping[str, Any]) -> set[str]:
    """The parameters of a call, as LangChain reports them -> the tools that it offers, each as canonical JSON."""
    tools: set[str] = set()
    for name in ("tools", "functions"):
        if offered_tools := parameters.get(name):
            each_tool = offered_tools if isinstance(offered_tools, (list, tuple)) else [offered_tools]
            tools.update(canonical_json(_to_one_form(tool)) for tool in each_tool)
    return tools


def _to_one_form(tool: Any) -> Any:
    """The tool in OpenAI's form; as it is where that cannot be read."""
    try:
        return tool_to_openai(tool)
    except Exception:  # noqa: BLE001 - a form that LangChain does not know is the app's own affair
        return tool


def tools_to_lineage(offered_tools: Mapping[str, Collection[str]]) -> dict[str, str]:
    """`tools/<node>` -> SHA-256, for each node, of the tools that its calls offered (canonical JSON).

    The order of the tools, and which call offered which, make no difference: a loop that ends early offers the same.
    """
    return {
        f"{TOOLS_OF}{node}": text_sha256(canonical_json(sorted(tools)))
        for node, tools in offered_tools.items()
        if tools
    }


def tools_to_single_lineage(offered_tools: Mapping[str, Collection[str]]) -> dict[str, str]:
    """`tool/<node>/<tool>` -> SHA-256, for each single tool; one without a usable name is named by its hash.

    Where one name had several schemas, they are hashed together.
    """
    tools_by_name: dict[str, list[str]] = {}
    for node, tools in offered_tools.items():
        for tool in sorted(tools):
            tools_by_name.setdefault(f"{ONE_TOOL_OF}{node}/{tool_name(tool)}", []).append(tool)
    return {
        name: text_sha256(tools[0] if len(tools) == 1 else canonical_json(tools))
        for name, tools in tools_by_name.items()
    }


def tool_name(tool: str) -> str:
    """The name of a tool, given as canonical JSON. A name with a slash is not used: it would read as a node's path."""
    parsed_tool = json.loads(tool) if tool.startswith("{") else {}
    definition = parsed_tool.get("function", parsed_tool)
    name = definition.get("name") if isinstance(definition, dict) else None
    return name if isinstance(name, str) and name and "/" not in name else f"#{text_sha256(tool)[:12]}"
