"""server.json of a run folder: addresses and keys of the servers of `marft-bridge serve`, for other commands to attach.

Invariants: only its owner can read the file, because it holds keys; a server that does not answer is not used. `serve`
holds the file from before it starts its servers until it ends: others wait for one that is starting, and no key of one
that was left behind is sent to whoever has the port by now.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from marft_bridge.common.errors import ServingError, StoreError
from marft_bridge.common.files import held_file, read_held
from marft_bridge.common.progress import Reporter
from marft_bridge.config.serve import ServeOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.serving.vllm_server import Endpoint

_KEY_VARIABLE = "MARFT_SERVER_KEY"
_POLL_S = 0.2
_SLACK_S = 60.0  # for what `serve` does besides: it loads its libraries, and ends servers that did not come


@contextmanager
def starting_servers(folder: RunFolder) -> Iterator[None]:
    """Other commands wait for servers that come, until `announced_servers` names them or the block ends."""
    with _held_note(folder, {}):
        yield


@contextmanager
def announced_servers(folder: RunFolder, endpoints: Mapping[str, Endpoint]) -> Iterator[None]:
    """Other commands find the address and key of each server, by the name of its base model, until the block ends.

    A file that another command has written meanwhile stays.
    """
    servers = {
        name: {"base_url": endpoint.base_url, "api_key": endpoint.api_key} for name, endpoint in endpoints.items()
    }
    with _held_note(folder, {"servers": servers}):
        yield


@contextmanager
def _held_note(folder: RunFolder, content: Mapping[str, Any]) -> Iterator[None]:
    with held_file(folder.server, json.dumps({**content, "pid": os.getpid()}) + "\n") as is_ours:
        try:
            yield
        finally:
            if is_ours():
                folder.server.unlink(missing_ok=True)


def running_servers(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Name -> address and key of each server that `marft-bridge serve` runs for this folder; {} when one is down, and
    when `serve` has ended, however it did."""
    try:
        text = read_held(folder.server)
        if text is None:
            return {}
        content = json.loads(text)
        servers = {
            name: (server["base_url"].removesuffix("/v1"), server["api_key"])
            for name, server in content["servers"].items()
        }
        for address, key in servers.values():
            headers = {"Authorization": f"Bearer {key}"}
            httpx.get(f"{address}/v1/models", headers=headers, timeout=5.0, trust_env=False).raise_for_status()
    except (AttributeError, OSError, StoreError, TypeError, ValueError, KeyError, httpx.HTTPError, httpx.InvalidURL):
        return {}
    return servers


def _starting_pid(folder: RunFolder) -> int | None:
    """The process of a `serve` that runs for this folder and has not named its servers yet; None: there is none."""
    try:
        text = read_held(folder.server)
        content = {} if text is None else json.loads(text)
        return None if "servers" in content or "pid" not in content else int(content["pid"])
    except (OSError, StoreError, TypeError, ValueError):
        return None


def _wait_for_start(folder: RunFolder, reporter: Reporter, limit_s: float) -> None:
    """Until no `serve` of this folder is starting: a server beside it would empty its log, and take its memory.

    Raises ServingError after `limit_s`, in which it should have come or given up.
    """
    if (pid := _starting_pid(folder)) is None:
        return
    reporter.say(f"waiting for the server that `marft-bridge serve` (process {pid}) is starting for this folder")
    deadline = time.monotonic() + limit_s
    while (pid := _starting_pid(folder)) is not None:
        if time.monotonic() > deadline:
            raise ServingError(
                f"`marft-bridge serve` (process {pid}) is still starting a server for {folder.path} after "
                f"{limit_s:.0f} s; is it stopped? Continue it, or end it"
            )
        time.sleep(_POLL_S)


def server_options(bases: Sequence[BaseModelSpec], folder: RunFolder, reporter: Reporter) -> list[ServeOptions]:
    """Serving options by base model: attach to the server of `marft-bridge serve` if it runs, else as configured.

    Waits for one that is starting.

    Raises:
        ServingError: it is starting for longer than all its servers may take.
    """
    _wait_for_start(folder, reporter, sum(base.serve.startup_timeout_s for base in bases) + _SLACK_S)
    servers = running_servers(folder)
    options = []
    for number, base in enumerate(bases):
        if base.serve.attach is not None or base.name not in servers:
            options.append(base.serve)
            continue
        variable = f"{_KEY_VARIABLE}_{number}" if number else _KEY_VARIABLE
        address, os.environ[variable] = servers[base.name]
        reporter.say(f"using the {base.title} at {address}")
        options.append(
            ServeOptions(
                attach=address,
                api_key_env=variable,
                lora_target_modules=base.serve.lora_target_modules,
                hang_s=base.serve.hang_s,
            )
        )
    return options
