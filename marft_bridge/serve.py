"""`marft-bridge serve`: the model server of a run folder, for as long as a command (or the user) needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from marft_bridge.config import BridgeConfig
from marft_bridge.engine import model_directory, running_server, served_modules, write_server_file
from marft_bridge.errors import ConfigError, ServingError
from marft_bridge.progress import Reporter
from marft_bridge.run_folder import RunFolder
from marft_bridge.serving import ModelServer


def serve(config: BridgeConfig, reporter: Reporter, command: Sequence[str]) -> int:
    """Starts the server and runs `command` beside it; without one it serves until Ctrl-C.

    Returns:
        The command's exit code; 0 after Ctrl-C.

    Raises:
        ServingError: it does not start, dies, or one is running for this folder already.
    """
    folder = RunFolder(config.run_folder)
    if config.serve.attach is not None:
        raise ConfigError("serve: serve.attach names a server that runs already; take it out to start one")
    if (found := running_server(folder)) is not None:
        raise ServingError(f"a server for {folder.path} runs already at {found[0]}; stop that one first")
    folder.create()
    model_dir = model_directory(config, reporter.say)
    options = served_modules(config)
    with ModelServer(options, model_dir, folder.adapters, folder.server_log) as server:
        with reporter.bars(), reporter.task("model server") as task:
            endpoint = server.start(lambda phase: task.update(figures=phase))
        write_server_file(folder, endpoint)
        try:
            reporter.say(f"serving {model_dir.name} at {endpoint.base_url}, log {folder.server_log}")
            return _run_beside(server, command) if command else _serve_until_interrupted(server)
        finally:
            folder.server.unlink(missing_ok=True)


def _run_beside(server: ModelServer, command: Sequence[str]) -> int:
    """The command has a process group of its own, so that a signal reaches all of it, once, from here."""
    try:
        child = subprocess.Popen(command, process_group=0)
    except OSError as error:
        raise ConfigError(f"serve: cannot run {command[0]!r}: {error.strerror}") from None
    try:
        while child.poll() is None:
            server.check()
            time.sleep(0.5)
    except BaseException:  # Ctrl-C, SIGTERM, or the server died: the command ends before the server does
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)  # SIGINT is ignored by what a shell put in the background
        child.wait()
        raise
    return child.returncode


def _serve_until_interrupted(server: ModelServer) -> int:
    try:
        while True:
            server.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
