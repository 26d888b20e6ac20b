"""The configuration that a run folder notes in bridge.json -> the directories of the base models that it names.

Invariant: what is missing is absent, never guessed; nothing is downloaded, and no directory is looked into.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import model_to_directory
from marft_bridge.config.models import ModelOptions, config_to_paths
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.prepare_model import SMOLLM2_NAME

_BUILT_IN_MODEL = ModelOptions().path  # the name of the model that a package brings


def read_noted_config(folder: Path) -> dict[str, Any]:
    """`train`'s configuration in a run folder's bridge.json, else that of its last command; empty where there is none.

    Anybody may have written it: only that it is a table is known.
    """
    try:
        entry_by_command = json.loads(RunFolder(folder).notes.read_text(encoding="utf-8"))
        configs = {command: entry["config"] for command, entry in entry_by_command.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}
    chosen = configs.get("train") or (list(configs.values()) or [{}])[-1]
    return chosen if isinstance(chosen, dict) else {}


def noted_to_directories(config: Mapping[str, Any]) -> dict[str, Path]:
    """The directory of each base model of a noted configuration: that of `[model]` under "", those of `[models]` by
    node.

    Empty where no command noted its base model.
    """
    table = config.get("model")
    noted = table.get("cache") if isinstance(table, Mapping) else None
    cache = os.environ.get("MARFT_CACHE") or (noted if isinstance(noted, str) else "") or ModelOptions().cache
    return {
        node: Path(cache) / SMOLLM2_NAME if path == _BUILT_IN_MODEL else _directory_of(path)
        for node, path in config_to_paths(config).items()
    }


def _directory_of(model: str) -> Path:
    """The directory of a noted model; the name itself, below which nothing is, for one that is gone from the cache or
    that no file system takes."""
    with suppress(ConfigError, OSError, ValueError):
        return model_to_directory(model)
    return Path(model)
