"""Pairs of mathematical expressions on standard input -> whether they are equal, one JSON line each.

Started by `math` as a process of its own, which may be killed at any moment: sympy can need for ever, and all memory,
for a short expression, and the signals by which math-verify stops itself work in a main thread only. Invariants: an
expression is read by a LaTeX parser and never evaluated as Python; once the libraries are loaded the kernel holds this
process to no network, no children, no signals, no changes to files and a limited memory. It does not know where the
expressions come from.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

_GRACE_S = 5  # after its limit a worker whose owner is gone ends itself


def expressions_equal(expected: str, answer: str) -> bool:
    """Whether two LaTeX or plain expressions mean the same. False for one that cannot be read."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> Any:
        plain = text.replace("$", "").replace("**", "^")
        return parse(f"${plain}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    gold, given = read(expected), read(answer)
    return bool(gold and given and verify(gold, given, timeout_seconds=None))


def main(memory_mb: int, readable: list[str]) -> None:
    """Says "ready", then answers one line with one line until its input ends."""
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable(logging.CRITICAL)  # math-verify warns that it does not stop itself
    sys.dont_write_bytecode = True
    try:
        expressions_equal(r"\frac{1}{2}", "0.5")  # loads and warms what it needs
        _confine(memory_mb, readable)
    except Exception as error:  # noqa: BLE001 - told to the owner, who makes one line of it
        os.write(out, (json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n").encode())
        return
    os.write(out, b'{"ready": true}\n')
    for line in sys.stdin:
        job = json.loads(line)
        signal.alarm(int(job["limit_s"]) + 1 + _GRACE_S)
        told = json.dumps(_job_to_told(job["expected"], job["answer"]))
        signal.alarm(0)
        os.write(out, (told + "\n").encode())


def _job_to_told(expected: str, answer: str) -> dict[str, Any]:
    try:
        return {"equal": expressions_equal(expected, answer)}
    except MemoryError:
        return {"failed": "it needs too much memory"}
    except RecursionError:
        return {"failed": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001 - sympy raises whatever it likes
        return {"failed": f"sympy gave up ({type(error).__name__})"}


def _confine(memory_mb: int, readable: list[str]) -> None:
    from marft_bridge.rewards.call_filter import Refusal, filter_calls
    from marft_bridge.rewards.confine import enter_landlock

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(Refusal):  # reading other files would tell nobody anything
        enter_landlock(readable, [])
    filter_calls(alone=True)
