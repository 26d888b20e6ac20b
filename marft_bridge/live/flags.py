"""The flags of `marft-bridge serve` -> how live traffic is shared out, or that it is not.

Invariant: a flag that would have no effect is refused. Versions and keys are looked up elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from marft_bridge.errors import ConfigError
from marft_bridge.live.split import Split, text_to_split
from marft_bridge.live.teams import NEWEST

DEFAULT_PORT = 8100
DEFAULT_QUIET_S = 60.0
_ONLY_MIRROR = Split(100.0, 0.0)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How live traffic is shared out. `base` and `candidate` as in `teams.text_to_versions`."""

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
    """What was asked for; None where neither --split nor --mirror is there.

    Raises:
        ConfigError: flags that need one of them, or a split that is none.
    """
    if split is None and not mirror:
        given = {"--base": base, "--candidate": candidate, "--port": port, "--key-env": key_env}
        wrong = [name for name, value in (given | {"--quiet-seconds": quiet_s}).items() if value is not None]
        if wrong:
            raise ConfigError(f"serve: {', '.join(wrong)} without --split or --mirror; leave it out, or split traffic")
        return None
    return LiveOptions(
        split=text_to_split(split) if split is not None else _ONLY_MIRROR,
        base=base,
        candidate=candidate or NEWEST,
        mirror=mirror,
        port=DEFAULT_PORT if port is None else port,
        key_env=key_env,
        quiet_s=DEFAULT_QUIET_S if quiet_s is None else quiet_s,
    )
