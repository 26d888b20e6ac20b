"""A connection that a node opens during a replay -> a divergence, and no connection.

Only what is called in the replay's own context is looked at, so that threads of libraries go on; and what OpenTelemetry
sends from there is no call of the app's. Invariant: sockets connect as ever when the block has ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value

Refuse = Callable[[str], BaseException]
"""(address) -> the error to raise."""

_refuse: ContextVar[Refuse | None] = ContextVar("marft_replay_refuses", default=None)
_INTERNET = (socket.AF_INET, socket.AF_INET6)


@contextmanager
def refused_connections(refuse: Refuse) -> Iterator[None]:
    """While the block runs, code called from inside it cannot connect by TCP or UDP."""
    originals = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    inherited = [name for name in originals if name not in vars(socket.socket)]

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(self: socket.socket, address: Any) -> Any:
            refusal = _refuse.get()
            if refusal is not None and self.family in _INTERNET and not get_value(_SUPPRESS_INSTRUMENTATION_KEY):
                raise refusal(f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address))
            return original(self, address)

        return connect

    for name, original in originals.items():
        setattr(socket.socket, name, replacement(original))
    reset_token = _refuse.set(refuse)
    try:
        yield
    finally:
        _refuse.reset(reset_token)
        for name, original in originals.items():
            if name in inherited:
                delattr(socket.socket, name)
            else:
                setattr(socket.socket, name, original)


@contextmanager
def allowed_connections() -> Iterator[None]:
    """Code called from inside the block may connect again."""
    reset_token = _refuse.set(None)
    try:
        yield
    finally:
        _refuse.reset(reset_token)
