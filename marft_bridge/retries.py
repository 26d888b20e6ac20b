"""What ended an episode -> whether another attempt may end otherwise, and how long to wait before it.

Invariant: what the user's graph does wrong is tried again only where the user asks for it; a connection that broke, or
a server that was busy or failed, says nothing about the graph. It knows nothing of episodes or of how they are run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_BUSY = (408, 425, 429)  # status codes that say "later", besides every 5xx
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost."""

    max_tokens: int | None = None  # sampled by the nodes on the served model, in one attempt; None: any number
    retries: int = 0  # attempts after the first
    graph_errors: bool = False  # whether what is not the connection's fault is tried again too

    def may_try_again(self, attempt: int, error: Exception) -> bool:
        """Whether another attempt comes after `attempt`, counted from 0, which ended with `error`."""
        return attempt < self.retries and (self.graph_errors or is_of_the_connection(error))


def is_of_the_connection(error: BaseException) -> bool:
    """Whether a broken connection, or a server that was busy or failed, is behind an error, however it was wrapped."""
    return any(map(_is_passing, _behind(error)))


def pause_s(attempt: int, seed: int) -> float:
    """Seconds before the attempt after `attempt`, counted from 0: they double, and differ between episodes."""
    longest: float = min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S)
    return longest * random.Random(f"{seed}/{attempt}").uniform(0.5, 1.0)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _is_passing(error: BaseException) -> bool:
    import httpx  # where something failed: a configuration is read faster than it loads

    if isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
        return True
    # The clients of OpenAI and Anthropic tell the status; that of httpx has it on the answer.
    answer = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(answer, "status_code", None)
    return isinstance(status, int) and (status in _BUSY or status >= 500)
