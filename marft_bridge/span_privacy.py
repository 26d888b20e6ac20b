"""A span as it was recorded -> the span as it may be written: redacted, or without its content.

Invariants: what a redaction could not clean is dropped, never written; HTTP headers never are written; an LLM call
whose texts changed loses its token ids and log-probs, which decode to what was taken out, and says so; ids, edges and
numbers stay as they are.
Where the span goes afterwards (journal, exporter) is not known here.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from marft_bridge.redaction import Redactor
from trace_store import conventions as c
from trace_store.attribute_kinds import Kind, key_to_kind
from trace_store.records import SpanRow

log = logging.getLogger("marft_bridge")

NO_CONTENT = "content is not captured"
_HEADERS = '"headers"'  # a key of `response_metadata`, see `_without_headers`
SPAN_NAME, STATUS = "span.name", "span.status"  # what a user's function is told of texts that are no attributes


class SpanPrivacy:
    """Decides what of a span may be written. One for all threads of a recorder."""

    def __init__(self, redactor: Redactor, *, content: bool = True) -> None:
        """`content`: whether messages, tool arguments and the like are captured at all."""
        self._redactor = redactor
        self._content = content
        self._lock = threading.Lock()
        self.redactions: Counter[str] = Counter()  # replacements so far, by pattern; `function` is the user's
        self.failures = 0  # spans whose content was dropped because redacting it failed

    def row_to_clean(self, row: SpanRow) -> SpanRow:
        """The row as it may be written."""
        found: Counter[str] = Counter()
        try:
            cleaned = self._redacted(row, found)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and must not harm the app
            self._note_failure(error)
            return _without_content(row, {}, row.operation, f"redaction failed: {type(error).__name__}")
        if found:
            with self._lock:
                self.redactions.update(found)
        return cleaned

    def attributes_to_clean(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of an event or a link as they may be exported; none of them when redacting them fails."""
        try:
            cleaned, _ = self._cleaned(attributes, Counter())
        except Exception as error:  # noqa: BLE001 - as above
            self._note_failure(error)
            return {}
        return cleaned

    def _redacted(self, row: SpanRow, found: Counter[str]) -> SpanRow:
        if self._content:
            text = "\n".join((row.name, row.status_message or "", *_texts(row.attributes)))
            if _HEADERS not in text and self._redactor.passes(text):
                return row  # nearly always: nothing in it looks like a secret
        attributes, changed = self._cleaned(row.attributes, found)
        name = self._redactor.value_to_clean(SPAN_NAME, row.name, found)
        if not self._content:
            labels = {key: value for key, value in attributes.items() if key_to_kind(key) is Kind.LABEL}
            return _without_content(row, labels, name, NO_CONTENT)
        message = row.status_message
        if message is not None:
            message = self._redactor.value_to_clean(STATUS, message, found)
        if changed:
            attributes = {key: value for key, value in attributes.items() if key_to_kind(key) is not Kind.TOKENS}
            if row.operation == c.CHAT:
                earlier = [reason] if (reason := attributes.get(c.UNTRAINABLE)) else []
                attributes[c.UNTRAINABLE] = "; ".join((*earlier, f"redacted: {', '.join(sorted(changed))}"))
        return replace(row, name=name, status_message=message, attributes=attributes)

    def _cleaned(self, attributes: Mapping[str, Any], found: Counter[str]) -> tuple[dict[str, Any], Counter[str]]:
        """The attributes, cleaned, and what was replaced in their content."""
        cleaned: dict[str, Any] = {}
        changed: Counter[str] = Counter()
        for key, value in attributes.items():
            kind = key_to_kind(key)
            if kind is Kind.LABEL:
                cleaned[key] = self._redactor.value_to_clean(key, value, found)
            elif kind is Kind.STRUCTURE or (kind is Kind.TOKENS and self._content):
                cleaned[key] = value
            elif self._content:
                cleaned[key] = self._redactor.value_to_clean(key, _without_headers(value), changed)
        found.update(changed)
        return cleaned, changed

    def _note_failure(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:  # the message may quote the text that was to be hidden
            log.warning("redaction failed with %s; the content of such spans is dropped", type(error).__name__)


def _texts(attributes: Mapping[str, Any]) -> Iterator[str]:
    """What is to be looked through, as text."""
    for key, value in attributes.items():
        kind = key_to_kind(key)
        if kind is Kind.CONTENT or kind is Kind.LABEL:
            yield value if isinstance(value, str) else json.dumps(value, default=str)


def _without_headers(value: Any) -> Any:
    """Messages without the HTTP headers that LangChain puts into `response_metadata` of an answer when it is asked to:
    they hold cookies and keys, come back in the next prompt, and are no part of what the model is told."""
    if not isinstance(value, str) or _HEADERS not in value or '"response_metadata"' not in value:
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    waiting = [parsed]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict):
            metadata = at.get("response_metadata")
            if isinstance(metadata, dict):
                metadata.pop("headers", None)
            waiting += at.values()
        elif isinstance(at, list):
            waiting += at
    return json.dumps(parsed, ensure_ascii=False)


def _without_content(row: SpanRow, labels: Mapping[str, Any], name: str, reason: str) -> SpanRow:
    """Structure, numbers and these labels. Of an error its type is left, of another end that there was a reason."""
    attributes = {key: value for key, value in row.attributes.items() if key_to_kind(key) is Kind.STRUCTURE}
    attributes |= labels
    ended = row.attributes.get(c.OUTCOME_REASON)
    if isinstance(ended, str):  # a run that is not terminated has a reason, or its episode is not sound
        attributes[c.OUTCOME_REASON] = _error_type(ended) if row.attributes.get(c.OUTCOME) == "failed" else reason
    if row.operation == c.CHAT:
        attributes[c.UNTRAINABLE] = reason
    return replace(row, name=name, status_message=_error_type(row.status_message), attributes=attributes)


def _error_type(message: str | None) -> str | None:
    """The type in a message of the form `Type: text`, which is how the recorder writes errors."""
    if message is None:
        return None
    kind, colon, _ = message.partition(":")
    return kind if colon and kind.isidentifier() else "error"
