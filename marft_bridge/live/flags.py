"""The flags of `marft-bridge serve` -> `LiveOptions`, or None where traffic is not split.

Invariant: a flag that would have no effect is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.compare import BEST
from marft_bridge.live.split import Split, text_to_split

DEFAULT_PORT = 8100
DEFAULT_QUIET_S = 60.0
_ALL_TO_BASE = Split(100.0, 0.0)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How live traffic is split. `base` and `candidate` as in `teams.text_to_versions`."""

    split: Split
    base: str | None  # None: what was promoted, or else version 0
    candidate: str
    mirror: bool
    port: int
    key_env: str | None
    quiet_s: float


def flags_to_live(
    split: str | None,
    base: str | None,
    candidate: str | None,
    mirror: bool,
    port: int | None,
    key_env: str | None,
    quiet_s: float | None,
) -> LiveOptions | None:
    """The options of the flags; None where neither --split nor --mirror is given.

    Raises:
        ConfigError: flags that need one of them, or a malformed split.
    """
    if split is None and not mirror:
        live_flags = {"--base": base, "--candidate": candidate, "--port": port, "--key-env": key_env}
        stray_flags = [name for name, value in (live_flags | {"--quiet-seconds": quiet_s}).items() if value is not None]
        if stray_flags:
            raise ConfigError(
                f"serve: {', '.join(stray_flags)} without --split or --mirror; leave it out, or split traffic"
            )
        return None
    return LiveOptions(
        split=text_to_split(split) if split is not None else _ALL_TO_BASE,
        base=base,
        candidate=candidate or BEST,
        mirror=mirror,
        port=DEFAULT_PORT if port is None else port,
        key_env=key_env,
        quiet_s=DEFAULT_QUIET_S if quiet_s is None else quiet_s,
    )
