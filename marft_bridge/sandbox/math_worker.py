"""Pairs of mathematical expressions on standard input -> whether they are equal, one JSON line each.

Started by `rewards.math` as a process of its own, which may be killed at any moment: sympy can take forever, and all
memory, for a short expression, and the signals by which math-verify stops itself work in a main thread only.
Invariants: an expression is read by a LaTeX parser and never evaluated as Python; `worker_main` confines the process.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.sandbox.worker_main import answer_jobs


def expressions_equal(expected: str, answer: str) -> bool:
    """Whether two LaTeX or plain expressions mean the same. False for one that cannot be read."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> Any:
        plain = text.replace("$", "").replace("**", "^")
        return parse(f"${plain}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    expected_parts, answer_parts = read(expected), read(answer)  # lists of what math-verify extracts
    return bool(expected_parts and answer_parts and verify(expected_parts, answer_parts, timeout_seconds=None))


def main(memory_mb: int, readable: list[str]) -> None:
    """The entry point of the process: answers one line with one line until the input ends."""
    # math-verify would warn that it has no timeout: `worker_main` silences it. A first comparison loads sympy.
    answer_jobs(memory_mb, readable, lambda: expressions_equal(r"\frac{1}{2}", "0.5"), job_to_reply=_job_to_reply)


def _job_to_reply(job: Any) -> dict[str, Any]:
    try:
        return {"equal": expressions_equal(job["expected"], job["answer"])}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - sympy raises whatever it likes
        return {"failed": f"sympy gave up ({type(error).__name__})"}
