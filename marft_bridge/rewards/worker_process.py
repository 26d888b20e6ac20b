"""Jobs of JSON -> answers of JSON, from processes of our own that may hang, die or be killed at any moment.

`worker_main` is their inside. Invariants: a job that takes too long costs its process and nothing else; a process is
used by one thread at a time, started when it is first needed, and replaced after it failed. It does not know what the
jobs are about.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from marft_bridge.errors import GraphError

_START_S = 120.0  # loading large libraries from a cold disk
_MEMORY_MB = 2_048  # address space of a worker, of which the libraries take about a third


class Unanswered(Exception):  # noqa: N818 - of the job, not of the program
    """A job got no answer; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the processes of a pool do."""

    module: str  # whose `main(memory_mb, readable)` they run
    undone: str  # how a reason begins: "an expression could not be compared"
    unsafe: str  # how the error begins when no process can be started: "expressions cannot be compared safely here"


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        start = f"import sys; sys.path[:] = sys.argv[2:]; from {work.module} import main; "
        paths = [os.path.realpath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start + "main(int(sys.argv[1]), sys.argv[2:])", str(_MEMORY_MB), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._pending = b""
        try:
            told = self._line(_START_S)
        except Unanswered as problem:
            told = {"refused": str(problem)}
        if "ready" not in told:
            self.close()
            raise GraphError(f"{work.unsafe}: {told.get('refused')}")

    def ask(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**job, "limit_s": limit_s}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unanswered(f"{self._work.undone}: the worker was gone") from None
        told = self._line(limit_s)
        if "failed" in told:
            raise Unanswered(f"{self._work.undone}: {told['failed']}")
        return told

    def _line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, pipe = time.monotonic() + limit_s, self._process.stdout.fileno()
        with selectors.DefaultSelector() as readable:
            readable.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not readable.select(max(deadline - time.monotonic(), 0)):
                    raise Unanswered(f"{self._work.undone} in {limit_s:g} s")
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    raise Unanswered(f"{self._work.undone}: the worker died of it")
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class WorkerPool:
    """At most so many workers, each started when it is first needed and replaced after it failed."""

    def __init__(self, work: Work, most: int) -> None:
        self._work, self._most = work, most
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(most):
            self._places.put(None)

    def ask(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """What a worker answers. Blocks; safe in any thread. Starting a worker is not in the limit.

        Raises:
            Unanswered: not within time and memory; the message is the reason.
            GraphError: no worker can be started, or the kernel does not hold it.
        """
        worker = self._places.get()
        try:
            worker = worker or _Worker(self._work)
            return worker.ask(job, limit_s)
        except BaseException:
            if worker is not None:
                worker.close()  # it may still be at it, or have no memory left
                worker = None
            raise
        finally:
            self._places.put(worker)

    def close(self) -> None:
        """Ends the processes; the next job starts new ones."""
        taken = [self._places.get() for _ in range(self._most)]
        for worker in taken:
            if worker is not None:
                worker.close()
            self._places.put(None)
