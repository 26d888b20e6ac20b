"""A chat span, of the record or of its replay -> what the call asked of its model besides its prompt, and the first
difference of two such calls.

Compared are the tools that the call offered, and the settings that the app gave, where nobody put others in their
place. Invariant: what the record does not know of a call is compared with nothing; a form of the answer or a choice of
tools is compared where the record has one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.recording.recorder import LIVE
from marft_bridge.recording.tool_lineage import request_to_tools, tool_name
from marft_bridge.replay.divergence import Divergence, value_difference
from trace_store import conventions as c
from trace_store.json_text import read_json
from trace_store.records import ONE_TOOL_OF, Episode, SpanRow

_SETTINGS = {
    c.REQUEST_MODEL: "model",
    c.REQUEST_TEMPERATURE: "temperature",
    c.REQUEST_TOP_P: "top_p",
    c.REQUEST_TOP_K: "top_k",
    c.REQUEST_MAX_TOKENS: "max_tokens",
    c.REQUEST_STOP: "stop",
    c.REQUEST_SEED: "seed",
    c.REQUEST_CHOICES: "n",
}
_FORM, _SOME_FORM = "response_format", "json"  # what is known of a form of the answer that is not recorded itself
OPTION_KEYS = (*_SETTINGS, c.OUTPUT_TYPE, c.REQUEST_REST, c.TOOL_DEFINITIONS)
"""The attributes that options are read from."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call asked for besides its prompt."""

    settings: Mapping[str, Any] | None = None  # by their names at OpenAI, those that were given; None: not known
    tools: Mapping[str, Sequence[str]] | None = None  # name -> definitions, as canonical JSON; None: not known
    rest: Mapping[str, Any] = field(default_factory=dict)  # tool_choice and response_format, as JSON


def attributes_to_options(attributes: Mapping[str, Any]) -> CallOptions:
    """The attributes of a chat span -> all that they say."""
    tools = _attributes_to_tools(attributes)
    settings = {name: _to_plain(attributes[key]) for key, name in _SETTINGS.items() if attributes.get(key) is not None}
    rest = _text_to_rest(attributes.get(c.REQUEST_REST))
    if not tools and attributes.get(c.OUTPUT_TYPE) is not None:  # tools alone make it json, too
        rest.setdefault(_FORM, _SOME_FORM)
    return CallOptions(settings, tools, rest)


def spans_to_options(spans: Iterable[SpanRow], episode: Episode, *, is_dated: bool) -> dict[str, CallOptions]:
    """Span id of each call -> what the record knows of its options.

    Args:
        is_dated: recorded before it was noted how a run was started.
    """
    calls = [span for span in spans if span.operation == c.CHAT]
    if is_dated or not all(c.follows_todays_rule(call.convention) for call in calls):
        return {call.span_id: CallOptions() for call in calls}
    # A command, a served team or a fork puts its own model and sampling in the place of the app's.
    is_apps_own = episode.split == LIVE and not episode.adapters and episode.fork_action is None
    options = {call.span_id: attributes_to_options(call.attributes) for call in calls}
    lost_nodes = _nodes_with_lost_tools(calls, options, episode)
    for call in calls:
        if not is_apps_own or call.attributes.get(c.ADAPTER) is not None:
            options[call.span_id] = replace(options[call.span_id], settings=None)
        if call.attributes.get(c.NODE) in lost_nodes:
            rest = dict(options[call.span_id].rest)
            if rest.get(_FORM) == _SOME_FORM:  # the tools may be what makes it json
                del rest[_FORM]
            options[call.span_id] = replace(options[call.span_id], tools=None, rest=rest)
    return options


