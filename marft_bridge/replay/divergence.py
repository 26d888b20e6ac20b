"""What a replay does otherwise than its record -> the first difference, by node, call and place, in one line.

Invariant: a difference is named by what is recorded and what came instead, cut short, from the first word that differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from marft_bridge.common.printable import text_to_line

Kind = Literal[
    "prompt",  # a call with another prompt
    "extra call",  # a call that the record has no answer for
    "missing call",  # a recorded call that was not made
    "order",  # a call before one that it came after
    "tool",  # a tool that was called otherwise
    "tools offered",  # a call that offers the model other tools
    "options",  # a call that asks its model otherwise: temperature, stop texts
    "connection",  # a node that connects to something past its models and tools
    "outcome",  # a run that fails, or ends otherwise
    "edges",  # calls that depend on other calls
    "result",  # another final state
    "tokenizer",  # another tokenizer than the recorded calls had
    "template",  # another chat template
    "prompt ids",  # a call with the same messages in other token ids
]
_OF_TOKENS = ("tokenizer", "template", "prompt ids")
_WORDS = 8  # that are shown of each side
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a record and its replay."""

    kind: Kind
    node: str | None  # None: no node's, such as the result
    call: int | None  # number of the call in its node, from 1
    text: str  # what differs, where
    recorded: str | None = None  # the words from there on
    replayed: str | None = None

    @property
    def is_of_tokens(self) -> bool:
        """Whether all but the token ids of prompts came out the same, so that what goes on with the run can be, too."""
        return self.kind in _OF_TOKENS

    def __str__(self) -> str:
        place = self.node or ("outside any node" if self.node == "" else "")
        if self.call is not None:
            place += f", call {self.call}"
        sides = ""
        if self.recorded is not None or self.replayed is not None:
            sides = f": recorded {_quote(self.recorded)}, now {_quote(self.replayed)}"
        return f"{place}: {self.text}{sides}" if place else f"{self.text}{sides}"


class DivergedError(RuntimeError):
    """Raised in the app where a replay has no recorded answer. (LangGraph does not retry it.)"""


class RefusedConnectionError(DivergedError, OSError):
    """Raised where an app connects during a replay: an error of the network, which libraries clean up after."""


def _quote(words: str | None) -> str:
    return "nothing" if words is None else f'"{text_to_line(words, 120)}"'


def prompt_difference(recorded: Sequence[Any], replayed: Sequence[Any]) -> tuple[str, str | None, str | None]:
    """(where, recorded words, replayed words) of the first difference of two prompts, which are lists of messages in
    the form of the GenAI conventions."""
    for number, (before, now) in enumerate(zip_longest(recorded, replayed, fillvalue=_MISSING)):
        if before == now:
            continue
        if now is _MISSING:
            return f"message {number} is missing", _message_to_text(before), None
        if before is _MISSING:
            return f"message {number} was not there", None, _message_to_text(now)
        if _role_of(before) != _role_of(now):
            return f"message {number} has another role", _role_of(before), _role_of(now)
        word, recorded_words, replayed_words = first_words(_message_to_text(before), _message_to_text(now))
        return f"message {number} ({_role_of(before)}) differs at word {word}", recorded_words, replayed_words
    return "the prompts are the same", None, None


def first_words(recorded: str, replayed: str) -> tuple[int, str | None, str | None]:
    """The number, from 0, of the first word that differs, and some words of both sides from there on."""
    before, now = re.findall(r"\S+", recorded), re.findall(r"\S+", replayed)
    for number, (one, other) in enumerate(zip_longest(before, now)):
        if one != other:
            return number, _some(before[number:]), _some(now[number:])
    return len(before), "other white space", "other white space"


def value_difference(recorded: Any, replayed: Any, path: str = "") -> tuple[str, str | None, str | None] | None:
    """(path, recorded words, replayed words) of the first difference of two JSON values; None where they are equal."""
    if recorded == replayed:
        return None
    if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
        for key in [*recorded, *(key for key in replayed if key not in recorded)]:
            difference = _inner_difference(
                recorded.get(key, _MISSING), replayed.get(key, _MISSING), f"{path}.{key}" if path else str(key)
            )
            if difference is not None:
                return difference
    if isinstance(recorded, list) and isinstance(replayed, list):
        for number, (before, now) in enumerate(zip_longest(recorded, replayed, fillvalue=_MISSING)):
            difference = _inner_difference(before, now, f"{path}[{number}]")
            if difference is not None:
                return difference
    _, recorded_words, replayed_words = first_words(_value_to_words(recorded), _value_to_words(replayed))
    return path, recorded_words, replayed_words


def _inner_difference(before: Any, now: Any, path: str) -> tuple[str, str | None, str | None] | None:
    if before is _MISSING or now is _MISSING:
        words = [None if value is _MISSING else _some(_value_to_words(value).split()) for value in (before, now)]
        return path, words[0], words[1]
    return value_difference(before, now, path)


def _value_to_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _some(words: Sequence[str]) -> str | None:
    return None if not words else " ".join(words[:_WORDS]) + (" ..." if len(words) > _WORDS else "")


def _role_of(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, Mapping) else "?"


def _message_to_text(message: Any) -> str:
    """The words of a message: texts as they are, any other part as JSON."""
    if not isinstance(message, Mapping):
        return json.dumps(message)
    parts = message.get("parts")
    name = [] if message.get("name") is None else [f"[{message['name']}]"]
    if not isinstance(parts, list):
        return json.dumps(message)
    return "\n".join([*map(_part_to_text, parts), *name])


def _part_to_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("content"), str):
        return str(part["content"])
    if isinstance(part, Mapping) and part.get("type") == "tool_call_response":
        response = part.get("response")
        return f"{response if isinstance(response, str) else json.dumps(response)} (result of {part.get('id')})"
    return json.dumps(part)
