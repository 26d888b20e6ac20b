"""The error that ended an episode -> whether to try again, and how long to wait before that.

Invariant: an error of the user's graph is retried only where the user asks for it; a connection that broke, or a
server that was busy or failed, says nothing about the graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_BUSY_STATUSES = (408, 425, 429)  # status codes that say "later", besides every 5xx
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may cost."""

    max_tokens: int | None = None  # sampled by the nodes on the served model, in one attempt; None: any number
    retries: int = 0  # attempts after the first
    graph_errors: bool = False  # whether errors that are not the connection's are retried too

    def may_try_again(self, attempt: int, error: Exception) -> bool:
        """Whether another attempt comes after `attempt`, counted from 0, which ended with `error`."""
        return attempt < self.retries and (self.graph_errors or is_connection_error(error))


def is_connection_error(error: BaseException) -> bool:
    """Whether a broken connection, or a busy or failed server, caused an error, however it was wrapped."""
    return any(map(_is_transient, _error_chain(error)))


def pause_s(attempt: int, seed: int) -> float:
    """Seconds to wait after attempt number `attempt`, from 0: doubling up to 30 s, jittered by `seed`."""
    longest_pause_s: float = min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S)
    return longest_pause_s * random.Random(f"{seed}/{attempt}").uniform(0.5, 1.0)


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, the errors that it was raised from or while handling, and the members of groups."""
    pending, visited_ids = [error], set()
    while pending:
        linked_error = pending.pop()
        if id(linked_error) in visited_ids:
            continue
        visited_ids.add(id(linked_error))
        yield linked_error
        pending += [cause for cause in (linked_error.__cause__, linked_error.__context__) if cause is not None]
        pending += linked_error.exceptions if isinstance(linked_error, BaseExceptionGroup) else ()


def _is_transient(error: BaseException) -> bool:
    import httpx  # imported late: it takes longer to load than a configuration takes to read

    if isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
        return True
    # The clients of OpenAI and Anthropic put the status on the error; that of httpx puts it on the response.
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    return isinstance(status, int) and (status in _BUSY_STATUSES or status >= 500)
