"""`marft-bridge serve`: the model servers of a run folder, for as long as a command (or the user) needs them; with
--split, an app's live traffic in front of one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from marft_bridge.bases import Base, config_to_bases
from marft_bridge.config import BridgeConfig
from marft_bridge.engine import running_servers, write_server_file
from marft_bridge.errors import ConfigError, ServingError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.served_models import ServedModels, refuse_whole_gpus
from marft_bridge.server_keeper import ServerKeeper
from marft_bridge.serving import Endpoint, ModelServer
from marft_bridge.watched_calls import CallsUnderWay

if TYPE_CHECKING:
    from marft_bridge.live.command import LiveTraffic
    from marft_bridge.live.flags import LiveOptions

Check = Callable[[], None]
"""Raises a BridgeError when what it looks at is broken."""


def serve(config: BridgeConfig, reporter: Reporter, command: Sequence[str], live: LiveOptions | None = None) -> int:
    """Starts the server and runs `command` beside it; without one it serves until Ctrl-C.

    With `live`, a proxy in front of the server shares an app's traffic out between two teams, and the server is for
    that alone: other commands on the folder, which load and unload adapters, start their own. So it knows all that
    the server holds, and starts one that died again; without `live` it does not.

    Returns:
        The command's exit code; 0 after Ctrl-C.

    Raises:
        ServingError: it does not start, dies, or one is running for this folder already.
    """
    folder = RunFolder(config.run_folder)
    if live is None:
        _refuse_attached(config)
    elif config.models:
        raise ConfigError("serve: --split serves the nodes of one base model; leave [models] out")
    if found := running_servers(folder):
        at = ", ".join(address for address, _ in found.values())
        raise ServingError(f"a server for {folder.path} runs already at {at}; stop that one first")
    folder.create()
    bases = config_to_bases(config, reporter.say)
    if live is not None:
        return _serve_live(config, folder, bases[0], live, reporter, command)
    refuse_whole_gpus(bases, [base.serve for base in bases])
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(base, folder)) for base in bases]
        endpoints = {base.name: _started(server, base, reporter) for server, base in zip(servers, bases, strict=True)}
        write_server_file(folder, endpoints)
        stack.callback(folder.server.unlink, missing_ok=True)
        for base in bases:
            log = folder.server_log_of(base.name)
            reporter.say(f"serving {base.directory.name} at {endpoints[base.name].base_url}, log {log}")
        return _until_the_end([server.check for server in servers], command, {})


def _refuse_attached(config: BridgeConfig) -> None:
    tables = {"serve": config.serve, **{f"models.{name}.serve": other.serve for name, other in config.models.items()}}
    for table, options in tables.items():
        if options.attach is not None:
            raise ConfigError(f"serve: {table}.attach names a server that runs already; take it out to start one")


def _server(base: Base, folder: RunFolder) -> ModelServer:
    return ModelServer(base.serve, base.directory, folder.adapters, folder.server_log_of(base.name))


def _started(server: ModelServer, base: Base, reporter: Reporter) -> Endpoint:
    with reporter.bars(), reporter.task(base.title) as task:
        return server.start(lambda phase: task.update(figures=phase))


def _serve_live(
    config: BridgeConfig, folder: RunFolder, base: Base, live: LiveOptions, reporter: Reporter, command: Sequence[str]
) -> int:
    traffic = _live_traffic(config, folder, base, live)
    with _server(base, folder) as server:
        endpoint = _started(server, base, reporter)
        restarts, calls = config.serve.restarts, CallsUnderWay()  # the proxy's calls have limits of their own
        with (
            ServerKeeper(server, restarts, config.serve.hang_s, calls, reporter.say) as keeper,
            traffic.running(server, endpoint, reporter) as proxy,
        ):
            watched = (server.check if server.attached else keeper.check, proxy.check)
            return _until_the_end(watched, command, traffic.command_environment(proxy))


def _live_traffic(config: BridgeConfig, folder: RunFolder, base: Base, options: LiveOptions) -> LiveTraffic:
    try:
        from marft_bridge.live.command import LiveTraffic  # needs an extra that a model server without vLLM may lack
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: --split needs {error.name}; pip install 'marft-bridge[live]'") from None
    return LiveTraffic(config, folder, ServedModels(config, [base], folder.adapters), options)


def _until_the_end(watched: Sequence[Check], command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Until the command ends, or else until Ctrl-C; at once when what is watched says that it is broken."""
    return _run_beside(watched, command, environment) if command else _serve_until_interrupted(watched)


def _run_beside(watched: Sequence[Check], command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command has a process group of its own, so that a signal reaches all of it, once, from here."""
    try:
        child = subprocess.Popen(command, process_group=0, env={**os.environ, **environment})
    except OSError as error:
        raise ConfigError(f"serve: cannot run {command[0]!r}: {error.strerror}") from None
    try:
        while child.poll() is None:
            for check in watched:
                check()
            time.sleep(0.5)
    except BaseException:  # Ctrl-C, SIGTERM, or the server died: the command ends before the server does
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)  # SIGINT is ignored by what a shell put in the background
        child.wait()
        raise
    return child.returncode


def _serve_until_interrupted(watched: Sequence[Check]) -> int:
    try:
        while True:
            for check in watched:
                check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
