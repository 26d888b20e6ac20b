"""Episodes of a round whose calls a teacher answered too -> the same episodes with its answers for those of the policy.

The prompt is the engine's own ids; the answer is the teacher's text, as the chat template of the base model renders it.
Invariants: an action without a usable answer of the teacher has no ids, and the reason; nothing that the trained policy
said itself is left, so that nothing of it is imitated. Nothing is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.ingest.recorded_chats import UnusableChatError, span_to_chat
from marft_bridge.training.retokenise import STOP_REASONS, ChatTokenizer
from trace_store import conventions as c
from trace_store.records import RETOKENISED, Action, SpanRow, Trajectory


@dataclass(slots=True)
class TeacherLabels:
    """Counts of the calls of trained nodes in a round, and of what the teacher answered to them."""

    tokenizers: Mapping[str, tuple[ChatTokenizer, int | None]]  # trained node -> of its base; most tokens that it reads
    calls: int = 0
    labelled: int = 0
    prompt_tokens: int = 0  # of the teacher, as far as it counted them
    sampled_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reason -> calls without a label

    def trajectory_to_taught(self, trajectory: Trajectory, spans_of: Callable[[str], Sequence[SpanRow]]) -> Trajectory:
        """The episode as the teacher would have answered in it. `spans_of`: the spans of a trace, by its id."""
        spans = {span.span_id: span for span in spans_of(trajectory.episode.episode_id)}
        actions = (
            self._label(action, spans.get(action.action_id)) if action.node in self.tokenizers else action
            for action in trajectory.actions
        )
        return replace(trajectory, actions=tuple(actions))

    def metrics(self) -> dict[str, Any]:
        """calls, labelled, prompt_tokens, sampled_tokens, refused (by reason)."""
        return {
            "calls": self.calls,
            "labelled": self.labelled,
            "prompt_tokens": self.prompt_tokens,
            "sampled_tokens": self.sampled_tokens,
            "refused": dict(self.refused),
        }

    def _label(self, action: Action, span: SpanRow | None) -> Action:
        self.calls += 1
        tokenizer, max_tokens = self.tokenizers[action.node]
        try:
            prompt_ids, sampled_ids = self._ids(action, span, tokenizer, max_tokens=max_tokens)
        except UnusableChatError as error:
            self.refused[str(error)] += 1
            prompt_ids, sampled_ids, reason = None, None, f"no answer of the teacher: {error}"
        else:
            self.labelled += 1
            reason = RETOKENISED
        return replace(
            action,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            logprobs=None,
            temperature=None,
            trainable=False,
            untrainable_reason=reason,
        )

    def _ids(
        self, action: Action, span: SpanRow | None, tokenizer: ChatTokenizer, *, max_tokens: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if span is None:
            raise UnusableChatError("its span is not stored")
        attributes = span.attributes
        self.prompt_tokens += int(attributes.get(c.TEACHER_INPUT_TOKENS) or 0)
        self.sampled_tokens += int(attributes.get(c.TEACHER_OUTPUT_TOKENS) or 0)
        if attributes.get(c.TEACHER_MESSAGES) is None:
            error = attributes.get(c.TEACHER_ERROR)
            raise UnusableChatError("the teacher was not asked" if error is None else f"the teacher failed ({error})")
        if not action.prompt_ids:
            raise UnusableChatError(action.untrainable_reason or "no prompt token ids")
        answered = replace(span, attributes={**attributes, c.OUTPUT_MESSAGES: attributes[c.TEACHER_MESSAGES]})
        chat = span_to_chat(answered, needs_tools=False)  # what was offered is in the engine's prompt ids
        ended = attributes.get(c.TEACHER_FINISH_REASON) in STOP_REASONS and not attributes.get(c.REQUEST_STOP)
        sampled_ids = tokenizer.answer_to_ids(chat, ended=ended)
        if max_tokens is not None and len(action.prompt_ids) + len(sampled_ids) > max_tokens:
            raise UnusableChatError("longer than the base model reads")
        return action.prompt_ids, sampled_ids


def teacher_metrics_to_text(metrics: Mapping[str, Any]) -> str:
    """A line about the teacher's part in a round."""
    parts = [
        f"{metrics['labelled']} of {metrics['calls']} calls have an answer of the teacher, which read"
        f" {metrics['prompt_tokens']} and sampled {metrics['sampled_tokens']} tokens"
    ]
    parts += [f"not {count}: {reason}" for reason, count in sorted(metrics["refused"].items())]
    return "; ".join(parts)
