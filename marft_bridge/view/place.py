"""A path of the command line -> what there is to look at: a store, and the run folder around it.

Invariant: what is not there is None, never guessed; nothing is opened for writing. What the files hold is not known
here, but for where the base model's tokenizer lies, which bridge.json says.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_bridge.errors import ConfigError
from marft_bridge.metrics_lines import read_metrics
from marft_bridge.model_options import ModelOptions, config_to_paths
from marft_bridge.prepare_model import SMOLLM2_NAME
from marft_bridge.run_folder import RunFolder
from trace_store.readers import CATALOG_SUFFIX

_PREPARED = ModelOptions().path  # the name of the model that a package brings


@dataclass(frozen=True, slots=True)
class Place:
    """What is looked at. `run`: the folder that the store belongs to; None for a store, or an export, on its own."""

    store: Path
    run: RunFolder | None

    @property
    def name(self) -> str:
        """What it is called, for people."""
        return str(self.store if self.run is None else self.run.path)

    def config(self) -> dict[str, Any]:
        """The newest configuration that a command wrote down, `train`'s where it did; empty where none did."""
        try:
            path = (self.run.path if self.run is not None else self.store.parent) / "bridge.json"
            written = json.loads(path.read_text(encoding="utf-8"))
            configs = {command: said["config"] for command, said in written.items()}
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return {}
        chosen = configs.get("train") or (list(configs.values()) or [{}])[-1]
        return chosen if isinstance(chosen, dict) else {}

    def setting(self, *keys: str) -> Any:
        """One option of that configuration; None where it is not there."""
        found: Any = self.config()
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def tokenizers(self) -> dict[str, Path]:
        """Where the tokenizers of the base models should be: that of `[model]` under "", of `[models]` by node.

        Empty where no command said which model it was.
        """
        cache = os.environ.get("MARFT_CACHE") or self.setting("model", "cache") or ModelOptions().cache
        return {
            node: (Path(cache) / SMOLLM2_NAME if path == _PREPARED else Path(path)) / "tokenizer.json"
            for node, path in config_to_paths(self.config()).items()
        }

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [] if self.run is None else read_metrics(self.run.metrics)


def path_to_place(path: Path) -> Place:
    """A run folder, a store's file, or what `traces export` wrote. Raises ConfigError where there is nothing."""
    if path.is_dir() and RunFolder(path).store.is_file():
        return Place(RunFolder(path).store, RunFolder(path))
    if path.is_file() and path.suffix != CATALOG_SUFFIX and path == RunFolder(path.parent).store:
        return Place(path, RunFolder(path.parent))
    if path.is_file() or (path.is_dir() and next(path.rglob("*.parquet"), None) is not None):
        return Place(path, None)
    if path.is_dir():
        raise ConfigError(f"view: {path} holds no store; `marft-bridge collect` makes one, or name another run folder")
    raise ConfigError(f"view: there is no {path}; name a run folder or a store")
