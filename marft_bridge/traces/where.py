"""The flags of a `traces` command -> the store that it is about.

Invariant: flags that name two places are refused. Whether the store exists and can be opened is its own affair.
"""

from __future__ import annotations

from pathlib import Path

from marft_bridge.config import toml_to_config
from marft_bridge.errors import ConfigError
from marft_bridge.run_folder import RunFolder

DEFAULT_CONFIG = Path("bridge.toml")


def flags_to_store(config: Path | None, run: str | None, store: Path | None) -> Path:
    """`--store` is the file itself, `--run` the folder that holds it; otherwise a bridge.toml says which folder.

    Raises ConfigError when both are given, and when neither is and the bridge.toml cannot be read.
    """
    if store is not None:
        if run is not None or config is not None:
            other = "--run" if run is not None else "--config"
            raise ConfigError(f"traces: --store and {other} both say which store; leave one out")
        return store
    if run is not None:
        return RunFolder(Path(run)).store
    if config is None and not DEFAULT_CONFIG.exists():
        raise ConfigError(f"traces: there is no {DEFAULT_CONFIG} here; name a store with --store, --run or --config")
    return RunFolder(toml_to_config(config or DEFAULT_CONFIG).run_folder).store
