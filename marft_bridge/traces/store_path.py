"""The arguments of a command that looks into a run -> its folder, or the path of its store.

Invariant: flags that name two stores are refused. Whether the store exists is checked where it is opened.
"""

from __future__ import annotations

from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder

DEFAULT_CONFIG = Path("bridge.toml")


def flags_to_store(config: Path | None, run: str | None, store: Path | None, *, argument: Path | None = None) -> Path:
    """`argument` is a run folder or the file itself; `--store` is the file, `--run` the folder that holds it; otherwise
    a bridge.toml names the folder.

    Raises ConfigError for `--store` together with another flag, and where the bridge.toml cannot be read; StoreError
    for a folder that is not safe to work in.
    """
    if argument is not None:
        if store is not None:
            raise ConfigError(f"traces: {argument} and --store both say which store; leave one out")
        one_run(argument, run, config, command="traces")
        return argument if argument.is_file() else _safe_store(RunFolder(argument))
    if store is not None:
        if run is not None or config is not None:
            second_flag = "--run" if run is not None else "--config"
            raise ConfigError(f"traces: --store and {second_flag} both say which store; leave one out")
        return store
    if run is not None:
        return _safe_store(RunFolder(Path(run)))
    if config is None and not DEFAULT_CONFIG.exists():
        raise ConfigError(f"traces: there is no {DEFAULT_CONFIG} here; name a store with --store, --run or --config")
    from marft_bridge.config.bridge import toml_to_config  # a store that is named needs no options, nor the trainer's

    return _safe_store(RunFolder(toml_to_config(config or DEFAULT_CONFIG).run_folder))


def one_run(argument: Path | None, run: str | None, config: Path | None, *, command: str) -> str | None:
    """The run folder that an argument or `--run` names; None where neither does.

    Raises ConfigError where the argument stands beside a flag that names a folder too.
    """
    if argument is None:
        return run
    if run is not None or config is not None:
        flag = "--run" if run is not None else "--config"
        raise ConfigError(f"{command}: {argument} and {flag} both say which run; leave one out")
    return str(argument)


def _safe_store(folder: RunFolder) -> Path:
    folder.refuse_unsafe()
    return folder.store
