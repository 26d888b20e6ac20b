"""A command line for vLLM -> its process, from the first line of its log until nothing of it is left.

Invariants: nothing of the process outlives this one, however that ends (`process_guard`); its output goes to the log,
which only its owner can read; a start that another thread halts ends soon.
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

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.serving import process_guard
from marft_bridge.serving.cpu.plan import options_to_cpu_plan
from marft_bridge.serving.prepare_model import check_model_dir
from marft_bridge.serving.vllm_arguments import server_argv, server_environment, vllm_runs_on_cpu
from marft_bridge.serving.vllm_client import EngineClient
from marft_bridge.serving.vllm_log import last_lines, startup_phase
from trace_store.files import make_folder, open_to_write


class ServerProcess:
    """The process of one model server, which may be started again after it ended.

    Args:
        log_path: receives its output, 0600; is emptied first.
    """

    def __init__(self, options: ServeOptions, model_dir: Path, log_path: Path) -> None:
        self._options, self._model_dir, self._log_path = options, model_dir, log_path
        self._guard: subprocess.Popen[bytes] | None = None
        self._halted = threading.Event()
        make_folder(log_path.parent)
        log = open_to_write(log_path)
        os.truncate(log, 0)
        os.close(log)

    def start(self, client: EngineClient, port: int, api_key: str, on_progress: Callable[[str], None]) -> None:
        """Starts the process and waits until the server answers `client`; its output is appended to the log.

        Raises:
            ServingError: it died (with its last log lines), was not ready in time, or was halted.
        """
        cpu = vllm_runs_on_cpu()
        argv = server_argv(self._options, check_model_dir(self._model_dir), port, cpu=cpu)
        placed_options = self._options if isinstance(self._options, PlacedServeOptions) else PlacedServeOptions()
        log = open_to_write(self._log_path, append=True)
        try:
            log_offset = os.fstat(log).st_size
            if cpu:
                os.write(log, f"marft-bridge: vLLM on the CPU: {options_to_cpu_plan(self._options.cpu)}\n".encode())
            # -I -S: the guard needs the standard library only, whatever the environment says.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), "--", *argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(api_key, cpu, self._options.cpu, visible_devices=placed_options.visible_devices),
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server in order
            )
        finally:
            os.close(log)
        self._wait_until_ready(client, log_offset, on_progress)

    def end_reason(self) -> str | None:
        """How the process ended; None while it runs."""
        guard = self._guard
        code = guard.poll() if guard is not None else None
        return None if code is None else f"the model server ended with exit code {code}"

    def with_log(self, problem: str) -> str:
        """`problem`, followed by the end of the log."""
        return "\n    ".join([f"{problem}; the end of {str(self._log_path)!r}:", *last_lines(self._log_path)])

    def halt(self) -> None:
        """Makes a start that is under way, or comes later, end soon with an error."""
        self._halted.set()

    def end(self) -> None:
        """Ends the server and all its processes; returns when they are gone. Safe to call twice."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()  # the guard sees the end of its input and ends the group
            guard.wait()

    def _wait_until_ready(self, client: EngineClient, log_offset: int, on_progress: Callable[[str], None]) -> None:
        began, last_text = time.monotonic(), ""
        with self._log_path.open(encoding="utf-8", errors="replace") as log:
            log.seek(log_offset)
            phase = "importing vLLM"
            while not client.is_healthy():
                if (end_reason := self.end_reason()) is not None:
                    raise ServingError(self.with_log(end_reason))
                if self._halted.is_set():
                    raise ServingError("the model server was stopped while it was starting")
                elapsed = time.monotonic() - began
                if elapsed > self._options.startup_timeout_s:
                    raise ServingError(
                        self.with_log(f"the model server was not ready after {elapsed:.0f} s (startup_timeout_s)")
                    )
                phase = startup_phase(log.read()) or phase
                if (text := f"{phase}, {elapsed:.0f} s") != last_text:
                    on_progress(text)
                    last_text = text
                time.sleep(0.2)
        on_progress(f"ready, {time.monotonic() - began:.0f} s")


def port_when_free(port: int, patience_s: float = 15.0) -> int:
    """`port`, once it is free: processes of a server that ended without its guard hold it for some seconds more."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return free_port(port)
        except ServingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def free_port(port: int | None) -> int:
    """`port`, or any free port for None. Raises ServingError when `port` is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does: lingering connections do not count
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ServingError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); stop what listens there, "
                "or set another port, or none for a free one"
            ) from error
        return int(probe.getsockname()[1])
