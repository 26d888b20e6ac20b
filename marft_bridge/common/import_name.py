"""A name in the configuration -> the Python object that it means.

Invariant: whatever is wrong with it is a `GraphError` of one line that names the configuration key.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.common.errors import GraphError
from trainers.common.import_name import load_object


def load_name(name: str, key: str) -> Any:
    """The object called `name`; `key` is the configuration key that names it, for the message.

    Raises:
        GraphError: the name has another form, does not import, or the module has no such attribute.
    """
    try:
        return load_object(name)
    except ValueError as error:
        raise GraphError(f"{key}: {error}") from error.__cause__
