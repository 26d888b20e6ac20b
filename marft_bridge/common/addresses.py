"""The address of a model that a configuration names -> a refusal where it would send text or a key astray.

Invariant: to another machine a key goes only over TLS, and text to a hosted model only where the configuration allows
it.
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
    is_local = _is_this_machine(host)
    if not is_local and not remote:
        raise ValueError(f"base_url: {host} is another machine, which would see {seen}; allow_remote lets it")
    if not is_local and key and url.scheme != "https":
        raise ValueError("base_url: a key does not go to another machine over http; use https")


def refuse_server_address(address: str, *, key: bool) -> None:
    """Refuses the address of a model server that is none, or to which a key would go over plain http.

    Without a key any address is right: servers in a cluster's own network are asked over http.

    Args:
        key: whether a key is sent along.

    Raises:
        ValueError: one line, with the ways on.
    """
    url = address_to_url(address)
    if "@" in url.netloc:
        raise ValueError(f"{url.scheme}://…@{url.hostname}: no user or password in an address; name a key's variable")
    host = url.hostname or ""
    if key and url.scheme != "https" and not _is_this_machine(host):
        port = url.port or 80
        raise ValueError(
            f"{address}: a key does not go to another machine over http. Give the server a certificate (vLLM's "
            f"--ssl-keyfile and --ssl-certfile) and its address with https; or go through a tunnel, as `ssh -N -L "
            f"{port}:127.0.0.1:{port} {host}`, with http://127.0.0.1:{port}; or, where nobody else reaches that "
            "network, have the server ask for no key, and leave out api_key_env"
        )


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):  # a name, not an address
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return False
