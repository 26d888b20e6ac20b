"""`marft-bridge collect --engine ray`: the same requests as on one machine, run by workers on a Ray cluster.

Invariants: a cluster that this command started ends with it, and one that was there stays; nothing is reported to
Ray's makers; an installation without Ray is told what to install. Ray is imported here only, and nothing but `collect`
needs it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marft_bridge.app import App
from marft_bridge.bases import Base
from marft_bridge.cluster.driver import Driver
from marft_bridge.cluster.filing import Filing
from marft_bridge.cluster.messages import Assignment, agreement
from marft_bridge.cluster.options import AUTO, RayOptions, address_to_place
from marft_bridge.cluster.worker import endpoint_to_options
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ClusterError, ConfigError
from marft_bridge.plan import EpisodeRequest
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.served_models import ServedModels
from marft_bridge.tally import Tally
from trace_store.journal import Journal

_LOOPBACK = "127.0.0.1"
_REACH_S = 5.0  # for a cluster's address to answer
_TRIES = "RAY_gcs_server_port_wait_time_s"
_NOT_PART = "No node info found"  # Ray's words where this machine runs none of the cluster's nodes
# Ray keeps large arguments in shared memory; a report is at most some megabytes.
_OBJECT_STORE = 128 * 2**20
# Not sent to the workers with `ray.working_dir`, besides what .gitignore names: large, private, or no part of an app.
_LEFT_HERE = ("runs", ".venv", ".cache", ".git", "*.duckdb", "*.safetensors")


def refuse_unusable(config: BridgeConfig) -> None:
    """Refuses what cannot work on a cluster, before anything starts.

    Raises:
        ConfigError: Ray is not installed, or a setting contradicts `collect.engine = "ray"`.
        ClusterError: nothing answers at `ray.address`.
    """
    _imported(config.ray.address)
    if config.models and config.ray.endpoints:
        raise ConfigError("ray.endpoints are servers of one base model each; with [models] workers start their own")
    for name, other in config.models.items():
        if other.serve.attach is not None or other.serve.port is not None:
            what = "attach" if other.serve.attach is not None else "port"
            raise ConfigError(
                f"models.{name}.serve.{what}: with collect.engine = ray workers start servers of their own"
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
    """Ray itself would try for long, and then not say why."""
    try:
        socket.create_connection(address_to_place(address), timeout=_REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"ray.address: nothing answers at {address} ({error.strerror or error}); is the cluster up, and is this "
            "the address that `ray start --head` showed?"
        ) from error


def requests_on_ray(
    config: BridgeConfig,
    folder: RunFolder,
    app: App,
    bases: Sequence[Base],
    reporter: Reporter,
    requests: Sequence[EpisodeRequest],
) -> Tally:
    """Runs the requests on the cluster, all nodes at version 0, and shows how far they are.

    Raises:
        BridgeError: see `Driver.run`; the cluster cannot be reached.
        StoreError: this machine's disk does not take the records.
    """
    lineage = _publish(config, folder, app, bases, reporter)
    agreed, endpoints = agreement(config, lineage), config.ray.endpoints
    content = config.model_dump(mode="json", exclude_unset=True)
    here = None if config.ray.working_dir is not None else str(Path.cwd())

    def assign(number: int) -> Assignment:
        endpoint = endpoints[(number - 1) % len(endpoints)] if endpoints else None
        return Assignment(number, content, here, endpoint, agreed)

    reporter.say(f"collecting with {config.ray.workers} workers on Ray, {config.ray.address or 'on this machine'}")
    journal = Journal(folder.journal)
    try:
        with connected(config.ray) as ray, reporter.bars(), reporter.task("collect", len(requests)) as task:
            in_flight = config.ray.in_flight or config.collect.in_flight
            driver = Driver(ray, config.ray, in_flight, assign, Filing(journal, requests[0].run_id), reporter.say)
            reward = config.train.trainer.reward
            tally = driver.run(requests, lambda done, tally: task.update(done, tally.figures(reward)))
    finally:
        journal.close()
    for line in (*tally.without(), *tally.silent(config.graph.nodes)):
        reporter.say(line)
    return tally


def _publish(
    config: BridgeConfig, folder: RunFolder, app: App, bases: Sequence[Base], reporter: Reporter
) -> dict[str, str]:
    """Has every shared server answer to version 0 of every node; gives back the lineage of the base models."""
    models = ServedModels(config, bases, folder.adapters)
    nodes = (*config.graph.nodes, *app.frozen)
    if config.ray.endpoints:
        models.register_null(nodes)
        with asyncio.Runner() as loop:
            for endpoint in config.ray.endpoints:
                with models.served([endpoint_to_options(config, endpoint)], folder.server_log_of, loop, reporter):
                    models.publish(dict.fromkeys(nodes, 0))
    return models.lineage


@contextmanager
def connected(options: RayOptions) -> Iterator[Any]:
    """The module `ray`, connected to the cluster that the options name until the block ends.

    Where this process is connected already, that cluster is used, and stays.

    Raises:
        ClusterError: the cluster cannot be reached or started.
    """
    ray = _imported(options.address)
    if ray.is_initialized():
        yield ray
        return
    how: dict[str, Any] = {"address": options.address}
    if options.address is None:
        how = {
            "address": "local",
            "num_cpus": max(1, math.ceil(options.workers * options.cpus_per_worker)),
            "object_store_memory": _OBJECT_STORE,
            "include_dashboard": False,
            "_node_ip_address": _LOOPBACK,
        }
    if options.working_dir is not None:
        how["runtime_env"] = {"working_dir": options.working_dir, "excludes": list(_LEFT_HERE)}
    try:
        with _own_signals(), _one_try(options.address):
            ray.init(**how, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(_why_not_connected(options.address, error)) from error
    try:
        if options.address is None and (at := ray.util.get_node_ip_address()) != _LOOPBACK:
            raise ClusterError(
                f"Ray would listen on {at}: it was imported before marft-bridge could keep it to loopback"
            )
        yield ray
    finally:
        ray.shutdown()


def _why_not_connected(address: str | None, error: BaseException) -> str:
    """Ray's error, and what that one came from, in one line."""
    reasons = [_in_one_line(str(each)) for each in (error, error.__cause__) if each is not None]
    where = "on this machine" if address is None else f"at {address}"
    said = f"no Ray cluster {where}: {': '.join(reasons)}"
    if _NOT_PART in said:
        said += "; this machine is no part of it: start the command on one that is, or `ray start --address` here first"
    return said


def _in_one_line(text: str) -> str:
    """Ray puts a whole traceback into some errors: of that, the last line."""
    said, _, traceback = text.partition("Traceback")
    last = [line for line in traceback.splitlines() if line.strip()][-1:]
    return " ".join(" ".join([said, *last]).split())[:300]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM; the command line has one already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_try(address: str | None) -> Iterator[None]:
    """Ray tries 20 times to reach a cluster, of 40 s each where none is. The variable also bounds starting one."""
    if address is None or _TRIES in os.environ:
        yield
        return
    os.environ[_TRIES] = "1"
    try:
        yield
    finally:
        del os.environ[_TRIES]


def _imported(address: str | None) -> Any:
    # All are read when Ray is imported. A worker that asks for no GPU keeps those that its environment shows.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        # Otherwise Ray replaces the address of loopback by the machine's own, and listens on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as error:
        raise ConfigError("collect.engine is ray, which is not installed; install marft-bridge[ray]") from error
    return ray
