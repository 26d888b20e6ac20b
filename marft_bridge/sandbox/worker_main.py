"""The main loop of a process of `worker_process`: jobs on standard input -> replies, one JSON line each.

Invariants: once the libraries are loaded the kernel denies this process network, children, signals and changes to
files, and limits its memory; what a library prints is discarded; a worker whose owner is gone ends itself.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_GRACE_S = 5  # after its limit a worker whose owner is gone ends itself


def answer_jobs(
    memory_mb: int,
    readable: list[str],
    load: Callable[[], object],
    job_to_reply: Callable[[Any], dict[str, Any]],
) -> None:
    """Loads and confines, writes a "ready" line, then answers each line with one line until the input ends."""
    output_fd = os.dup(1)
    devnull_fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull_fd, 1)
    os.dup2(devnull_fd, 2)
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    try:
        load()
        confine(memory_mb, readable)
    except Exception as error:  # noqa: BLE001 - told to the owner, who makes one line of it
        os.write(output_fd, (json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n").encode())
        return
    with os.fdopen(output_fd, "wb") as replies:
        replies.write(b'{"ready": true}\n')
        replies.flush()
        for line in sys.stdin:
            job = json.loads(line)
            signal.alarm(int(job["limit_s"]) + 1 + _GRACE_S)
            reply = json.dumps(_answer_job(job_to_reply, job))
            signal.alarm(0)
            replies.write(reply.encode() + b"\n")
            replies.flush()


def _answer_job(job_to_reply: Callable[[Any], dict[str, Any]], job: Any) -> dict[str, Any]:
    try:
        return job_to_reply(job)
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except RecursionError:
        return {"failed": "it is nested too deeply"}


def confine(memory_mb: int, readable: list[str]) -> None:
    """From here on the kernel confines this process. Raises Refusal where it cannot."""
    from marft_bridge.sandbox.call_filter import Refusal, filter_calls
    from marft_bridge.sandbox.confine import enter_landlock

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(Refusal):  # not essential: whatever a job reads cannot leave the process
        enter_landlock(readable, [])
    filter_calls(alone=True)
