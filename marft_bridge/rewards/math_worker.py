"""Pairs of mathematical expressions on standard input -> whether they are equal, one JSON line each.

Started by `math` as a process of its own, which may be killed at any moment: sympy can need for ever, and all memory,
for a short expression, and the signals by which math-verify stops itself work in a main thread only. Invariants: an
expression is read by a LaTeX parser and never evaluated as Python; the kernel holds this process, see `worker_main`. It
does not know where the expressions come from.
"""

from __future__ import annotations

from typing import Any

from marft_bridge.rewards.worker_main import answer_jobs


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
    # math-verify would warn that it does not stop itself: `worker_main` has nobody hear it.
    answer_jobs(memory_mb, readable, lambda: expressions_equal(r"\frac{1}{2}", "0.5"), _job_to_told)


def _job_to_told(job: Any) -> dict[str, Any]:
    try:
        return {"equal": expressions_equal(job["expected"], job["answer"])}
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - sympy raises whatever it likes
        return {"failed": f"sympy gave up ({type(error).__name__})"}
