"""The adapter versions of a trained team -> the run folder of another app, so that one comparison runs both.

Invariants: a version keeps its number and its weights; adapters of another base model, of a node that the app trains
itself, or whose number another team's version has here, are not taken, and it is said why.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from marft_bridge.common.errors import BridgeError
from marft_bridge.runs.named_version import choose_version, read_named_version
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import CONFIG_FILE, WEIGHTS_FILE, check_files
from marft_bridge.serving.adapter_registry import AdapterRegistry


def copy_team_adapters(
    team: RunFolder, registry: AdapterRegistry, *, team_nodes: Collection[str], own_nodes: Collection[str]
) -> tuple[dict[str, int], str | None]:
    """Registers the version of each of the team's nodes that its training names, or else the newest.

    Args:
        team: its run folder.
        registry: of the app's run folder.
        team_nodes: the agents that acted in the team.
        own_nodes: those of the app.

    Returns:
        Node -> version, of all that are there now; and why some are not, None where all are.
    """
    named_version = read_named_version(team)
    team_registry = AdapterRegistry(team.adapters, registry.base_of(""))
    copied: dict[str, int] = {}
    for node in sorted(team_nodes):
        version = choose_version(named_version, team_registry.versions(node))
        if version is None:
            continue
        if node in own_nodes:
            return copied, f"{node!r} is the name of a node of both"
        try:
            if version not in registry.versions(node):
                _copy_version(team_registry, registry, node, version=version)
            elif _is_other(team_registry.hashes(node, version), registry.hashes(node, version)):
                return copied, (
                    f"adapter v{version} of node {node!r} is in {registry.root} already and is another team's; to "
                    "compare this one, distil it into the run folder of another configuration"
                )
        except BridgeError as error:
            return copied, str(error)
        copied[node] = version
    return copied, None if copied else f"{team.path} has none"


def _is_other(hashes: Mapping[str, str], own_hashes: Mapping[str, str]) -> bool:
    """Whether two registered versions differ; a record of an earlier release lacks the hash of a file."""
    return any(hashes[name] != own_hashes[name] for name in hashes.keys() & own_hashes.keys())


def _copy_version(team_registry: AdapterRegistry, registry: AdapterRegistry, node: str, *, version: int) -> None:
    row = team_registry.get(node, version)
    check_files(Path(row.path), team_registry.hashes(node, version))  # before they get a record of their own
    folder = registry.new_folder(node, version)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        shutil.copyfile(Path(row.path) / name, folder / name)
    registry.register(node, version, None, metrics=row.metrics)
