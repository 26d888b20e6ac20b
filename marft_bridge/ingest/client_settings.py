"""Span attributes -> the same without client credentials: headers, keys, passwords, cookies.

Tracers record the settings of HTTP clients; LangSmith's export has `extra_headers` as they were sent. An entry is
removed by its name, at any depth, also inside JSON that an attribute holds as text. Such a text goes as a whole where
it is nested more deeply than Python reads. Secrets in ordinary text are left to the redaction of `[record]`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from marft_bridge.ingest.otlp import WireSpan

OWN_SCOPE = "marft_bridge"  # instrumentation scope of our recorder

_TOO_DEEP = "[left out: nested too deeply to look for credentials]"

_NAME_PATTERN = (
    r"(?:proxy[-_])?authorization|(?:[\w-]*[-_])?api[-_]?key|(?:set[-_])?cookies?|(?:\w+[-_])?headers"
    r"|(?:[\w-]*[-_])?(?:password|passwd|secret)|(?:access|refresh|auth|bearer|id|api)[-_]token|secret[-_](?:access[-_])?key"
)
_SECRET_NAME = re.compile(_NAME_PATTERN, re.IGNORECASE)
# A part of every name above: a text without it is not parsed.
_SECRET_NAME_PART = re.compile(r"authorization|api[-_]?key|cookie|headers|passw|secret|[hrdi][-_]token", re.IGNORECASE)


def remove_client_secrets(span: WireSpan) -> tuple[WireSpan, int]:
    """The span without its credentials, and the number of entries removed."""
    cleaned_attributes, removed_count = _clean_attributes(span.attributes)
    return (replace(span, attributes=cleaned_attributes), removed_count) if removed_count else (span, 0)


def _clean_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    cleaned_attributes: dict[str, Any] = {}
    removed_count = 0
    for key, value in attributes.items():
        # Semantic conventions write headers as http.request.header.<name>.
        if ".header." in key or _SECRET_NAME.fullmatch(key.rpartition(".")[2]):
            removed_count += 1
            continue
        cleaned_attributes[key], removed_inside = _clean_text(value) if isinstance(value, str) else _clean_value(value)
        removed_count += removed_inside
    return cleaned_attributes, removed_count


def _clean_text(text: str) -> tuple[str, int]:
    """A text whose JSON, if it is any, is without credentials; a text that is too deep to be read is left out."""
    if not _SECRET_NAME_PART.search(text):
        return text, 0
    try:
        content = json.loads(text)
        if not isinstance(content, (dict, list)):
            return text, 0
        removed_count = _remove_secrets(content)
        return (json.dumps(content, ensure_ascii=False), removed_count) if removed_count else (text, 0)
    except ValueError:
        return text, 0
    except RecursionError:
        return _TOO_DEEP, 1


def _clean_value(value: Any) -> tuple[Any, int]:
    """A value that is not text, itself without credentials: nobody else has it."""
    return value, _remove_secrets(value)


def _remove_secrets(value: Any) -> int:
    """Removes the credentials from the dicts and lists of a JSON value, however deep; their number."""
    removed_count = 0
    waiting_containers = [value]
    while waiting_containers:
        container = waiting_containers.pop()
        if isinstance(container, dict):
            secret_names = [key for key, item in container.items() if item is not None and _is_secret_name(key)]
            removed_count += len(secret_names)
            for key in secret_names:
                del container[key]
            entries = list(container.items())
        elif isinstance(container, list):
            entries = list(enumerate(container))
        else:
            continue
        for key, item in entries:
            if isinstance(item, str):
                container[key], removed_inside = _clean_text(item)  # each text in a text has twice as many backslashes
                removed_count += removed_inside
            else:
                waiting_containers.append(item)
    return removed_count


def _is_secret_name(key: Any) -> bool:
    return _SECRET_NAME.fullmatch(str(key)) is not None
