"""A model server that dies or hangs -> the same server started again, up to a limit of restarts.

Invariants: one restart at a time, whichever thread notices the need; a server counts as hanging only when none of its
calls makes progress, never for a single slow answer; once it is lost for good, every call raises the same error, and a
watch that cannot go on, whatever went wrong, is a lost server. Work that failed meanwhile is repeated by the caller of
`came_back`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

from marft_bridge.common.errors import ServingError, UserError
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.serving.vllm_server import ModelServer

log = logging.getLogger("marft_bridge")

_POLL_S = 0.5
_DYING_S = 20.0  # a dying server fails its calls at once, but its process ends only later; a busy one is up again

T = TypeVar("T")


class Supervisor:
    """Watches a running server inside a `with` block.

    Args:
        restarts: how many times it may be started again; a server in `attach` never is.
        hang_s: the server hangs when its waiting calls receive nothing for half of this time, and a request for one
            token then gets no answer for the other half.
        calls: the calls under way to the server.
        report: gets a line whenever the server is started again.
    """

    def __init__(
        self, server: ModelServer, restarts: int, hang_s: float, calls: CallsUnderWay, report: Callable[[str], None]
    ) -> None:
        self._server, self._calls, self._report = server, calls, report
        self._max_restarts, self._restarts = (0 if server.attached else restarts), 0
        self._half_hang_s = hang_s / 2
        self._lock = threading.Lock()  # held while the server is checked or started again
        self._up_since = time.monotonic()
        self._lost_reason: str | None = None  # set once, when the server is lost for good
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="model-server-supervisor", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the watch; a restart under way is halted, and none begins afterwards."""
        self._closing.set()
        self._server.halt()
        with self._lock:  # waits for a restart under way
            pass

    def check(self) -> None:
        """Raises ServingError when the server is lost for good. Waits for nothing."""
        if self._lost_reason is not None:
            raise ServingError(self._lost_reason)

    def came_back(self, began: float) -> bool:
        """Whether the server was started again since `began` (monotonic seconds), if need be now; waits until it is up.

        Raises:
            ServingError: it is lost for good.
        """
        with self._lock:
            self.check()
            if began < self._up_since:
                return True
            problem = self._diagnose()
            if problem is None:
                return False
            self._restart(problem)
            return True

    def run_with_restarts(self, work: Callable[[], T]) -> T:
        """Returns `work()`, which is called once more after each restart that it needed.

        Raises:
            ServingError: that of `work`, from a server that is up; or the server is lost for good.
        """
        while True:
            began = time.monotonic()
            try:
                return work()
            except ServingError:
                if not self.came_back(began):
                    raise

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """The server gives its memory back until the block ends, and is not started again meanwhile.

        One that died in its sleep is started again afterwards. Does nothing with a server that cannot sleep.

        Raises:
            ServingError: as `run_with_restarts`.
        """
        if not self._server.can_sleep:
            yield
            return
        self.run_with_restarts(self._server.sleep)
        with self._lock:  # its memory is another's now, so nobody may start it
            yield
        self.run_with_restarts(self._server.wake)  # one that was started again is awake, and stays so

    def _diagnose(self) -> str | None:
        """Why the server needs a restart; None when it is up, or answers slowly. With the lock held."""
        deadline = time.monotonic() + _DYING_S
        while (end_reason := self._server.end_reason()) is None:
            if self._server.is_healthy():
                return None
            if self._closing.is_set():
                return "the model server does not answer any more"
            if time.monotonic() > deadline:
                if self._server.can_sample(self._half_hang_s):
                    return None
                return "the model server does not answer any more"
            time.sleep(0.2)
        return end_reason

    def _restart(self, problem: str) -> None:
        """With the lock held."""
        if self._closing.is_set():
            raise ServingError("the command is ending")
        if self._restarts == self._max_restarts:
            restarts_text = f" after {self._restarts} restarts (serve.restarts)" if self._restarts else ""
            self._lost_reason = self._server.explain(problem + restarts_text)
            raise ServingError(self._lost_reason)
        self._restarts += 1
        count = f"{self._restarts} of {self._max_restarts}"
        log_position = f"{self._server.log_path}:{_count_lines(self._server)}"
        self._report(f"{problem}; starting it again ({count}); log {log_position}")
        began = time.monotonic()
        try:
            self._server.restart()
        except (UserError, OSError) as error:  # of its log and its adapters too
            self._lost_reason = f"{problem}, and did not start again: {error}"
            raise ServingError(self._lost_reason) from error
        self._up_since = time.monotonic()
        self._report(f"the model server is up again with its adapters, after {self._up_since - began:.0f} s")

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                hangs, checked_start = self._hangs(), self._up_since
                with self._lock:
                    if self._closing.is_set() or self._lost_reason is not None:
                        return
                    if (end_reason := self._server.end_reason()) is not None:
                        self._restart(end_reason)
                    elif hangs and checked_start == self._up_since:  # not started again since it was found to hang
                        hang_limit = f"{2 * self._half_hang_s:g} s (serve.hang_s)"
                        symptoms = f"{self._calls.count} calls wait, no answer in {hang_limit}"
                        self._restart(f"the model server hangs: {symptoms}")
            except ServingError:
                return  # `check` raises it where the server is used
            except Exception as error:  # nobody would start it again, so nobody may believe that somebody does
                self._lost_reason = f"the watch over the model server failed: {type(error).__name__}: {error}"
                log.debug("the watch failed", exc_info=error)
                return

    def _hangs(self) -> bool:
        if self._server.end_reason() is not None or self._calls.silence_s() < self._half_hang_s:
            return False
        return not self._server.can_sample(self._half_hang_s) and self._calls.silence_s() >= self._half_hang_s


def _count_lines(server: ModelServer) -> int:
    """The lines of the log so far, for a reader to find the restart in it; 0 where it cannot be read."""
    try:
        with server.log_path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0
