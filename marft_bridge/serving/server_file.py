"""server.json of a run folder: addresses and keys of the servers of `marft-bridge serve`, for other commands to attach.

Invariant: only its owner can read the file, because it holds keys; a server that does not answer is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import httpx

from marft_bridge.common.files import write_atomically
from marft_bridge.common.progress import Reporter
from marft_bridge.config.serve import ServeOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.serving.vllm_server import Endpoint

_KEY_VARIABLE = "MARFT_SERVER_KEY"


def write_server_file(folder: RunFolder, endpoints: Mapping[str, Endpoint]) -> None:
    """Writes the address and key of each server, by the name of its base model; 0600, because keys are in it."""
    servers = {
        name: {"base_url": endpoint.base_url, "api_key": endpoint.api_key} for name, endpoint in endpoints.items()
    }
    write_atomically(folder.server, json.dumps({"servers": servers, "pid": os.getpid()}) + "\n")


def running_servers(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Name -> address and key of each server that `marft-bridge serve` runs for this folder; {} when one is down."""
    try:
        content = json.loads(folder.server.read_text(encoding="utf-8"))
        servers = {
            name: (server["base_url"].removesuffix("/v1"), server["api_key"])
            for name, server in content["servers"].items()
        }
        for address, key in servers.values():
            headers = {"Authorization": f"Bearer {key}"}
            httpx.get(f"{address}/v1/models", headers=headers, timeout=5.0, trust_env=False).raise_for_status()
    except (AttributeError, OSError, TypeError, ValueError, KeyError, httpx.HTTPError):
        return {}
    return servers


def server_options(bases: Sequence[BaseModelSpec], folder: RunFolder, reporter: Reporter) -> list[ServeOptions]:
    """Serving options by base model: attach to the server of `marft-bridge serve` if it runs, else as configured."""
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
