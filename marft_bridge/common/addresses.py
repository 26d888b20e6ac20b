"""The base URL of a model that a configuration names -> a refusal where it would send text or a key astray.

Invariant: nothing goes to another machine unless the configuration allows it, and a key only over TLS.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit


def address_to_url(address: str) -> SplitResult:
    """The parts of a server's address. Raises ValueError, one line, for what is none, as a port that is no number."""
    problem = f"{address!r} is not an address like http://127.0.0.1:8000"
    try:
        url = urlsplit(address)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    if url.scheme not in ("http", "https") or not host or not address.isprintable() or " " in address:
        raise ValueError(problem)
    return url


def refuse_address(base_url: str, *, remote: bool, key: bool, seen: str) -> None:
    """Refuses an address that is none, that of another machine unless `remote`, and a key over plain http.

    Args:
        key: whether a key is sent along.
        seen: what another machine would see, as in "the answers".

    Raises:
        ValueError: names the option.
    """
    try:
        url = address_to_url(base_url)
    except ValueError as error:
        raise ValueError(f"base_url: {error}") from None
    host = url.hostname or ""
    if "@" in url.netloc or url.query or url.fragment:
        raise ValueError("base_url: an address like http://127.0.0.1:8000/v1 without a user is needed")
    is_local = host == "localhost"
    with suppress(ValueError):  # a name, not an address
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not is_local and not remote:
        raise ValueError(f"base_url: {host} is another machine, which would see {seen}; allow_remote lets it")
    if not is_local and key and url.scheme != "https":
        raise ValueError("base_url: a key does not go to another machine over http; use https")
