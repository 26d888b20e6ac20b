"""A local answer and the request that it answers -> a judge's score of it, or why there is none.

Invariants: request and answer are data for the judge, in one text between marks (`rewards/judge`); whatever is no score
has a reason and is none of the two verdicts; nothing that the judge writes besides the score is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from marft_bridge.common.errors import GraphError
from marft_bridge.config.fallback import FallbackJudgeOptions
from marft_bridge.live.wire import Answer
from marft_bridge.rewards.contract import ModelAddress
from marft_bridge.rewards.judge import MAX_JUDGED, request_score
from marft_bridge.rewards.judge_requests import NoVerdict, NoVerdictKind, judge_client

UnjudgedReason = Literal["judge_late", "judge_failed", "judge_unreadable", "judge_not_asked"]
_REASONS: Mapping[NoVerdictKind, UnjudgedReason] = {
    "late": "judge_late",
    "failed": "judge_failed",
    "unreadable": "judge_unreadable",
}
_REQUEST_PARTS = ("messages", "prompt", "tools", "tool_choice", "response_format")
_WHAT_IS_GRADED = (
    "The text is one call of a language model, as JSON. Grade its `answer`, given its `request`, and nothing else."
)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """No score, and why."""

    reason: UnjudgedReason
    sentence: str


class AnswerJudge:
    """One judge, for one event loop."""

    def __init__(self, options: FallbackJudgeOptions, api_key: str | None) -> None:
        self.options = options
        self._address = ModelAddress(options.base_url, options.model, api_key or "")
        self._http = judge_client(options.after_s)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def score(self, node: str, body: Mapping[str, Any], answer: Answer) -> float | Unjudged:
        """The score of a node's whole answer, on the scale of the options."""
        judged_text = _call_to_text(body, answer)
        if judged_text is None:
            return Unjudged("judge_not_asked", f"a call of more than {MAX_JUDGED} characters, or no text")
        rubric = f"{self.options.rubrics[node]}\n\n{_WHAT_IS_GRADED}"
        try:
            score, _ = await request_score(
                self.options, self._address, rubric, judged_text=judged_text, http=self._http
            )
        except NoVerdict as failure:
            return Unjudged(_REASONS[failure.kind], str(failure))
        except GraphError as refusal:
            return Unjudged("judge_failed", str(refusal))
        return score


def _call_to_text(body: Mapping[str, Any], answer: Answer) -> str | None:
    """What the judge reads; None where that is too long, or the prompt is token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(part, str) for part in prompt):
        return None
    messages = [message for _, message in sorted(answer.messages.items())]
    call = {
        "request": {name: body[name] for name in _REQUEST_PARTS if body.get(name) is not None},
        "answer": messages[0] if len(messages) == 1 else messages,
    }
    try:
        text = json.dumps(call, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-8", "replace").decode() if len(text) <= MAX_JUDGED else None
