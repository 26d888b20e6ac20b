"""The environment variable that an option names -> the key in it, as it may stand in a header.

Invariant: what no header can carry is refused here, in one line, and the key is not in it.
"""

from __future__ import annotations

import os


def variable_to_key(variable: str) -> str:
    """The key, without white space around it. Raises ValueError where the variable holds none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"environment variable {variable!r} (api_key_env) is not set; it holds the key")
    if not key.isascii() or not key.isprintable():
        raise ValueError(
            f"environment variable {variable!r} (api_key_env) holds no key: one is of printable ASCII characters, and "
            "this has others, such as a line break, an accent or a curved quotation mark; copy it again"
        )
    return key
