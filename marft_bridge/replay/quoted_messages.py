"""Texts that quote whole messages of LangChain's -> the same texts without what a model reports besides its answer.

An app puts `str(messages)`, or the JSON of messages, into a prompt: with it come the provider's id of the request, its
counts of tokens and the like, which no replay gives back. Invariants: a text that quotes no message stays as it is, and
so does a quotation that is cut off, with all behind it; a text, which anybody may have written, is read once.
"""

from __future__ import annotations

import re
from typing import Any

from marft_bridge.replay.json_texts import map_texts

# `response_metadata={...}` of `str` and `repr`, `"response_metadata": {...}` of JSON and of a dict, and what is before.
_REPORT = re.compile(
    r"(?:, ?| )?(?P<quote>[\"']?)\b(?:additional_kwargs|response_metadata|usage_metadata)(?P=quote)(?:=|: ?)"
    r"(?P<value>\{|null\b|None\b)"
)


def without_reports(value: Any) -> Any:
    """A value of JSON, in whose texts no message says what its model reported besides it."""
    return map_texts(value, _text_without_reports)


def _text_without_reports(text: str) -> str:
    if "response_metadata" not in text:  # every message that is quoted whole has it
        return text
    parts, position = [], 0
    for match in _REPORT.finditer(text):
        if match.start() < position:  # in the table of another report
            continue
        end = _end_of_table(text, match.start("value")) if match["value"] == "{" else match.end()
        if end is None:  # looking on from every report behind it would read the rest as often as there are reports
            break
        parts.append(text[position : match.start()])
        position = end
    return "".join([*parts, text[position:]])


def _end_of_table(text: str, start: int) -> int | None:
    """Where the `{...}` that begins at `start` has ended; None where it does not end."""
    depth, quote, position = 0, "", start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # the next one is meant as it is
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position + 1
        position += 1
    return None
