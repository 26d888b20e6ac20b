"""Span attributes -> the same without client credentials: headers, keys, passwords, cookies.

Tracers record the settings of HTTP clients; LangSmith's export has `extra_headers` as they were sent. An entry is
removed by its name, at any depth, also inside JSON that an attribute holds as text. Secrets in ordinary text are left
to the redaction of `[record]`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import parse_json

OWN_SCOPE = "marft_bridge"  # instrumentation scope of our recorder

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


def _clean_text(value: str) -> tuple[str, int]:
    if not _SECRET_NAME_PART.search(value):
        return value, 0
    content = parse_json(value)
    if not isinstance(content, (dict, list)):
        return value, 0
    cleaned, removed_count = _clean_value(content)
    return (json.dumps(cleaned, ensure_ascii=False), removed_count) if removed_count else (value, 0)


def _clean_value(value: Any) -> tuple[Any, int]:
    if isinstance(value, dict):
        secret_names = [key for key in value if _SECRET_NAME.fullmatch(str(key)) and value[key] is not None]
        cleaned_entries = {key: _clean_value(item) for key, item in value.items() if key not in secret_names}
        removed_count = len(secret_names) + sum(count for _, count in cleaned_entries.values())
        return {key: item for key, (item, _) in cleaned_entries.items()}, removed_count
    if isinstance(value, list):
        cleaned = [_clean_value(item) for item in value]
        return [item for item, _ in cleaned], sum(count for _, count in cleaned)
    return _clean_text(value) if isinstance(value, str) else (value, 0)
