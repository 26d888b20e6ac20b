"""A command line for vLLM -> its process, from the first line of its log until nothing of it is left.

Invariants: nothing of the process outlives this one, however that ends (`server_guard`); its output is in the log,
which only its owner can read; a start that another thread halts ends soon. It knows no adapters and does not decide
when a server is started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from marft_bridge import server_guard
from marft_bridge.cpu_plan import options_to_cpu_plan
from marft_bridge.errors import ServingError
from marft_bridge.prepare_model import check_model_dir
from marft_bridge.server_client import EngineClient
from marft_bridge.server_command import ServeOptions, server_argv, server_environment, vllm_runs_on_cpu
from marft_bridge.server_log import last_lines, startup_phase


class ServerProcess:
    """The process of one model server, which may be started again after it ended.

    Args:
        log_path: receives its output, 0600; is emptied first.
    """

    def __init__(self, options: ServeOptions, model_dir: Path, log_path: Path) -> None:
        self._options, self._model_dir, self._log_path = options, model_dir, log_path
        self._guard: subprocess.Popen[bytes] | None = None
        self._halted = threading.Event()
        log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))

    def start(self, client: EngineClient, port: int, api_key: str, on_progress: Callable[[str], None]) -> None:
        """Starts it and waits until it is up, as `client` sees it; the log goes on where it was.

        Raises:
            ServingError: it died (with its last log lines), was not ready in time, or was halted.
        """
        cpu = vllm_runs_on_cpu()
        argv = server_argv(self._options, check_model_dir(self._model_dir), port, cpu)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            log_from = os.fstat(log).st_size
            if cpu:
                os.write(log, f"marft-bridge: vLLM on the CPU: {options_to_cpu_plan(self._options.cpu)}\n".encode())
            # -I -S: the guard needs the standard library only, whatever the environment says.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(server_guard.__file__)), "--", *argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(api_key, cpu, self._options.cpu),
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server in order
            )
        finally:
            os.close(log)
        self._wait_until_ready(client, log_from, on_progress)

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        guard = self._guard
        code = guard.poll() if guard is not None else None
        return None if code is None else f"the model server ended with exit code {code}"

    def with_log(self, what: str) -> str:
        """`what`, and the end of the log."""
        return "\n    ".join([f"{what}; the end of {str(self._log_path)!r}:", *last_lines(self._log_path)])

    def halt(self) -> None:
        """Makes a start that is under way, or comes later, end soon with an error."""
        self._halted.set()

    def end(self) -> None:
        """Ends it and all its processes; returns when they are gone. Safe to call twice."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()  # the guard sees the end of its input and ends the group
            guard.wait()

    def _wait_until_ready(self, client: EngineClient, log_from: int, on_progress: Callable[[str], None]) -> None:
        began, told = time.monotonic(), ""
        with self._log_path.open(encoding="utf-8", errors="replace") as log:
            log.seek(log_from)
            phase = "importing vLLM"
            while not client.healthy():
                if (ended := self.ended()) is not None:
                    raise ServingError(self.with_log(ended))
                if self._halted.is_set():
                    raise ServingError("the model server was stopped while it was starting")
                elapsed = time.monotonic() - began
                if elapsed > self._options.startup_timeout_s:
                    raise ServingError(
                        self.with_log(f"the model server was not ready after {elapsed:.0f} s (startup_timeout_s)")
                    )
                phase = startup_phase(log.read()) or phase
                if (text := f"{phase}, {elapsed:.0f} s") != told:
                    on_progress(text)
                    told = text
                time.sleep(0.2)
        on_progress(f"ready, {time.monotonic() - began:.0f} s")


def port_when_free(port: int, patience_s: float = 15.0) -> int:
    """`port`, once it is free: what is left of a server that ended without its guard needs some seconds to go."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return free_port(port)
        except ServingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def free_port(wanted: int | None) -> int:
    """`wanted`, or a free port; ServingError when `wanted` is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does: lingering connections do not count
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise ServingError(
                f"port {wanted} on 127.0.0.1 cannot be used ({error.strerror}); stop what listens there, "
                "or set another port, or none for a free one"
            ) from error
        return int(probe.getsockname()[1])
