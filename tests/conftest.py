"""Fixtures that more than one test file uses: the small real model, and one real model server per session."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from asyncio import selector_events
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from support.paths import ROOT

from marft_bridge.config.serve import ServeOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.prepare_model import SMOLLM2_NAME, installed_gguf, prepare_smollm2
from marft_bridge.serving.server_file import announced_servers
from marft_bridge.serving.vllm_server import Endpoint, ModelServer

_CACHE = Path(os.environ.get("MARFT_CACHE") or ROOT / ".cache")


@dataclass(frozen=True)
class RunningServer:
    """The session's vLLM. Adapters are served from below `adapter_root`; versions and names must be new."""

    server: ModelServer
    endpoint: Endpoint
    adapter_root: Path
    model_dir: Path
    log_path: Path


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where a shell started pytest in the background and had it ignore SIGINT."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How fast examples are drawn says how busy the machine is, and nothing about a law.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    os.environ.setdefault("MARFT_QUIET", "1")  # hundreds of stores are recorded into; what they would say is one test's


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A property whose time is up ends its worker; another worker goes on.

    Hypothesis takes the failure that an alarm raises for one more failing example, and goes on without an alarm.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker is not None else None
            item.add_marker(pytest.mark.timeout(seconds, method="thread"), append=False)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct; made once (some 20 s) under MARFT_CACHE or .cache, then found."""
    if not (_CACHE / SMOLLM2_NAME).exists():
        pytest.importorskip("gguf")
        pytest.importorskip("transformers")
        installed_gguf()
    return prepare_smollm2(_CACHE)


@pytest.fixture(scope="session")
def vllm_server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The real engine on the real small model in float32, with room for 8 adapters on q_proj and v_proj."""
    pytest.importorskip("vllm", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("vllm")
    modules = ("q_proj", "v_proj")
    options = ServeOptions(
        dtype="float32",
        max_loras=8,
        lora_target_modules=modules,
        tool_call_parser="hermes",
        startup_timeout_s=600,
    )
    with ModelServer.start(options, smollm2_dir, adapters=folder / "adapters", log=folder / "vllm.log") as server:
        yield RunningServer(server, server.endpoint, folder / "adapters", smollm2_dir, folder / "vllm.log")


_open_connections: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def connections_are_counted() -> Iterator[None]:
    """asyncio's connections of this process, as they are made."""
    connection = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    made = connection.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _open_connections.add(self)

    connection.__init__ = counted
    yield
    connection.__init__ = made


@pytest.fixture(autouse=True)
def no_connection_outlives_its_loop(connections_are_counted: None) -> Iterator[None]:
    """Fails the test that leaves a connection behind, or else the collector makes a later test pay for it."""
    yield
    left = [c for c in _open_connections if c._sock is not None and getattr(c._loop, "is_closed", bool)()]
    for connection in left:
        connection._sock.close()
        connection._sock = None
    assert not left, f"{len(left)} connections were still open when their event loop ended: close their client"


@pytest.fixture
def announce(vllm_server: RunningServer) -> Iterator[Callable[[RunFolder], None]]:
    """Has commands on a run folder find the session's server, as `serve` does, until the test ends.

    Without the adapters of other run folders, which have the same names.
    """
    with ExitStack() as stack:

        def announce_in(run: RunFolder) -> None:
            stack.enter_context(announced_servers(run, {"": vllm_server.endpoint}))
            for name in vllm_server.server.adapter_names():
                vllm_server.server.unload_adapter(name)

        yield announce_in
