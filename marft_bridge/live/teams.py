"""The values of `--base` and `--candidate` -> teams of adapter versions that the engine serves.

A team is one version of every node; frozen nodes have version 0, which changes nothing, in both. Invariant: every
version that `text_to_versions` returns exists in the registry, and a promoted one has the weights that were signed off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.config.compare import BEST, NEWEST
from marft_bridge.promotion.manifest import Manifest, refuse_other_weights
from marft_bridge.serving.adapter_registry import AdapterRegistry

PROMOTED = "promoted"

ReadPromoted = Callable[[], Manifest | None]
"""Returns the latest promotion, checked; None without one."""


@dataclass(frozen=True, slots=True)
class Team:
    """One version of every node, and the names under which the engine serves them."""

    name: str
    versions: Mapping[str, int]
    served_names: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{node}@{version}" for node, version in self.versions.items())

    def to_json(self) -> dict[str, Any]:
        """Node -> version."""
        return dict(self.versions)


def text_to_versions(
    flag: str,
    text: str,
    nodes: Sequence[str],
    registry: AdapterRegistry,
    read_promoted: ReadPromoted,
    named_version: int | None = None,
) -> dict[str, int]:
    """`3`, `best`, `newest`, `promoted` or `planner=3,executor=newest` -> a version of each of `nodes`.

    Args:
        named_version: what `best` stands for; None: each node's newest.

    Raises:
        ConfigError: it is none of these, leaves out a node or names another one; or nothing was promoted.
        ServingError: a version does not exist, or a promoted one has other weights than were signed off.
    """
    if "=" not in text:
        version_texts = dict.fromkeys(nodes, text.strip())
    else:
        pairs = [_part_to_pair(flag, part) for part in text.split(",")]
        version_texts = dict(pairs)
        if len(pairs) > len(version_texts):
            node_counts = Counter(node for node, _ in pairs)
            nodes_text = ", ".join(node for node, count in node_counts.items() if count > 1)
            raise ConfigError(f"serve: {flag} {text}: names {nodes_text} more than once; give each node one version")
        if version_texts.keys() != set(nodes):
            mismatched_nodes = ", ".join(sorted(version_texts.keys() ^ set(nodes)))
            raise ConfigError(
                f"serve: {flag} {text}: name each of {', '.join(nodes)} once (wrong or missing: {mismatched_nodes})"
            )
    if named_version is not None:
        version_texts = {
            node: str(named_version) if version_text == BEST else version_text
            for node, version_text in version_texts.items()
        }
    promotion = read_promoted() if PROMOTED in version_texts.values() else None
    if PROMOTED in version_texts.values() and promotion is None:
        raise ConfigError(f"serve: {flag}: nothing was promoted in this run folder; name a version")
    versions = {
        node: _text_to_version(flag, node, version_text, registry=registry, promotion=promotion)
        for node, version_text in version_texts.items()
    }
    for node, version in versions.items():
        registry.get(node, version)
    return versions


def _part_to_pair(flag: str, part: str) -> tuple[str, str]:
    node, _, version_text = (side.strip() for side in part.rpartition("="))
    if not node or not version_text:
        raise ConfigError(f"serve: {flag}: {part!r} is not node=version")
    return node, version_text


def _text_to_version(
    flag: str, node: str, version_text: str, registry: AdapterRegistry, promotion: Manifest | None
) -> int:
    if version_text == PROMOTED:
        if promotion is None or node not in promotion.versions:
            raise ConfigError(f"serve: {flag}: the promotion says nothing of node {node!r}; name a version")
        version = promotion.versions[node]
        refuse_other_weights(promotion, node, registry.get(node, version))
        return version
    if version_text in (BEST, NEWEST):
        latest = registry.latest(node)
        if latest is None:
            raise ServingError(f"node {node!r} has no adapter yet; train first, or name version 0")
        return latest.version
    if not version_text.isascii() or not version_text.isdecimal():
        raise ConfigError(
            f"serve: {flag}: {version_text!r} is no version; give a number, {BEST}, {NEWEST} or {PROMOTED}"
        )
    return int(version_text)


def versions_to_team(name: str, versions: Mapping[str, int], frozen: Sequence[str]) -> Team:
    """The team, its frozen nodes at version 0."""
    all_versions = {**versions, **dict.fromkeys(frozen, 0)}
    return Team(
        name, all_versions, {node: AdapterRegistry.served_name(node, version) for node, version in all_versions.items()}
    )
