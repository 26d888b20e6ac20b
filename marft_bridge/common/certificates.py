"""SSL_CERT_FILE and SSL_CERT_DIR -> the authorities whose certificates the clients of model servers trust.

They take nothing else from the environment (`trust_env=False`), where a proxy would see keys and texts. Whom to trust
is another question: a server with a certificate of a private authority is reached as by any client of httpx.
Invariants: without the two variables the public authorities count, and no others; what cannot be read is refused.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from pathlib import Path

from marft_bridge.common.errors import ConfigError

_FILE, _FOLDER = "SSL_CERT_FILE", "SSL_CERT_DIR"  # the file counts where both are set, as in httpx


def trusted_authorities() -> ssl.SSLContext:
    """What a client verifies a server by: `verify` of httpx. Raises ConfigError."""
    return _load(os.environ.get(_FILE), os.environ.get(_FOLDER))


@lru_cache(maxsize=4)  # it takes 30 ms, and some clients are made for one request
def _load(file: str | None, folder: str | None) -> ssl.SSLContext:
    """See `trusted_authorities`; the arguments are what the environment says."""
    import httpx

    if not file and folder and not Path(folder).is_dir():  # in which OpenSSL would find nothing, and say so nowhere
        raise ConfigError(f"{_FOLDER}: there is no folder {folder}; name one with certificates, or leave it out")
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        problem = "it has none in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"{_FILE}: cannot read certificates from {file}: {problem}; name a file that has some, or leave it out"
        ) from None
