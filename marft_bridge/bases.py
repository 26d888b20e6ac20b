"""A configuration -> its base models: where each lies, how it is served, and which nodes run on it.

Invariant: the first is that of `[model]`; every trained or frozen node is in one of them. It starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.config import BridgeConfig
from marft_bridge.prepare_model import SMOLLM2_NAME, check_model_dir, prepare_smollm2
from marft_bridge.server_command import ServeOptions

PREPARED_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Base:
    """One base model of a configuration."""

    name: str  # as in [models.NAME]; "" for that of [model]
    directory: Path
    serve: ServeOptions  # with the modules of the configuration's adapters
    nodes: tuple[str, ...]

    @property
    def title(self) -> str:
        """What people are shown."""
        return f"model server {self.name}".rstrip()


def config_to_bases(config: BridgeConfig, say: Callable[[str], None] = lambda _: None) -> tuple[Base, ...]:
    """The base models of a configuration; the packaged one is prepared first where it is named.

    Raises:
        ServingError: a directory holds no model.
    """
    elsewhere = {node for other in config.models.values() for node in other.nodes}
    here = tuple(node for node in (*config.graph.nodes, *config.graph.frozen) if node not in elsewhere)
    named = [("", config.model.path, config.serve, here)]
    named += [(name, other.path, other.serve, other.nodes) for name, other in config.models.items()]
    return tuple(
        Base(name, _directory(path, config, say), with_modules(config, serve), nodes)
        for name, path, serve, nodes in named
    )


def directory_of(bases: Sequence[Base], node: str) -> Path:
    """The base model that a node runs on; the first, where no table names the node."""
    return next((base.directory for base in bases if node in base.nodes), bases[0].directory)


def with_modules(config: BridgeConfig, options: ServeOptions) -> ServeOptions:
    """The options of a server for this configuration's adapters: wrapping no other layers serves faster."""
    if options.lora_target_modules is None:
        return options.model_copy(update={"lora_target_modules": config.train.trainer.lora.target_modules})
    return options


def _directory(path: str, config: BridgeConfig, say: Callable[[str], None]) -> Path:
    if path != PREPARED_MODEL:
        return check_model_dir(Path(path))
    cache = Path(os.environ.get("MARFT_CACHE") or config.model.cache)
    if not (cache / SMOLLM2_NAME).exists():
        say(f"preparing {SMOLLM2_NAME} in {cache} (once, about 20 s)")
    return prepare_smollm2(cache, say)
