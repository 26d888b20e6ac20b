"""HTTP calls to the model server -> how many are under way, and for how long the server has been silent to all of them.

Invariants: a call is under way from its sending until its response is closed, however it ends; requests and responses
pass through unchanged. Whether a silence is too long is for the caller to judge.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx

from marft_bridge.common.certificates import trusted_authorities


class CallsUnderWay:
    """Counts the calls under way and times their silence. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._last_activity_s = time.monotonic()

    @property
    def count(self) -> int:
        """Number of calls that wait for the server now."""
        return self._count

    def silence_s(self) -> float:
        """Seconds since any call under way received data; 0 while no call is under way."""
        with self._lock:
            return time.monotonic() - self._last_activity_s if self._count else 0.0

    def note_start(self) -> None:
        """Notes that a call is sent."""
        with self._lock:
            if self._count == 0:
                self._last_activity_s = time.monotonic()
            self._count += 1

    def note_activity(self) -> None:
        """Notes that the server sent data on some call."""
        self._last_activity_s = time.monotonic()

    def note_end(self) -> None:
        """Notes that a call is over."""
        with self._lock:
            self._count -= 1


class _MonitoredBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a response; notes each part that arrives, and the end of the call when it is closed."""

    def __init__(self, body: httpx.SyncByteStream | httpx.AsyncByteStream, calls: CallsUnderWay) -> None:
        self._body, self._calls, self._is_open = body, calls, True

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._body, httpx.SyncByteStream)
        for part in self._body:
            self._calls.note_activity()
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._body, httpx.AsyncByteStream)
        async for part in self._body:
            self._calls.note_activity()
            yield part

    def close(self) -> None:
        """Ends the call, once."""
        assert isinstance(self._body, httpx.SyncByteStream)
        try:
            self._body.close()
        finally:
            self._end_once()

    async def aclose(self) -> None:
        """Ends the call, once."""
        assert isinstance(self._body, httpx.AsyncByteStream)
        try:
            await self._body.aclose()
        finally:
            self._end_once()

    def _end_once(self) -> None:
        if self._is_open:
            self._is_open = False
            self._calls.note_end()


class WatchedTransport(httpx.HTTPTransport):
    """A transport that counts a client's calls."""

    def __init__(self, calls: CallsUnderWay, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False, verify=trusted_authorities())
        self._calls = calls

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call."""
        self._calls.note_start()
        try:
            response = super().handle_request(request)
        except BaseException:
            self._calls.note_end()
            raise
        self._calls.note_activity()
        response.stream = _MonitoredBody(response.stream, self._calls)
        return response


class AsyncWatchedTransport(httpx.AsyncHTTPTransport):
    """A transport that counts an asynchronous client's calls."""

    def __init__(self, calls: CallsUnderWay, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False, verify=trusted_authorities())
        self._calls = calls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One call."""
        self._calls.note_start()
        try:
            response = await super().handle_async_request(request)
        except BaseException:
            self._calls.note_end()
            raise
        self._calls.note_activity()
        response.stream = _MonitoredBody(response.stream, self._calls)
        return response
