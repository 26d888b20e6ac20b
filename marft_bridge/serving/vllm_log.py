"""The model server's log -> the phase to show while it starts, and the lines to show when it died.

Invariant: the wording of the log (that of vLLM 0.2x and 0.3x is known here) decides what a person reads, never what the
program does.
"""

from __future__ import annotations

import re
from pathlib import Path

_PHASES = (
    ("non-default args", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "preparing the KV cache"),
    ("Compiling a graph", "compiling"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("init engine (", "opening the port"),
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# "(EngineCore pid=7108) INFO 11-21 15:50:58 [core.py:133] " before a message.
_PREFIX = re.compile(r"^(\(\w[\w-]* pid=\d+\)\s)?((INFO|WARNING|ERROR|DEBUG) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_NOISE = re.compile(
    r"^(\s|$|[█▄▀▐▌]|Loading safetensors checkpoint|Triton is installed|During handling of the above|Route: /)"
)
_TAIL_BYTES = 256 * 1024


def startup_phase(log_text: str) -> str | None:
    """The latest phase that this part of the log mentions; None when it mentions none."""
    position, phase = max((log_text.rfind(mark), phase) for mark, phase in _PHASES)
    return phase if position >= 0 else None


def last_lines(log_path: Path, count: int = 15) -> list[str]:
    """At most `count` last lines without stack frames, progress bars, blank and repeated lines, each cut to 400.

    Only the last 256 KiB are read. A file that is missing or cannot be read gives no lines.
    """
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    messages: dict[str, None] = {}  # an ordered set: the last occurrence decides the order
    for line in _COLOUR.sub("", text).splitlines():
        message = _PREFIX.sub("", line, count=1)
        if not _NOISE.match(message):
            messages.pop(message, None)
            messages[message] = None
    return [message[:400] for message in list(messages)[-count:]]
