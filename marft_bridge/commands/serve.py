"""`marft-bridge serve`: the model servers of a run folder, for as long as a command (or the user) needs them; with
--split, an app's live traffic in front of one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING

from marft_bridge.commands.foreground import LentTerminal, PutOffInterrupts
from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.runs.device_lines import LIVE, SERVE, announced_devices
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.base_models import BaseModelSpec, config_to_bases
from marft_bridge.serving.model_versions import bases_to_versions
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.served_base import start_server
from marft_bridge.serving.served_bases import refuse_whole_gpus
from marft_bridge.serving.server_file import announced_servers, running_servers, starting_servers
from marft_bridge.serving.supervisor import Supervisor

if TYPE_CHECKING:
    from marft_bridge.live.command import LiveTraffic
    from marft_bridge.live.flags import LiveOptions

Check = Callable[[], None]
"""Raises a BridgeError when a server or the proxy is broken."""


def serve(config: BridgeConfig, reporter: Reporter, command: Sequence[str], live: LiveOptions | None = None) -> int:
    """Starts the server and runs `command` beside it; without a command it serves until Ctrl-C.

    With `live`, a proxy in front of the server splits an app's traffic between two teams. The server is for that alone:
    other commands on the folder, which load and unload adapters, start their own. So all adapters in service are known
    here, and a server that died or hangs is restarted; without `live` it is not.

    Returns:
        The command's exit code; 0 after Ctrl-C.

    Raises:
        ServingError: the server does not start, dies, or one is running for this folder already.
        ConfigError: another `serve` starts its server in this folder.
    """
    folder = RunFolder(config.run_folder)
    if live is None:
        _refuse_attached(config)
    elif config.models:
        raise ConfigError("serve: --split serves the nodes of one base model; leave [models] out")
    if running := running_servers(folder):
        addresses = ", ".join(address for address, _ in running.values())
        raise ServingError(f"a server for {folder.path} runs already at {addresses}; stop that one first")
    folder.create()
    with _lock(folder, live):
        bases = config_to_bases(config, reporter.say)
        if live is not None:
            return _serve_live(config, folder, bases[0], live=live, reporter=reporter, command=command)
        return _serve_bases(config, folder, bases, reporter=reporter, command=command)


def _lock(folder: RunFolder, live: LiveOptions | None) -> AbstractContextManager[None]:
    """Keeps a second one out from before the server starts: both would write the same log and the same address.

    Other commands work beside it.
    """
    if live is None:
        return folder.lock_for("serve", name="serve.lock")
    return folder.lock_for("serve --split", name="live.lock")


def _serve_bases(
    config: BridgeConfig,
    folder: RunFolder,
    bases: Sequence[BaseModelSpec],
    reporter: Reporter,
    command: Sequence[str],
) -> int:
    options, device_lines = _place(config, bases, reporter)
    with ExitStack() as stack:
        stack.enter_context(announced_devices(folder, device_lines, whose=SERVE))
        stack.enter_context(starting_servers(folder))
        servers = [
            stack.enter_context(
                start_server(
                    base,
                    placed_options,
                    adapters=folder.adapters,
                    log=folder.server_log_of(base.name),
                    reporter=reporter,
                )
            )
            for base, placed_options in zip(bases, options, strict=True)
        ]
        endpoints = {base.name: server.endpoint for server, base in zip(servers, bases, strict=True)}
        stack.enter_context(announced_servers(folder, endpoints))
        for base in bases:
            log = folder.server_log_of(base.name)
            reporter.say(f"serving {base.directory.name} at {endpoints[base.name].base_url}, log {log}")
        return _run_or_serve([server.check for server in servers], command, {})


def _refuse_attached(config: BridgeConfig) -> None:
    tables = {"serve": config.serve, **{f"models.{name}.serve": model.serve for name, model in config.models.items()}}
    for table, options in tables.items():
        if options.attach is not None:
            raise ConfigError(f"serve: {table}.attach names a server that runs already; take it out to start one")


def _place(
    config: BridgeConfig, bases: Sequence[BaseModelSpec], reporter: Reporter
) -> tuple[list[ServeOptions], list[str]]:
    """The servers' options with their cards, and the lines that say them, which are said.

    `train` cannot put servers of another command to sleep.
    """
    placement = Placement(config, bases, [base.serve for base in bases], trains=False, takes_turns=False)
    options = placement.serve_options()
    lines = placement.lines()[:-1]  # without the trainer's, which may never come
    refuse_whole_gpus(bases, options)
    for line in lines:
        reporter.say(line)
    return options, lines


def _serve_live(
    config: BridgeConfig,
    folder: RunFolder,
    base: BaseModelSpec,
    live: LiveOptions,
    reporter: Reporter,
    command: Sequence[str],
) -> int:
    traffic = _live_traffic(config, folder, base, options=live)
    (options,), device_lines = _place(config, [base], reporter)
    log = folder.live_server_log
    with (
        announced_devices(folder, device_lines, whose=LIVE),
        start_server(base, options, adapters=folder.adapters, log=log, reporter=reporter) as server,
    ):
        restarts, calls = config.serve.restarts, CallsUnderWay()
        with (
            Supervisor(server, restarts, config.serve.hang_s, calls=calls, report=reporter.say) as supervisor,
            traffic.running(server, reporter, calls) as proxy,
        ):
            checks = (*((server.check,) if server.attached else ()), supervisor.check, proxy.check)
            return _run_or_serve(checks, command, traffic.command_environment(proxy))


def _live_traffic(config: BridgeConfig, folder: RunFolder, base: BaseModelSpec, options: LiveOptions) -> LiveTraffic:
    from marft_bridge.live.command import LiveTraffic  # imported late: most servers have no proxy

    return LiveTraffic(config, folder, bases_to_versions([base], folder.adapters, config), options=options)


def _run_or_serve(checks: Sequence[Check], command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Waits until the command ends, without one until Ctrl-C; a check that fails ends it at once with its error."""
    return _run_beside(checks, command, environment) if command else _serve_until_interrupted(checks)


def _run_beside(checks: Sequence[Check], command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command in a process group of its own, so that a signal from here reaches all its processes once.

    The terminal is lent to it. Ctrl-C is its own then: when it ends by that, so does this process; 128 + N is the code
    of a command that signal N ended, as in a shell.
    """
    interrupts = PutOffInterrupts()  # one inside Popen would leave a process that nobody knows
    try:
        child = subprocess.Popen(command, process_group=0, env={**os.environ, **environment})
    except OSError as error:
        interrupts.let_come()
        raise ConfigError(f"serve: cannot run {command[0]!r}: {error.strerror}") from None
    try:
        interrupts.let_come()
        with LentTerminal(child) as terminal:
            while child.poll() is None:
                for check in checks:
                    check()
                terminal.follow()
                time.sleep(0.5)
            terminal.pass_on_interrupt()
    except BaseException:  # Ctrl-C, SIGTERM, SIGHUP, or the server died: the command ends before the server does
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)  # SIGINT is ignored by what a shell put in the background
            os.killpg(child.pid, signal.SIGCONT)  # a process that is stopped ends only once it goes on
        child.wait()
        raise
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _serve_until_interrupted(checks: Sequence[Check]) -> int:
    try:
        while True:
            for check in checks:
                check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
