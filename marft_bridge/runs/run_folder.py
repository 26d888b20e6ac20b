"""A run's files: one folder, which is all that a run leaves behind.

    bridge.json     the configuration of each command, as it was given and with all defaults, with versions
    store.duckdb    spans and trajectories (its journal beside it)
    adapters/       <node>/<version>/; version 0 changes nothing
    models/         a folder for each other base model of a comparison: version 0 of every node, the server's log
    checkpoint/     the trainer's newest state
    metrics.jsonl   one line per update, behind a line with what training was expected to learn from
    best.json       the version that training names, with its evidence
    advantages/     the advantages of each round's actions, where train.keep_advantages is set
    tensorboard/    the metrics as TensorBoard reads them, where train.loggers names it
    loggers/        those of the other loggers, and what each was told of
    vllm.log (vllm-<name>.log of [models.<name>]), live-vllm.log of the server behind live traffic, learner-<number>.log
                    of further learners
    server.json, report.json, report.html, report.md
    devices.json    who has which card while a command runs; devices-serve.json, devices-live.json: of `serve`
    live.json       the salt and key that assign live traffic to its team, and the proxy's address while it runs
    distilling/     episodes while `distil` tries them, deleted by its end
    learned.json    digests of the tasks that were learned from, which can be held out no more
    promoted/       manifests of the promoted versions, and which one counts
    lock            held by the command that works in the folder; serve.lock and live.lock by `serve`, without and with
                    --split, which other commands work beside

Invariants: a folder that holds records is not written into again unless the user says --resume; one command at a time
works in a folder; no command works in one through which others could lead it elsewhere (`refuse_unsafe`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import write_atomically
from trace_store.files import locked_file, make_folder, open_to_read, refuse_unsafe_folder
from trace_store.journal import is_recorded

if TYPE_CHECKING:
    from marft_bridge.config.bridge import BridgeConfig

COLLECT, TRAIN, EVALUATE, MEASURE = "collect", "train", "evaluate", "measure"
"""The ids of the runs that `collect` and `train` make in a folder's store; nothing is learned from the last two."""
DISTIL = "distil"
"""The command of the runs that hold what a team said as one node's episodes; `train` imitates them."""
DISTILLED_FROM = "distilled_from"
"""The tag of these episodes: the id of the team's episode that each tells."""
FORECAST = "forecast"
"""The phase of the line of metrics.jsonl that is of no update."""

