"""An answer to a task of reasoning-gym -> the score that the task's own generator gives it, usually 0 to 1.

Invariant: whatever the answer holds, it is scored in a worker process that the kernel confines
(`sandbox.reasoning_gym_worker`), within a time limit; an answer that cannot be scored is absent, or worth 0 if the
table says so.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import Field

from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.math import text_to_expression
from marft_bridge.rewards.numbers import number_to_text
from marft_bridge.sandbox.worker_process import UnansweredJob
from marft_bridge.tasks.reasoning_gym import answer_to_score, require_gym

_ANSWER_TAG = "answer"


class GymOptions(RewardOptions):
    """`kind = "reasoning_gym"`: the score of the generator that made the task."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    answer_from: str
    """Path to the text with the answer."""
    find: Literal["whole", "tag", "boxed", "hashes", "last_number"] = "whole"
    """Where in the text the answer is: all of it, the last <answer>...</answer>, or as for `math`. The scorers compare
    closely, and many give the less the more there is around the right answer."""
    limit_s: float = Field(5.0, gt=0)
    """Seconds for one score."""
    uncheckable: Literal["absent", "wrong"] = "absent"
    """How an answer counts that cannot be scored within time and memory, or at which the scorer fails."""


async def gym_to_earned(options: GymOptions, run: RunView) -> list[Earned]:
    """The registry's function: the score, 0.0 for no answer, or Absent."""
    answer = run.written_answer(options.answer_from)
    if answer is None:
        return [Earned(0.0)]
    gym_answer = _extract_answer(answer if isinstance(answer, str) else number_to_text(answer), options)
    if gym_answer is None:
        return [Earned(0.0)]
    try:
        return [Earned(await asyncio.to_thread(answer_to_score, run.task, gym_answer, options.limit_s))]
    except UnansweredJob as error:
        if options.uncheckable == "wrong":
            return [Earned(0.0)]
        raise Absent(str(error)) from None


def _extract_answer(text: str, options: GymOptions) -> str | None:
    if options.find == "tag":
        _, open_tag, rest = text.rpartition(f"<{_ANSWER_TAG}>")
        inside, close_tag, _ = rest.partition(f"</{_ANSWER_TAG}>")
        return inside.strip() if open_tag and close_tag else None
    return text_to_expression(text, options.find)


def check_gym(_: GymOptions) -> None:
    """Raises where reasoning-gym is not installed, before any episode is run."""
    require_gym()


GYM = Kind(GymOptions, gym_to_earned, check_gym)
KINDS = (GYM,)
