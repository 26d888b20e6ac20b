"""Where a run's files live: one folder, which is what a run leaves behind.

    bridge.json     the resolved configuration of each command, with versions
    store.duckdb    spans and trajectories (its journal beside it)
    adapters/       <node>/<version>/; version 0 changes nothing
    models/         of other base models that were compared: version 0 of every node, the server's log
    checkpoint/     the trainer's newest state
    metrics.jsonl   one line per update
    advantages/     what the actions of each round were credited with, where train.keep_advantages asks for it
    tensorboard/    the same for TensorBoard, where train.tensorboard asks for it
    vllm.log (vllm-<name>.log of [models.<name>]), server.json, report.json, report.html, report.md
    live.json       what keeps live traffic with its team: salt, key, and the proxy's address while it runs
    learned.json    digests of the tasks that were learned from, which are not held out any more
    promoted/       manifests of what was signed off, and which one counts
    lock            held by the command that works in the folder

Invariants: a folder that holds records is not written into again unless the user says --resume; one command at a time
works in a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically

COLLECT, TRAIN = "collect", "train"
"""The ids of the runs that these two commands make in a folder's store."""


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
    def advantages(self) -> Path:
        """A file per round: see `kept_advantages`."""
        return self.path / "advantages"

    @property
    def tensorboard(self) -> Path:
        """What TensorBoard shows."""
        return self.path / "tensorboard"

    @property
    def other_models(self) -> Path:
        """A folder for each other base model that a comparison served: its version 0 of every node, and its log."""
        return self.path / "models"

    @property
    def server_log(self) -> Path:
        """What the model server printed."""
        return self.path / "vllm.log"

    def server_log_of(self, base: str) -> Path:
        """What the server of `[models.<base>]` printed; of "" that of [model]."""
        return self.path / f"vllm-{base}.log" if base else self.server_log

    @property
    def server(self) -> Path:
        """Addresses and keys of the servers that `marft-bridge serve` runs for this folder."""
        return self.path / "server.json"

    @property
    def live(self) -> Path:
        """What `marft-bridge serve --split` keeps of its live traffic."""
        return self.path / "live.json"

    def create(self) -> None:
        """Makes the folder, readable by its owner only."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def require_store(self, command: str) -> None:
        """Refuses a command that needs collected episodes where there are none."""
        if not self.store.exists():
            raise ConfigError(f"{command}: {self.path} has no store; run `marft-bridge collect` first, or name --run")

    @contextmanager
    def held_by(self, command: str) -> Iterator[None]:
        """Keeps the other commands out of the folder meanwhile; a command that dies lets go of it.

        Raises:
            ConfigError: another command works in the folder; the message names it.
        """
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(handle, 200, 0).decode(errors="replace") or "another command"
                raise ConfigError(
                    f"{command}: {self.path} is in use by {holder}; wait until it ends, or choose another --run folder"
                ) from None
            os.truncate(handle, 0)  # what a killed command left
            os.pwrite(handle, f"`marft-bridge {command}` (process {os.getpid()})".encode(), 0)
            yield
        finally:
            os.close(handle)

    def record_config(self, command: str, config: BridgeConfig) -> None:
        """Adds the resolved configuration of `command` to bridge.json."""
        path = self.path / "bridge.json"
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known[command] = {"version": bridge_version(), "config": config.model_dump(mode="json")}
        write_atomically(path, json.dumps(known, indent=1) + "\n")


def bridge_version() -> str:
    """Of the installed distribution."""
    return version("marft-bridge")
