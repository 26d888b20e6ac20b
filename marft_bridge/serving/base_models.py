"""A configuration -> its base models: the directory of each, how it is served, and which nodes run on it.

Invariant: the first is that of `[model]`; every trained or frozen node belongs to exactly one. No server is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.hub_names import model_to_directory, text_to_hub_name
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.models import ModelOptions
from marft_bridge.config.serve import ServeOptions
from marft_bridge.serving.prepare_model import SMOLLM2_NAME, check_model_dir, prepare_smollm2

PREPARED_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class BaseModelSpec:
    """One base model of a configuration."""

    name: str  # as in [models.NAME]; "" for that of [model]
    directory: Path
    serve: ServeOptions  # with the modules of the configuration's adapters
    nodes: tuple[str, ...]

    @property
    def title(self) -> str:
        """What progress lines and messages call its server."""
        return f"model server {self.name}".rstrip()


def config_to_bases(config: BridgeConfig, report: Callable[[str], None] = lambda _: None) -> tuple[BaseModelSpec, ...]:
    """The base models of a configuration; the packaged one is prepared first where it is named.

    Args:
        report: gets a line when something takes long.

    Raises:
        ConfigError: a name of the Hub is not in the local cache.
        ServingError: a directory holds no model.
    """
    assigned_nodes = {node for model in config.models.values() for node in model.nodes}
    default_nodes = tuple(node for node in (*config.graph.nodes, *config.graph.frozen) if node not in assigned_nodes)
    tables = [("", config.model.path, config.serve, default_nodes)]
    tables += [(name, model.path, model.serve, model.nodes) for name, model in config.models.items()]
    return tuple(
        BaseModelSpec(name, prepare_directory(path, config.model, report), with_modules(config, serve), nodes=nodes)
        for name, path, serve, nodes in tables
    )


def is_prepared(config: BridgeConfig) -> bool:
    """Whether every base model's directory is there, a name's in the Hub's cache, so that `config_to_bases` takes no
    time."""
    paths = [config.model.path, *(model.path for model in config.models.values())]
    try:
        return all(
            (_cache_of(config.model) / SMOLLM2_NAME if path == PREPARED_MODEL else model_to_directory(path)).is_dir()
            for path in paths
        )
    except ConfigError:  # not in the cache, or without huggingface_hub
        return False


def directory_of(bases: Sequence[BaseModelSpec], node: str) -> Path:
    """The directory of the base model that a node runs on; of the first, where no table names the node."""
    return next((base.directory for base in bases if node in base.nodes), bases[0].directory)


def with_modules(config: BridgeConfig, options: ServeOptions) -> ServeOptions:
    """The options with `lora_target_modules` of this configuration's adapters: wrapping fewer layers serves faster."""
    if options.lora_target_modules is None:
        return options.model_copy(update={"lora_target_modules": config.train.trainer.lora.target_modules})
    return options


def prepare_directory(path: str, options: ModelOptions, report: Callable[[str], None] = lambda _: None) -> Path:
    """What a configuration calls a model -> its directory: a path, a name in the Hub's cache, or the packaged model.

    `options`: of `[model]`, which says where the packaged one is kept.

    Raises as `config_to_bases`.
    """
    if path != PREPARED_MODEL:
        return name_to_model_dir(path)
    cache = _cache_of(options)
    if not (cache / SMOLLM2_NAME).exists():
        report(f"preparing {SMOLLM2_NAME} in {cache} (once, about 20 s)")
    return prepare_smollm2(cache, report)


def name_to_model_dir(path: str) -> Path:
    """The directory of a path or of a name in the Hub's cache, once its files are checked.

    Raises as `config_to_bases`.
    """
    name = text_to_hub_name(path)
    try:
        return check_model_dir(model_to_directory(path))
    except ServingError as error:  # a download that was broken off, or of some files only
        raise error if name is None else ServingError(f"{error}: {name.download_command}") from None


def _cache_of(options: ModelOptions) -> Path:
    return Path(os.environ.get("MARFT_CACHE") or options.cache)
