"""A path of the command line -> what `view` shows: a store, and the run folder that it belongs to.

Invariant: what is missing is None, never guessed; nothing is opened for writing. Of the run folder's files only
bridge.json is read (the configuration, with the paths of the base models) and metrics.jsonl; of those beside it, only
metrics.jsonl and the store.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder, read_forecast, read_metrics, store_to_run_folder
from marft_bridge.serving.noted_models import noted_to_directories, read_noted_config
from trace_store.errors import StoreError
from trace_store.journal import is_recorded

MAX_NEIGHBOURS = 200


@dataclass(frozen=True, slots=True)
class ViewSource:
    """The store to show. `run`: the run folder that the store belongs to; None for a store, or an export, alone."""

    store: Path
    run: RunFolder | None

    @property
    def name(self) -> str:
        """The path of the run folder, or of the store on its own, for people."""
        return str(self.store if self.run is None else self.run.path)

    def config(self) -> dict[str, Any]:
        """`train`'s configuration from bridge.json, else that of the last command in it; empty where there is none."""
        return read_noted_config(self.run.path if self.run is not None else self.store.parent)

    def setting(self, *keys: str) -> Any:
        """One option of `config()`, by its keys from the outside in; None where it is missing."""
        value: Any = self.config()
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def tokenizer_paths(self) -> dict[str, Path]:
        """The path of each base model's tokenizer.json: that of `[model]` under "", those of `[models]` by node.

        Empty where no command noted its base model.
        """
        directories = noted_to_directories(self.config())
        return {node: directory / "tokenizer.json" for node, directory in directories.items()}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [] if self.run is None else read_metrics(self.run.metrics)

    def forecast(self) -> list[str]:
        """What training was expected to learn from, in lines; empty where nothing was noted."""
        line = None if self.run is None else read_forecast(self.run.metrics)
        lines = [] if line is None else line.get("lines")
        return [str(text) for text in lines] if isinstance(lines, list) else []

    def neighbours(self) -> dict[str, RunFolder]:
        """Run folders beside this one that have metrics, by name: what its curves can be compared with."""
        if self.run is None:
            return {}
        own = self.run.path.resolve()
        with suppress(OSError):
            folders = sorted(path for path in own.parent.iterdir() if path != own and not path.is_symlink())
            runs = {path.name: RunFolder(path) for path in folders[:MAX_NEIGHBOURS]}
            return {name: run for name, run in runs.items() if run.metrics.is_file() and _is_safe(run)}
        return {}


def _is_safe(run: RunFolder) -> bool:
    try:
        run.refuse_unsafe()
    except StoreError:
        return False
    return True


def path_to_source(path: Path) -> ViewSource:
    """A run folder, a store's file, or what `traces export` wrote. Raises ConfigError for anything else."""
    folder = store_to_run_folder(path) or RunFolder(path)
    if is_recorded(folder.store):
        folder.refuse_unsafe()
        return ViewSource(folder.store, folder)
    if is_recorded(path) or (path.is_dir() and next(path.rglob("*.parquet"), None) is not None):
        return ViewSource(path, None)
    if path.is_dir():
        raise ConfigError(f"view: {path} holds no store; `marft-bridge collect` makes one, or name another run folder")
    raise ConfigError(f"view: there is no {path}; name a run folder or a store")
