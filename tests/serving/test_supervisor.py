"""Owns: nothing that goes wrong beside the model server leaves a command waiting for a restart that never comes.

- A server is started again though its log cannot be read; what hinders the restart itself is the reason of the loss.
- A watch that fails, however, is told wherever the server is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marft_bridge.common.errors import ServingError
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.serving.supervisor import Supervisor
from marft_bridge.serving.vllm_client import EngineClient
from trace_store.errors import StoreError


class Server:
    """A server of its own process, whose restart does what it is told."""

    attached = can_sleep = False

    def __init__(self, log_path: Path, restart: Callable[[], object] = lambda: None) -> None:
        self.log_path, self._restart = log_path, restart
        self.is_dead, self.starts = False, 0

    def end_reason(self) -> str | None:
        return "the model server ended with exit code 137" if self.is_dead else None

    def is_healthy(self) -> bool:
        return not self.is_dead

    def can_sample(self, _timeout_s: float) -> bool:
        return not self.is_dead

    def explain(self, problem: str) -> str:
        return problem

    def halt(self) -> None:
        """Nothing runs."""

    def restart(self) -> None:
        self.starts += 1
        self._restart()
        self.is_dead = False


def supervise(server: Any, calls: CallsUnderWay | None = None, hang_s: float = 60.0) -> Supervisor:
    return Supervisor(server, 2, hang_s, calls=calls or CallsUnderWay(), report=lambda _: None)


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_lost(supervisor: Supervisor) -> bool:
    try:
        supervisor.check()
    except ServingError:
        return True
    return False


def test_a_server_whose_log_was_deleted_is_started_again(tmp_path: Path) -> None:
    server = Server(tmp_path / "none.log")
    with supervise(server) as supervisor:
        server.is_dead = True
        assert eventually(lambda: server.starts == 1 and not server.is_dead)
        supervisor.check()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        StoreError("vllm.log is a symbolic link; only a plain file is used; remove it"),
        ServingError("the model server was not ready after 300 s"),
    ],
)
def test_what_hinders_a_restart_ends_the_command_with_the_reason(tmp_path: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    server = Server(tmp_path / "vllm.log", fail)
    with supervise(server) as supervisor:
        server.is_dead = True
        assert eventually(lambda: is_lost(supervisor))
        reason = f"ended with exit code 137, and did not start again: .*{error.args[-1]}"
        with pytest.raises(ServingError, match=reason):
            supervisor.check()
        with pytest.raises(ServingError, match=reason):
            supervisor.came_back(time.monotonic())


def test_a_watch_that_fails_is_told_where_the_server_is_used(tmp_path: Path) -> None:
    class Surprising(CallsUnderWay):
        def silence_s(self) -> float:
            raise ZeroDivisionError("a fault of ours")

    with supervise(Server(tmp_path / "vllm.log"), Surprising()) as supervisor:
        assert eventually(lambda: is_lost(supervisor))
        with pytest.raises(ServingError, match=r"the watch .* failed: ZeroDivisionError: a fault of ours"):
            supervisor.came_back(time.monotonic())


def test_an_attached_server_that_answers_late_after_a_failed_call_is_not_lost(tmp_path: Path) -> None:
    class Attached(Server):
        attached = True
        late = 2

        def is_healthy(self) -> bool:
            self.late -= 1
            return self.late < 0

    with supervise(Attached(tmp_path / "vllm.log")) as supervisor:
        assert not supervisor.came_back(time.monotonic())
        supervisor.check()


def test_a_client_that_was_closed_meanwhile_says_that_nothing_answers() -> None:
    client = EngineClient("http://127.0.0.1:9", "key")
    client.close()
    assert not client.is_healthy()
    assert not client.can_sample("base", 1.0)
    with pytest.raises(ServingError, match=r"model server http://127\.0\.0\.1:9/v1/models: .*closed"):
        client.models()
