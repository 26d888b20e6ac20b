"""A span as it was recorded -> the span as it may be written: redacted, or without its content.

Invariants: content that could not be redacted is dropped, never written; HTTP headers are never written; an LLM call
whose texts changed loses its token ids and log-probs, which decode to what was taken out, and is marked untrainable;
ids, edges and numbers stay as they are.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from marft_bridge.recording.redaction import Redactor
from marft_bridge.recording.span_messages import encode_json
from trace_store import conventions as c
from trace_store.attribute_kinds import KINDS, Kind, key_to_kind
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")

NO_CONTENT = "content is not captured"
_HEADERS = '"headers"'  # a key of `response_metadata`, see `_without_headers`
SPAN_NAME, STATUS = "span.name", "span.status"  # keys that a user's function gets for texts that are no attributes
_NEVER_SEARCHED = frozenset(key for key, kind in KINDS.items() if kind in (Kind.STRUCTURE, Kind.TOKENS))


class SpanPrivacy:
    """Decides what of a span may be written. One instance serves all threads of a recorder."""

    def __init__(self, redactor: Redactor, *, content: bool = True) -> None:
        """`content`: whether messages, tool arguments and the like are captured at all."""
        self._redactor = redactor
        self._content = content
        self._lock = threading.Lock()
        self.redactions: Counter[str] = Counter()  # replacements so far, by pattern; `function` is the user's
        self.failures = 0  # spans whose content was dropped because redacting it failed

    def passes(self, rows: Iterable[SpanRow]) -> bool:
        """Whether these rows may surely be written as they are: the common case, told by one look at all texts of a
        run. Never raises."""
        try:
            return self._passes(rows)
        except Exception:  # noqa: BLE001 - `row_to_clean` finds out which row it is
            return False

    def _passes(self, rows: Iterable[SpanRow]) -> bool:
        if not self._content:
            return False
        text = "\n".join(_rows_to_texts(rows))
        return _HEADERS not in text and self._redactor.passes(text)

    def row_to_clean(self, row: SpanRow) -> SpanRow:
        """The row as it may be written; without its content when redacting it failed. Never raises."""
        replacements: Counter[str] = Counter()
        try:
            cleaned = self._redact_row(row, replacements)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and must not harm the app
            self._note_failure(error)
            return _without_content(row, {}, row.operation, reason=f"redaction failed: {type(error).__name__}")
        if replacements:
            with self._lock:
                self.redactions.update(replacements)
        return cleaned

    def _redact_row(self, row: SpanRow, replacements: Counter[str]) -> SpanRow:
        if self._passes([row]):
            return row
        attributes, content_replacements = self._clean_attributes(row.attributes, replacements)
        name = self._redactor.value_to_clean(SPAN_NAME, row.name, replacements)
        if not self._content:
            labels = {key: value for key, value in attributes.items() if key_to_kind(key) is Kind.LABEL}
            return _without_content(row, labels, name, reason=NO_CONTENT)
        message = row.status_message
        if message is not None:
            message = self._redactor.value_to_clean(STATUS, message, replacements)
        if content_replacements:
            attributes = {key: value for key, value in attributes.items() if key_to_kind(key) is not Kind.TOKENS}
            if row.operation == c.CHAT:
                reason = attributes.get(c.UNTRAINABLE)  # of a span that was received, it may be anything
                earlier_reasons = [reason] if isinstance(reason, str) and reason else []
                attributes[c.UNTRAINABLE] = "; ".join(
                    (*earlier_reasons, f"redacted: {', '.join(sorted(content_replacements))}")
                )
        return replace(row, name=name, status_message=message, attributes=attributes)

    def _clean_attributes(
        self, attributes: Mapping[str, Any], replacements: Counter[str]
    ) -> tuple[dict[str, Any], Counter[str]]:
        """The redacted attributes, and the replacements in those of kind content."""
        cleaned: dict[str, Any] = {}
        content_replacements: Counter[str] = Counter()
        for key, value in attributes.items():
            kind = key_to_kind(key)
            if kind is Kind.LABEL:
                cleaned[key] = self._redactor.value_to_clean(key, value, replacements)
            elif kind is Kind.STRUCTURE or (kind is Kind.TOKENS and self._content):
                cleaned[key] = value
            elif self._content:
                cleaned[key] = self._redactor.value_to_clean(key, _without_headers(value), content_replacements)
        replacements.update(content_replacements)
        return cleaned, content_replacements

    def _note_failure(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            is_first = self.failures == 1
        if is_first:  # the message may quote the text that was to be hidden
            log.warning("redaction failed with %s; the content of such spans is dropped", type(error).__name__)


def _rows_to_texts(rows: Iterable[SpanRow]) -> list[str]:
    """All of the rows that may hold secrets."""
    texts: list[str] = []
    for row in rows:
        texts += (row.name, row.status_message or "")
        for key in row.attributes.keys() - _NEVER_SEARCHED:
            value = row.attributes[key]
            texts.append(value if isinstance(value, str) else encode_json(value))
    return texts


def _without_headers(value: Any) -> Any:
    """Messages without the HTTP headers that LangChain can be set to put into the `response_metadata` of an answer:
    they hold cookies and keys, come back in the next prompt, and never reach the model."""
    if not isinstance(value, str) or _HEADERS not in value or '"response_metadata"' not in value:
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    pending = [parsed]
    while pending:
        element = pending.pop()
        if isinstance(element, dict):
            metadata = element.get("response_metadata")
            if isinstance(metadata, dict):
                metadata.pop("headers", None)
            pending += element.values()
        elif isinstance(element, list):
            pending += element
    return json.dumps(parsed, ensure_ascii=False)


def _without_content(row: SpanRow, labels: Mapping[str, Any], name: str, reason: str) -> SpanRow:
    """The row with only structure, numbers and these labels. An error keeps its type; another outcome gets `reason`."""
    attributes = {key: value for key, value in row.attributes.items() if key_to_kind(key) is Kind.STRUCTURE}
    attributes |= labels
    outcome_reason = row.attributes.get(c.OUTCOME_REASON)
    if isinstance(outcome_reason, str):  # a run that is not terminated has a reason, or its episode is not sound
        attributes[c.OUTCOME_REASON] = (
            _error_type(outcome_reason) if row.attributes.get(c.OUTCOME) == "failed" else reason
        )
    if row.operation == c.CHAT:
        attributes[c.UNTRAINABLE] = reason
    return replace(row, name=name, status_message=_error_type(row.status_message), attributes=attributes)


def _error_type(message: str | None) -> str | None:
    """The type in a message of the form `Type: text`, which is how the recorder writes errors."""
    if message is None:
        return None
    kind, colon, _ = message.partition(":")
    return kind if colon and kind.isidentifier() else "error"
