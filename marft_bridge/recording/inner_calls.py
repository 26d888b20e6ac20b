"""A model's call that starts -> the call that it is part of, where the model of that one makes it to answer.

A chat model that wraps another one is one decision of its agent, and so one action: the outer call, with the prompt
that the node gave. Invariant: a call that only begins while another one is open (a stream that is not read to its end,
one that was cancelled and never ended) is no part of it.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType
from uuid import UUID

from langchain_core.language_models import BaseLanguageModel

from marft_bridge.common.library_internals import CHAT_INNER

latest_call: ContextVar[UUID | None] = ContextVar("marft_latest_call", default=None)
"""The call that was started last in this context; it may have ended."""

# What LangChain calls of a model once a call has been announced.
_ANSWERING = frozenset(["_generate", "_agenerate", "_stream", "_astream", "_call", "_acall", *CHAT_INNER])


def answers_a_call() -> bool:
    """Whether a model that is answering is among the callers. Slow: ask only where a call is open in this context."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name in _ANSWERING
            and code.co_varnames[:1] == ("self",)
            and isinstance(frame.f_locals.get("self"), BaseLanguageModel)
        ):
            return True
        frame = frame.f_back
    return False
