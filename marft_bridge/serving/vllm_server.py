"""A model directory -> a running vLLM server that adapters can be loaded into, or one that runs already.

Invariants: nothing of the server outlives this process, however that ends (`process_guard`); it is reached with a
random key only; after a restart it has the same port, key and adapters; every failure to start names the step that
failed and shows the end of the log. `supervisor` decides when to start it again.
"""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from marft_bridge.common.api_keys import variable_to_key
from marft_bridge.common.errors import ServingError
from marft_bridge.common.extras import install_command
from marft_bridge.config.serve import PlacedServeOptions, ServeOptions
from marft_bridge.serving.adapter_checks import (
    LayerShapes,
    check_adapter_folder,
    check_adapter_name,
    check_files,
    model_layers,
)
from marft_bridge.serving.prepare_model import check_model_dir
from marft_bridge.serving.vllm_arguments import BASE_NAME, vllm_runs_on_cpu
from marft_bridge.serving.vllm_client import EngineClient
from marft_bridge.serving.vllm_process import ServerProcess, free_port, port_when_free

_PORT_TRIES = 3  # another process may take a free port in the seconds before vLLM binds it
_AWAY_S, _AWAY_POLL_S = 15.0, 0.2  # for which an attached server does not say that it is up, and has gone away
_CARD_OPTIONS = {
    "gpu_memory_utilization": "use kv_cache_gib",
    "devices": "leave it out",
    "tensor_parallel": "leave it out",
}
_NO_HASHES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI client sends requests. `base_url` ends with /v1; `model` is the base model's served name."""

    base_url: str
    api_key: str = field(repr=False)
    model: str


