"""A key and a salt -> base or candidate: always the same, and monotone in the candidate's share.

The key's position on [0, 1) is a keyed hash; positions below the candidate's share are the candidate's. So raising the
share from 10 to 20 % moves a tenth of all keys to the candidate and none back, and without the salt nobody can choose a
key for a team. Invariant: salt and API key of a run folder are made once and stay (live.json, 0600), and the
file is held by the proxy as long as it tells of its address.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import held_file, read_held, write_atomically

BASE, CANDIDATE, MIRRORED = "base", "candidate", "candidate (mirror)"
_SHARES = re.compile(r"(\d{1,3}(?:\.\d+)?)/(\d{1,3}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Split:
    """The share of keys that each team answers, in percent; both add up to 100."""

    base: float
    candidate: float

    def __str__(self) -> str:
        return f"{self.base:g}/{self.candidate:g}"


def text_to_split(text: str) -> Split:
    """`90/10`, base first. Raises ConfigError for anything else, or when the two are not 100 together."""
    match = _SHARES.fullmatch(text.strip())
    shares = tuple(map(float, match.groups())) if match else ()
    if len(shares) != 2 or not math.isclose(sum(shares), 100.0):
        raise ConfigError(f"serve: --split {text}: give the shares of base and candidate in percent, such as 90/10")
    return Split(*shares)


def key_to_position(salt: bytes, key: str) -> float:
    """The position of a key on [0, 1): uniform over keys, always the same for one."""
    digest = hashlib.blake2b(key.encode("utf-8", "replace"), key=salt, digest_size=8).digest()
    # The upper 53 of 64 bits: what a float holds exactly, so that the result is below 1.
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def key_to_variant(salt: bytes, key: str, split: Split) -> str:
    """The variant that answers all requests of a key."""
    return CANDIDATE if key_to_position(salt, key) < split.candidate / 100 else BASE


@dataclass(frozen=True, slots=True)
class LiveFile:
    """live.json of a run folder: the salt, the app's API key, and the proxy's address while it runs."""

    path: Path
    salt: bytes = field(repr=False)
    api_key: str = field(repr=False)
    base_url: str | None = None  # ends with /v1

    @contextmanager
    def announced(self, base_url: str) -> Iterator[None]:
        """Other commands find the proxy at this address until the block ends, or this process does.

        A file that was deleted meanwhile, to assign every key anew, or that another proxy has written, stays so.
        """
        with held_file(self.path, replace(self, base_url=base_url)._to_text()) as is_ours:
            try:
                yield
            finally:
                if is_ours():
                    replace(self, base_url=None).save()

    def save(self) -> LiveFile:
        """Writes the file."""
        write_atomically(self.path, self._to_text())
        return self

    def _to_text(self) -> str:
        return json.dumps({"salt": self.salt.hex(), "api_key": self.api_key, "base_url": self.base_url}) + "\n"


def read_live_file(path: Path) -> LiveFile | None:
    """The content of the file; None when there is none.

    Raises:
        ConfigError: it is unreadable; a new salt would move users to the other team, so none is made up.
    """
    try:
        return _text_to_live_file(path, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def read_running_file(path: Path) -> LiveFile | None:
    """The content of the file while the proxy runs that it tells of; else None. Raises as `read_live_file`."""
    try:
        text = read_held(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return None if text is None else _text_to_live_file(path, text)


def _text_to_live_file(path: Path, text: str) -> LiveFile:
    try:
        content: Any = json.loads(text)
        salt, api_key, base_url = bytes.fromhex(content["salt"]), content["api_key"], content["base_url"]
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    return LiveFile(path, salt, api_key, base_url=base_url)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = type(error).__name__
    return ConfigError(f"serve: {path} is unreadable ({reason}); put it back, or delete it and assign every key anew")


def read_or_make_live_file(path: Path) -> LiveFile:
    """The content of the file, made with a fresh salt and key when there is none. Raises as `read_live_file`."""
    live_file = read_live_file(path)
    return live_file or LiveFile(path, secrets.token_bytes(32), secrets.token_urlsafe(32)).save()
