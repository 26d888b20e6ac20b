"""A text or bytes -> a whole file.

Invariant: a reader sees the old file or the new one, never a part, and only its owner can read it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` by a text as UTF-8, or by bytes; 0600, synced to disk before it takes the name.

    A link of that name is replaced itself; what it leads to stays as it is.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
