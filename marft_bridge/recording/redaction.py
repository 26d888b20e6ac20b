"""Attributes of a span -> the same attributes without secrets, and the count of replacements in them.

Invariant: every text is searched as a reader would see it, that is with its JSON quoting undone, at any depth, keys
included; and a text that a user's function fails to redact is never returned. `trace_store.attribute_kinds` decides
which attributes hold text for people.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from marft_bridge.common.redaction_patterns import Prefilter, is_secret_field, names_to_patterns

Redact = Callable[[str, str], str]
"""A user's function (attribute name, text) -> text to write instead; the text itself where there is nothing to hide."""

FUNCTION = "function"  # name under which replacements by the user's function are counted
_FIELD = "secret_field"
_ESCAPED = re.compile(r"\\(?:/|u00[2-7])")  # ASCII that JSON writers rarely escape; an escape hides pattern fragments
REDACTED = "[redacted:"
"""How what stands in the place of a secret begins."""
_MAX_CLEAN_ELEMENTS = 20_000  # that are remembered
_BETWEEN_ELEMENTS = re.compile(r"\s*([,\]])\s*")
_read_element = json.JSONDecoder().raw_decode
_MIN_CARD_NUMBER = 10**12  # the smallest number of 13 digits


class Redactor:
    """Redacts the values of attributes by patterns and then by a user's function. Safe to use from several threads."""

    def __init__(self, patterns: Sequence[str] = (), function: Redact | None = None) -> None:
        """`patterns`: names or groups of `redaction_patterns`. Raises ValueError for a name that is not known."""
        chosen_patterns = names_to_patterns(patterns)
        self._prefilter = Prefilter(chosen_patterns)
        self._patterns = [(pattern, Prefilter([pattern])) for pattern in chosen_patterns]
        self._redacts_fields = any(pattern.name == _FIELD for pattern in chosen_patterns)
        self._function = function
        self._clean_elements: set[bytes] = set()  # digests of elements of JSON lists that hold nothing to redact

    def passes(self, text: str) -> bool:
        """Whether the text surely holds nothing to redact; False where only the full search can tell."""
        return self._function is None and not self._may_match(text)

    def value_to_clean(self, key: str, value: Any, replacements: Counter[str]) -> Any:
        """The redacted value of the attribute `key`. Adds each replacement to `replacements`, by the pattern's name.

        Raises:
            TypeError: the user's function did not return a text. Its own exceptions pass through.
        """
        if isinstance(value, str):
            return self._text_to_clean(key, value, replacements)
        if isinstance(value, dict):
            return {
                self._text_to_clean(key, str(name), replacements): self._field_to_clean(
                    key, name, item, replacements=replacements
                )
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value_to_clean(key, item, replacements) for item in value]
        if isinstance(value, int) and abs(value) >= _MIN_CARD_NUMBER:  # a card number need not be quoted
            text = str(value)
            cleaned = self._text_to_clean(key, text, replacements)
            return value if cleaned == text else cleaned
        return value

    def _field_to_clean(self, key: str, name: Any, value: Any, replacements: Counter[str]) -> Any:
        if self._redacts_fields and isinstance(value, str) and value and is_secret_field(str(name)):
            if value.startswith(REDACTED):
                return value
            replacements[_FIELD] += 1
            return f"{REDACTED}{_FIELD}]"
        return self.value_to_clean(key, value, replacements)

    def _text_to_clean(self, key: str, text: str, replacements: Counter[str]) -> str:
        is_suspect = self._may_match(text)
        if not is_suspect and self._function is None:
            return text
        elements = _text_to_elements(text) if self._function is None else None
        if elements is not None:
            return self._list_to_clean(key, text, elements, replacements=replacements)
        container = _text_to_container(text)
        if container is not None:
            cleaned = self.value_to_clean(key, container, replacements)
            return text if cleaned == container else json.dumps(cleaned, ensure_ascii=False)
        for pattern, prefilter in self._patterns if is_suspect else ():
            if prefilter.may_be_in(text):
                text, replaced_count = pattern.text_to_clean(text)
                if replaced_count:
                    replacements[pattern.name] += replaced_count
        return text if self._function is None else self._apply_function(key, text, replacements)

    def _list_to_clean(
        self, key: str, text: str, elements: Sequence[tuple[str, Any]], replacements: Counter[str]
    ) -> str:
        """The text of a JSON list. Its elements, the messages of a prompt, come again in the prompts after it."""
        cleaned_elements = []
        changed = False
        for element_text, element in elements:
            digest = hashlib.blake2b(element_text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in self._clean_elements:
                cleaned_elements.append(element)
                continue
            cleaned_element = self.value_to_clean(key, element, replacements)
            cleaned_elements.append(cleaned_element)
            if cleaned_element != element:
                changed = True
            else:
                if len(self._clean_elements) >= _MAX_CLEAN_ELEMENTS:
                    self._clean_elements.clear()
                self._clean_elements.add(digest)
        return json.dumps(cleaned_elements, ensure_ascii=False) if changed else text

    def _may_match(self, text: str) -> bool:
        return self._prefilter.may_be_in(text) or ("\\" in text and _ESCAPED.search(text) is not None)

    def _apply_function(self, key: str, text: str, replacements: Counter[str]) -> str:
        assert self._function is not None
        cleaned = self._function(key, text)
        if not isinstance(cleaned, str):
            raise TypeError(f"the redaction function returned a {type(cleaned).__name__}, not a text")
        if cleaned != text:
            replacements[FUNCTION] += 1
        return cleaned


def _text_to_elements(text: str) -> list[tuple[str, Any]] | None:
    """The elements of a JSON list of objects, each with its text; None where the text holds something else."""
    if not text.startswith("[{"):
        return None
    elements = []
    position = 1
    try:
        while True:
            element, end = _read_element(text, position)
            elements.append((text[position:end], element))
            separator = _BETWEEN_ELEMENTS.match(text, end)
            if separator is None:
                return None
            position = separator.end()
            if separator[1] == "]":
                return elements if position == len(text) else None
    except ValueError:
        return None


def _text_to_container(text: str) -> Any:
    """The JSON object or list that a text holds; None where it holds something else."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
