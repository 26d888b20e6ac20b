"""The base URL of a model that a configuration names -> a refusal where it would send text or a key astray.

Invariant: nothing goes to another machine unless the configuration allows it, and a key only over TLS.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit


def refuse_address(base_url: str, *, remote: bool, key: bool, seen: str) -> None:
    """Refuses an address that is none, that of another machine unless `remote`, and a key over plain http.

    Args:
        key: whether a key is sent along.
        seen: what another machine would see, as in "the answers".

    Raises:
        ValueError: names the option.
    """
    url = urlsplit(base_url)
    host = url.hostname or ""
    if url.scheme not in ("http", "https") or not host or "@" in url.netloc or url.query or url.fragment:
        raise ValueError("base_url: an address like http://127.0.0.1:8000/v1 without a user is needed")
    _ = url.port  # raises ValueError for none of 0 to 65535
    is_local = host == "localhost"
    with suppress(ValueError):  # a name, not an address
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not is_local and not remote:
        raise ValueError(f"base_url: {host} is another machine, which would see {seen}; allow_remote lets it")
    if not is_local and key and url.scheme != "https":
        raise ValueError("base_url: a key does not go to another machine over http; use https")
