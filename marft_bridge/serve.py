"""`marft-bridge serve`: the model server of a run folder, for as long as a command (or the user) needs it; with
--split, an app's live traffic in front of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from marft_bridge.config import BridgeConfig
from marft_bridge.engine import model_directory, running_server, served_modules, write_server_file
from marft_bridge.errors import ConfigError, ServingError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.server_keeper import ServerKeeper
from marft_bridge.serving import ModelServer
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
    if live is None and config.serve.attach is not None:
        raise ConfigError("serve: serve.attach names a server that runs already; take it out to start one")
    if (found := running_server(folder)) is not None:
        raise ServingError(f"a server for {folder.path} runs already at {found[0]}; stop that one first")
    folder.create()
    model_dir = model_directory(config, reporter.say)
    traffic = _live_traffic(config, folder, model_dir, live) if live is not None else None
    with ModelServer(served_modules(config), model_dir, folder.adapters, folder.server_log) as server:
        with reporter.bars(), reporter.task("model server") as task:
            endpoint = server.start(lambda phase: task.update(figures=phase))
        if traffic is not None:
            restarts, calls = config.serve.restarts, CallsUnderWay()  # the proxy's calls have limits of their own
            with (
                ServerKeeper(server, restarts, config.serve.hang_s, calls, reporter.say) as keeper,
                traffic.running(server, endpoint, reporter) as proxy,
            ):
                watched = (server.check if server.attached else keeper.check, proxy.check)
                return _until_the_end(watched, command, traffic.command_environment(proxy))
        write_server_file(folder, endpoint)
        try:
            reporter.say(f"serving {model_dir.name} at {endpoint.base_url}, log {folder.server_log}")
            return _until_the_end((server.check,), command, {})
        finally:
            folder.server.unlink(missing_ok=True)


def _live_traffic(config: BridgeConfig, folder: RunFolder, model_dir: Path, options: LiveOptions) -> LiveTraffic:
    try:
        from marft_bridge.live.command import LiveTraffic  # needs an extra that a model server without vLLM may lack
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: --split needs {error.name}; pip install 'marft-bridge[live]'") from None
    from marft_bridge.served_model import ServedModel

    return LiveTraffic(config, folder, ServedModel(config, model_dir, folder.adapters), options)


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
