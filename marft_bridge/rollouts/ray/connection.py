"""`[ray]` of bridge.toml -> the module `ray`, connected to that cluster.

Invariants: a cluster that this command started ends with it, its files too, and one that ran before stays; no usage
statistics go to Ray's makers; without Ray installed, the error says what to install. Ray is imported in this module
only.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ClusterError, ConfigError
from marft_bridge.common.extras import install_command
from marft_bridge.config.ray import AUTO, RayOptions, address_to_host_port

_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0  # for a cluster's address to answer
_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
_NO_LOCAL_NODE = "No node info found"  # Ray's message where this machine runs none of the cluster's nodes
# Ray keeps large arguments in shared memory; a report is at most some megabytes.
_OBJECT_STORE_BYTES = 128 * 2**20
# Not sent to the workers with `ray.working_dir`, besides the entries of .gitignore: large, private, or not the app's.
_NOT_SENT = ("runs", ".venv", ".cache", ".git", "*.duckdb", "*.safetensors")


def refuse_unusable_cluster(options: RayOptions, option: str) -> None:
    """Refuses what cannot work with any cluster, before anything starts.

    Args:
        option: which has the value "ray", for the message.

    Raises:
        ConfigError: Ray is not installed, or there is no `ray.working_dir`.
        ClusterError: nothing answers at `ray.address`.
    """
    _import_ray(options.address, option)
    folder = options.working_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"ray.working_dir: there is no folder {folder!r}")
    if options.address is not None and options.address != AUTO:
        _refuse_unreachable(options.address)


def _refuse_unreachable(address: str) -> None:
    """Refuses an address that does not answer: Ray itself would try for minutes, and then give no reason."""
    try:
        socket.create_connection(address_to_host_port(address), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"ray.address: nothing answers at {address} ({error.strerror or error}); is the cluster up, and is this "
            "the address that `ray start --head` showed?"
        ) from error


@contextmanager
def connect_ray(options: RayOptions, *, option: str, processors: float) -> Iterator[Any]:
    """The module `ray`, connected to the cluster that the options name until the block ends.

    The files of a cluster that was started here (logs with what an app prints, spilled objects) are removed with it,
    but for those of one that failed. Where this process is connected already, that connection is used and stays open.

    Args:
        option: which has the value "ray", for the message.
        processors: that a cluster has which is started here.

    Raises:
        ClusterError: the cluster cannot be reached or started.
    """
    ray = _import_ray(options.address, option)
    if ray.is_initialized():
        yield ray
        return
    arguments: dict[str, Any] = {"address": options.address}
    if options.address is None:
        arguments = {
            "address": "local",
            "num_cpus": max(1, math.ceil(processors)),
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_node_ip_address": _LOOPBACK,
        }
    if options.working_dir is not None:
        arguments["runtime_env"] = {"working_dir": options.working_dir, "excludes": list(_NOT_SENT)}
    try:
        with _keep_signal_handler(), _single_attempt(options.address):
            ray.init(**arguments, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(_connection_error_text(options.address, error)) from error
    with _remove_session(_session_folder(ray)) if options.address is None else nullcontext(), _shut_down(ray):
        if options.address is None and (node_address := ray.util.get_node_ip_address()) != _LOOPBACK:
            raise ClusterError(
                f"Ray would listen on {node_address}: it was imported before marft-bridge could keep it to loopback"
            )
        yield ray


def _session_folder(ray: Any) -> Path:
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


@contextmanager
def _shut_down(ray: Any) -> Iterator[None]:
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _remove_session(session: Path) -> Iterator[None]:
    """Removes the folder at the end of the block, unless a ClusterError ends it: the logs may say why."""
    is_kept = False
    try:
        yield
    except ClusterError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(session, ignore_errors=True)


def _connection_error_text(address: str | None, error: BaseException) -> str:
    """Ray's error and its cause, in one line."""
    reasons = [_in_one_line(str(cause)) for cause in (error, error.__cause__) if cause is not None]
    location = "on this machine" if address is None else f"at {address}"
    text = f"no Ray cluster {location}: {': '.join(reasons)}"
    if _NO_LOCAL_NODE in text:
        text += "; this machine is no part of it: start the command on one that is, or `ray start --address` here first"
    return text


def _in_one_line(text: str) -> str:
    """One line of an error's text. Ray puts a whole traceback into some: of that, the last line."""
    head, _, traceback = text.partition("Traceback")
    last = [line for line in traceback.splitlines() if line.strip()][-1:]
    return " ".join(" ".join([head, *last]).split())[:300]


@contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Restores the handler of SIGTERM at the end of the block: Ray replaces the one of the command line."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _single_attempt(address: str | None) -> Iterator[None]:
    """Has Ray try once to reach a cluster: by default it tries 20 times, for 40 s each where none answers.

    The variable also limits the start of a local cluster, so it is not set for one.
    """
    if address is None or _WAIT_VARIABLE in os.environ:
        yield
        return
    os.environ[_WAIT_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[_WAIT_VARIABLE]


def _import_ray(address: str | None, option: str) -> Any:
    # Ray reads these variables at import. The second lets a worker without GPUs of Ray's keep those of its environment.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        # Otherwise Ray replaces the loopback address by the machine's own, and listens on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"{option} is ray, which is not installed: {install_command('ray')}") from error
    return ray


def bundle_to_strategy(group: Any, index: int) -> Any:
    """Where Ray puts an actor: one bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def resources_to_text(ray: Any) -> str:
    """What a cluster has, and has free."""
    free, total = ray.available_resources(), ray.cluster_resources()
    return " and ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s free" for name in ("CPU", "GPU"))


def error_to_text(error: BaseException) -> str:
    """Ray's message without its indented lines, which hold an actor's ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines)[:300] or type(error).__name__


def last_line(error: BaseException) -> str:
    """The last line of a traceback: the error itself."""
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]
