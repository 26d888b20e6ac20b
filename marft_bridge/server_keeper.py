"""A model server that dies or hangs -> the same server again, so many times; whoever depends on it learns which.

Invariants: one restart at a time, whoever noticed the need; it is the server's work that decides, never a single slow
answer; when it cannot be helped any more, every question gets the same error. It knows no episodes and no adapters:
those that failed meanwhile are repeated by whoever asked `came_back`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from marft_bridge.errors import ServingError
from marft_bridge.serving import ModelServer
from marft_bridge.watched_calls import CallsUnderWay

_EVERY_S = 0.5
_DYING_S = 20.0  # a server that is about to end answers badly, and its guard then needs some seconds to end the rest

T = TypeVar("T")


class ServerKeeper:
    """Watches a running server inside a `with` block.

    Args:
        restarts: how many times it may be started again; a server in `attach` never is.
        hang_s: calls wait and none is told anything for half of this, then a question for one token is not answered
            for the other half: it hangs.
        calls: those that the server answers.
        say: gets a line whenever something happens.
    """

    def __init__(
        self, server: ModelServer, restarts: int, hang_s: float, calls: CallsUnderWay, say: Callable[[str], None]
    ) -> None:
        self._server, self._calls, self._say = server, calls, say
        self._restarts, self._used = (0 if server.attached else restarts), 0
        self._half_s = hang_s / 2
        self._lock = threading.Lock()  # held while the server is looked at or started again
        self._up_since = time.monotonic()
        self._lost: str | None = None
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watching, name="model-server-keeper", daemon=True)

    def __enter__(self) -> Self:
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing is started any more afterwards; a question that the watch still waits for ends with the server."""
        self._closing.set()
        self._server.halt()
        with self._lock:
            pass

    def check(self) -> None:
        """Raises ServingError when the server is lost for good. Waits for nothing."""
        if self._lost is not None:
            raise ServingError(self._lost)

    def came_back(self, began: float) -> bool:
        """Whether the server was started again since `began` (monotonic seconds), now if need be; waits until it is up.

        Raises:
            ServingError: it is lost for good.
        """
        with self._lock:
            self.check()
            if began < self._up_since:
                return True
            wrong = self._what_is_wrong()
            if wrong is None:
                return False
            self._start_again(wrong)
            return True

    def through(self, work: Callable[[], T]) -> T:
        """What `work` answers, which is done once more after each time the server had to be started again.

        Raises:
            ServingError: its own, from a server that is up; or the server is lost for good.
        """
        while True:
            began = time.monotonic()
            try:
                return work()
            except ServingError:
                if not self.came_back(began):
                    raise

    def _what_is_wrong(self) -> str | None:
        deadline = time.monotonic() + _DYING_S
        while (ended := self._server.ended()) is None:
            if self._server.healthy():
                return None
            if self._server.attached or self._closing.is_set():
                return "the model server does not answer any more"
            if time.monotonic() > deadline:
                return None if self._server.samples(self._half_s) else "the model server does not answer any more"
            time.sleep(0.2)
        return ended

    def _start_again(self, wrong: str) -> None:
        """With the lock held."""
        if self._closing.is_set():
            raise ServingError("the command is ending")
        if self._used == self._restarts:
            after = f" after {self._used} restarts (serve.restarts)" if self._used else ""
            self._lost = self._server.explained(wrong + after)
            raise ServingError(self._lost)
        self._used += 1
        lines = _lines_in(self._server)
        self._say(f"{wrong}; starting it again ({self._used} of {self._restarts}); log {self._server.log_path}:{lines}")
        began = time.monotonic()
        try:
            self._server.restart()
        except ServingError as error:
            self._lost = f"{wrong}, and did not start again: {error}"
            raise ServingError(self._lost) from error
        self._up_since = time.monotonic()
        self._say(f"the model server is up again with its adapters, after {self._up_since - began:.0f} s")

    def _watching(self) -> None:
        while not self._closing.wait(_EVERY_S):
            hangs, seen = self._hangs(), self._up_since
            try:
                with self._lock:
                    if self._closing.is_set() or self._lost is not None:
                        return
                    if (ended := self._server.ended()) is not None:
                        self._start_again(ended)
                    elif hangs and seen == self._up_since:
                        waited = f"{2 * self._half_s:g} s (serve.hang_s)"
                        waiting = f"{self._calls.count} calls wait, no answer in {waited}"
                        self._start_again(f"the model server hangs: {waiting}")
            except ServingError:
                return  # whoever depends on the server asks `check`

    def _hangs(self) -> bool:
        if self._server.ended() is not None or self._calls.silence_s() < self._half_s:
            return False
        return not self._server.samples(self._half_s) and self._calls.silence_s() >= self._half_s


def _lines_in(server: ModelServer) -> int:
    """How long the log is by now: where a person looks."""
    with server.log_path.open("rb") as log:
        return sum(1 for _ in log)
