"""JSON values and texts -> SHA-256. Invariant: equal content has an equal hash, however its JSON is laid out."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """JSON that is the same for equal values; a value that JSON has no form for counts by its qualified name."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_qualified_name)
    except (TypeError, ValueError, RecursionError):
        return _qualified_name(value)


def _qualified_name(value: Any) -> str:
    """Name of a class or function; of any other value that of its type, because its repr may hold a memory address."""
    symbol = value if hasattr(value, "__qualname__") else type(value)
    return f"{symbol.__module__}.{symbol.__qualname__}"


def text_sha256(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()
