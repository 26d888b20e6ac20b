"""What a command line says of a run -> its configuration, its folder, or the path of its store.

Every command takes the run in the same words: RUN, a folder behind the command; `--config`, a bridge.toml; `--run`, a
folder in place of the configuration's own; and `--store` where only the store is needed. Invariants: words that name
two runs are refused in one line; without any, `bridge.toml` names it. Whether the store exists is checked where it is
opened.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder
from trace_store.journal import is_recorded

if TYPE_CHECKING:
    from marft_bridge.config.bridge import BridgeConfig

DEFAULT_CONFIG = Path("bridge.toml")
STORE_SUFFIX = ".duckdb"
_SEARCHED_DEPTH, _SEARCHED_FOLDERS = 3, 2000  # for run folders to complete a word with


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The words of one command line that name a run; None for those that were not given."""

    command: str
    argument: Path | None = None  # RUN
    config: Path | None = None
    run: str | None = None  # overrides the configuration's folder
    store: Path | None = None

    def to_config(self, overrides: Mapping[str, Any] | None = None) -> BridgeConfig:
        """The configuration of the run, with `overrides` (dotted keys; None: not given).

        RUN alone has that of the bridge.toml here, if RUN is its folder, else what RUN itself notes.

        Raises:
            ConfigError: two runs are named, there is no configuration, or it is not valid.
        """
        from marft_bridge.config.bridge import notes_to_config, toml_to_config

        self._refuse_file()
        self._refuse_two_runs([self._place("RUN"), self._place("--run")])
        changes = {**(overrides or {}), "run": self.run}
        if self.config is None and self.argument is not None and not self._is_default_config_of_argument():
            return notes_to_config(self.argument, self.command, changes)
        config = toml_to_config(self._config_path(), changes)
        self._refuse_two_runs([self._place("RUN"), (config.run_folder, f"the run folder of {self._config_path()}")])
        return config

    def has_options(self) -> bool:
        """Whether anything says with which options the run works: only RUN may stand for a folder that notes none."""
        if self.config is not None or self.argument is None:
            return True
        return self._is_default_config_of_argument() or RunFolder(self.argument).notes.exists()

    def to_config_if_any(self) -> BridgeConfig | None:
        """As `to_config`; None where RUN is a store or an export, or a folder without options. Raises ConfigError."""
        if self.argument is not None and not (self.argument.is_dir() and self.has_options()):
            return None
        if self.argument is None and self.config is None and not DEFAULT_CONFIG.exists():
            return None  # --run alone names a folder
        return self.to_config()

    def to_folder(self) -> Path:
        """What RUN, `--run` or the configuration names: a run folder, or a file in its place. Raises ConfigError."""
        places = [self._place("RUN"), self._place("--run")]
        if self.config is not None and self.run is None:
            places.append((self._folder_of_config(), f"the run folder of {self.config}"))
        self._refuse_two_runs(places)
        named = [place[0] for place in places if place is not None]
        return named[0] if named else self._folder_of_config(may_be_store=True)

    def to_store(self) -> Path:
        """The store, which RUN or `--store` may name itself.

        Raises:
            ConfigError: two stores are named, or none.
            StoreError: the run folder is not safe to work in.
        """
        if self.store is None:
            return _folder_to_store(self.to_folder())
        if self.argument is not None or self.run is not None or self.config is not None:
            title = next(str(word) for word in (self.argument, self.run, self.config) if word is not None)
            self._refuse_two_runs([(self.store, f"--store {self.store}"), (_folder_to_store(self.to_folder()), title)])
        return self.store

    def _place(self, word: str) -> tuple[Path, str] | None:
        """A path that is named, and how a message calls it; None where it is not."""
        if word == "RUN":
            return None if self.argument is None else (self.argument, str(self.argument))
        return None if self.run is None else (Path(self.run), f"--run {self.run}")

    def _refuse_two_runs(self, places: list[tuple[Path, str] | None]) -> None:
        (path, title), *rest = [place for place in places if place is not None] or [(Path(), "")]
        for second_path, second_title in rest:
            if os.path.realpath(path) != os.path.realpath(second_path):
                remedy = "leave one out"
                if second_title.startswith("the run folder of"):
                    second_title = f"{second_path}, {second_title},"
                    remedy = f"leave one out, or say --run {shlex.quote(str(path))} to use these options there"
                raise ConfigError(f"{self.command}: {title} and {second_title} are two runs; {remedy}")

    def _refuse_file(self) -> None:
        for place in (self._place("RUN"), self._place("--run")):
            if place is not None and place[0].is_file():
                raise ConfigError(f"{self.command}: {place[0]} is a file; name the run folder that it lies in")

    def _is_default_config_of_argument(self) -> bool:
        if not DEFAULT_CONFIG.exists():
            return False
        from marft_bridge.config.bridge import toml_to_run_folder

        folder = toml_to_run_folder(DEFAULT_CONFIG)
        return folder is not None and os.path.realpath(folder) == os.path.realpath(self.argument or "")

    def _config_path(self, *, may_be_store: bool = False) -> Path:
        if self.config is None and not DEFAULT_CONFIG.exists():
            stores = sorted(Path().glob(f"*{STORE_SUFFIX}")) if may_be_store else []
            raise ConfigError(
                f"{self.command}: there is no {DEFAULT_CONFIG} here; name a run folder, or a configuration with "
                f"--config{f', or the store {stores[0]}' if stores else ''}"
            )
        return self.config or DEFAULT_CONFIG

    def _folder_of_config(self, *, may_be_store: bool = False) -> Path:
        path = self._config_path(may_be_store=may_be_store)
        from marft_bridge.config.bridge import toml_to_config  # a folder that is named needs no options

        return toml_to_config(path).run_folder


def _folder_to_store(path: Path) -> Path:
    if path.suffix == STORE_SUFFIX or is_recorded(
        path
    ):  # of a store that is still to be made there is only its journal
        return path
    RunFolder(path).refuse_unsafe()
    return RunFolder(path).store


def run_folders_below(incomplete: str) -> Iterator[str]:
    """Run folders whose path begins with a word that is not typed to its end: what a shell completes it with."""
    typed_folder = incomplete[: incomplete.rfind("/") + 1]  # as it was typed: the shell replaces the whole word
    searched = [(typed_folder, 1)]
    for count, (prefix, depth) in enumerate(searched):
        if count >= _SEARCHED_FOLDERS:
            return
        try:
            names = sorted(entry.name for entry in os.scandir(prefix or ".") if entry.is_dir(follow_symlinks=False))
        except OSError:
            continue
        for name in names:
            path = prefix + name
            if not path.startswith(incomplete) or name.startswith("."):
                continue
            run = RunFolder(Path(path))
            if any(own_path.exists() for own_path in (run.notes, run.store, run.journal)):
                yield path
            elif depth < _SEARCHED_DEPTH:
                searched.append((f"{path}/", depth + 1))
