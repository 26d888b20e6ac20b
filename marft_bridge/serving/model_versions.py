"""Base models and a folder of adapters -> which base model each node runs on, and its versions, before any server runs.

Invariants: a node runs on one base model and has adapters of that model only; nodes that no table names run on the
first. Version 0 of a node is its base model, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import BaseModelSpec, config_to_bases
from marft_bridge.serving.model_lineage import bases_to_lineage
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trainers.common.files import weights_to_sha256


@dataclass(frozen=True, slots=True)
class ModelVersions:
    """Base models, at least one, with the registry of their adapters and the lineage of what they answer."""

    bases: tuple[BaseModelSpec, ...]
    registry: AdapterRegistry
    lineage: Mapping[str, str]
    target_modules: tuple[str, ...]  # of the adapters

    def base_of(self, node: str) -> BaseModelSpec:
        """The base model that a node runs on."""
        return next((base for base in self.bases[1:] if node in base.nodes), self.bases[0])

    def register_zero(self, nodes: Iterable[str]) -> None:
        """Gives each of these nodes a version 0, an adapter of zeros, unless it has one."""
        for node in nodes:
            if 0 not in self.registry.versions(node):
                folder = self.registry.new_folder(node, 0)
                write_zero_adapter(folder, self.base_of(node).directory, self.target_modules)
                self.registry.register(node, 0, None, metrics={})


def config_to_versions(config: BridgeConfig, adapters: Path, report: Callable[[str], None]) -> ModelVersions:
    """The base models of a configuration, and the versions in a folder of adapters.

    Raises:
        ConfigError: a tokenizer cannot be read.
        ServingError: see `config_to_bases`.
    """
    return bases_to_versions(config_to_bases(config, report), adapters, config)


def bases_to_versions(bases: Sequence[BaseModelSpec], adapters: Path, config: BridgeConfig) -> ModelVersions:
    """Base models, and the versions in a folder of adapters whose new ones are made as the configuration says.

    Raises:
        ConfigError: a tokenizer cannot be read.
    """
    hashes = [weights_to_sha256(base.directory) for base in bases]
    hash_by_node = {node: sha256 for base, sha256 in zip(bases[1:], hashes[1:], strict=True) for node in base.nodes}
    registry = AdapterRegistry(adapters, hashes[0], hash_by_node)
    return ModelVersions(
        tuple(bases), registry, bases_to_lineage(bases, hashes), target_modules=config.train.trainer.lora.target_modules
    )
