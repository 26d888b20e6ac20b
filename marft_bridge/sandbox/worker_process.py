"""JSON jobs -> JSON replies, from worker processes that may hang, die or be killed at any moment.

`worker_main` is the loop that they run. Invariants: a job that takes too long costs its process and nothing else; a
process is used by one thread at a time, started when it is first needed, and replaced after a failure.
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

from marft_bridge.common.errors import GraphError

_START_S = 120.0  # loading large libraries from a cold disk
_MEMORY_MB = 2_048  # address space of a worker, of which the libraries take about a third


class UnansweredJob(Exception):  # noqa: N818 - of the job, not of the program
    """A job got no reply; the message is the reason."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the processes of a pool run, and how their errors begin."""

    module: str  # whose `main(memory_mb, readable)` they run
    failure_prefix: str  # of the reason why a job got no reply: "an expression could not be compared"
    start_failure_prefix: str  # of the error when no process starts: "expressions cannot be compared safely here"


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        preamble = f"import sys; sys.path[:] = sys.argv[2:]; from {spec.module} import main; "
        paths = [os.path.realpath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", preamble + "main(int(sys.argv[1]), sys.argv[2:])", str(_MEMORY_MB), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._pending = b""
        try:
            reply = self._read_reply(_START_S)
        except UnansweredJob as reason:
            reply = {"refused": str(reason)}
        if "ready" not in reply:
            self.close()
            raise GraphError(f"{spec.start_failure_prefix}: {reply.get('refused')}")

    def run_job(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**job, "limit_s": limit_s}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UnansweredJob(f"{self._spec.failure_prefix}: the worker was gone") from None
        reply = self._read_reply(limit_s)
        if "failed" in reply:
            raise UnansweredJob(f"{self._spec.failure_prefix}: {reply['failed']}")
        return reply

    def _read_reply(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, pipe = time.monotonic() + limit_s, self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise UnansweredJob(f"{self._spec.failure_prefix} in {limit_s:g} s")
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    raise UnansweredJob(f"{self._spec.failure_prefix}: the worker died of it")
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class WorkerPool:
    """At most `max_workers` workers, each started when it is first needed and replaced after a failure."""

    def __init__(self, spec: WorkerSpec, max_workers: int) -> None:
        self._spec, self._max_workers = spec, max_workers
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(max_workers):
            self._slots.put(None)

    def run_job(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply of a worker. Blocks; safe in any thread. The limit does not count the start of a worker.

        Raises:
            UnansweredJob: no reply within time and memory; the message is the reason.
            GraphError: no worker can be started, or the kernel cannot confine it.
        """
        worker = self._slots.get()
        try:
            worker = worker or _Worker(self._spec)
            return worker.run_job(job, limit_s)
        except BaseException:
            if worker is not None:
                worker.close()  # it may still be working, or be out of memory
                worker = None
            raise
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Ends the processes; the next job starts new ones."""
        workers = [self._slots.get() for _ in range(self._max_workers)]
        for worker in workers:
            if worker is not None:
                worker.close()
            self._slots.put(None)
