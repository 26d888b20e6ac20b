"""The flags of a `traces` command -> the path of its store.

Invariant: flags that name two stores are refused. Whether the store exists is checked where it is opened.
"""

from __future__ import annotations

from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder

DEFAULT_CONFIG = Path("bridge.toml")


def flags_to_store(config: Path | None, run: str | None, store: Path | None) -> Path:
    """`--store` is the file itself, `--run` the folder that holds it; otherwise a bridge.toml names the folder.

    Raises ConfigError for `--store` together with another flag, and where the bridge.toml cannot be read; StoreError
    for a folder that is not safe to work in.
    """
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


def _safe_store(folder: RunFolder) -> Path:
    folder.refuse_unsafe()
    return folder.store
