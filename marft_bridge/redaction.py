"""Attributes of a span -> the same attributes without secrets, and what was replaced in them.

Invariant: every text is looked at as a reader would see it, that is behind its JSON quoting, at any depth, keys
included; and what a user's function cannot clean is never handed on. Which attributes hold text for people is decided
in `trace_store.attribute_kinds`; nothing here knows of journals or exporters.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from marft_bridge.redaction_patterns import Prefilter, is_secret_field, names_to_patterns

Redact = Callable[[str, str], str]
"""A user's function (attribute name, text) -> text to write instead; the text itself where there is nothing to hide."""

FUNCTION = "function"  # how a replacement by the user's function is called where the patterns have names
_FIELD = "secret_field"
_ESCAPED = re.compile(r"\\(?:/|u00[2-7])")  # ASCII that JSON writers may escape but rarely do: fragments hide behind it
_MARK = "[redacted:"
_LONG = 10**12  # the smallest number of 13 digits


class Redactor:
    """Cleans the values of attributes by patterns and then by a user's function. Safe to use from several threads."""

    def __init__(self, patterns: Sequence[str] = (), function: Redact | None = None) -> None:
        """`patterns`: names or groups of `redaction_patterns`. Raises ValueError for a name that is not known."""
        chosen = names_to_patterns(patterns)
        self._prefilter = Prefilter(chosen)
        self._patterns = [(pattern, Prefilter([pattern])) for pattern in chosen]
        self._fields = any(pattern.name == _FIELD for pattern in chosen)
        self._function = function

    def passes(self, text: str) -> bool:
        """Whether nothing in this text can need cleaning; false where only a closer look can tell."""
        return self._function is None and not self._may_match(text)

    def value_to_clean(self, key: str, value: Any, found: Counter[str]) -> Any:
        """The value of the attribute `key`, cleaned; each replacement is counted in `found` by the pattern's name.

        Whatever the user's function raises passes through; so does TypeError when it does not return a text.
        """
        if isinstance(value, str):
            return self._text_to_clean(key, value, found)
        if isinstance(value, dict):
            return {
                self._text_to_clean(key, str(name), found): self._field_to_clean(key, name, item, found)
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value_to_clean(key, item, found) for item in value]
        if isinstance(value, int) and abs(value) >= _LONG:  # a card number need not be quoted
            text = str(value)
            cleaned = self._text_to_clean(key, text, found)
            return value if cleaned == text else cleaned
        return value

    def _field_to_clean(self, key: str, name: Any, value: Any, found: Counter[str]) -> Any:
        if self._fields and isinstance(value, str) and value and is_secret_field(str(name)):
            if value.startswith(_MARK):
                return value
            found[_FIELD] += 1
            return f"{_MARK}{_FIELD}]"
        return self.value_to_clean(key, value, found)

    def _text_to_clean(self, key: str, text: str, found: Counter[str]) -> str:
        suspect = self._may_match(text)
        if not suspect and self._function is None:
            return text
        container = _text_to_container(text)
        if container is not None:
            cleaned = self.value_to_clean(key, container, found)
            return text if cleaned == container else json.dumps(cleaned, ensure_ascii=False)
        for pattern, prefilter in self._patterns if suspect else ():
            if prefilter.may_be_in(text):
                text, replaced = pattern.text_to_clean(text)
                if replaced:
                    found[pattern.name] += replaced
        return text if self._function is None else self._by_function(self._function, key, text, found)

    def _may_match(self, text: str) -> bool:
        return self._prefilter.may_be_in(text) or ("\\" in text and _ESCAPED.search(text) is not None)

    @staticmethod
    def _by_function(function: Redact, key: str, text: str, found: Counter[str]) -> str:
        cleaned = function(key, text)
        if not isinstance(cleaned, str):
            raise TypeError(f"the redaction function returned a {type(cleaned).__name__}, not a text")
        if cleaned != text:
            found[FUNCTION] += 1
        return cleaned


def _text_to_container(text: str) -> Any:
    """The JSON object or list that a text holds; None where it holds something else."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
