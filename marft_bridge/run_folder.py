"""Where a run's files live: one folder, which is what a run leaves behind.

    bridge.json     the resolved configuration of each command, with versions
    store.duckdb    spans and trajectories (its journal beside it)
    adapters/       <node>/<version>/; version 0 changes nothing
    checkpoint/     the trainer's newest state
    metrics.jsonl   one line per update
    vllm.log, server.json, report.json, report.html

Invariant: a folder that holds records is not written into again unless the user says --resume.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

    @property
    def store(self) -> Path:
        """The DuckDB file."""
        return self.path / "store.duckdb"

    @property
    def journal(self) -> Path:
        """Where recorders write what the store takes in."""
        return self.path / "store.duckdb.journal"

    @property
    def adapters(self) -> Path:
        """Published adapters."""
        return self.path / "adapters"

    @property
    def checkpoint(self) -> Path:
        """The trainer's newest state."""
        return self.path / "checkpoint"

    @property
    def metrics(self) -> Path:
        """One JSON line per update."""
        return self.path / "metrics.jsonl"

    @property
    def server_log(self) -> Path:
        """What the model server printed."""
        return self.path / "vllm.log"

    @property
    def server(self) -> Path:
        """Address and key of the server that `marft-bridge serve` runs for this folder."""
        return self.path / "server.json"

    def create(self) -> None:
        """Makes the folder, readable by its owner only."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def require_store(self, command: str) -> None:
        """Refuses a command that needs collected episodes where there are none."""
        if not self.store.exists():
            raise ConfigError(f"{command}: {self.path} has no store; run `marft-bridge collect` first, or name --run")

    def record_config(self, command: str, config: BridgeConfig) -> None:
        """Adds the resolved configuration of `command` to bridge.json."""
        path = self.path / "bridge.json"
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known[command] = {"version": bridge_version(), "config": config.model_dump(mode="json")}
        write_atomically(path, json.dumps(known, indent=1) + "\n")


def bridge_version() -> str:
    """Of the installed distribution."""
    return version("marft-bridge")
