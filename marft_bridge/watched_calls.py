"""HTTP calls to the model server -> how many are under way, and for how long it has said nothing to any of them.

Invariants: a call is under way from its sending until its answer is closed, however it ends; whatever the calls
themselves see is untouched. It knows no models, and does not judge whether the silence is too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx


class CallsUnderWay:
    """Counts calls. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._heard = time.monotonic()

    @property
    def count(self) -> int:
        """Calls that wait for the server now."""
        return self._count

    def silence_s(self) -> float:
        """Seconds that calls have waited without any of them being told anything; 0 while there are none."""
        with self._lock:
            return time.monotonic() - self._heard if self._count else 0.0

    def began(self) -> None:
        """A call is sent."""
        with self._lock:
            if self._count == 0:
                self._heard = time.monotonic()
            self._count += 1

    def heard(self) -> None:
        """The server said something."""
        self._heard = time.monotonic()

    def ended(self) -> None:
        """A call is over."""
        with self._lock:
            self._count -= 1


class _Heard(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of an answer, which tells that it comes and when it is closed."""

    def __init__(self, body: httpx.SyncByteStream | httpx.AsyncByteStream, calls: CallsUnderWay) -> None:
        self._body, self._calls, self._open = body, calls, True

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._body, httpx.SyncByteStream)
        for part in self._body:
            self._calls.heard()
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._body, httpx.AsyncByteStream)
        async for part in self._body:
            self._calls.heard()
            yield part

    def close(self) -> None:
        """Ends the call, once."""
        assert isinstance(self._body, httpx.SyncByteStream)
        try:
            self._body.close()
        finally:
            self._over()

    async def aclose(self) -> None:
        """Ends the call, once."""
        assert isinstance(self._body, httpx.AsyncByteStream)
        try:
            await self._body.aclose()
        finally:
            self._over()

    def _over(self) -> None:
        if self._open:
            self._open = False
            self._calls.ended()


class WatchedTransport(httpx.HTTPTransport):
    """How a client's calls are counted."""

    def __init__(self, calls: CallsUnderWay, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False)
        self._calls = calls

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call."""
        self._calls.began()
        try:
            response = super().handle_request(request)
        except BaseException:
            self._calls.ended()
            raise
        self._calls.heard()
        response.stream = _Heard(response.stream, self._calls)
        return response


class AsyncWatchedTransport(httpx.AsyncHTTPTransport):
    """How an asynchronous client's calls are counted."""

    def __init__(self, calls: CallsUnderWay, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False)
        self._calls = calls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One call."""
        self._calls.began()
        try:
            response = await super().handle_async_request(request)
        except BaseException:
            self._calls.ended()
            raise
        self._calls.heard()
        response.stream = _Heard(response.stream, self._calls)
        return response
