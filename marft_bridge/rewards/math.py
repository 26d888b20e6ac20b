"""An answer with a mathematical expression in it, and the expected one -> 1.0 when they mean the same, else 0.0.

math-verify and sympy decide equality in worker processes (`sandbox.math_worker`) that are started once, reused, and
killed when a comparison takes too long. Invariant: no expression can hang, fill the memory of, or run code in the
calling process, from whichever thread.
"""

from __future__ import annotations

import asyncio
import atexit
from typing import Literal

from pydantic import Field

from marft_bridge.common.errors import GraphError
from marft_bridge.common.extras import require_extra
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.numbers import number_to_text, numbers_in, plain_minus, without_exponent
from marft_bridge.sandbox.worker_process import UnansweredJob as Uncheckable
from marft_bridge.sandbox.worker_process import WorkerPool, WorkerSpec

FindMode = Literal["auto", "boxed", "hashes", "last_number", "whole"]

MAX_EXPRESSION = 2_000  # characters
_FIRST_COMPARISON_S = 120.0  # a worker then imports sympy


class MathOptions(RewardOptions):
    """`kind = "math"`: whether the answer equals what the task expects, as mathematics."""

    kind: Literal["math"] = "math"
    answer_from: str
    """Path to the text with the answer."""
    expected_from: str
    """Path in the task to the expected expression: all of it, or what it boxes or puts after ####."""
    find: FindMode = "auto"
    """Where in the answer the expression is: the last \\boxed{}, after the last ####, the last number, all of it;
    auto: the first of the first three that the answer has."""
    limit_s: float = Field(5.0, gt=0)
    """Seconds for one comparison."""
    uncheckable: Literal["absent", "wrong"] = "absent"
    """How an answer counts that cannot be compared within time, memory and length."""


def text_to_expression(text: str, find: FindMode) -> str | None:
    """The expression that a text gives as its answer; None when it has none. Linear in the length of the text."""
    if find == "whole":
        return text.strip() or None
    if find in ("auto", "boxed") and (boxed := _last_boxed(text)) is not None:
        return boxed
    if find in ("auto", "hashes") and "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    if find in ("auto", "last_number"):
        numbers = numbers_in(text, fractions=True)
        return without_exponent(numbers[-1]) if numbers else None
    return None


def _last_boxed(text: str) -> str | None:
    """The inside of the last \\boxed{...}, which may hold braces; None when it is missing, empty or not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for index in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index].strip() or None
    return None


_workers = WorkerPool(
    WorkerSpec(
        "marft_bridge.sandbox.math_worker",
        failure_prefix="an expression could not be compared",
        start_failure_prefix="expressions cannot be compared safely here",
    ),
    max_workers=2,
)
atexit.register(_workers.close)


def close_workers() -> None:
    """Ends the worker processes; the next comparison starts new ones."""
    _workers.close()


def are_equal(expected: str, answer: str, limit_s: float = 5.0) -> bool:
    """Whether two expressions mean the same. Blocks; safe in any thread.

    Args:
        limit_s: seconds for the comparison; the start of a worker does not count.

    Raises:
        Uncheckable: they cannot be compared within time, memory and length; the message is the reason.
        GraphError: no worker can be started, or the kernel cannot confine it.
    """
    if expected.strip() == answer.strip():
        return True
    if max(len(expected), len(answer)) > MAX_EXPRESSION:
        raise Uncheckable(f"an expression is longer than {MAX_EXPRESSION} characters")
    return bool(_workers.run_job({"expected": expected, "answer": answer}, limit_s)["equal"])


async def math_to_earned(options: MathOptions, run: RunView) -> list[Earned]:
    """The registry's function: 1.0, 0.0 (also for no answer, or one without an expression), or Absent."""
    answer, expected = run.written_answer(options.answer_from), run.expected(options.expected_from)
    if not isinstance(expected, (str, int, float)) or not str(expected).strip():
        raise GraphError(f"{options.expected_from!r} of task {run.task.get('id')!r} is not an expression: {expected!r}")
    expression = None if answer is None else text_to_expression(_to_plain_text(answer), options.find)
    if expression is None:
        return [Earned(0.0)]
    gold = _to_plain_text(expected)
    gold = text_to_expression(gold, "boxed") or text_to_expression(gold, "hashes") or gold
    gold, expression = without_exponent(gold), without_exponent(expression)
    try:
        return [Earned(float(await asyncio.to_thread(are_equal, gold, expression, options.limit_s)))]
    except Uncheckable as error:
        if options.uncheckable == "wrong":
            return [Earned(0.0)]
        raise Absent(str(error)) from None


def _to_plain_text(value: str | float) -> str:
    return plain_minus(value if isinstance(value, str) else number_to_text(value))


def check_math(_: MathOptions) -> None:
    """Starts a worker, so that a missing library ends the command before any episode is run."""
    require_extra("math", "a reward of kind 'math'")
    are_equal("1/2", "0.5", _FIRST_COMPARISON_S)


MATH = Kind(MathOptions, math_to_earned, check_math)
KINDS = (MATH,)
