"""`marft-bridge collect --engine ray`: the same requests as on one machine, run by workers on a Ray cluster.

Invariants: a cluster that this command started ends with it, its files too, and one that ran before stays; no usage
statistics go to Ray's makers; without Ray installed, the error says what to install. Ray is imported in this module
only.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ClusterError, ConfigError
from marft_bridge.common.extras import install_command
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.ray import AUTO, RayOptions, address_to_host_port
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.ray.driver import Driver
from marft_bridge.rollouts.ray.filing import Filing
from marft_bridge.rollouts.ray.messages import Assignment, config_to_digests
from marft_bridge.rollouts.ray.worker import endpoint_to_options
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.serving.served_bases import serve_bases
from trace_store.journal import Journal

_LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0  # for a cluster's address to answer
_WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"
_NO_LOCAL_NODE = "No node info found"  # Ray's message where this machine runs none of the cluster's nodes
# Ray keeps large arguments in shared memory; a report is at most some megabytes.
_OBJECT_STORE_BYTES = 128 * 2**20
# Not sent to the workers with `ray.working_dir`, besides the entries of .gitignore: large, private, or not the app's.
_NOT_SENT = ("runs", ".venv", ".cache", ".git", "*.duckdb", "*.safetensors")


def refuse_unusable_config(config: BridgeConfig) -> None:
    """Refuses a configuration that cannot work on a cluster, before anything starts.

    Raises:
        ConfigError: Ray is not installed, or a setting contradicts `collect.engine = "ray"`.
        ClusterError: nothing answers at `ray.address`.
    """
    _import_ray(config.ray.address)
    if config.models and config.ray.endpoints:
        raise ConfigError("ray.endpoints are servers of one base model each; with [models] workers start their own")
    for name, model in config.models.items():
        if model.serve.attach is not None or model.serve.port is not None:
            option = "attach" if model.serve.attach is not None else "port"
            raise ConfigError(
                f"models.{name}.serve.{option}: with collect.engine = ray workers start servers of their own"
            )
    if config.serve.attach is not None:
        raise ConfigError("serve.attach names one server for one machine; with collect.engine = ray use ray.endpoints")
    if config.serve.port is not None and not config.ray.endpoints:
        raise ConfigError("serve.port: several workers may run on one machine; leave it out with collect.engine = ray")
    folder = config.ray.working_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"ray.working_dir: there is no folder {folder!r}")
    if config.ray.address not in (None, AUTO):
        _refuse_unreachable(config.ray.address)


def _refuse_unreachable(address: str) -> None:
    """Refuses an address that does not answer: Ray itself would try for minutes, and then give no reason."""
    try:
        socket.create_connection(address_to_host_port(address), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"ray.address: nothing answers at {address} ({error.strerror or error}); is the cluster up, and is this "
            "the address that `ray start --head` showed?"
        ) from error


def run_requests_on_ray(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    versions: ModelVersions,
    reporter: Reporter,
    requests: Sequence[EpisodeRequest],
) -> Tally:
    """Runs the requests on the cluster, all nodes at version 0, and shows their progress.

    Raises:
        BridgeError: see `Driver.run`; the cluster cannot be reached.
        StoreError: this machine's disk does not take the records.
    """
    _publish(config, folder, app, versions=versions, reporter=reporter)
    digests, endpoints = config_to_digests(config, versions.lineage), config.ray.endpoints
    content = config.model_dump(mode="json", exclude_unset=True)
    folder_path = None if config.ray.working_dir is not None else str(Path.cwd())

    def assign(number: int) -> Assignment:
        endpoint = endpoints[(number - 1) % len(endpoints)] if endpoints else None
        return Assignment(number, content, folder_path, endpoint=endpoint, digests=digests)

    reporter.say(f"collecting with {config.ray.workers} workers on Ray, {config.ray.address or 'on this machine'}")
    journal = Journal(folder.journal)
    try:
        with connect_ray(config.ray) as ray, reporter.bars(), reporter.task("collect", len(requests)) as task:
            in_flight = config.ray.in_flight or config.collect.in_flight
            driver = Driver(
                ray,
                config.ray,
                in_flight,
                assign=assign,
                filing=Filing(journal, requests[0].run_id),
                notify=reporter.say,
            )
            reward = config.train.trainer.reward
            tally = driver.run(requests, lambda done, tally: task.update(done, tally.figures(reward)))
    finally:
        journal.close()
    for line in (*tally.failure_lines(), *tally.missing_reward_lines(), *tally.silent_node_lines(config.graph.nodes)):
        reporter.say(line)
    return tally


def _publish(config: BridgeConfig, folder: RunFolder, app: App, versions: ModelVersions, reporter: Reporter) -> None:
    """Publishes version 0 of every node on every shared server."""
    if not config.ray.endpoints:
        return
    nodes = (*config.graph.nodes, *app.frozen)
    versions.register_zero(nodes)
    with asyncio.Runner() as loop:
        for endpoint in config.ray.endpoints:
            options = [endpoint_to_options(config, endpoint)]
            with serve_bases(
                config, versions, options, log_of=folder.server_log_of, loop=loop, reporter=reporter
            ) as models:
                models.publish(dict.fromkeys(nodes, 0))


@contextmanager
def connect_ray(options: RayOptions) -> Iterator[Any]:
    """The module `ray`, connected to the cluster that the options name until the block ends.

    The files of a cluster that was started here (logs with what an app prints, spilled objects) are removed with it,
    but for those of one that failed. Where this process is connected already, that connection is used and stays open.

    Raises:
        ClusterError: the cluster cannot be reached or started.
    """
    ray = _import_ray(options.address)
    if ray.is_initialized():
        yield ray
        return
    arguments: dict[str, Any] = {"address": options.address}
    if options.address is None:
        arguments = {
            "address": "local",
            "num_cpus": max(1, math.ceil(options.workers * options.cpus_per_worker)),
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


def _import_ray(address: str | None) -> Any:
    # Ray reads these variables at import. The second lets a worker without GPUs of Ray's keep those of its environment.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        # Otherwise Ray replaces the loopback address by the machine's own, and listens on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"collect.engine is ray, which is not installed: {install_command('ray')}") from error
    return ray
