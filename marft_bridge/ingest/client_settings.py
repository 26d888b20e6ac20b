"""Attributes -> the same without what a client authenticates with: headers, keys, passwords, cookies.

Tracers record the settings of HTTP clients; LangSmith's export has `extra_headers` as they were sent. An entry goes
by its name, at any depth, also inside JSON that an attribute holds as text. Secrets in ordinary text are not found
here.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.reading import parsed

OWN_SCOPE = "marft_bridge"  # instrumentation scope of our recorder

_NAMES = (
    r"(?:proxy[-_])?authorization|(?:[\w-]*[-_])?api[-_]?key|(?:set[-_])?cookies?|(?:\w+[-_])?headers"
    r"|(?:[\w-]*[-_])?(?:password|passwd|secret)|(?:access|refresh|auth|bearer|id|api)[-_]token|secret[-_](?:access[-_])?key"
)
_NAME = re.compile(_NAMES, re.IGNORECASE)
_MENTIONED = re.compile(r"authorization|api[-_]?key|cookie|headers|passw|secret|[hrdi][-_]token", re.IGNORECASE)


def without_client_secrets(span: WireSpan) -> tuple[WireSpan, int]:
    """The span with the attributes that may be kept, and how many entries were left out."""
    kept, dropped = _cleaned_attributes(span.attributes)
    return (replace(span, attributes=kept), dropped) if dropped else (span, 0)


def _cleaned_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    kept: dict[str, Any] = {}
    dropped = 0
    for key, value in attributes.items():
        # Semantic conventions write headers as http.request.header.<name>.
        if ".header." in key or _NAME.fullmatch(key.rpartition(".")[2]):
            dropped += 1
            continue
        kept[key], found = _cleaned_text(value) if isinstance(value, str) else _cleaned(value)
        dropped += found
    return kept, dropped


def _cleaned_text(value: str) -> tuple[str, int]:
    if not _MENTIONED.search(value):
        return value, 0
    inside = parsed(value)
    if not isinstance(inside, (dict, list)):
        return value, 0
    cleaned, dropped = _cleaned(inside)
    return (json.dumps(cleaned, ensure_ascii=False), dropped) if dropped else (value, 0)


def _cleaned(value: Any) -> tuple[Any, int]:
    if isinstance(value, dict):
        names = [key for key in value if _NAME.fullmatch(str(key)) and value[key] is not None]
        found = {key: _cleaned(item) for key, item in value.items() if key not in names}
        return {key: item for key, (item, _) in found.items()}, len(names) + sum(n for _, n in found.values())
    if isinstance(value, list):
        cleaned = [_cleaned(item) for item in value]
        return [item for item, _ in cleaned], sum(n for _, n in cleaned)
    return _cleaned_text(value) if isinstance(value, str) else (value, 0)
