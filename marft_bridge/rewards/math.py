"""An answer with a mathematical expression in it, and the expected one -> 1.0 when they mean the same, else 0.0.

Equality is decided by math-verify and sympy in worker processes (`math_worker`) that are started once, reused, and
killed when a comparison takes too long. Invariant: no expression can hang, fill the memory of, or run code in the
process that asks, from whichever thread. It does not know how the answer came about.
"""

from __future__ import annotations

import asyncio
import atexit
import re
from typing import Literal

from pydantic import Field

from marft_bridge.errors import GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.worker_process import Unanswered as Uncheckable
from marft_bridge.rewards.worker_process import Work, WorkerPool

Find = Literal["auto", "boxed", "hashes", "last_number", "whole"]

MAX_EXPRESSION = 2_000  # characters
_WARM_S = 120.0  # for the first comparison of a run

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?)?|-?\.\d+")


class MathOptions(RewardOptions):
    """`kind = "math"`: whether the answer equals what the task expects, as mathematics."""

    kind: Literal["math"] = "math"
    answer_from: str
    """Path to the text with the answer."""
    expected_from: str
    """Path in the task to the expected expression: all of it, or what it boxes or puts after ####."""
    find: Find = "auto"
    """Where in the answer the expression is: the last \\boxed{}, after the last ####, the last number, all of it;
    auto: the first of these that there is, without `whole`."""
    limit_s: float = Field(5.0, gt=0)
    """Seconds for one comparison."""
    uncheckable: Literal["absent", "wrong"] = "absent"
    """What an answer is that cannot be compared within time, memory and length."""


def text_to_expression(text: str, find: Find) -> str | None:
    """What the text gives as its answer; None when there is no such place in it. Linear in the length of the text."""
    if find == "whole":
        return text.strip() or None
    if find in ("auto", "boxed") and (boxed := _last_boxed(text)) is not None:
        return boxed
    if find in ("auto", "hashes") and "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    if find in ("auto", "last_number"):
        numbers = _NUMBER.findall(text)
        return str(numbers[-1]).replace(",", "") if numbers else None
    return None


def _last_boxed(text: str) -> str | None:
    """What is inside the last \\boxed{...}, which may hold braces; None when it is missing, empty or not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip() or None
    return None


_workers = WorkerPool(
    Work(
        "marft_bridge.rewards.math_worker",
        undone="an expression could not be compared",
        unsafe="expressions cannot be compared safely here",
    ),
    most=2,
)
atexit.register(_workers.close)


def close_workers() -> None:
    """Ends the processes that compare; the next comparison starts new ones."""
    _workers.close()


def equal(expected: str, answer: str, limit_s: float = 5.0) -> bool:
    """Whether two expressions mean the same. Blocks; safe in any thread. Starting a worker is not in the limit.

    Raises:
        Uncheckable: not within time, memory and length; the message is the reason.
        GraphError: no worker can be started, or the kernel does not hold it.
    """
    if expected.strip() == answer.strip():
        return True
    if max(len(expected), len(answer)) > MAX_EXPRESSION:
        raise Uncheckable(f"an expression is longer than {MAX_EXPRESSION} characters")
    return bool(_workers.ask({"expected": expected, "answer": answer}, limit_s)["equal"])


async def math_to_earned(options: MathOptions, run: RunView) -> list[Earned]:
    """The registry's function: 1.0, 0.0 (also for no answer, or one without an expression), or Absent."""
    answer, expected = run.answer(options.answer_from), run.expected(options.expected_from)
    if answer is None:
        return [Earned(0.0)]
    if not isinstance(answer, (str, int, float)):
        raise GraphError(f"{options.answer_from!r} holds a {type(answer).__name__}, not a text with an answer")
    if not isinstance(expected, (str, int, float)) or not str(expected).strip():
        raise GraphError(f"{options.expected_from!r} of task {run.task.get('id')!r} is not an expression: {expected!r}")
    given = text_to_expression(str(answer), options.find)
    if given is None:
        return [Earned(0.0)]
    gold = str(expected)
    gold = text_to_expression(gold, "boxed") or text_to_expression(gold, "hashes") or gold
    try:
        return [Earned(float(await asyncio.to_thread(equal, gold, given, options.limit_s)))]
    except Uncheckable as reason:
        if options.uncheckable == "wrong":
            return [Earned(0.0)]
        raise Absent(str(reason)) from None


def check_math(_: MathOptions) -> None:
    """Starts a worker, so that what is missing is said before any episode is run."""
    equal("1/2", "0.5", _WARM_S)


MATH = Kind(MathOptions, math_to_earned, check_math)
KINDS = (MATH,)
