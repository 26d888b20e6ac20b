"""The loggers of a training run: lines of metrics.jsonl -> the figures of every step, to each logger once.

metrics.jsonl is the record and loggers follow it. loggers/state.json has each one's run and the last step that it was
given, so that a resumed training goes on in the same run, and a logger that failed, or is new, gets what it lacks.
Invariants: a logger is told of a step after its checkpoint, and of one that it has only where a kill came between the
two; whatever a logger raises, training goes on, and one line says that it is left out; packages are looked for before
anything is started.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import is_installed
from marft_bridge.common.files import write_atomically
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.loggers import AnyLoggerOptions
from marft_bridge.runs.run_folder import RunFolder, bridge_version
from marft_bridge.training.loggers.interface import LoggedRun, Logger
from marft_bridge.training.loggers.mlflow import open_mlflow
from marft_bridge.training.loggers.tensorboard import open_tensorboard
from marft_bridge.training.loggers.trackio import open_trackio
from marft_bridge.training.loggers.wandb import open_wandb
from trace_store.files import make_folder


class _Kind(NamedTuple):
    open: Callable[[Any, LoggedRun], Logger]
    install: str  # what pip is given
    modules: tuple[str, ...]


_KINDS = {
    "tensorboard": _Kind(open_tensorboard, "'marft-bridge[tensorboard]'", ("tensorboard",)),
    "wandb": _Kind(open_wandb, "'marft-bridge[wandb]'", ("wandb",)),
    "mlflow": _Kind(open_mlflow, "'marft-bridge[mlflow]'", ("mlflow",)),
    "trackio": _Kind(open_trackio, "'marft-bridge[trackio]'", ("trackio",)),
}
_FILE_STORE_MODULES = ("sqlalchemy", "alembic")  # of MLflow, where no server is named


def require_loggers(loggers: Sequence[AnyLoggerOptions]) -> None:
    """Raises ConfigError for a logger whose package is not installed. Cheap: imports nothing."""
    for options in loggers:
        kind = _KINDS[options.name]
        keeps_file = options.name == "mlflow" and options.tracking_uri is None
        for module in (*kind.modules, *(_FILE_STORE_MODULES if keeps_file else ())):
            if not is_installed(module):
                raise ConfigError(
                    f"train.loggers: {options.name} needs {module}: pip install {kind.install}, or leave it out"
                )


class RunLoggers:
    """The loggers of one run that have not failed."""

    def __init__(self, state: _State, loggers: dict[str, Logger], say: Callable[[str], None]) -> None:
        self._state, self._loggers, self._say = state, loggers, say

    def log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Tells each logger of the lines that it does not have yet."""
        for name, logger in list(self._loggers.items()):
            for line in lines:
                if line["round"] > self._state.last_step(name) and not self._log(name, logger, line):
                    break

    def _log(self, name: str, logger: Logger, line: Mapping[str, Any]) -> bool:
        try:
            logger.log(line["round"], line_to_scalars(line))
            self._state.note_step(name, line["round"])
        except Exception as error:  # noqa: BLE001 - whatever a library raises, training is worth more
            del self._loggers[name]
            _say_failed(name, error, self._say)
            return False
        return True

    def close(self) -> None:
        """Ends all of them."""
        for name, logger in self._loggers.items():
            try:
                logger.close()
            except Exception as error:  # noqa: BLE001 - as above
                _say_failed(name, error, self._say)


@contextmanager
def open_loggers(
    config: BridgeConfig, folder: RunFolder, is_resumed: bool, say: Callable[[str], None]
) -> Iterator[RunLoggers]:
    """The loggers of `train.loggers`, until the block ends; those that cannot be opened are said and left out.

    Args:
        is_resumed: whether training goes on from a checkpoint; else each logger begins a new run.
    """
    state = _State(folder, is_resumed)
    loggers: dict[str, Logger] = {}
    for options in config.train.loggers:
        name = options.name
        own_folder = folder.tensorboard if name == "tensorboard" else folder.loggers / name
        try:
            for path in (own_folder.parent, own_folder):  # 0700 each
                make_folder(path)
            run = LoggedRun(config.name, state.run_id(name), folder=own_folder, options=_training_options(config))
            loggers[name] = _KINDS[name].open(options, run)
        except Exception as error:  # noqa: BLE001 - as above
            _say_failed(name, error, say)
    opened = RunLoggers(state, loggers, say)
    try:
        yield opened
    finally:
        opened.close()


def _training_options(config: BridgeConfig) -> dict[str, Any]:
    """What a logger is told of the configuration: how it is trained, and no path."""
    content = config.recorded()
    train = {name: value for name, value in content["train"].items() if name not in ("loggers", "traces")}
    shown = {"nodes": content["graph"]["nodes"], "seed": content["seed"], "sampling": content["sampling"]}
    return {"marft_bridge": bridge_version(), **shown, "train": train}


def _say_failed(name: str, error: Exception, say: Callable[[str], None]) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    say(f"logger {name} failed and is left out, training goes on ({reason}); --resume logs what it lacks")


def line_to_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Nested figures -> name -> number, as `agents/reasoner/approx_kl`.

    None, texts and lists are left out: what was not measured has no point, rather than one at 0. True and False are 1
    and 0.
    """
    return dict(_scalars(line, ""))


def _scalars(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)


class _State:
    """loggers/state.json: logger -> its run, and the last step that it was told of."""

    def __init__(self, folder: RunFolder, is_resumed: bool) -> None:
        self._folder = folder.loggers
        self._path = folder.loggers / "state.json"
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            noted = {name: (str(entry["run"]), int(entry["last_step"])) for name, entry in content.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none yet, or nothing that can be used
            noted = {}
        self._runs = noted if is_resumed else {}  # steps of a training that begins again are none of the old run's

    def run_id(self, name: str) -> str:
        """The run of a logger, made now where it has none."""
        if name not in self._runs:
            self._runs[name] = (uuid.uuid4().hex[:8], -1)
            self._write()
        return self._runs[name][0]

    def last_step(self, name: str) -> int:
        """The last step that a logger was told of; -1 before the first."""
        return self._runs[name][1]

    def note_step(self, name: str, step: int) -> None:
        """Notes that a logger was told of a step."""
        self._runs[name] = (self._runs[name][0], step)
        self._write()

    def _write(self) -> None:
        make_folder(self._folder)
        content = {name: {"run": run_id, "last_step": step} for name, (run_id, step) in self._runs.items()}
        write_atomically(self._path, json.dumps(content, indent=1) + "\n")
