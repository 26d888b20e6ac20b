"""Calls of LangChain's models -> the same calls of another model, for as long as somebody stands in for models.

It replaces the methods of BaseChatModel (and, where asked, of BaseLLM) that every call passes, below every provider's
class. Invariants: what no stand-in claims is not touched; the methods are restored when the last block has ended.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import BaseLLM

from marft_bridge.common.library_internals import CHAT_ENTRIES, CHAT_V3

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: by position, of which the first is what the model is given, and by name."""
StandIn = Callable[[Any, Arguments, str], tuple[Any, Arguments]]
"""(model, arguments, name of the method) -> the model that answers instead, and its arguments; or the same."""

LLM_ENTRIES = ("generate", "agenerate", "stream", "astream")
"""Methods of BaseLLM that every call of a completion model passes."""


def _replace_method(original: Callable[..., Any], entry: str, stand_ins: list[StandIn]) -> Callable[..., Any]:
    if entry in CHAT_V3:  # their decorator warns of a beta whenever the caller is not LangChain's own code
        original = getattr(original, "__wrapped__", original)

    # Calling is enough for all four kinds of method: a coroutine or a generator belongs to the model it was made of.
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, arguments = self, (args, kwargs)
        for stand_in in stand_ins:
            model, arguments = stand_in(model, arguments, entry)
        return original(model, *arguments[0], **arguments[1])

    return method


class _Entries:
    """The replaced methods of one class of LangChain's, and who stands in."""

    def __init__(self, owner: type[Any], entries: tuple[str, ...]) -> None:
        self._owner, self._entries = owner, entries
        self._stand_ins: list[StandIn] = []
        self._originals: dict[str, Callable[..., Any]] = {}

    def add(self, stand_in: StandIn) -> None:
        if not self._stand_ins:
            for name in self._entries:
                self._originals[name] = vars(self._owner)[name]
                setattr(self._owner, name, _replace_method(self._originals[name], name, self._stand_ins))
        self._stand_ins.append(stand_in)

    def remove(self, stand_in: StandIn) -> None:
        self._stand_ins.remove(stand_in)
        if not self._stand_ins:
            for name, original in self._originals.items():
                setattr(self._owner, name, original)
            self._originals.clear()


_lock = threading.Lock()
_chat_entries = _Entries(BaseChatModel, CHAT_ENTRIES)
_llm_entries = _Entries(BaseLLM, LLM_ENTRIES)


@contextmanager
def stand_in_for_models(chat: StandIn, llm: StandIn | None = None) -> Iterator[None]:
    """While the block runs, `chat` says who answers each call of a chat model, and `llm` of a completion model."""
    with _lock:
        _chat_entries.add(chat)
        if llm is not None:
            _llm_entries.add(llm)
    try:
        yield
    finally:
        with _lock:
            _chat_entries.remove(chat)
            if llm is not None:
                _llm_entries.remove(llm)
