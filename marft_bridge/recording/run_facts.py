"""What an app says of a run (tags, metadata, thread, input, output) -> attributes of its root span.

Invariants: LangGraph's and LangChain's own entries are left out; a value that JSON has no form for becomes its text, so
nothing that an app passes can fail the recording. What of it may be written is decided by `SpanPrivacy`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, message_to_dict
from langgraph.types import Send
from pydantic import BaseModel

from marft_bridge.common.library_internals import CONFIG_KEY_RUNTIME
from marft_bridge.recording.episode_context import SUBJECT_METADATA
from marft_bridge.recording.span_messages import to_shown
from marft_bridge.recording.value_forms import value_to_fields, value_to_forms
from trace_store import conventions as names

USER_KEYS = ("user_id", "langgraph_user_id", "langgraph_auth_user_id")
"""Metadata keys that name the user: an app's own, then those that LangGraph's server sets."""
_THREAD_KEY = "thread_id"
_LIBRARY_PREFIXES = ("langgraph_", "ls_", "lc_", "__", "checkpoint_")
_SECRET_NAME = re.compile("key|token|secret|password|auth(?!ors?([^a-z]|$))|credential", re.IGNORECASE)
_ALWAYS_SECRET_NAME = re.compile("secret|password|credential", re.IGNORECASE)  # a number too, as a PIN is


def run_to_attributes(
    tags: Sequence[str] | None, metadata: Mapping[str, Any], own_tags: Mapping[str, str]
) -> dict[str, Any]:
    """Tags, metadata, thread and user of a run; None where the app gave none. `own_tags` are those of the episode."""
    user = next((metadata[key] for key in USER_KEYS if metadata.get(key) is not None), None)
    thread = metadata.get(_THREAD_KEY)
    app_metadata = {
        key: value
        for key, value in metadata.items()
        if key not in (_THREAD_KEY, SUBJECT_METADATA) and not str(key).startswith(_LIBRARY_PREFIXES)
    }
    all_tags = {**dict.fromkeys(map(to_shown, tags or ()), ""), **own_tags}
    return {
        names.TAGS: value_to_text(all_tags) if all_tags else "{}",
        names.METADATA: value_to_text(app_metadata) if app_metadata else None,
        names.THREAD_ID: None if thread is None else to_shown(thread),
        names.USER_ID: None if user is None else to_shown(user),
    }


def loop_to_run_config(loop: Any) -> dict[str, Any]:
    """How a graph run was started, from LangGraph's loop of it: what a second run has to be given besides the input.

    `configurable` and `context` as the app passed them, limits and breakpoints; what is as ever is absent. Keys that
    are LangGraph's own are left out, and so is everything, however deep, whose name is that of a secret.
    """
    config = loop.config
    given = config.get("configurable") or {}
    runtime = given.get(CONFIG_KEY_RUNTIME)
    context = getattr(runtime, "context", None)
    kept_configurable = {key: value for key, value in given.items() if _is_apps_own(key, value)}
    kept_context = _without_secrets(context)
    forms = [(path, form) for path, form in value_to_forms(context) if not any(map(_is_secret, path))]
    facts = {
        "is_async": hasattr(loop, "__aenter__"),
        "configurable": _without_secrets(kept_configurable),
        "context": kept_context,
        "context_forms": forms,
        "recursion_limit": config.get("recursion_limit"),
        "max_concurrency": config.get("max_concurrency"),
        "interrupt_before": loop.interrupt_before,
        "interrupt_after": loop.interrupt_after,
        "has_store": loop.store is not None or None,
    }
    present_facts: dict[str, Any] = {
        name: value for name, value in facts.items() if value is not None and value not in ({}, (), [])
    }
    if kept_context == {} and forms:  # an object of which nothing may be kept is still one
        present_facts["context"] = {}
    return present_facts


def _is_apps_own(key: str, value: Any) -> bool:
    is_librarys = key.startswith(_LIBRARY_PREFIXES) or key in (_THREAD_KEY, "run_id")
    is_plain = value is None or isinstance(value, (str, int, float, bool, list, dict))
    return is_plain and not is_librarys


def _is_secret(name: Any, value: Any = "") -> bool:
    """Whether a key, or the name of a field, is that of a secret. Limits and switches are none: `max_tokens`."""
    pattern = _ALWAYS_SECRET_NAME if value is None or isinstance(value, (int, float)) else _SECRET_NAME
    return isinstance(name, str) and pattern.search(name) is not None


def _without_secrets(value: Any) -> Any:
    """The value as its JSON has it, without any entry or field whose name is that of a secret."""
    if value is None:
        return None
    root = json.loads(value_to_text(value))
    pending = [root]
    while pending:
        element = pending.pop()
        if isinstance(element, dict):
            for key in [key for key, item in element.items() if _is_secret(key, item)]:
                del element[key]
            pending.extend(element.values())
        elif isinstance(element, list):
            pending.extend(element)
    return root


def value_to_text(value: Any) -> str:
    """Any value -> JSON text; messages, models and dataclasses by their fields, anything else by its `str`."""
    try:
        return _encode(value)
    except Exception:  # noqa: BLE001 - an app's own objects may raise anything, and keys may be of any type
        return json.dumps(to_shown(value))


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, BaseMessage):
        return message_to_dict(value)
    if isinstance(value, Send):
        return {"node": value.node, "arg": value.arg}
    if (fields := value_to_fields(value)) is not None:
        if isinstance(value, BaseModel):
            return fields
        return {name: item for name, item in fields.items() if item is not None and item != ()}  # as of a Command
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


_encode = json.JSONEncoder(default=_to_jsonable).encode
