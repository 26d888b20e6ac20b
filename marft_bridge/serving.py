"""A model directory -> a running vLLM server that adapters can be loaded into, or one that runs already.

Invariants: nothing of the server outlives this process, however that ends (`server_guard`); it is reached with a
random key only; every failure to start says which step failed and shows the end of the log.
It does not know graphs, rollouts or training.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from marft_bridge import server_guard
from marft_bridge.adapter_files import LayerShapes, checked_adapter_folder, checked_adapter_name, model_layers
from marft_bridge.errors import ServingError
from marft_bridge.prepare_model import check_model_dir
from marft_bridge.server_client import EngineClient
from marft_bridge.server_command import BASE_NAME, ServeOptions, server_argv, server_environment, vllm_runs_on_cpu
from marft_bridge.server_log import last_lines, startup_phase

__all__ = ["Endpoint", "ModelServer", "ServeOptions"]


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI client sends requests. `base_url` ends with /v1; `model` is the base model's served name."""

    base_url: str
    api_key: str = field(repr=False)
    model: str


class ModelServer:
    """One vLLM server and the adapters in it.

    Args:
        model_dir: the base model. With `attach` it may be missing here; then adapters are not compared with it.
        adapter_root: adapters are served from inside this folder only. With `attach` the server must see it under
            the same path.
        log_path: receives the server's output, 0600.

    Used as a context manager it stops at the end; `start` stays explicit, because it takes a while.
    """

    def __init__(self, options: ServeOptions, model_dir: Path, adapter_root: Path, log_path: Path) -> None:
        self._options, self._model_dir = options, model_dir
        self._adapter_root, self._log_path = adapter_root, log_path
        self._guard: subprocess.Popen[bytes] | None = None
        self._client: EngineClient | None = None
        self._base_layers: LayerShapes | None = None

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self, on_progress: Callable[[str], None] = lambda _: None) -> Endpoint:
        """Start (or attach) and wait until requests are answered.

        `on_progress` gets one short text per second and phase, e.g. "loading weights, 12 s".

        Raises:
            ServingError: the port is taken, the model is none, vLLM is missing, it died (with its last log lines)
                or it was not ready in time.
        """
        if self._client is not None:
            raise ServingError("the model server is running already")
        try:
            return self._attached() if self._options.attach else self._started(on_progress)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise ServingError, with the last log lines, when the server that was started here has died."""
        code = self._guard.poll() if self._guard else None
        if code is not None:
            raise ServingError(self._with_log(f"the model server ended with exit code {code}"))
        if self._guard is None and self._client is not None and not self._client.healthy():
            raise ServingError(self._with_log(f"the model server at {self._options.attach} does not answer any more"))

    def stop(self) -> None:
        """End the server and all its processes; returns when they are gone. Safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()  # the guard sees the end of its input and ends the group
            self._guard.wait()
            self._guard = None

    def load_adapter(self, name: str, path: Path) -> None:
        """Serve the adapter in folder `path` under the new name `name`.

        Raises:
            ServingError: the folder is not one that may be served, or the server's own refusal (rank, base model).
        """
        checked_adapter_name(name)
        if self._base_layers is None and self._model_dir.is_dir():
            self._base_layers = model_layers(self._model_dir)
        served = self._options.lora_target_modules
        folder = checked_adapter_folder(path, self._adapter_root, served, self._base_layers)
        self._running().load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Take `name` out of service; ServingError when it is not served."""
        self._running().unload_adapter(checked_adapter_name(name))

    def adapters(self) -> dict[str, str]:
        """Served adapter name -> the folder it was loaded from, as the server tells it."""
        return {name: path for name, path in self._running().models().items() if path is not None}

    def loaded(self) -> list[str]:
        """Names of the adapters in service."""
        return sorted(self.adapters())

    def _running(self) -> EngineClient:
        self.check()
        if self._client is None:
            raise ServingError("the model server is not running; start it first")
        return self._client

    def _with_log(self, what: str) -> str:
        return "\n    ".join([f"{what}; the end of {str(self._log_path)!r}:", *last_lines(self._log_path)])

    def _attached(self) -> Endpoint:
        address = (self._options.attach or "").rstrip("/").removesuffix("/v1")
        variable = self._options.api_key_env
        key = os.environ.get(variable) if variable else None
        if variable and not key:
            raise ServingError(f"environment variable {variable!r} (api_key_env) is not set; it holds the server's key")
        self._client = client = EngineClient(address, key)
        if not client.healthy():
            raise ServingError(f"no vLLM server answers at {address}/health; start it, or leave out attach")
        base = next((name for name, path in client.models().items() if path is None), None)
        if base is None:
            raise ServingError(f"the server at {address} serves no base model")
        if not client.can_load_adapters():
            raise ServingError(
                f"the server at {address} cannot load adapters; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        cold, hot = client.logprob_gap(base, 1.0), client.logprob_gap(base, 2.0)
        # Dividing the logits by 2 halves the gap; unprocessed log-probs keep it.
        if cold is None or hot is None or abs(hot - cold / 2) > abs(hot - cold):
            raise ServingError(
                f"the server at {address} does not report the log-probs that it samples from; start it with "
                "--logprobs-mode processed_logprobs"
            )
        return Endpoint(f"{address}/v1", key or "none", base)

    def _started(self, on_progress: Callable[[str], None]) -> Endpoint:
        model_dir = check_model_dir(self._model_dir)
        if importlib.util.find_spec("vllm") is None:
            raise ServingError(
                "vLLM is not installed; run `make setup` (CPU), install marft-bridge[cuda], or set attach"
            )
        cpu = vllm_runs_on_cpu()
        if cpu and self._options.gpu_memory_utilization is not None:
            raise ServingError("gpu_memory_utilization has no effect on the CPU build of vLLM; use kv_cache_gib")
        port = free_port(self._options.port)
        key = secrets.token_urlsafe(32)
        self._log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            # -I -S: the guard needs the standard library only, whatever the environment says.
            guard = [sys.executable, "-I", "-S", str(Path(server_guard.__file__)), "--"]
            self._guard = subprocess.Popen(
                guard + server_argv(self._options, model_dir, port, cpu),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(key, cpu),
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server in order
            )
        finally:
            os.close(log)
        self._client = EngineClient(f"http://127.0.0.1:{port}", key)
        self._wait_until_ready(self._client, on_progress)
        self._client.models()  # refused if another server than ours answers on this port
        return Endpoint(f"http://127.0.0.1:{port}/v1", key, BASE_NAME)

    def _wait_until_ready(self, client: EngineClient, on_progress: Callable[[str], None]) -> None:
        began, told = time.monotonic(), ""
        with self._log_path.open(encoding="utf-8", errors="replace") as log:
            phase = "importing vLLM"
            while not client.healthy():
                self.check()
                elapsed = time.monotonic() - began
                if elapsed > self._options.startup_timeout_s:
                    raise ServingError(
                        self._with_log(f"the model server was not ready after {elapsed:.0f} s (startup_timeout_s)")
                    )
                phase = startup_phase(log.read()) or phase
                if (text := f"{phase}, {elapsed:.0f} s") != told:
                    on_progress(text)
                    told = text
                time.sleep(0.2)
        on_progress(f"ready, {time.monotonic() - began:.0f} s")


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