OWN_NAMES = (
    *("*.json", "store.duckdb*", "adapters", "models", "checkpoint", "metrics.jsonl", "advantages", "tensorboard"),
    *("loggers/*.json", "*.log", "report.*", "promoted", "judge", "trees", "distilling"),
    *("lock", "serve.lock", "live.lock"),
)
"""Patterns of the names that commands make in a folder; what else lies in it is the user's."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

    @property
    def notes(self) -> Path:
        """What each command was given; see `config.bridge.notes_to_config`."""
        return self.path / "bridge.json"

    @property
    def store(self) -> Path:
        """The DuckDB file."""
        return self.path / "store.duckdb"

    @property
    def journal(self) -> Path:
        """The folder of the journal, where recorders write and from where the store takes records in."""
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
    def best(self) -> Path:
        """The version that training names: see `runs.named_version`."""
        return self.path / "best.json"

    @property
    def advantages(self) -> Path:
        """A file per round: see `training.advantage_log`."""
        return self.path / "advantages"

    @property
    def trees(self) -> Path:
        """A file per round with forks: see `training.planned_forks`."""
        return self.path / "trees"

    @property
    def scratch(self) -> Path:
        """A run folder for what `distil` tries."""
        return self.path / "distilling"

    @property
    def tensorboard(self) -> Path:
        """The folder for `tensorboard --logdir`."""
        return self.path / "tensorboard"

    @property
    def loggers(self) -> Path:
        """The files of the other loggers: see `training.loggers`."""
        return self.path / "loggers"

    @property
    def other_models(self) -> Path:
        """A folder for each other base model that a comparison served: its version 0 of every node, and its log."""
        return self.path / "models"

    @property
    def server_log(self) -> Path:
        """The output of the model server."""
        return self.path / "vllm.log"

    def server_log_of(self, base: str) -> Path:
        """The output of the server of `[models.<base>]`; of that of [model] for ""."""
        return self.path / f"vllm-{base}.log" if base else self.server_log

    @property
    def live_server_log(self) -> Path:
        """The output of the server behind live traffic, beside which other commands start their own."""
        return self.path / "live-vllm.log"

    def learner_log(self, rank: int) -> Path:
        """What a learner beside the first one said, from 1; see `training.child_learners`."""
        return self.path / f"learner-{rank}.log"

    @property
    def server(self) -> Path:
        """Addresses and keys of the servers that `marft-bridge serve` runs for this folder."""
        return self.path / "server.json"

    @property
    def live(self) -> Path:
        """The state of `marft-bridge serve --split`: salt, key and address."""
        return self.path / "live.json"

    def devices_note(self, whose: str) -> Path:
        """Which cards the command has that runs in the folder: see `runs.device_lines`."""
        return self.path / (f"devices-{whose}.json" if whose else "devices.json")

    def create(self) -> None:
        """Makes the folder, readable by its owner only, or checks the one that is there: see `refuse_unsafe`."""
        make_folder(self.path.resolve())  # it may be reached by a link, which its user made
        self.refuse_unsafe()

    def refuse_unsafe(self) -> None:
        """Refuses a folder in which others may write, or with a link, a FIFO or a device under a name of ours.

        Raises StoreError, which names the file. A folder that is missing is as it should be.
        """
        refuse_unsafe_folder(self.path, OWN_NAMES)

    def require_store(self, command: str) -> None:
        """Refuses a command that needs collected episodes where there are none. Raises ConfigError."""
        if not is_recorded(self.store):
            raise ConfigError(f"{command}: {self.path} has no store; run `marft-bridge collect` first, or name --run")

    @contextmanager
    def lock_for(self, command: str, *, name: str = "lock") -> Iterator[None]:
        """Keeps other commands out of the folder until the block ends; a process that dies loses its lock.

        Args:
            name: of the lock; another than the usual one keeps out only who takes it too.

        Raises:
            ConfigError: another command works in the folder; the message names it.
            StoreError: the folder is not safe to work in, see `refuse_unsafe`.
        """
        self.refuse_unsafe()
        path = self.path / name
        with locked_file(path) as handle:
            if handle is None:
                with open_to_read(path) as file:
                    lock_owner = file.read(200).decode(errors="replace") or "another command"
                raise ConfigError(
                    f"{command}: {self.path} is in use by {lock_owner}; wait until it ends, or choose another --run "
                    "folder"
                )
            os.truncate(handle, 0)  # the name of a command that was killed
            os.pwrite(handle, f"`marft-bridge {command}` (process {os.getpid()})".encode(), 0)
            if name == "lock":
                self.devices_note("").unlink(missing_ok=True)  # likewise
            yield

    def record_config(self, command: str, config: BridgeConfig) -> None:
        """Adds the configuration of `command` to bridge.json, as the newest.

        Raises:
            ConfigError: the file cannot be read; what earlier commands were given is not overwritten.
        """
        configs = self._read_notes(command)
        configs.pop(command, None)
        configs[command] = {
            "version": bridge_version(),
            "given": config.model_dump(mode="json", exclude_unset=True),  # some options may not be set to their default
            "config": config.recorded(),
        }
        write_atomically(self.notes, json.dumps(configs, indent=1) + "\n")

    def _read_notes(self, command: str) -> dict[str, Any]:
        try:
            configs: Any = json.loads(self.notes.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error)
        else:
            if isinstance(configs, dict):
                return configs
            problem = f"it holds a {type(configs).__name__} where the commands' options stand"
        raise ConfigError(
            f"{command}: cannot read {self.notes}: {problem}; put it back from a copy, or delete it, which forgets the "
            "options of earlier commands"
        )


def store_to_run_folder(store: Path) -> RunFolder | None:
    """The run folder whose store this is; None for a store of another name, which lies among files of others."""
    folder = RunFolder(store.parent)
    return folder if store == folder.store else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are of updates; none when the file is missing. A torn last line is left out."""
    return [line for line in _read_lines(path) if line.get("phase") != FORECAST]


def read_forecast(path: Path) -> dict[str, Any] | None:
    """The line of metrics.jsonl that says what training was expected to learn from; None where there is none."""
    return next((line for line in _read_lines(path) if line.get("phase") == FORECAST), None)


def write_metrics(path: Path, forecast: Mapping[str, Any] | None, updates: Sequence[Mapping[str, Any]]) -> None:
    """Replaces metrics.jsonl: the forecast, then the updates."""
    lines = [*([] if forecast is None else [forecast]), *updates]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            content = json.loads(line.decode())
        except ValueError:  # torn, also inside a character
            break
        if not isinstance(content, dict):
            break
        lines.append(content)
    return lines


def bridge_version() -> str:
    """The version of the installed distribution."""
    return version("marft-bridge")
