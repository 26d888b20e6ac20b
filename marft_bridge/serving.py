"""A model directory -> a running vLLM server that adapters can be loaded into, or one that runs already.

Invariants: nothing of the server outlives this process, however that ends (`server_guard`); it is reached with a
random key only; started again it is the same server, with its port, its key and its adapters; every failure to start
says which step failed and shows the end of the log. It does not know graphs, rollouts or training, nor when it should
be started again (`server_keeper`).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType

from marft_bridge.adapter_files import (
    LayerShapes,
    check_files,
    checked_adapter_folder,
    checked_adapter_name,
    model_layers,
)
from marft_bridge.errors import ServingError
from marft_bridge.prepare_model import check_model_dir
from marft_bridge.server_client import EngineClient
from marft_bridge.server_command import BASE_NAME, ServeOptions, vllm_runs_on_cpu
from marft_bridge.server_process import ServerProcess, free_port, port_when_free

_PORTS = 3  # free ones that are tried: another process may take a port before vLLM, which needs seconds, binds it
_ANY: Mapping[str, str] = MappingProxyType({})

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
        self.log_path = log_path
        self._options, self._model_dir, self._adapter_root = options, model_dir, adapter_root
        self._process: ServerProcess | None = None
        self._client: EngineClient | None = None
        self._endpoint: Endpoint | None = None
        self._base_layers: LayerShapes | None = None
        self._live: dict[str, tuple[Path, Mapping[str, str]]] = {}  # name -> folder, and the hashes of files in it

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def attached(self) -> bool:
        """Whether the server was running before, and is not this object's to start or end."""
        return self._options.attach is not None

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
            self._endpoint = self._attached() if self.attached else self._started(on_progress)
        except BaseException:
            self.stop()
            raise
        return self._endpoint

    def restart(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """End what is left of the server and start it again, with the port, key and adapters that it had.

        Calls that are under way break off. The log goes on where it was.

        Raises:
            ServingError: as `start`; the server is not one that was started here; an adapter is not the one that was
                loaded before. Nothing runs then.
        """
        process, endpoint, client = self._process, self._endpoint, self._client
        if process is None or endpoint is None or client is None:
            raise ServingError("only a model server that was started here can be started again")
        process.end()
        try:
            port = port_when_free(int(endpoint.base_url.removesuffix("/v1").rpartition(":")[2]))
            process.start(client, port, endpoint.api_key, on_progress)
            for name, (folder, hashes) in list(self._live.items()):
                self._load(client, name, folder, hashes)
        except BaseException:
            process.end()
            raise

    def check(self) -> None:
        """Raise ServingError when the server has died, with the last log lines of one that was started here."""
        if self._process is not None and (ended := self._process.ended()) is not None:
            raise ServingError(self._process.with_log(ended))
        if self.attached and self._client is not None and not self._client.healthy():
            raise ServingError(self.explained("the model server does not answer any more"))

    def ended(self) -> str | None:
        """How the process that was started here ended; None while it runs, and of a server in `attach`."""
        return self._process.ended() if self._process is not None else None

    def healthy(self) -> bool:
        """Whether the server says that it is up; False after two seconds, and when none is running."""
        client = self._client
        return client is not None and client.healthy()

    def samples(self, timeout_s: float) -> bool:
        """Whether the server samples a token within the time: what one that hangs does not do, healthy as it looks."""
        client, endpoint = self._client, self._endpoint
        return client is not None and endpoint is not None and client.samples(endpoint.model, timeout_s)

    def explained(self, what: str) -> str:
        """What is wrong with the server, and what a person can see or do."""
        if self._process is not None:
            return self._process.with_log(what)
        return f"{what}: {self._options.attach}; start it again, then this command with --resume"

    def halt(self) -> None:
        """Makes a start that is under way in another thread end soon, with an error."""
        if self._process is not None:
            self._process.halt()

    def stop(self) -> None:
        """End the server and all its processes; returns when they are gone. Safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.halt()
            self._process.end()
            self._process = None
        self._live.clear()

    def load_adapter(self, name: str, path: Path, hashes: Mapping[str, str] = _ANY) -> None:
        """Serve the adapter in folder `path` under the new name `name`.

        Args:
            hashes: file name -> the SHA-256 that it must have; also whenever the server is started again.

        Raises:
            ServingError: the folder is not one that may be served, or the server's own refusal (rank, base model).
        """
        self._load(self._running(), checked_adapter_name(name), path, hashes)
        self._live[name] = (path, hashes)

    def unload_adapter(self, name: str) -> None:
        """Take `name` out of service; ServingError when it is not served.

        Calls that it is answering go on to their end with its weights; its files must stay as long.
        """
        self._running().unload_adapter(checked_adapter_name(name))
        self._live.pop(name, None)

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

    def _load(self, client: EngineClient, name: str, path: Path, hashes: Mapping[str, str]) -> None:
        if self._base_layers is None and self._model_dir.is_dir():
            self._base_layers = model_layers(self._model_dir)
        served = self._options.lora_target_modules
        check_files(path, hashes)
        folder = checked_adapter_folder(path, self._adapter_root, served, self._base_layers)
        client.load_adapter(name, folder)

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
        check_model_dir(self._model_dir)
        if importlib.util.find_spec("vllm") is None:
            raise ServingError(
                "vLLM is not installed; run `make setup` (CPU), install marft-bridge[cuda], or set attach"
            )
        if vllm_runs_on_cpu() and self._options.gpu_memory_utilization is not None:
            raise ServingError("gpu_memory_utilization has no effect on the CPU build of vLLM; use kv_cache_gib")
        if not vllm_runs_on_cpu() and "cpu" in self._options.model_fields_set:
            raise ServingError("serve.cpu has no effect on the CUDA build of vLLM; leave it out")
        port, tries = free_port(self._options.port), _PORTS if self._options.port is None else 1
        key = secrets.token_urlsafe(32)
        self._process = ServerProcess(self._options, self._model_dir, self.log_path)
        while True:
            tries -= 1
            self._client = EngineClient(f"http://127.0.0.1:{port}", key)
            self._process.start(self._client, port, key, on_progress)
            try:
                self._client.models()  # refused if another server than ours answers on this port
            except ServingError:
                if not tries:
                    raise
                self._process.end()
                self._client.close()
                port = free_port(None)
            else:
                return Endpoint(f"http://127.0.0.1:{port}/v1", key, BASE_NAME)
