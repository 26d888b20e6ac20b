"""What `--base` and `--candidate` say -> two teams of adapter versions that the engine serves.

A team is one version of every node; nodes that are frozen run version 0, which changes nothing, in both. Invariant:
every version exists and is served before the first request is taken; two equal teams are refused. Traffic is not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.adapters import AdapterRegistry
from marft_bridge.errors import ConfigError, ServingError

NEWEST, PROMOTED = "newest", "promoted"

Promoted = Callable[[], Mapping[str, int] | None]
"""The versions that the latest promotion signed off; None without one."""


@dataclass(frozen=True, slots=True)
class Team:
    """One version of every node, and the names under which the engine serves them."""

    name: str
    versions: Mapping[str, int]
    served: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{node}@{version}" for node, version in self.versions.items())

    def to_json(self) -> dict[str, Any]:
        """Node -> version."""
        return dict(self.versions)


def text_to_versions(
    flag: str, text: str, nodes: Sequence[str], registry: AdapterRegistry, promoted: Promoted
) -> dict[str, int]:
    """`3`, `newest`, `promoted` or `planner=3,executor=newest` -> a version of each of `nodes`.

    Raises:
        ConfigError: it is none of these, leaves out a node or names another one; or nothing was promoted.
        ServingError: a version does not exist.
    """
    if "=" not in text:
        each = dict.fromkeys(nodes, text.strip())
    else:
        each = dict(_pair(flag, part) for part in text.split(","))
        if each.keys() != set(nodes):
            wrong = ", ".join(sorted(each.keys() ^ set(nodes)))
            raise ConfigError(f"serve: {flag} {text}: name each of {', '.join(nodes)} once (wrong or missing: {wrong})")
    signed = promoted() if PROMOTED in each.values() else None
    if PROMOTED in each.values() and signed is None:
        raise ConfigError(f"serve: {flag}: nothing was promoted in this run folder; name a version")
    versions = {node: _version(flag, node, said, registry, signed or {}) for node, said in each.items()}
    for node, version in versions.items():
        registry.get(node, version)
    return versions


def _pair(flag: str, part: str) -> tuple[str, str]:
    node, _, said = (side.strip() for side in part.rpartition("="))
    if not node or not said:
        raise ConfigError(f"serve: {flag}: {part!r} is not node=version")
    return node, said


def _version(flag: str, node: str, said: str, registry: AdapterRegistry, signed: Mapping[str, int]) -> int:
    if said == PROMOTED:
        if node not in signed:
            raise ConfigError(f"serve: {flag}: the promotion says nothing of node {node!r}; name a version")
        return signed[node]
    if said == NEWEST:
        latest = registry.latest(node)
        if latest is None:
            raise ServingError(f"node {node!r} has no adapter yet; train first, or name version 0")
        return latest.version
    if not said.isascii() or not said.isdecimal():
        raise ConfigError(f"serve: {flag}: {said!r} is no version; give a number, {NEWEST} or {PROMOTED}")
    return int(said)


def versions_to_team(name: str, versions: Mapping[str, int], frozen: Sequence[str]) -> Team:
    """The team, its frozen nodes at version 0."""
    whole = {**versions, **dict.fromkeys(frozen, 0)}
    return Team(name, whole, {node: AdapterRegistry.served_name(node, version) for node, version in whole.items()})