def options_divergence(recorded: CallOptions, now: CallOptions, node: str, *, number: int) -> Divergence | None:
    """The first option that two calls do not share; None where they share all that is known of both."""
    if recorded.tools is not None and now.tools is not None and recorded.tools != now.tools:
        return _tools_divergence(recorded.tools, now.tools, node, number=number)
    if recorded.settings is None or now.settings is None:
        return None
    for name in _SETTINGS.values():
        recorded_setting, setting = recorded.settings.get(name), now.settings.get(name)
        if recorded_setting != setting:
            text = f"it asks its model for another {name}"
            return Divergence(
                "options", node, number, text=text, recorded=_to_words(recorded_setting), replayed=_to_words(setting)
            )
    for name, recorded_part in recorded.rest.items():
        is_some_form = name in now.rest and name == _FORM and _SOME_FORM in (recorded_part, now.rest[name])
        part = {name: now.rest[name]} if name in now.rest else {}
        if not is_some_form and (difference := value_difference({name: recorded_part}, part)) is not None:
            path, words, words_now = difference
            text = f"it asks its model for another {path}"
            return Divergence("options", node, number, text=text, recorded=words, replayed=words_now)
    return None


def _tools_divergence(
    recorded: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]], node: str, *, number: int
) -> Divergence:
    name = next(name for name in sorted(recorded.keys() | now.keys()) if recorded.get(name) != now.get(name))
    if name not in recorded or name not in now:
        verb = "no longer" if name in recorded else "now"
        return Divergence("tools offered", node, number, text=f"it offers its model {verb} the tool {name}")
    definitions = [[read_json(definition) for definition in tools[name]] for tools in (recorded, now)]
    both_one = len(definitions[0]) == len(definitions[1]) == 1
    schemas = [side[0].get("function", side[0]) if both_one else side for side in definitions]
    path, recorded_words, words = value_difference(schemas[0], schemas[1]) or ("", None, None)
    text = f"it offers its model another schema of the tool {name}{f', at {path}' if path else ''}"
    return Divergence("tools offered", node, number, text=text, recorded=recorded_words, replayed=words)


def _nodes_with_lost_tools(calls: Sequence[SpanRow], options: Mapping[str, CallOptions], episode: Episode) -> set[str]:
    """The nodes that offered a tool which none of their calls tells: it is no JSON, or too long to be recorded."""
    told_tools: dict[str, set[str]] = {}
    for call in calls:
        told_tools.setdefault(str(call.attributes.get(c.NODE)), set()).update(options[call.span_id].tools or ())
    lost_nodes = set()
    for name in episode.lineage:
        if name.startswith(ONE_TOOL_OF):
            node, _, tool = name.removeprefix(ONE_TOOL_OF).rpartition("/")
            if tool not in told_tools.get(node, ()):
                lost_nodes.add(node)
    return lost_nodes


def _attributes_to_tools(attributes: Mapping[str, Any]) -> Mapping[str, Sequence[str]] | None:
    """The tools that a call offered, each in one form, see `tool_lineage`; None where they cannot be read."""
    written = attributes.get(c.TOOL_DEFINITIONS) or "[]"
    return _text_to_tools(written if isinstance(written, str) else json.dumps(written))


@functools.lru_cache(maxsize=64)  # a node offers the same tools in each of its calls
def _text_to_tools(written: str) -> Mapping[str, Sequence[str]] | None:
    try:
        offered = read_json(written)
    except ValueError:
        return None
    tools: dict[str, list[str]] = {}
    for definition in sorted(request_to_tools({"tools": [_to_nested(tool) for tool in offered]})):
        tools.setdefault(tool_name(definition), []).append(definition)
    return tools


def _text_to_rest(written: Any) -> dict[str, Any]:
    """What `REQUEST_REST` says; nothing where it cannot be read."""
    try:
        rest = read_json(written) if isinstance(written, str) else written
    except ValueError:
        return {}
    return dict(rest) if isinstance(rest, dict) else {}


def _to_nested(tool: Any) -> Any:
    """A function in the form of the conventions -> in OpenAI's or Anthropic's, which it was made of."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "name" not in tool:
        return tool
    fields = {name: field for name, field in tool.items() if name != "type"}
    return fields if "input_schema" in fields else {"type": "function", "function": fields}


def _to_plain(setting: Any) -> Any:
    """Stop texts as a list, in whichever form the store has them."""
    if isinstance(setting, str) and setting.startswith("["):
        try:
            return read_json(setting)
        except ValueError:  # a name that begins so
            return setting
    return list(setting) if isinstance(setting, tuple) else setting


def _to_words(setting: Any) -> str | None:
    return None if setting is None else ", ".join(map(repr, setting)) if isinstance(setting, list) else str(setting)