class ModelServer:
    """A running vLLM server and the adapters in it, made by `ModelServer.start`.

    As a context manager it stops the server at the end.
    """

    def __init__(
        self,
        options: ServeOptions,
        model_dir: Path,
        *,
        adapters: Path,
        log: Path,
        client: EngineClient,
        endpoint: Endpoint,
        process: ServerProcess | None,
    ) -> None:
        self.endpoint, self.log_path = endpoint, log
        self._options, self._model_dir, self._adapter_root = options, model_dir, adapters
        self._client, self._process = client, process
        self._base_layers: LayerShapes | None = None
        self._stopped = False
        self._loaded: dict[str, tuple[Path, Mapping[str, str]]] = {}  # adapter name -> folder, and hashes of its files

    @classmethod
    def start(
        cls,
        options: ServeOptions,
        model_dir: Path,
        *,
        adapters: Path,
        log: Path,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Starts a server (or attaches to one) and waits until it answers requests.

        Args:
            model_dir: the base model. With `attach` it may be missing on this machine; adapters are then not compared
                with it.
            adapters: adapters are served from inside this folder only. With `attach` the server must see it under
                the same path.
            log: receives the server's output, 0600.
            on_progress: gets one short text per second and phase, e.g. "loading weights, 12 s".

        Raises:
            ServingError: the port is taken, the directory holds no model, vLLM is missing, the server died (with its
                last log lines) or was not ready in time. Nothing of it is left running then.
        """
        if options.attach is not None:
            client, endpoint = _attach(options, options.attach)
            process = None
        else:
            process = _new_process(options, model_dir, log)
            client, endpoint = _start_process(process, options.port, on_progress)
        return cls(options, model_dir, adapters=adapters, log=log, client=client, endpoint=endpoint, process=process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def attached(self) -> bool:
        """Whether the server ran before, so that this object neither starts nor ends it."""
        return self._process is None

    @property
    def can_sleep(self) -> bool:
        """Whether the server was started to give its memory back when it is not needed."""
        return isinstance(self._options, PlacedServeOptions) and self._options.sleeps

    def sleep(self) -> None:
        """Gives the server's memory back until `wake`, once calls under way are answered; adapters stay loaded."""
        self._client.sleep()

    def wake(self) -> None:
        """Takes the memory again. Raises ServingError when the server does not wake."""
        self._client.wake()

    def restart(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Ends what is left of the server and starts it again, with the port, key and adapters that it had.

        Calls under way break off. The output is appended to the log.

        Raises:
            ServingError: as `start`; the server is an attached one; the files of an adapter have changed since it was
                loaded. Nothing runs then.
        """
        process = self._process
        if process is None:
            raise ServingError("only a model server that was started here can be started again")
        process.end()
        try:
            port = port_when_free(int(self.endpoint.base_url.removesuffix("/v1").rpartition(":")[2]))
            process.start(self._client, port, self.endpoint.api_key, on_progress=on_progress)
            for name, (folder, hashes) in list(self._loaded.items()):
                self._load(name, folder, hashes)
        except BaseException:
            process.end()
            raise

    def check(self) -> None:
        """Raises ServingError when the server has died, with the last log lines of one that was started here.

        An attached one has died when /health fails for `_AWAY_S`, which this then waits for: a busy one answers late.
        """
        if self._stopped:
            raise ServingError("the model server is not running any more")
        if self._process is not None and (end_reason := self._process.end_reason()) is not None:
            raise ServingError(self._process.with_log(end_reason))
        if self.attached and self._stays_away():
            raise ServingError(self.explain("the model server does not answer any more"))

    def end_reason(self) -> str | None:
        """How the process that was started here ended; None while it runs, and for an attached server."""
        return self._process.end_reason() if self._process is not None else None

    def is_healthy(self) -> bool:
        """Whether the server reports within two seconds that it is up; a hanging one may do so."""
        return self._client.is_healthy()

    def can_sample(self, timeout_s: float) -> bool:
        """Whether the server samples a token within the time, which a hanging one does not."""
        return self._client.can_sample(self.endpoint.model, timeout_s)

    def explain(self, problem: str) -> str:
        """`problem` with what helps a person: the end of the log, or how to go on with an attached server."""
        if self._process is not None:
            return self._process.with_log(problem)
        return f"{problem}: {self._options.attach}; start it again, then this command (with --resume where it has that)"

    def halt(self) -> None:
        """Makes a restart that is under way in another thread end soon, with an error."""
        if self._process is not None:
            self._process.halt()

    def stop(self) -> None:
        """Ends the server and all its processes; returns when they are gone. Safe to call twice."""
        self._stopped = True
        self._client.close()
        if self._process is not None:
            self._process.halt()
            self._process.end()
        self._loaded.clear()

    def load_adapter(self, name: str, path: Path, hashes: Mapping[str, str] = _NO_HASHES) -> None:
        """Serves the adapter in folder `path` under the new name `name`.

        Args:
            hashes: file name -> the SHA-256 that it must have, now and at every restart.

        Raises:
            ServingError: the folder is not one that may be served, or the server's own refusal (rank, base model).
        """
        self.check()
        self._load(check_adapter_name(name), path, hashes)
        self._loaded[name] = (path, hashes)

    def unload_adapter(self, name: str) -> None:
        """Takes `name` out of service; ServingError when it is not served.

        Calls under way end with its weights; its files must stay until then.
        """
        self.check()
        self._client.unload_adapter(check_adapter_name(name))
        self._loaded.pop(name, None)

    def adapters(self) -> dict[str, str]:
        """Served adapter name -> the folder it was loaded from, as the server lists them."""
        self.check()
        return {name: path for name, path in self._client.models().items() if path is not None}

    def adapter_names(self) -> list[str]:
        """Names of the adapters in service, sorted."""
        return sorted(self.adapters())

    def _stays_away(self) -> bool:
        deadline = time.monotonic() + _AWAY_S
        while not self._client.is_healthy():
            if self._stopped or time.monotonic() > deadline:
                return True
            time.sleep(_AWAY_POLL_S)
        return False

    def _load(self, name: str, path: Path, hashes: Mapping[str, str]) -> None:
        if self._base_layers is None and self._model_dir.is_dir():
            self._base_layers = model_layers(self._model_dir)
        served_modules = self._options.lora_target_modules
        check_files(path.resolve(), hashes)
        check_adapter_folder(path, self._adapter_root, served_modules, base=self._base_layers)
        # as it is written, not as it resolves: it tells which files they are, and the server's caches go by it
        self._client.load_adapter(name, path.absolute())


def _attach(options: ServeOptions, url: str) -> tuple[EngineClient, Endpoint]:
    """A client of the server that runs at `url`, once it is checked that adapters can be trained on it."""
    address = url.rstrip("/").removesuffix("/v1")
    try:
        key = variable_to_key(options.api_key_env) if options.api_key_env is not None else None
    except ValueError as error:
        raise ServingError(f"serve.attach: {error}") from None
    client = EngineClient(address, key)
    try:
        return client, Endpoint(f"{address}/v1", key or "none", _find_trainable_base(client, address))
    except BaseException:
        client.close()
        raise


def _find_trainable_base(client: EngineClient, address: str) -> str:
    """The served name of the base model, once it is checked that the server does what training needs.

    Raises:
        ServingError: it does not answer, loads no adapters, or reports log-probs before the temperature.
    """
    if not client.is_healthy():
        raise ServingError(f"no vLLM server answers at {address}/health; start it, or leave out attach")
    base = next((name for name, path in client.models().items() if path is None), None)
    if base is None:
        raise ServingError(f"the server at {address} serves no base model")
    if not client.can_load_adapters():
        raise ServingError(
            f"the server at {address} cannot load adapters; start it with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )
    gap_1, gap_2 = client.logprob_gap(base, 1.0), client.logprob_gap(base, 2.0)
    # Dividing the logits by 2 halves the gap between two log-probs; unprocessed log-probs keep it.
    if gap_1 is None or gap_2 is None or abs(gap_2 - gap_1 / 2) > abs(gap_2 - gap_1):
        raise ServingError(
            f"the server at {address} does not report the log-probs that it samples from; start it with "
            "--logprobs-mode processed_logprobs"
        )
    return base


def _new_process(options: ServeOptions, model_dir: Path, log: Path) -> ServerProcess:
    """A process that is not started yet, once options, model directory and port are checked."""
    check_model_dir(model_dir)
    if importlib.util.find_spec("vllm") is None:
        raise ServingError(
            f"vLLM is not installed: {install_command('cuda')}, or [cpu] where there is no GPU; or set serve.attach"
        )
    if vllm_runs_on_cpu():
        for name, instead in _CARD_OPTIONS.items():
            if getattr(options, name) is not None:
                raise ServingError(f"{name} has no effect on the CPU build of vLLM; {instead}")
    if not vllm_runs_on_cpu() and "cpu" in options.model_fields_set:
        raise ServingError("serve.cpu has no effect on the CUDA build of vLLM; leave it out")
    if options.port is not None:
        free_port(options.port)
    return ServerProcess(options, model_dir, log)


def _start_process(
    process: ServerProcess, port_option: int | None, on_progress: Callable[[str], None]
) -> tuple[EngineClient, Endpoint]:
    """Starts the process on the port of the options, or on a free one; ends it when that fails."""
    key = secrets.token_urlsafe(32)
    for tries_left in reversed(range(_PORT_TRIES if port_option is None else 1)):
        port = free_port(port_option)
        client = EngineClient(f"http://127.0.0.1:{port}", key)
        try:
            process.start(client, port, key, on_progress=on_progress)
            client.models()  # refused if another server than ours answers on this port
        except BaseException as error:
            client.close()
            process.end()
            # Ours is gone, so that whoever has the port now took it first: ours died of it, or the other answered.
            if not tries_left or not isinstance(error, ServingError) or not _is_taken(port):
                raise
        else:
            return client, Endpoint(f"http://127.0.0.1:{port}/v1", key, BASE_NAME)
    raise AssertionError("every try returned or raised")


def _is_taken(port: int) -> bool:
    try:
        free_port(port)
    except ServingError:
        return True
    return False
