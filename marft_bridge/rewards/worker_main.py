"""The inside of a process of `worker_process`: jobs on standard input -> answers, one JSON line each.

Invariants: once the libraries are loaded the kernel holds this process to no network, no children, no signals, no
changes to files and a limited memory; what a library prints reaches nobody; a worker whose owner is gone ends itself.
It does not know what the jobs are about, nor where they come from.
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
    memory_mb: int, readable: list[str], load: Callable[[], object], job_to_told: Callable[[Any], dict[str, Any]]
) -> None:
    """Says "ready", then answers one line with one line until its input ends."""
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable(logging.CRITICAL)
    sys.dont_write_bytecode = True
    try:
        load()
        confine(memory_mb, readable)
    except Exception as error:  # noqa: BLE001 - told to the owner, who makes one line of it
        os.write(out, (json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n").encode())
        return
    with os.fdopen(out, "wb") as answers:
        answers.write(b'{"ready": true}\n')
        answers.flush()
        for line in sys.stdin:
            job = json.loads(line)
            signal.alarm(int(job["limit_s"]) + 1 + _GRACE_S)
            told = json.dumps(_told(job_to_told, job))
            signal.alarm(0)
            answers.write(told.encode() + b"\n")
            answers.flush()


def _told(job_to_told: Callable[[Any], dict[str, Any]], job: Any) -> dict[str, Any]:
    try:
        return job_to_told(job)
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except RecursionError:
        return {"failed": "it is nested too deeply"}


def confine(memory_mb: int, readable: list[str]) -> None:
    """From here on the kernel holds this process. Raises Refusal where it cannot."""
    from marft_bridge.rewards.call_filter import Refusal, filter_calls
    from marft_bridge.rewards.confine import enter_landlock

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(Refusal):  # reading other files would tell nobody anything
        enter_landlock(readable, [])
    filter_calls(alone=True)
