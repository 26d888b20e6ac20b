"""Another process that has a store open, for tests of who may open one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from trace_store.store import TraceStore
with TraceStore.open(Path(sys.argv[1]), read_only=sys.argv[2] == "reads"):
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(path: Path, does: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the store open for as long as the block, to read or to write."""
    command = [sys.executable, "-c", HOLDER, str(path), does]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"open\n"
        yield holder
        holder.stdin.close()
