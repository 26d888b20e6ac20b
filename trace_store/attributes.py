"""A span's open attribute bag -> typed values, or a reason in words why it holds something else.

Absent is None; a value of the wrong type is never coerced or dropped but raises `Malformed`. Lists and objects
may be given as JSON text, which is how OpenTelemetry exporters carry them cheaply.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trace_store import conventions as c
from trace_store.packed import FLOATS, INTS, text_to_values
from trace_store.records import SpanRow

_BIGINT = 2**63
_SHA256 = re.compile("[0-9a-f]{64}")


class Malformed(ValueError):  # noqa: N818 - says what the trace is
    """The trace will never make a trajectory; the message says why."""


class Bag:
    """Typed access to the attributes of one span."""

    def __init__(self, span: SpanRow) -> None:
        self._span = span

    @property
    def convention(self) -> str:
        """The version of the names that the span was written with."""
        return self._span.convention

    def has(self, key: str) -> bool:
        """Whether the span says anything under this name."""
        return self._span.attributes.get(key) is not None

    def text(self, key: str) -> str | None:
        """A text, as it is."""
        value = self._span.attributes.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def integer(self, key: str, bound: int = _BIGINT) -> int | None:
        """An integer in [-bound, bound)."""
        value = self._span.attributes.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not -bound <= value < bound:
            raise self._wrong(key, f"an integer of {bound.bit_length()} bits")
        return value

    def small(self, key: str) -> int | None:
        """An integer that a 32-bit column holds."""
        return self.integer(key, 2**31)

    def number(self, key: str) -> float | None:
        """A number."""
        value = self._span.attributes.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A JSON object; empty when absent."""
        value = self._parsed(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(key, "a JSON object")
        return value

    def adapter_versions(self) -> dict[str, int]:
        """Node -> adapter version that the episode ran with."""
        value = self.mapping(c.ADAPTERS)
        if not all(isinstance(version, int) and not isinstance(version, bool) for version in value.values()):
            raise self._wrong(c.ADAPTERS, "a JSON object of integers")
        return value

    def tags(self) -> dict[str, str]:
        """Label -> value of the episode."""
        value = self.mapping(c.TAGS)
        if not all(isinstance(tag, str) for tag in value.values()):
            raise self._wrong(c.TAGS, "a JSON object of texts")
        return value

    def lineage(self) -> dict[str, str]:
        """Name -> SHA-256 of what the episode depends on."""
        value = self.mapping(c.LINEAGE)
        if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in value.values()):
            raise self._wrong(c.LINEAGE, "a JSON object of SHA-256 in hex")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty when absent."""
        value = self._parsed(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """A list of integers from 0 that a 32-bit column holds; packed, as JSON, or as it is."""
        packed = self._packed(key, INTS, "token ids")
        value = self._parsed(key) if packed is None else packed
        if value is None:
            return None
        # A bool is no token id.
        if packed is None and not (isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}):
            raise self._wrong(key, "a list of token ids")
        if value and (min(value) < 0 or (packed is None and max(value) >= 2**31)):
            raise self._wrong(key, "a list of token ids")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers, also those that are not finite; packed, as JSON, or as it is."""
        packed = self._packed(key, FLOATS, "numbers")
        if packed is not None:
            return packed
        value = self._parsed(key)
        if value is None:
            return None
        try:
            return tuple(map(float, value))
        except (TypeError, ValueError):
            raise self._wrong(key, "a list of numbers") from None

    def finish_reason(self) -> str | None:
        """The first of the finish reasons: one completion per call."""
        value = self._span.attributes.get(c.FINISH_REASONS)
        if isinstance(value, str) and not value.startswith("["):
            return value
        reasons = self.texts(c.FINISH_REASONS)
        return reasons[0] if reasons else None

    def completion(self) -> str | None:
        """The text of the output messages, for people; None when they are absent or of another shape."""
        try:
            messages = self._parsed(c.OUTPUT_MESSAGES)
        except Malformed:
            return None
        found: list[str] = []
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("parts", [message]) if isinstance(message, dict) else ()
            found += [
                part["content"]
                for part in (parts if isinstance(parts, (list, tuple)) else ())
                if isinstance(part, dict) and isinstance(part.get("content"), str)
            ]
        return "".join(found) if found else None

    def _packed(self, key: str, prefix: str, what: str) -> tuple[Any, ...] | None:
        """The values of a packed list; None when the attribute holds something else or nothing."""
        value = self._span.attributes.get(key)
        if not isinstance(value, str):
            return None
        try:
            return text_to_values(value, prefix)
        except ValueError:
            raise self._wrong(key, f"a packed list of {what}") from None

    def _parsed(self, key: str) -> Any:
        value = self._span.attributes.get(key)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError:
            raise self._wrong(key, "JSON") from None

    def _wrong(self, key: str, wanted: str) -> Malformed:
        shown = repr(self._span.attributes.get(key))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return Malformed(f"attribute {key} of span {self._span.span_id} is not {wanted}: {shown}")
