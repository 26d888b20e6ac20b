"""The attributes of a span -> typed values.

Invariant: an absent value is None; a value of the wrong type is never coerced or dropped, but raises `Malformed` with
the reason. Lists and objects may be given as JSON text, which is how OpenTelemetry exporters carry them cheaply.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from trace_store import conventions as c
from trace_store.json_text import read_json
from trace_store.packed import FLOATS, INTS, text_to_values
from trace_store.records import SpanRow

BIGINT, INTEGER = 2**63, 2**31
"""Bounds of the columns of these types: a number n fits where -bound <= n < bound."""
_SHA256 = re.compile("[0-9a-f]{64}")


class Malformed(ValueError):  # noqa: N818 - says what the trace is
    """The trace will never make a trajectory; the message says why."""


class SpanAttributes:
    """Typed access to the attributes of one span."""

    def __init__(self, span: SpanRow) -> None:
        self._span = span

    @property
    def convention(self) -> str:
        """The version of the attribute names that the span was written with."""
        return self._span.convention

    def is_set(self, key: str) -> bool:
        """Whether the attribute is present and not None."""
        return self._span.attributes.get(key) is not None

    def text(self, key: str) -> str | None:
        """A text, as it is."""
        value = self._span.attributes.get(key)
        if value is not None and not isinstance(value, str):
            raise self._malformed(key, "text")
        return value

    def integer(self, key: str, bound: int = BIGINT) -> int | None:
        """An integer in [-bound, bound)."""
        value = self._span.attributes.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not -bound <= value < bound:
            raise self._malformed(key, f"an integer of {bound.bit_length()} bits")
        return value

    def int32(self, key: str) -> int | None:
        """An integer that a 32-bit column holds."""
        return self.integer(key, INTEGER)

    def is_true(self, key: str) -> bool:
        """Whether the attribute is there and true."""
        return self._span.attributes.get(key) is True

    def number(self, key: str) -> float | None:
        """A number."""
        value = self._span.attributes.get(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._malformed(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._malformed(key, "a number") from None

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self._span.attributes.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._malformed(key, "true or false")
        return value

    def beginning(self) -> Literal["turn", "resume"] | None:
        """How the run begins on its thread."""
        match self.text(c.BEGINS):
            case None:
                return None
            case "turn":
                return "turn"
            case "resume":
                return "resume"
        raise self._malformed(c.BEGINS, "turn or resume")

    def mapping(self, key: str) -> dict[str, Any]:
        """A JSON object; empty when absent."""
        value = self._parse_json(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._malformed(key, "a JSON object")
        return value

    def adapter_versions(self) -> dict[str, int]:
        """Node -> adapter version that the episode ran with."""
        value = self.mapping(c.ADAPTERS)
        if not all(isinstance(version, int) and not isinstance(version, bool) for version in value.values()):
            raise self._malformed(c.ADAPTERS, "a JSON object of integers")
        return value

    def tags(self) -> dict[str, str]:
        """Label -> value of the episode."""
        value = self.mapping(c.TAGS)
        if not all(isinstance(tag, str) for tag in value.values()):
            raise self._malformed(c.TAGS, "a JSON object of texts")
        return value

    def lineage(self) -> dict[str, str]:
        """Name -> SHA-256 of what the episode depends on."""
        value = self.mapping(c.LINEAGE)
        if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in value.values()):
            raise self._malformed(c.LINEAGE, "a JSON object of SHA-256 in hex")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty when absent."""
        value = self._parse_json(key)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self._malformed(key, "a list of texts")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """A list of integers from 0 that a 32-bit column holds; packed, as JSON, or as it is."""
        packed = self._unpack_list(key, INTS, "token ids")
        value = self._parse_json(key) if packed is None else packed
        if value is None:
            return None
        # A bool is no token id.
        if packed is None and not (isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}):
            raise self._malformed(key, "a list of token ids")
        if value and (min(value) < 0 or (packed is None and max(value) >= INTEGER)):
            raise self._malformed(key, "a list of token ids")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers, also those that are not finite; packed, as JSON, or as it is."""
        packed = self._unpack_list(key, FLOATS, "numbers")
        if packed is not None:
            return packed
        value = self._parse_json(key)
        if value is None:
            return None
        try:
            return tuple(map(float, value))
        except (TypeError, ValueError, OverflowError):
            raise self._malformed(key, "a list of numbers") from None

    def finish_reason(self) -> str | None:
        """The first of the finish reasons: one completion per call."""
        value = self._span.attributes.get(c.FINISH_REASONS)
        if isinstance(value, str) and not value.startswith("["):
            return value
        reasons = self.texts(c.FINISH_REASONS)
        return reasons[0] if reasons else None

    def completion(self) -> str | None:
        """The text of the output messages, for people: "" of an answer that has none, such as a mere tool call.

        None when they are absent or not a list of messages. A row from before release 0.1.0 keeps the text that it had,
        in which thoughts counted, and a message of parts without a text had none.
        """
        try:
            messages = self._parse_json(c.OUTPUT_MESSAGES)
        except Malformed:
            return None
        is_former = self.convention.startswith(c.FORMER_VERSIONS)
        contents: list[str] = []
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("parts", [message]) if isinstance(message, dict) else ()
            parts = parts if isinstance(parts, (list, tuple)) else ()
            contents += [
                part["content"]
                for part in parts
                if isinstance(part, dict)
                and isinstance(part.get("content"), str)
                and (is_former or part.get("type") != "reasoning")
            ]
            if not is_former and isinstance(message, dict) and "parts" in message:
                contents.append("")
        return "".join(contents) if contents else None

    def _unpack_list(self, key: str, prefix: str, element_name: str) -> tuple[Any, ...] | None:
        """The values of a packed list; None when the attribute holds something else or nothing."""
        value = self._span.attributes.get(key)
        if not isinstance(value, str):
            return None
        try:
            return text_to_values(value, prefix)
        except ValueError:
            raise self._malformed(key, f"a packed list of {element_name}") from None

    def _parse_json(self, key: str) -> Any:
        value = self._span.attributes.get(key)
        if not isinstance(value, str):
            return value
        try:
            return read_json(value)
        except ValueError:
            raise self._malformed(key, "JSON") from None

    def _malformed(self, key: str, expected: str) -> Malformed:
        value_text = repr(self._span.attributes.get(key))
        value_text = value_text if len(value_text) <= 60 else value_text[:57] + "..."
        return Malformed(f"attribute {key} of span {self._span.span_id} is not {expected}: {value_text}")
