"""A node's own model, asked beside the served one -> what it would have answered to the same call (DAgger's expert).

The served model's answer is what the graph goes on with. Invariants: the teacher is asked what the app asked, with the
settings of its own model, below LangChain's callbacks, so that neither the app's callbacks nor the recorder see a call
more; its failure is noted, and never reaches the app.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatResult

# What LangChain takes out of a call's options before the provider's own method gets them.
_NOT_PROVIDERS = frozenset(
    [
        "callbacks",
        "config",
        "ls_structured_output_format",
        "metadata",
        "run_id",
        "run_name",
        "stream_usage",
        "structured_output_format",
        "tags",
    ]
)


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """What the teacher answered to one call, or the class of the error that it failed with."""

    message: AIMessage | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """The own model of a node, and the options of one call of it, as the app gave them."""

    model: BaseChatModel
    options: Mapping[str, Any]

    def ask(self, messages: Sequence[BaseMessage]) -> TeacherAnswer:
        """Its answer to these messages."""
        try:
            if self.model.rate_limiter is not None:
                self.model.rate_limiter.acquire(blocking=True)
            return _result_to_answer(self.model._generate(list(messages), **self._arguments()))
        except Exception as error:  # noqa: BLE001 - any error of a provider leaves this call without a label
            return TeacherAnswer(None, type(error).__name__)

    async def aask(self, messages: Sequence[BaseMessage]) -> TeacherAnswer:
        """As `ask`."""
        try:
            if self.model.rate_limiter is not None:
                await self.model.rate_limiter.aacquire(blocking=True)
            return _result_to_answer(await self.model._agenerate(list(messages), **self._arguments()))
        except Exception as error:  # noqa: BLE001 - as above
            return TeacherAnswer(None, type(error).__name__)

    def _arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name not in _NOT_PROVIDERS}


def _result_to_answer(result: ChatResult) -> TeacherAnswer:
    generation = result.generations[0]
    message = generation.message
    if len(result.generations) > 1 or not isinstance(message, AIMessage):
        return TeacherAnswer(None, "several answers, or none of a model")
    # what LangChain would add to the message above the provider's method
    facts = {"model_name": (result.llm_output or {}).get("model_name"), **(generation.generation_info or {})}
    return TeacherAnswer(message.model_copy(update={"response_metadata": {**facts, **message.response_metadata}}))
